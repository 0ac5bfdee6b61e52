-- Shared head of every script of the state machine.
-- KEYS[1] is the run's hash; every other key of the run has the same prefix and hash tag, hence the same slot.
-- A member of a state's set is the ordinal as twelve digits, so that equal scores order by ordinal.
-- Invariant: a drawn ordinal is in exactly one of the six sets, and its hash names that state.
local run = KEYS[1]
local prefix = string.sub(run, 1, -4)
local pending, leased, ready = prefix .. 'pending', prefix .. 'leased', prefix .. 'ready'
local reserved, consumed, evicted = prefix .. 'reserved', prefix .. 'consumed', prefix .. 'evicted'
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local SWEEP_LIMIT = 5000

local function field(name) return redis.call('HGET', run, name) end
local function number(name) return tonumber(redis.call('HGET', run, name) or 0) end
local function card(key) return redis.call('ZCARD', key) end
local function group(o) return prefix .. 'g:' .. o end
local function payload(o, token) return prefix .. 'p:' .. o .. ':' .. token end
-- Numbers of any size without an exponent: Lua's own conversion writes 1e+15.
local function digits(x) return string.format('%d', x) end

-- An error answer when the run is unknown, else nil.
local function missing()
  if redis.call('EXISTS', run) == 0 then return {'RUN_NOT_FOUND'} end
end

-- A full store refuses a script at its first write that may take memory, and none after a write that may not. The
-- trainer's calls take little and free payload: they must pass, or a full store would stay full.
local function pass_when_full() redis.call('DEL', prefix .. 'nothing') end

-- An error answer when the caller's session is not the newest, else nil.
local function fenced(epoch)
  local newest = number('trainer_epoch')
  if tonumber(epoch) ~= newest then return {'FENCED', digits(newest)} end
  pass_when_full()
end

local function evict(o, reason)
  redis.call('ZADD', evicted, tonumber(o), o)
  redis.call('HSET', group(o), 'state', 'EVICTED', 'reason', reason)
  redis.call('HINCRBY', prefix .. 'reasons', reason, 1)
end

local function to_pending(o)
  redis.call('ZADD', pending, tonumber(o), o)
  redis.call('HSET', group(o), 'state', 'PENDING')
end

-- An attempt that came to nothing (expired or released): another one, until max_attempts.
local function give_back(o)
  if redis.call('HINCRBY', group(o), 'failures', 1) >= number('max_attempts') then
    evict(o, 'FAILED')
  else
    to_pending(o)
  end
end

local function sweep_expired()
  local late = redis.call('ZRANGEBYSCORE', leased, '-inf', now, 'LIMIT', 0, SWEEP_LIMIT)
  for _, o in ipairs(late) do
    redis.call('ZREM', leased, o)
    redis.call('HINCRBY', run, 'lease_expired', 1)
    give_back(o)
  end
  return #late
end

-- Forgets a group's tensors; texts, headers and rewards stay for looking until `summary_limit` newer ones came.
local function free_tensors(o)
  local record = redis.call('HMGET', group(o), 'token', 'samples', 'bytes', 'freed')
  if not record[1] or record[4] then return end
  local names = {}
  for index = 0, tonumber(record[2]) - 1 do names[#names + 1] = 't' .. index end
  if #names > 0 then redis.call('HDEL', payload(o, record[1]), unpack(names)) end
  redis.call('HINCRBY', run, 'payload_bytes', '-' .. record[3])
  redis.call('HSET', group(o), 'freed', '1')
  local kept = prefix .. 'kept'
  redis.call('RPUSH', kept, o .. ':' .. record[1])
  while redis.call('LLEN', kept) > number('summary_limit') do
    redis.call('UNLINK', prefix .. 'p:' .. redis.call('LPOP', kept))
  end
end

-- Forgets everything that was made of a prompt.
local function drop_samples(o)
  local record = redis.call('HMGET', group(o), 'token', 'bytes', 'freed')
  if not record[1] then return end
  redis.call('UNLINK', payload(o, record[1]))
  if not record[3] then redis.call('HINCRBY', run, 'payload_bytes', '-' .. record[2]) end
  redis.call('HDEL', group(o), 'token', 'samples', 'bytes', 'freed', 'min_version', 'rewards', 'mean_length')
end

-- Groups that fell behind the published version by more than max_staleness leave READY.
local function sweep_stale()
  if field('sft') == '1' then return end
  local bound = number('policy_version') - number('max_staleness')
  local late = redis.call('ZRANGEBYSCORE', ready, '-inf', '(' .. digits(bound), 'LIMIT', 0, SWEEP_LIMIT)
  local drop = field('stale_policy') == 'drop'
  for _, o in ipairs(late) do
    redis.call('ZREM', ready, o)
    drop_samples(o)
    if drop then evict(o, 'STALE') else to_pending(o) end
  end
  if #late > 0 then
    redis.call('HINCRBY', run, 'stale', #late)
    redis.call('HINCRBY', run, 'stale_since_take', #late)
  end
end

-- Prompts that may be leased now.
local function capacity()
  local batch, waiting = number('batch'), card(ready) + card(leased)
  local accepted = card(consumed) + card(reserved) + waiting
  local room
  if field('sft') == '1' then
    room = 4 * batch - waiting
  elseif field('open') ~= '1' then
    return 0
  else
    room = number('base') + (number('max_staleness') + 1) * batch * number('interval') - accepted
  end
  local most_ready = number('most_ready')
  if most_ready > 0 then room = math.min(room, most_ready - waiting) end
  -- More than the steps still need would be generated in vain.
  room = math.min(room, number('steps') * batch - accepted)
  return math.max(room, 0)
end

-- Prompts that can still be drawn; -1 when there is no end.
local function undrawn()
  local limit = number('draw_limit')
  if limit < 0 then return -1 end
  return math.max(limit - number('drawn'), 0)
end
