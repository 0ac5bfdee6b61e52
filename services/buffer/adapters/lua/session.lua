-- Opens a trainer session. ARGV: caller.
local gone = missing() or ended()
if gone then return gone end
pass_when_full()
redis.call('HSET', run, 'trainer', ARGV[1])
return {'OK', digits(next_number('trainer_epoch'))}
