-- ARGV: trainer epoch, step. Answer: OK, groups consumed by the step.
local gone = missing()
if gone then return gone end
local old = fenced(ARGV[1])
if old then return old end
local step, committed = tonumber(ARGV[2]), number('committed_step')
if step <= committed then return {'OK', digits(redis.call('ZCOUNT', consumed, step, step))} end
local taken = redis.call('ZRANGE', reserved, 0, -1)
if step ~= committed + 1 or #taken == 0 then return {'STEP_OUT_OF_ORDER', digits(committed)} end
-- Without checkpoints on the way a loss is followed by a start from far behind, and that makes new samples.
local forget = field('saves') ~= '1'
for _, o in ipairs(taken) do
  redis.call('ZADD', consumed, step, o)
  redis.call('HSET', group(o), 'state', 'CONSUMED')
  if forget then free_tensors(o) else redis.call('ZADD', held, step, o) end
end
redis.call('DEL', reserved, since(reserved))
redis.call('HSET', run, 'committed_step', digits(step))
return {'OK', digits(#taken)}
