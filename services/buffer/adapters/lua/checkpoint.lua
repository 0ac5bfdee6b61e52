-- ARGV: trainer epoch, step, path. Answer: OK, lowest ordinal that the checkpoint does not contain.
local gone = missing()
if gone then return gone end
local old = fenced(ARGV[1])
if old then return old end
local step, committed = tonumber(ARGV[2]), number('committed_step')
if step > committed then return {'STEP_OUT_OF_ORDER', digits(committed)} end
local before = number('checkpoint_step')
if step >= before then
  redis.call('HSET', run, 'checkpoint_step', digits(step), 'checkpoint_path', ARGV[3])
  for _, o in ipairs(redis.call('ZRANGEBYSCORE', consumed, '(' .. digits(before), step)) do free_tensors(o) end
end
local frontier = number('drawn')
local first = redis.call('ZRANGE', pending, 0, 0)[1]
if first then frontier = math.min(frontier, tonumber(first)) end
local function open(members)
  for _, o in ipairs(members) do frontier = math.min(frontier, tonumber(o)) end
end
for _, key in ipairs({leased, ready, reserved}) do open(redis.call('ZRANGE', key, 0, -1)) end
open(redis.call('ZRANGEBYSCORE', consumed, '(' .. digits(step), '+inf'))
return {'OK', digits(frontier)}
