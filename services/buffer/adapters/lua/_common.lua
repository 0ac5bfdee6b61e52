-- Shared head of every script of the state machine.
-- KEYS[1] is the run's hash; every other key of the run has the same prefix and hash tag, hence the same slot.
-- A member of a state's set is the ordinal as twelve digits, so that equal scores order by ordinal.
-- Invariant: a drawn ordinal is in exactly one of the six sets, and its hash names that state.
local run = KEYS[1]
local prefix = string.sub(run, 1, -4)
local pending, leased, ready = prefix .. 'pending', prefix .. 'leased', prefix .. 'ready'
local reserved, consumed, evicted = prefix .. 'reserved', prefix .. 'consumed', prefix .. 'evicted'
-- Consumed groups whose tensors are still stored, by step.
local held = prefix .. 'held'
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local SWEEP_LIMIT = 5000
-- Reasons of eviction that come from a user's function are counted apart up to this many.
local REASON_LIMIT = 100

local function field(name) return redis.call('HGET', run, name) end
local function number(name) return tonumber(redis.call('HGET', run, name) or 0) end
local function card(key) return redis.call('ZCARD', key) end
local function group(o) return prefix .. 'g:' .. o end
local function payload(o, token) return prefix .. 'p:' .. o .. ':' .. token end
local function side(o, name) return prefix .. 'x:' .. o .. ':' .. name end
-- Numbers of any size without an exponent: Lua's own conversion writes 1e+15.
local function digits(x) return string.format('%d', x) end

-- An error answer when the run is unknown, else nil.
local function missing()
  if redis.call('EXISTS', run) == 0 then return {'RUN_NOT_FOUND'} end
end

-- An error answer when the run has ended, else nil.
local function ended()
  local state = field('state')
  if state ~= 'ACTIVE' then return {'RUN_FINISHED', state, field('reason')} end
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

-- The next of the numbers that a run gives out. No two trainers or weights may ever have the same, but a store that
-- restarted may have forgotten the last it gave, and so may another server after a failover: numbers then go on from
-- where one a millisecond would have come since the run was created, which no earlier restart can have given.
local function next_number(name)
  local server = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)') or ''
  local known = field(name .. '_by')
  if known ~= server then redis.call('HSET', run, name .. '_by', server) end
  local skipped = known and known ~= server and now - number('created') or 1
  return redis.call('HINCRBY', run, name, math.max(1, skipped))
end

-- Since when the groups of an open state are in it: what was open longest is found without reading all.
local function since(set) return set .. ':since' end

local function enter(set, o, score, state)
  redis.call('ZADD', set, score, o)
  redis.call('ZADD', since(set), now, o)
  redis.call('HSET', group(o), 'state', state)
end

local function leave(set, o)
  redis.call('ZREM', set, o)
  redis.call('ZREM', since(set), o)
end

-- Forgets what an unfinished attempt left behind.
local function drop_partial(o)
  local record = redis.call('HMGET', group(o), 'partial', 'partial_bytes')
  if not record[1] then return end
  redis.call('UNLINK', payload(o, record[1]))
  redis.call('HINCRBY', run, 'payload_bytes', '-' .. record[2])
  redis.call('HDEL', group(o), 'partial', 'partial_samples', 'partial_version', 'partial_bytes')
end

local function evict(o, reason)
  drop_partial(o)
  local reasons = prefix .. 'reasons'
  local head = string.match(reason, '^(.-):')
  if head and redis.call('HEXISTS', reasons, reason) == 0 and redis.call('HLEN', reasons) >= REASON_LIMIT then
    reason = head
  end
  redis.call('ZADD', evicted, tonumber(o), o)
  redis.call('HSET', group(o), 'state', 'EVICTED', 'reason', reason)
  redis.call('HINCRBY', reasons, reason, 1)
end

local function to_pending(o) enter(pending, o, tonumber(o), 'PENDING') end

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
    leave(leased, o)
    redis.call('HINCRBY', run, 'lease_expired', 1)
    give_back(o)
  end
  return #late
end

