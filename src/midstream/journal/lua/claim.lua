-- Make this process the writer, under the next epoch (R2).
-- With `orphan` (the writer thought dead, whose lease is KEYS[9]) only if it still is the writer and its lease is gone.
-- `nonce` is of this call: a claim that was made and whose reply was lost is told again, and not made twice.
local orphan, nonce = unpack(ARGV, 6, 7)

local told = redis.call('HMGET', STREAM, 'status', 'epoch', 'writer', 'nonce')
if not told[1] then
  return { UNKNOWN }
end
if told[1] ~= 'open' then
  return { OVER, told[1] }
end
if told[4] ~= nonce then
  if orphan ~= '' and (told[3] ~= orphan or redis.call('EXISTS', KEYS[9]) == 1) then
    return { CHANGED }
  end
  redis.call('HSET', STREAM, 'epoch', told[2] + 1, 'writer', process, 'nonce', nonce)
  redis.call('HSET', OPEN, id, process)
  keep()
  wake(told[3])
end
return { OK, numbers() }
