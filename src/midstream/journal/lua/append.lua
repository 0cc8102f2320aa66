-- Add a batch if it is the next one, by the writer of the epoch (R2 to R4).  Sent again, it is accepted and not written.
-- The writer too is compared: a store that was rolled back may give an epoch out a second time.
-- With three keys the batch is one entry, and nothing else is to be done: the case of every chunk.  With all of them the
-- batch may end the stream, or it is time to put off its expiry, or the server is another one than before.
local epoch, first, last, digest, weight, data = unpack(ARGV, 6, 11)

local told = redis.call('HMGET', KEYS[1], 'epoch', 'highest', 'status', 'writer', 'bytes')
local taken = told[1] == epoch and told[4] == ARGV[4] and told[3] == 'open' and told[2] + 1 == tonumber(first)
if taken then
  if #ARGV == 11 then
    redis.call('XADD', KEYS[2], last .. '-0', 'first', first, 'data', data)
  end
  for at = 15, #ARGV, 3 do
    redis.call('XADD', KEYS[2], ARGV[at] .. '-0', 'first', ARGV[at + 1], 'data', ARGV[at + 2])
  end
  redis.call('HSET', KEYS[1], 'highest', last, 'first', first, 'digest', digest, 'bytes', told[5] + weight)
  redis.call('INCRBY', KEYS[3], weight)
  if #KEYS == 3 then
    redis.call(ARGV[2], ARGV[3], ARGV[4] .. ' ' .. ARGV[1])
    return OK
  end
end

--@prelude

if taken then
  local status, now, expires, run = unpack(ARGV, 11, 14)
  redis.call('HSET', STREAM, 'run', run)
  if status ~= 'open' then
    finish(status, now, expires)
  end
  keep()
  wake()
  return OK
end
if not told[1] then
  return { UNKNOWN }
end
if told[1] ~= epoch or told[4] ~= process then
  return { STALE, tonumber(told[1]) }
end
local before = redis.call('HMGET', STREAM, 'first', 'digest')
if told[2] == last and before[1] == first and before[2] == digest then
  return AGAIN
end
if told[3] ~= 'open' then
  return { OVER, told[3] }
end
return { SEQUENCE, told[2] + 1 }
