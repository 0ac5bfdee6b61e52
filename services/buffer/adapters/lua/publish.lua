-- ARGV: trainer epoch, version, steps contained. Repeating the newest version changes nothing,
-- except that with more steps admission moves on: a run that only generates keeps its weights.
local gone = missing()
if gone then return gone end
local old = fenced(ARGV[1])
if old then return old end
-- A rollback that was cut off is to be finished first.
if field('restoring') then return {'RESTORING', field('restoring')} end
local version, current = tonumber(ARGV[2]), number('policy_version')
if version == current and field('open') == '1' then
  if tonumber(ARGV[3]) > number('published_steps') then
    redis.call('HSET', run, 'published_steps', ARGV[3], 'base', digits(card(consumed) + card(reserved)))
  end
  return {'OK'}
end
if version <= current or version > number('reserved_version') then
  return {'VERSION_OUT_OF_ORDER', digits(current), field('reserved_version')}
end
-- Numbers were skipped because the store restarted: that makes no group older.
local skipped = version - current - 1
if current > 0 and skipped >= 1000 then
  for _, o in ipairs(redis.call('ZRANGE', ready, 0, -1)) do redis.call('ZINCRBY', ready, skipped, o) end
  redis.call('HSET', run, 'skipped_after', digits(current), 'skipped', digits(skipped))
end
redis.call('HSET', run, 'policy_version', digits(version), 'open', '1', 'published_steps', ARGV[3],
  'base', digits(card(consumed) + card(reserved)))
sweep_stale()
return {'OK'}
