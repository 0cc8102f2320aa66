-- Let the oldest records go, if `expected` is still the first one (R6, R7).  Their sum is in the fold; where it is given
-- the entries that lie wholly below go from the log as well, until then they can be folded again.
local expected, oldest, acked, weight, fold, json = unpack(ARGV, 6, 11)

local told = redis.call('HMGET', STREAM, 'oldest', 'bytes', 'fold')
if not told[1] then
  return { UNKNOWN }
end
local hold = acked == '1' and lowest_hold()
if told[1] ~= expected or (hold and tonumber(oldest) > hold + 1) then
  return { CHANGED, numbers() }
end
redis.call('HSET', STREAM, 'oldest', oldest, 'bytes', told[2] - weight, 'fold', fold)
if acked == '1' then
  redis.call('HSET', STREAM, 'trimmed', oldest - 1)
end
local total = redis.call('INCRBY', BYTES, fold - told[3] - weight)
if json ~= '' then
  redis.call('SET', FOLD, json, 'PX', math.max(redis.call('PTTL', STREAM), 1))
  redis.call('XTRIM', LOG, 'MINID', '=', oldest)
end
return { OK, numbers(), total }
