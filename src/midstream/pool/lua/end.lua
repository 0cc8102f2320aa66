-- Remove a lease, with an entry that says so where `marker` is 1.  The answer is what kind it was.
local token, marker = unpack(ARGV, 3, 4)

local lease = found()
if not lease then
  return ENDED_NONE
end
if lease.over then
  return lease.over == token and lease.kind or ENDED_NONE
end
local kind = not live(lease) and ENDED_NONE or lease.cancelled and ENDED_CANCELLED or ENDED_LIVE
-- The token is the caller's, so that who asks again because the answer was lost is told the same.
local over = { over = kind ~= ENDED_NONE and token or '', kind = kind }
if marker == '1' then
  over.faulted = lease.cancelled and lease.chars or -1
end
finish(lease, over, marker == '1')
return kind
