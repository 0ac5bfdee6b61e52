-- ARGV: ttl in ms, then ordinal, lease id per lease. Answer: OK, deadline, lost lease ids.
local gone = missing()
if gone then return gone end
sweep_expired()
local deadline = now + tonumber(ARGV[1])
local answer = {'OK', digits(deadline)}
for i = 2, #ARGV, 2 do
  local record = redis.call('HMGET', group(ARGV[i]), 'state', 'lease')
  if record[1] == 'LEASED' and record[2] == ARGV[i + 1] then
    redis.call('ZADD', leased, deadline, ARGV[i])
  else
    answer[#answer + 1] = ARGV[i + 1]
  end
end
return answer
