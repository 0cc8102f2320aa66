-- Remove a lease, with an entry that says so where `marker` is 1.  The answer is what it was.
local marker = ARGV[3]

local lease = found()
if not lease then
  return ENDED_NONE
end
if lease.over then
  return lease.over
end
return finish(lease, live(lease) and ENDED_LIVE or ENDED_NONE, marker == '1')
