-- Count what the streams of one tag hold, after some were lost that nobody counted out, and forget the names of these.
-- KEYS: bytes, open, ended, then hashes of streams, with their ids in ARGV.  Nothing where these are not all there are.
local known = #KEYS - 3
if redis.call('HLEN', KEYS[2]) + redis.call('ZCARD', KEYS[3]) ~= known then
  return { CHANGED }
end
local total = 0
for at = 1, known do
  local told = redis.call('HMGET', KEYS[at + 3], 'bytes', 'fold')
  if told[1] then
    total = total + told[1] + told[2] + redis.call('HSTRLEN', KEYS[at + 3], 'request')
  else
    redis.call('HDEL', KEYS[2], ARGV[at])
    redis.call('ZREM', KEYS[3], ARGV[at])
  end
end
if redis.call('EXISTS', KEYS[1]) == 1 then
  redis.call('SET', KEYS[1], total, 'KEEPTTL')
end
return { OK, total }
