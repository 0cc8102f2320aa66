-- Begin a stream with its first records, and bind it to the names in KEYS[9…], all or nothing.
-- A stream of this id that stands already is this one: the reply of an earlier try was lost.
local meta, request, epoch, run, now, weight, first, last, digest = unpack(ARGV, 6, 14)

for at = 9, #KEYS do
  local taken = redis.call('GET', KEYS[at])
  if taken and taken ~= id then
    return { TAKEN, taken }
  end
end
if redis.call('EXISTS', STREAM) == 1 then
  return { AGAIN, numbers(), redis.call('INCRBY', BYTES, 0) }
end
add(15)
redis.call('HSET', STREAM, 'meta', meta, 'request', request, 'status', 'open', 'epoch', epoch, 'highest', last,
  'oldest', 1, 'acked', 0, 'trimmed', 0, 'bytes', weight, 'fold', 0, 'access', now, 'ended', '', 'writer', process,
  'run', run, 'first', first, 'digest', digest)
redis.call('HSET', OPEN, id, process)
redis.call('ZADD', OWNED, now, id)
for at = 9, #KEYS do
  redis.call('SET', KEYS[at], id, 'PX', ttl)
end
local total = redis.call('INCRBY', BYTES, weight + #request)
keep()
wake()
return { OK, numbers(), total }
