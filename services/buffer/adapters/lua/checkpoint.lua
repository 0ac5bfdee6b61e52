-- ARGV: trainer epoch, step, path. Answer: OK, lowest ordinal that the checkpoint does not contain.
local gone = missing()
if gone then return gone end
local old = fenced(ARGV[1])
if old then return old end
local step, committed = tonumber(ARGV[2]), number('committed_step')
if step > committed then return {'STEP_OUT_OF_ORDER', digits(committed)} end
local frontier = number('drawn')
local first = redis.call('ZRANGE', pending, 0, 0)[1]
if first then frontier = math.min(frontier, tonumber(first)) end
local function open(members)
  for _, o in ipairs(members) do frontier = math.min(frontier, tonumber(o)) end
end
for _, key in ipairs({leased, ready, reserved}) do open(redis.call('ZRANGE', key, 0, -1)) end
open(redis.call('ZRANGEBYSCORE', consumed, '(' .. digits(step), '+inf'))
if step >= number('checkpoint_step') then
  ensure_held()
  local kept = {}
  for _, one in ipairs(checkpoints()) do
    if one.step < step then kept[#kept + 1] = one end
  end
  kept[#kept + 1] = {step = step, path = ARGV[3], frontier = frontier}
  while #kept > math.max(1, number('keep_checkpoints')) do table.remove(kept, 1) end
  set_checkpoints(kept, step, ARGV[3])
end
return {'OK', digits(frontier)}
