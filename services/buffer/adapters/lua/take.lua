-- ARGV: trainer epoch, step, number of groups, then ordinal and payload token of each group that the run's own filter
-- picked, if it picks.
-- Answer: OK, published version, READY groups left, stale groups, then ordinal and payload token in manifest order;
-- no ordinals when there are too few groups yet. Or JUDGE, published version, and ordinal and token of stale groups
-- that the run's own policy must be asked of. Or PICK, published version, when the run's own filter must pick.
local gone = missing()
if gone then return gone end
local old = fenced(ARGV[1]) or ended()
if old then return old end
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

-- A rollback that was cut off is to be finished first.
if field('restoring') then return {'RESTORING', field('restoring')} end
if card(reserved) > 0 then return manifest(field('reserved_policy'), field('reserved_stale')) end
sweep_stale()
local policy = number('policy_version')
if field('stale_policy') == 'custom' then
  local ask = {'JUDGE', digits(policy)}
  for _, o in ipairs(stale_groups(SWEEP_LIMIT)) do
    local record = redis.call('HMGET', group(o), 'judged', 'token')
    if record[1] ~= digits(policy) then
      ask[#ask + 1] = o
      ask[#ask + 1] = record[2]
    end
    if #ask >= 1000 then break end
  end
  if #ask > 2 then return ask end
end
local waiting = card(ready)
local few = {'OK', digits(policy), digits(waiting), field('stale_since_take')}
if waiting < count then
  local rest = undrawn()
  if rest >= 0 and waiting + card(pending) + card(leased) + rest < count then
    return {'DATA_EXHAUSTED', digits(waiting + card(pending) + card(leased) + rest)}
  end
  return few
end

local function reserve(position, o, version)
  redis.call('ZREM', since(ready), o)
  enter(reserved, o, position, 'RESERVED')
  redis.call('HSET', group(o), 'step', digits(step))
  local lag = field('sft') == '1' and 0 or policy - tonumber(version)
  redis.call('HINCRBY', prefix .. 'staleness', digits(lag), 1)
end

if field('picks') == '1' then
  if #ARGV == 3 then return {'PICK', digits(policy)} end
  if #ARGV ~= 3 + 2 * count then return few end
  for at = 4, #ARGV, 2 do
    local record = redis.call('HMGET', group(ARGV[at]), 'state', 'token')
    -- It moved on while the filter looked at it.
    if record[1] ~= 'READY' or record[2] ~= ARGV[at + 1] then return few end
  end
  for at = 4, #ARGV, 2 do
    local version = redis.call('ZSCORE', ready, ARGV[at])
    redis.call('ZREM', ready, ARGV[at])
    reserve((at - 4) / 2, ARGV[at], version)
  end
else
  local taken = redis.call('ZPOPMIN', ready, count)
  for i = 1, #taken, 2 do reserve((i - 1) / 2, taken[i], taken[i + 1]) end
end
local stale = field('stale_since_take')
redis.call('HSET', run, 'reserved_policy', digits(policy), 'reserved_stale', stale, 'stale_since_take', '0')
return manifest(digits(policy), stale)
