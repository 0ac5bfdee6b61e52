-- ARGV: name, value, ... of a new run's hash. Answers {'EXISTS'} untouched when the run is there already.
if redis.call('EXISTS', run) == 1 then return {'EXISTS'} end
redis.call('HSET', run, unpack(ARGV))
redis.call('HSET', run, 'created', digits(now))
return {'OK'}
