-- Goes back to a step. ARGV: trainer epoch, step, most groups to move in this call.
-- Answer: OK, groups returned by this call, leases cancelled by it, 1 when there is more to move.
-- The first call moves the pointer (committed_step) and closes the run; groups of the lost steps follow in pieces. A
-- restore that was cut off in between goes on with the next call, and nothing is published before it is done.
local gone = missing()
if gone then return gone end
local old = fenced(ARGV[1])
if old then return old end
local step, limit = tonumber(ARGV[2]), tonumber(ARGV[3])
local after = '(' .. digits(step)
local returned, cancelled = 0, 0

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
  returned = returned + 1
end

-- An error answer when the step is ahead of what was trained, else nil.
local function turn_back()
  local committed = number('committed_step')
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
  -- Nothing is leased until the restored trainer has published its weights.
  redis.call('HSET', run, 'committed_step', digits(step), 'open', '0', 'restoring', digits(step))
  redis.call('HINCRBY', run, 'rollback', 1)
  if number('checkpoint_step') > step then
    local kept, path = {}, ''
    for _, one in ipairs(checkpoints()) do
      if one.step <= step then kept[#kept + 1] = one end
      if one.step == step then path = one.path end
    end
    set_checkpoints(kept, step, path)
  end
  for _, o in ipairs(redis.call('ZRANGE', ready, 0, -1)) do redis.call('HSET', group(o), 'restored', '1') end
  redis.call('DEL', reserved, since(reserved))
  for _, o in ipairs(taken) do give(o) end
  local leases = redis.call('ZRANGE', leased, 0, -1)
  redis.call('DEL', leased, since(leased))
  for _, o in ipairs(leases) do to_pending(o) end
  cancelled = #leases
end

if field('restoring') ~= digits(step) then
  ensure_held()
  local wrong = turn_back()
  if wrong then return wrong end
end
local lost = redis.call('ZRANGEBYSCORE', consumed, after, '+inf', 'LIMIT', 0, limit)
for _, o in ipairs(lost) do
  redis.call('ZREM', consumed, o)
  redis.call('ZREM', held, o)
  give(o)
end
local more = redis.call('ZCOUNT', consumed, after, '+inf') > 0
if not more then
  redis.call('HDEL', run, 'restoring')
  redis.call('HSET', run, 'base', digits(card(consumed)))
end
return {'OK', digits(returned), digits(cancelled), more and '1' or '0'}
