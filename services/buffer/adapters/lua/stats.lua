-- Answer: OK, state of the run, then the counts in the order below, and flat: reasons of eviction, staleness histogram,
-- ms that the oldest group of an open state is in it.
local gone = missing()
if gone then return gone end
sweep_expired()
local ages = {}
for state, set in pairs({PENDING = pending, LEASED = leased, READY = ready, RESERVED = reserved}) do
  local oldest = redis.call('ZRANGE', since(set), 0, 0, 'WITHSCORES')
  if oldest[1] then
    ages[#ages + 1] = state
    ages[#ages + 1] = digits(math.max(0, now - tonumber(oldest[2])))
  end
end
return {'OK', field('state'), field('drawn'), card(pending), card(leased), card(ready), card(reserved),
  card(consumed), card(evicted), field('lease_expired'), field('stale'), capacity(), field('payload_bytes'),
  field('policy_version'), field('row_count'), redis.call('HGETALL', prefix .. 'reasons'),
  redis.call('HGETALL', prefix .. 'staleness'), ages}
