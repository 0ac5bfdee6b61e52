-- ARGV: number of a block of a changing mixture, the block. Answer: OK, the block that is kept: the first one.
local gone = missing()
if gone then return gone end
local blocks = prefix .. 'blocks'
redis.call('HSETNX', blocks, ARGV[1], ARGV[2])
if tonumber(ARGV[1]) > tonumber(redis.call('HGET', blocks, 'last') or -1) then
  redis.call('HSET', blocks, 'last', ARGV[1])
end
return {'OK', redis.call('HGET', blocks, ARGV[1])}
