-- Flips groups whose payload was written before. ARGV, ten per group: ordinal, lease id, lease count, rollback
-- count, payload token, oldest version ('' when no engine made it), number of samples, bytes, "rewards|mean length",
-- name of its side payloads ('' without). Answer: OK, then outcome and detail per group.
local gone = missing()
if gone then return gone end
sweep_expired()
local rollback, quota = field('rollback'), number('max_bytes')
local answer = {'OK'}

local function flip(at)
  local o, id, count = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2])
  local record = redis.call('HMGET', group(o), 'state', 'lease', 'put_lease', 'leases', 'token', 'partial')
  local state, stored = record[1], tonumber(record[3] or 0)
  if not state or count > tonumber(record[4] or 0) then return 'INVALID', 'UNKNOWN_LEASE' end
  -- The client runs a script again when its answer got lost: this very payload is the stored one.
  if record[5] == ARGV[at + 4] then return 'STORED', '' end
  if ARGV[at + 3] ~= rollback then return 'LEASE_LOST', 'ROLLED_BACK' end
  if state == 'READY' or state == 'RESERVED' or state == 'CONSUMED' then return 'DUPLICATE', state end
  if state == 'EVICTED' then return 'LEASE_LOST', state end
  -- A late repeat of a put whose group has since been sent back for newer weights.
  if count == stored then return 'DUPLICATE', 'REQUEUED' end
  if count < stored or (state == 'LEASED' and record[2] ~= id) then return 'LEASE_LOST', state end
  if quota > 0 and number('payload_bytes') + tonumber(ARGV[at + 7]) > quota then return 'FULL', digits(quota) end
  if redis.call('PERSIST', payload(o, ARGV[at + 4])) == 0 then return 'RETRY', 'PAYLOAD_EXPIRED' end
  -- A refused group's payload is deleted by who wrote it.
  local beside = ARGV[at + 9]
  if beside ~= '' and redis.call('PERSIST', side(o, beside)) == 0 then return 'INVALID', 'SIDE_EXPIRED' end
  leave(state == 'LEASED' and leased or pending, o)
  if record[6] then drop_partial(o) end
  local version = ARGV[at + 5] ~= '' and ARGV[at + 5] or field('policy_version')
  local split = string.find(ARGV[at + 8], '|', 1, true)
  redis.call('HSET', group(o), 'put_lease', digits(count), 'token', ARGV[at + 4], 'min_version',
    version, 'samples', ARGV[at + 6], 'bytes', ARGV[at + 7], 'failures', '0', 'rewards',
    string.sub(ARGV[at + 8], 1, split - 1), 'mean_length', string.sub(ARGV[at + 8], split + 1))
  if beside ~= '' then redis.call('HSET', group(o), 'side', beside) end
  -- Made before numbers were skipped (see publish).
  local age = tonumber(version) <= number('skipped_after') and digits(version + number('skipped')) or version
  enter(ready, o, age, 'READY')
  redis.call('HINCRBY', run, 'payload_bytes', ARGV[at + 7])
  return 'STORED', ''
end

local stored = false
for at = 1, #ARGV, 10 do
  local outcome, detail = flip(at)
  stored = stored or outcome == 'STORED'
  answer[#answer + 1], answer[#answer + 2] = outcome, detail
end
if stored and number('rejections') > 0 then redis.call('HSET', run, 'rejections', '0') end
return answer
