-- Answer: OK, then the counts in the order below, the draw reasons and the staleness histogram (flat).
local gone = missing()
if gone then return gone end
sweep_expired()
return {'OK', field('drawn'), card(pending), card(leased), card(ready), card(reserved), card(consumed),
  card(evicted), field('lease_expired'), field('stale'), capacity(), field('payload_bytes'),
  field('policy_version'), field('row_count'), redis.call('HGETALL', prefix .. 'reasons'),
  redis.call('HGETALL', prefix .. 'staleness')}
