-- ARGV: trainer epoch, step, number of groups.
-- Answer: OK, published version, READY groups left, stale groups, then ordinal and payload token in manifest order;
-- no ordinals when there are too few groups yet.
local gone = missing()
if gone then return gone end
local old = fenced(ARGV[1])
if old then return old end
if field('state') ~= 'ACTIVE' then return {'RUN_FINISHED', field('state')} end
local step, count = tonumber(ARGV[2]), tonumber(ARGV[3])
local committed = number('committed_step')
if step ~= committed + 1 then return {'STEP_OUT_OF_ORDER', digits(committed)} end
sweep_expired()

local function manifest(version, stale)
  local answer = {'OK', version, digits(card(ready)), stale}
  for _, o in ipairs(redis.call('ZRANGE', reserved, 0, -1)) do
    answer[#answer + 1] = o
    answer[#answer + 1] = redis.call('HGET', group(o), 'token')
  end
  return answer
end

if card(reserved) > 0 then return manifest(field('reserved_policy'), field('reserved_stale')) end
sweep_stale()
local policy = number('policy_version')
local waiting = card(ready)
if waiting < count then
  local rest = undrawn()
  if rest >= 0 and waiting + card(pending) + card(leased) + rest < count then
    return {'DATA_EXHAUSTED', digits(waiting + card(pending) + card(leased) + rest)}
  end
  return {'OK', digits(policy), digits(waiting), field('stale_since_take')}
end
local taken = redis.call('ZPOPMIN', ready, count)
for i = 1, #taken, 2 do
  local o = taken[i]
  redis.call('ZADD', reserved, (i - 1) / 2, o)
  redis.call('HSET', group(o), 'state', 'RESERVED', 'step', digits(step))
  local lag = field('sft') == '1' and 0 or policy - tonumber(taken[i + 1])
  redis.call('HINCRBY', prefix .. 'staleness', digits(lag), 1)
end
local stale = field('stale_since_take')
redis.call('HSET', run, 'reserved_policy', digits(policy), 'reserved_stale', stale, 'stale_since_take', '0')
return manifest(digits(policy), stale)
