-- What every script about one stream begins with.  Above stand FIELDS and the codes of replies.
-- A store runs a script as one step, and none of it where its first write is refused: so XADD, the largest, comes first.
local STREAM, LOG, BYTES, FOLD, HOLDS, OWNED, OPEN, ENDED = unpack(KEYS, 1, 8)
local id, publish, channel, process, ttl = unpack(ARGV, 1, 5)

local function numbers()
  return redis.call('HMGET', STREAM, unpack(FIELDS))
end

-- Tell who waits for the stream; and `writer`, who listens to nobody else's streams, that this was done to it.
local function wake(writer)
  redis.call(publish, channel, process .. ' ' .. id)
  if writer and writer ~= process then
    redis.call(publish, channel .. ':' .. writer, process .. ' ' .. id)
  end
end

-- Have every key of the stream, and what it shares with others, for `ttl` more.
local function keep()
  for _, key in ipairs({ STREAM, LOG, FOLD }) do
    redis.call('PEXPIRE', key, ttl)
  end
  for _, key in ipairs({ BYTES, OWNED, OPEN, ENDED }) do
    if redis.call('PTTL', key) < tonumber(ttl) then
      redis.call('PEXPIRE', key, ttl)
    end
  end
end

local function finish(status, now, expires)
  redis.call('HSET', STREAM, 'status', status, 'ended', now, 'access', now)
  redis.call('HDEL', OPEN, id)
  redis.call('ZADD', ENDED, expires, id)
end

-- Add entries that stand in ARGV as triples: seq of the last record, seq of the first, the records.
local function add(from)
  for at = from, #ARGV, 3 do
    redis.call('XADD', LOG, ARGV[at] .. '-0', 'first', ARGV[at + 1], 'data', ARGV[at + 2])
  end
end

-- The lowest position that another process says one of its readers has, by the store's clock.
local function lowest_hold()
  local time = redis.call('TIME')
  local now = time[1] * 1000 + time[2] / 1000
  local holds = redis.call('HGETALL', HOLDS)
  local lowest
  for at = 1, #holds, 2 do
    local position, till = string.match(holds[at + 1], '^(%d+) (%d+)$')
    position = tonumber(position)
    if holds[at] ~= process and tonumber(till) > now and (not lowest or position < lowest) then
      lowest = position
    end
  end
  return lowest
end
