-- Forget a stream; with `due` only if it has ended and expires by then.
local due = ARGV[6]

if due ~= '' then
  local expires = redis.call('ZSCORE', ENDED, id)
  if not expires or tonumber(expires) > tonumber(due) then
    return { CHANGED }
  end
end
local told = redis.call('HMGET', STREAM, 'bytes', 'fold', 'writer')
local size = 0
if told[1] then
  size = told[1] + told[2] + redis.call('HSTRLEN', STREAM, 'request')
end
redis.call('DEL', STREAM, LOG, FOLD, HOLDS)
redis.call('HDEL', OPEN, id)
redis.call('ZREM', ENDED, id)
redis.call('ZREM', OWNED, id)
local total = redis.call('INCRBY', BYTES, 0 - size) -- Lua's -0 is no integer to the store
if redis.call('PTTL', BYTES) < 0 then
  redis.call('PEXPIRE', BYTES, ttl)
end
wake(told[3])
return { OK, total }
