-- Ends a deletion. ARGV: its token.
if redis.call('GET', prefix .. 'deleting') == ARGV[1] then redis.call('DEL', prefix .. 'deleting') end
return {'OK'}
