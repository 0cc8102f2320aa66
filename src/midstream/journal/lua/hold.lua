-- This process's lowest reader stands at `position`; without one there is none any more.
local position, term = unpack(ARGV, 6, 7)

if redis.call('EXISTS', STREAM) == 0 then
  return { UNKNOWN }
end
if position == '' then
  redis.call('HDEL', HOLDS, process)
  return { OK }
end
local time = redis.call('TIME')
local till = time[1] * 1000 + math.floor(time[2] / 1000) + term
redis.call('HSET', HOLDS, process, string.format('%d %d', position, till))
redis.call('PEXPIRE', HOLDS, term)
return { OK }
