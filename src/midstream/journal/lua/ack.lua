-- Take an ack, and say up to where records may go now (R6): not past a reader here (`floor`) or on another process.
local acked, floor = unpack(ARGV, 6, 7)

local told = redis.call('HMGET', STREAM, 'highest', 'acked', 'status', 'oldest', 'trimmed')
if not told[1] then
  return { UNKNOWN }
end
local highest, oldest = tonumber(told[1]), tonumber(told[4])
if tonumber(acked) > highest then
  return { AHEAD, highest }
end
acked = math.max(acked, told[2])
if acked > tonumber(told[2]) then
  redis.call('HSET', STREAM, 'acked', acked)
end
local upto = acked
if floor ~= '' then
  upto = math.min(upto, floor)
end
local hold = lowest_hold()
if hold then
  upto = math.min(upto, hold)
end
if told[3] ~= 'open' then
  upto = math.min(upto, highest - 1)
end
if upto == oldest - 1 and tonumber(told[5]) < upto then -- what was evicted this ack lets go too
  redis.call('HSET', STREAM, 'trimmed', upto)
end
return { OK, numbers(), upto }
