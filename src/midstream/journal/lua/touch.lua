-- Note an access that comes `interval` or more after the last one noted, and push the stream's end on (R10).
local now, interval, retain, cap = unpack(ARGV, 6, 9)

local told = redis.call('HMGET', STREAM, 'access', 'status', 'ended')
if not told[1] then
  return { UNKNOWN }
end
if now - told[1] < tonumber(interval) then
  return { OK, told[1] }
end
redis.call('HSET', STREAM, 'access', now)
if told[2] ~= 'open' then
  redis.call('ZADD', ENDED, string.format('%.6f', math.min(now + retain, told[3] + cap)), id)
end
keep()
return { OK, now }
