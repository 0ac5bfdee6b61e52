-- ARGV: trainer epoch, step. Answer: OK, groups returned, leases cancelled.
local gone = missing()
if gone then return gone end
local old = fenced(ARGV[1])
if old then return old end
local step, committed = tonumber(ARGV[2]), number('committed_step')
local taken = redis.call('ZRANGE', reserved, 0, -1)
-- The checkpoint was written, but the trainer died before its commit arrived: the step is part of the history.
if step == committed + 1 and #taken > 0 then
  for _, o in ipairs(taken) do
    redis.call('ZADD', consumed, step, o)
    redis.call('HSET', group(o), 'state', 'CONSUMED')
  end
  redis.call('DEL', reserved)
  taken, committed = {}, step
end
if step > committed then return {'STEP_NOT_RESTORABLE', digits(committed)} end

local function give(o)
  redis.call('HDEL', group(o), 'step')
  local record = redis.call('HMGET', group(o), 'token', 'freed', 'min_version')
  if record[1] and not record[2] then
    redis.call('ZADD', ready, record[3], o)
    redis.call('HSET', group(o), 'state', 'READY')
  else
    drop_samples(o)
    to_pending(o)
  end
end

local returned = redis.call('ZRANGEBYSCORE', consumed, '(' .. digits(step), '+inf')
redis.call('ZREMRANGEBYSCORE', consumed, '(' .. digits(step), '+inf')
for _, o in ipairs(returned) do give(o) end
redis.call('DEL', reserved)
for _, o in ipairs(taken) do give(o) end
local held = redis.call('ZRANGE', leased, 0, -1)
redis.call('DEL', leased)
for _, o in ipairs(held) do to_pending(o) end
-- Nothing is leased until the restored trainer has published its weights.
redis.call('HSET', run, 'committed_step', digits(step), 'open', '0', 'base', digits(card(consumed)))
redis.call('HINCRBY', run, 'rollback', 1)
if number('checkpoint_step') > step then
  redis.call('HSET', run, 'checkpoint_step', digits(step), 'checkpoint_path', '')
end
return {'OK', digits(#returned + #taken), digits(#held)}
