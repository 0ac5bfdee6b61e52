-- Flips groups whose payload was written before. ARGV, nine per group: ordinal, lease id, lease count, rollback
-- count, payload token, oldest version ('' when no engine made it), number of samples, bytes, "rewards|mean length".
-- Answer: OK, then outcome and detail per group.
local gone = missing()
if gone then return gone end
sweep_expired()
local rollback = field('rollback')
local answer = {'OK'}

local function flip(at)
  local o, id, count = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2])
  local record = redis.call('HMGET', group(o), 'state', 'lease', 'put_lease', 'leases', 'token')
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
  if redis.call('PERSIST', payload(o, ARGV[at + 4])) == 0 then return 'RETRY', 'PAYLOAD_EXPIRED' end
  redis.call('ZREM', state == 'LEASED' and leased or pending, o)
  local version = ARGV[at + 5] ~= '' and ARGV[at + 5] or field('policy_version')
  local split = string.find(ARGV[at + 8], '|', 1, true)
  redis.call('ZADD', ready, version, o)
  redis.call('HSET', group(o), 'state', 'READY', 'put_lease', digits(count), 'token', ARGV[at + 4], 'min_version',
    version, 'samples', ARGV[at + 6], 'bytes', ARGV[at + 7], 'failures', '0', 'rewards',
    string.sub(ARGV[at + 8], 1, split - 1), 'mean_length', string.sub(ARGV[at + 8], split + 1))
  redis.call('HINCRBY', run, 'payload_bytes', ARGV[at + 7])
  return 'STORED', ''
end

for at = 1, #ARGV, 9 do
  answer[#answer + 1], answer[#answer + 2] = flip(at)
end
return answer
