-- ARGV: expected spec, then name, value, ... to set. Reopens an ended run when there is something left to do.
local gone = missing()
if gone then return gone end
if field('spec') ~= ARGV[1] then return {'CHANGED'} end
local old_steps = number('steps')
redis.call('HSET', run, unpack(ARGV, 2))
-- Servers that hold the run's data know by this that they must read its settings again.
redis.call('HINCRBY', run, 'revision', 1)
local state = field('state')
if state == 'FAILED' or state == 'STOPPED' or (state == 'FINISHED' and number('steps') > old_steps) then
  redis.call('HSET', run, 'state', 'ACTIVE', 'reason', '', 'rejections', '0')
end
return {'OK'}
