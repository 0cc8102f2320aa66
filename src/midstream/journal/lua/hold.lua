-- This process's lowest reader stands at `position`; without one there is none any more, and its leaving was an access
-- (at `now`) of an open stream: who writes it counts from then how long nobody reads it.
local position, term, now = unpack(ARGV, 6, 8)

local told = redis.call('HMGET', STREAM, 'access', 'status')
if not told[1] then
  return { UNKNOWN }
end
if position == '' then
  redis.call('HDEL', HOLDS, process)
  if told[2] == 'open' and tonumber(now) > tonumber(told[1]) then
    redis.call('HSET', STREAM, 'access', now)
  end
  return { OK }
end
local time = redis.call('TIME')
local till = time[1] * 1000 + math.floor(time[2] / 1000) + term
redis.call('HSET', HOLDS, process, string.format('%d %d', position, till))
redis.call('PEXPIRE', HOLDS, term)
return { OK }
