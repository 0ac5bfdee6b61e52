-- ARGV: a caller that was started again. What it had leased before expires now. Answer: OK, number.
local gone = missing()
if gone then return gone end
local count = 0
for _, o in ipairs(redis.call('ZRANGE', leased, 0, -1)) do
  if redis.call('HGET', group(o), 'caller') == ARGV[1] then
    redis.call('ZADD', leased, now, o)
    count = count + 1
  end
end
sweep_expired()
return {'OK', digits(count)}
