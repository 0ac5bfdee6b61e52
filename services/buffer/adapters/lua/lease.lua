-- ARGV: request id, caller, most prompts, ttl in ms, ms to remember the request.
-- Answer: OK, published version, time in ms, 1 when the request is a repeat, then ordinal, lease id, attempt,
-- deadline, token of an unfinished attempt ('' without), its number of samples per lease.
local gone = missing() or ended()
if gone then return gone end
sweep_expired()
local request = prefix .. 'q:' .. ARGV[1]
local version = field('policy_version')
local answer = {'OK', version, digits(now), '0'}
local oldest = tonumber(version) - number('max_staleness')
local policy = field('stale_policy')
local judges = policy == 'keep' or policy == 'custom'

local function append(o, id, attempt)
  answer[#answer + 1] = o
  answer[#answer + 1] = id
  answer[#answer + 1] = attempt
  answer[#answer + 1] = redis.call('ZSCORE', leased, o)
  local partial = redis.call('HMGET', group(o), 'partial', 'partial_samples', 'partial_version')
  -- A group that goes on from tokens as old as these would be stale when it is done.
  if partial[1] and not judges and partial[3] ~= '' and tonumber(partial[3]) < oldest then
    drop_partial(o)
    partial = {false, false}
  end
  answer[#answer + 1] = partial[1] or ''
  answer[#answer + 1] = partial[2] or '0'
end

local before = redis.call('GET', request)
if before then
  answer[4] = '1'
  for o, id, attempt in string.gmatch(before, '(%d+) (%S+) (%d+);') do
    local record = redis.call('HMGET', group(o), 'state', 'lease')
    if record[1] == 'LEASED' and record[2] == id then append(o, id, attempt) end
  end
  return answer
end

local count = math.min(tonumber(ARGV[3]), capacity())
local limit, rollback, memory = number('draw_limit'), field('rollback'), {}
for _ = 1, count do
  local o = redis.call('ZPOPMIN', pending)[1]
  if o then
    redis.call('ZREM', since(pending), o)
  else
    local drawn = number('drawn')
    if limit >= 0 and drawn >= limit then break end
    o = string.format('%012d', drawn)
    redis.call('HINCRBY', run, 'drawn', 1)
  end
  local leases = redis.call('HINCRBY', group(o), 'leases', 1)
  local id = digits(o) .. '.' .. digits(leases) .. '.' .. rollback
  redis.call('HSET', group(o), 'lease', id, 'caller', ARGV[2])
  enter(leased, o, now + tonumber(ARGV[4]), 'LEASED')
  -- Only what failed counts as an attempt: a group sent back for newer weights, or by a rollback, did not fail.
  local failures = redis.call('HGET', group(o), 'failures') or '0'
  append(o, id, failures)
  memory[#memory + 1] = o .. ' ' .. id .. ' ' .. failures .. ';'
end
if #memory > 0 then redis.call('SET', request, table.concat(memory), 'PX', ARGV[5]) end
return answer
