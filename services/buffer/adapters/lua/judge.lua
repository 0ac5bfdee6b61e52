-- What the run's own policy said of stale groups. ARGV: the published version they were judged at, then ordinal,
-- payload token, verdict (keep, requeue or drop) per group. A group that moved on meanwhile is left alone.
local gone = missing()
if gone then return gone end
pass_when_full()
if digits(number('policy_version')) ~= ARGV[1] then return {'OK'} end
for at = 2, #ARGV, 3 do
  local o = ARGV[at]
  local record = redis.call('HMGET', group(o), 'state', 'token')
  if record[1] == 'READY' and record[2] == ARGV[at + 1] then
    if ARGV[at + 2] == 'keep' then
      redis.call('HSET', group(o), 'judged', ARGV[1])
    else
      set_aside(o, ARGV[at + 2] == 'drop')
    end
  end
end
return {'OK'}
