-- What the scripts about one request share.  KEYS: 1 the request's hash (generation -> its lease, as JSON; `flagged`
-- once it is cancelled), 2 its progress, 3 the tag's requests that have leases by when these were last renewed.
-- ARGV: 1 how far to be ahead of the server's clock, in ms, 2 the generation.
-- TERM, THIRD, LINGER, RETAIN (ms), BATCHES and ENTRIES stand before this, and the codes of the answers: Answer, Ended.
-- All that is written here expires: the progress RETAIN after its last entry, the rest LINGER after its last change.
local REQUEST, PROGRESS, HELD = unpack(KEYS)
local generation = ARGV[2]

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[1]

local function found()
  local told = redis.call('HGET', REQUEST, generation)
  return told and cjson.decode(told)
end

local function live(lease)
  return lease and not lease.over and now < lease.expires
end

local function write(name, lease)
  redis.call('HSET', REQUEST, name, cjson.encode(lease))
  redis.call('PEXPIRE', REQUEST, LINGER)
end

-- Say that the request has leases, and forget those whose leases can no longer be live.
local function note(name)
  redis.call('ZADD', HELD, now, name)
  redis.call('ZREMRANGEBYSCORE', HELD, '-inf', now - TERM - 2 * THIRD)
  redis.call('PEXPIRE', HELD, LINGER)
end

local function append(lease, seq, content, reasoning, ...)
  redis.call('XADD', PROGRESS, 'MAXLEN', '~', ENTRIES, '*', 'generation', generation, 'seq', seq,
    'content', content, 'reasoning', reasoning, 'worker', lease.worker, 'model', lease.model, ...)
  redis.call('PEXPIRE', PROGRESS, RETAIN)
end

-- What is kept: what the lease was (see Ended), and what a flag tells of it, -1 for a fault.
local function finish(lease, kind, marker)
  local posted
  if lease.cancelled then
    kind, posted = ENDED_CANCELLED, lease.chars
  elseif marker then
    posted = -1
  end
  if marker then
    append(lease, 0, '', '', 'ended', 1)
  end
  write(generation, { over = kind, posted = posted })
  return kind
end
