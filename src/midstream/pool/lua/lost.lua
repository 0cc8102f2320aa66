-- Is the lease gone?  One that has run out is removed, with an entry that says so.
local lease = found()
if live(lease) then
  return 0
end
if lease and not lease.over then
  finish(lease, ENDED_NONE, true)
end
return 1
