-- ARGV: expected spec, then name, value, ... to set. Reopens an ended run when there is something left to do.
local gone = missing()
if gone then return gone end
if field('spec') ~= ARGV[1] then return {'CHANGED'} end
local old_steps = number('steps')
redis.call('HSET', run, unpack(ARGV, 2))
local state = field('state')
if state == 'FAILED' or state == 'STOPPED' or (state == 'FINISHED' and number('steps') > old_steps) then
  redis.call('HSET', run, 'state', 'ACTIVE', 'reason', '')
end
return {'OK'}
