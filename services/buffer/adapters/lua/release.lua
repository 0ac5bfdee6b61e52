-- ARGV: reason of eviction, '' for another attempt, or 'UNDO' for a lease that never reached a node; then ordinal, lease id per lease. Answer: OK, number released, lost lease ids.
local gone = missing()
if gone then return gone end
sweep_expired()
local released, answer = 0, {'OK', '0'}
for i = 2, #ARGV, 2 do
  local o = ARGV[i]
  local record = redis.call('HMGET', group(o), 'state', 'lease')
  if record[1] == 'LEASED' and record[2] == ARGV[i + 1] then
    redis.call('ZREM', leased, o)
    if ARGV[1] == '' then
      give_back(o)
    elseif ARGV[1] == 'UNDO' then
      to_pending(o)
    else
      evict(o, ARGV[1])
    end
    released = released + 1
  else
    answer[#answer + 1] = ARGV[i + 1]
  end
end
answer[2] = digits(released)
return answer
