-- Remove a lease, with an entry that says so where `marker` is 1.  The answer is whether it was live.
local token, marker = unpack(ARGV, 3, 4)

local lease = found()
if not lease then
  return 0
end
if lease.over then
  return lease.over == token and 1 or 0
end
local lives = live(lease)
local faulted = marker == '1'
finish(lease, lives and token or '', faulted, faulted and lease.chars or nil)
return lives and 1 or 0
