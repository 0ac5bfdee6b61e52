-- ARGV: state, reason, trainer epoch (0: the user). The first end is kept.
local gone = missing()
if gone then return gone end
if ARGV[3] ~= '0' then
  local old = fenced(ARGV[3])
  if old then return old end
end
if field('state') == 'ACTIVE' then redis.call('HSET', run, 'state', ARGV[1], 'reason', ARGV[2]) end
return {'OK'}
