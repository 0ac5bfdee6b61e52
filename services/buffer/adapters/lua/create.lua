-- ARGV: name, value, ... of a new run's hash. Answers {'EXISTS'} untouched when the run is there already.
if redis.call('EXISTS', run) == 1 then return {'EXISTS'} end
if redis.call('EXISTS', prefix .. 'deleting') == 1 then return {'RUN_DELETING'} end
redis.call('HSET', run, unpack(ARGV))
-- Leases of a deleted run of this id must not pass for ours: the rollback count, part of every lease id, is never the
-- same again.
redis.call('HSET', run, 'created', digits(now), 'rollback', digits(now), 'holds', '1')
return {'OK'}
