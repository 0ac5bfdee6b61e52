-- ARGV: trainer epoch. Answer: OK, a version above every one handed out before.
local gone = missing()
if gone then return gone end
local old = fenced(ARGV[1])
if old then return old end
return {'OK', digits(next_number('reserved_version'))}
