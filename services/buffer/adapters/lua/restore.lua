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
    redis.call('ZADD', held, step, o)
    redis.call('HSET', group(o), 'state', 'CONSUMED')
  end
  redis.call('DEL', reserved, since(reserved))
  taken, committed = {}, step
end
if step > committed then return {'STEP_NOT_RESTORABLE', digits(committed)} end

for _, o in ipairs(redis.call('ZRANGE', ready, 0, -1)) do redis.call('HSET', group(o), 'restored', '1') end

local function give(o)
  redis.call('HDEL', group(o), 'step')
  local record = redis.call('HMGET', group(o), 'token', 'freed', 'min_version')
  if record[1] and not record[2] then
    redis.call('HSET', group(o), 'restored', '1')
    enter(ready, o, record[3], 'READY')
  else
    drop_samples(o)
    to_pending(o)
  end
end

ensure_held()
local after = '(' .. digits(step)
local returned = redis.call('ZRANGEBYSCORE', consumed, after, '+inf')
redis.call('ZREMRANGEBYSCORE', consumed, after, '+inf')
redis.call('ZREMRANGEBYSCORE', held, after, '+inf')
for _, o in ipairs(returned) do give(o) end
redis.call('DEL', reserved, since(reserved))
for _, o in ipairs(taken) do give(o) end
local leases = redis.call('ZRANGE', leased, 0, -1)
redis.call('DEL', leased, since(leased))
for _, o in ipairs(leases) do to_pending(o) end
-- Nothing is leased until the restored trainer has published its weights.
redis.call('HSET', run, 'committed_step', digits(step), 'open', '0', 'base', digits(card(consumed)))
redis.call('HINCRBY', run, 'rollback', 1)
if number('checkpoint_step') > step then
  local kept, path = {}, ''
  for _, one in ipairs(checkpoints()) do
    if one.step <= step then kept[#kept + 1] = one end
    if one.step == step then path = one.path end
  end
  set_checkpoints(kept, step, path)
end
return {'OK', digits(#returned + #taken), digits(#leases)}
