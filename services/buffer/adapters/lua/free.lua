-- Frees tensors that no retained checkpoint needs. ARGV: most groups. Answer: OK, groups freed.
local gone = missing()
if gone then return gone end
pass_when_full()
local oldest = checkpoints()[1]
if not oldest then return {'OK', '0'} end
local found = redis.call('ZRANGEBYSCORE', held, '-inf', digits(oldest.step), 'LIMIT', 0, ARGV[1])
for _, o in ipairs(found) do
  redis.call('ZREM', held, o)
  free_tensors(o)
end
return {'OK', digits(#found)}