local summary_limit
-- Forgets a group's tensors; texts, headers and rewards stay for looking until `summary_limit` newer ones came.
local function free_tensors(o)
  local record = redis.call('HMGET', group(o), 'token', 'samples', 'bytes', 'freed', 'side')
  if not record[1] or record[4] then return end
  local names = {}
  for index = 0, tonumber(record[2]) - 1 do names[#names + 1] = 't' .. index end
  if #names > 0 then redis.call('HDEL', payload(o, record[1]), unpack(names)) end
  if record[5] then redis.call('UNLINK', side(o, record[5])) end
  redis.call('HINCRBY', run, 'payload_bytes', '-' .. record[3])
  redis.call('HSET', group(o), 'freed', '1')
  local kept = prefix .. 'kept'
  local count = redis.call('RPUSH', kept, o .. ':' .. record[1])
  summary_limit = summary_limit or number('summary_limit')
  for _ = summary_limit + 1, count do redis.call('UNLINK', prefix .. 'p:' .. redis.call('LPOP', kept)) end
end

-- Forgets everything that was made of a prompt.
local function drop_samples(o)
  local record = redis.call('HMGET', group(o), 'token', 'bytes', 'freed', 'side')
  if not record[1] then return end
  redis.call('UNLINK', payload(o, record[1]))
  if record[4] then redis.call('UNLINK', side(o, record[4])) end
  if not record[3] then redis.call('HINCRBY', run, 'payload_bytes', '-' .. record[2]) end
  redis.call('HDEL', group(o), 'token', 'samples', 'bytes', 'freed', 'min_version', 'rewards', 'mean_length', 'side',
    'restored', 'judged')
end

-- Takes a group that became too stale out of READY; `drop` evicts it, else it is generated again. What a rollback made
-- READY was trained once already, and became stale by the trainer's fault: it is never dropped.
local function set_aside(o, drop)
  local restored = redis.call('HGET', group(o), 'restored')
  leave(ready, o)
  drop_samples(o)
  if drop and not restored then evict(o, 'STALE') else to_pending(o) end
  redis.call('HINCRBY', run, 'stale', 1)
  redis.call('HINCRBY', run, 'stale_since_take', 1)
end

-- READY groups behind the published version by more than max_staleness, oldest first.
local function stale_groups(limit)
  if field('sft') == '1' then return {} end
  local bound = number('policy_version') - number('max_staleness')
  return redis.call('ZRANGEBYSCORE', ready, '-inf', '(' .. digits(bound), 'LIMIT', 0, limit)
end

-- What a policy that needs no one's judgement does with stale groups.
local function sweep_stale()
  local policy = field('stale_policy')
  if policy ~= 'requeue' and policy ~= 'drop' then return end
  repeat
    local late = stale_groups(SWEEP_LIMIT)
    for _, o in ipairs(late) do set_aside(o, policy == 'drop') end
  until #late < SWEEP_LIMIT
end

-- Prompts that may be leased now.
local function capacity()
  local batch, waiting = number('batch'), card(ready) + card(leased)
  local admitted = math.max(batch, number('admitted'))
  local accepted = card(consumed) + card(reserved) + waiting
  local room
  if field('sft') == '1' then
    room = 4 * batch - waiting
  elseif field('open') ~= '1' then
    return 0
  else
    room = number('base') + (number('max_staleness') + 1) * admitted * number('interval') - accepted
  end
  local most_ready = number('most_ready')
  if most_ready > 0 then room = math.min(room, most_ready - waiting) end
  -- More than the steps still need would be generated in vain.
  room = math.min(room, number('steps') * batch + admitted - batch - accepted)
  return math.max(room, 0)
end

-- Prompts that can still be drawn; -1 when there is no end.
local function undrawn()
  local limit = number('draw_limit')
  if limit < 0 then return -1 end
  return math.max(limit - number('drawn'), 0)
end

-- Retained checkpoints as {step, path, frontier}, oldest first. Runs from before there was a list have one at most.
local function checkpoints()
  local text = field('checkpoints')
  if text then return cjson.decode(text) end
  local step = number('checkpoint_step')
  if step < 0 then return {} end
  return {{step = step, path = field('checkpoint_path'), frontier = 0}}
end

-- The pointer flip: which checkpoints there are, in one write.
local function set_checkpoints(list, step, path)
  local text = #list > 0 and cjson.encode(list) or '[]'
  redis.call('HSET', run, 'checkpoints', text, 'checkpoint_step', digits(step), 'checkpoint_path', path)
end

-- Groups consumed before `held` was kept are found in `consumed`.
local function ensure_held()
  if field('holds') then return end
  local from = '(' .. digits(number('checkpoint_step'))
  local found = field('saves') == '1' and redis.call('ZRANGEBYSCORE', consumed, from, '+inf', 'WITHSCORES') or {}
  for i = 1, #found, 2 do redis.call('ZADD', held, found[i + 1], found[i]) end
  redis.call('HSET', run, 'holds', '1')
end
