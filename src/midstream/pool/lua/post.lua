-- One post of progress: the checks, in the order that PROTOCOL.md gives them, and the append.
-- `size` is the bytes and `chars` the characters of content and reasoning, `digest` tells batches of one number apart;
-- `run` is the server's run id as the caller last met it.
-- Repeated after a lost answer it finds its own batch as the last one, and changes nothing.
local key, seq, digest, size, chars, content, reasoning, run = unpack(ARGV, 3, 10)
seq, size = tonumber(seq), tonumber(size)

local lease = found()
if not live(lease) then
  return { NO_LEASE, 0 }
end
if lease.key ~= key then
  return { WRONG_KEY, 0 }
end

local function renewed(code)
  local due = code == OK and now - lease.noted >= THIRD
  if due then
    lease.noted = now
    note(lease.request)
  end
  lease.expires = now + TERM
  write(generation, lease)
  return { code, due and 1 or 0 }
end

if lease.cancelled then
  return renewed(CANCELLED)
end
if seq == 0 and size == 0 then
  return renewed(OK)
end
if seq == lease.seq and seq > 0 and digest == lease.digest then
  lease.run = run -- this server lacks nothing
  return renewed(OK)
end
if seq ~= lease.seq + 1 then
  -- A server that was restarted or replaced since the last batch, and lacks some: what follows would leave a hole.
  if seq > lease.seq and run ~= lease.run then
    finish(lease, ENDED_NONE, false)
    return { NO_LEASE, 0 }
  end
  return { SEQUENCE, lease.seq + 1 }
end
if seq > BATCHES or lease.bytes + size > lease.max_bytes then
  return renewed(TOO_LARGE)
end
append(lease, ARGV[4], content, reasoning)
lease.seq, lease.digest, lease.run = seq, digest, run
lease.bytes, lease.chars = lease.bytes + size, lease.chars + chars
return renewed(OK)
