-- ARGV: what becomes of the prompts: '' another attempt, 'UNDO' as if the lease had never been given, else the reason of
-- their eviction; then six per lease: ordinal, lease id, and of what was made so far: token ('' when nothing), number
-- of samples, oldest version ('' without), bytes. Answer: OK, number released, lost lease ids.
local gone = missing()
if gone then return gone end
sweep_expired()
local fate, released, answer = ARGV[1], 0, {'OK', '0'}

-- Keeps what an attempt made for the next one; false when it is not in the store any more.
local function keep(o, at)
  local token = ARGV[at + 2]
  if token == '' or redis.call('PERSIST', payload(o, token)) == 0 then return false end
  drop_partial(o)
  redis.call('HSET', group(o), 'partial', token, 'partial_samples', ARGV[at + 3], 'partial_version', ARGV[at + 4],
    'partial_bytes', ARGV[at + 5])
  redis.call('HINCRBY', run, 'payload_bytes', ARGV[at + 5])
  return true
end

for at = 2, #ARGV, 6 do
  local o = ARGV[at]
  local record = redis.call('HMGET', group(o), 'state', 'lease', 'partial')
  if record[1] == 'LEASED' and record[2] == ARGV[at + 1] then
    leave(leased, o)
    local kept = keep(o, at)
    if fate == 'UNDO' or (fate == '' and kept) then
      to_pending(o)
    elseif fate == '' then
      give_back(o)
    else
      evict(o, fate)
    end
    released = released + 1
  elseif ARGV[at + 2] ~= '' and record[3] == ARGV[at + 2] then
    -- The script runs again because its answer got lost.
    released = released + 1
  else
    answer[#answer + 1] = ARGV[at + 1]
  end
end
if released > 0 and string.sub(fate, 1, 8) == 'FILTERED' then
  local count, most = redis.call('HINCRBY', run, 'rejections', released), number('max_rejections')
  if most > 0 and count >= most and field('state') == 'ACTIVE' then
    redis.call('HSET', run, 'state', 'FAILED', 'reason', 'dynamic_sampling_filter_path rejected ' .. digits(count)
      .. ' groups in a row, the last one as ' .. fate .. '; loosen the filter, choose other prompts, or raise'
      .. ' max_filter_rejections.')
  end
end
answer[2] = digits(released)
return answer
