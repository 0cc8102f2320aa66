-- Take the stream from its writer and end it, in one step; after the end it changes nothing.
-- `record` is the terminal record with `mark` where its seq belongs.
local record, mark, overhead, now, expires = unpack(ARGV, 6, 10)

local told = redis.call('HMGET', STREAM, 'status', 'epoch', 'highest', 'bytes', 'writer')
if not told[1] then
  return { UNKNOWN }
end
if told[1] ~= 'open' then
  return { OK, numbers(), redis.call('INCRBY', BYTES, 0) }
end
local seq = string.format('%d', told[3] + 1)
local data = string.gsub(record, mark, seq)
local weight = #data + overhead
redis.call('XADD', LOG, seq .. '-0', 'first', seq, 'data', data)
redis.call('HSET', STREAM, 'epoch', told[2] + 1, 'highest', seq, 'first', seq, 'digest', '', 'bytes', told[4] + weight)
finish('cancelled', now, expires)
local total = redis.call('INCRBY', BYTES, weight)
keep()
wake(told[5])
return { OK, numbers(), total }
