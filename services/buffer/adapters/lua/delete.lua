-- Makes the run unknown; what it left is deleted afterwards, and it cannot be created meanwhile.
-- ARGV: token of this deletion, ms to finish, 1 to delete an active run.
local marker = prefix .. 'deleting'
if field('state') == 'ACTIVE' and ARGV[3] ~= '1' then return {'RUN_ACTIVE'} end
pass_when_full()
local owner = redis.call('GET', marker)
if owner and owner ~= ARGV[1] then return {'RUN_DELETING'} end
redis.call('SET', marker, ARGV[1], 'PX', ARGV[2])
return {'OK', digits(redis.call('UNLINK', run))}
