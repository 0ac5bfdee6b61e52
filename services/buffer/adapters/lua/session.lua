-- Opens a trainer session. ARGV: caller.
local gone = missing()
if gone then return gone end
if field('state') ~= 'ACTIVE' then return {'RUN_FINISHED', field('state')} end
pass_when_full()
redis.call('HSET', run, 'trainer', ARGV[1])
return {'OK', digits(redis.call('HINCRBY', run, 'trainer_epoch', 1))}
