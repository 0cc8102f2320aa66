-- Grant a lease; what is held already stays as it is.
local request, lease, run = unpack(ARGV, 3, 5)

local held = found()
if redis.call('HEXISTS', REQUEST, 'flagged') == 1 or (held and held.over) then
  return CANCELLED
end
if live(held) then
  return OK
end
lease = cjson.decode(lease)
lease.request, lease.run = request, run
lease.seq, lease.digest, lease.bytes, lease.chars, lease.cancelled = 0, '', 0, 0, false
lease.noted, lease.expires = now, now + TERM
write(generation, lease)
note(request)
return OK
