-- The writer's process is alive, though it has nothing to write: its stream does not expire.
-- `run` is the server of which it knows that it has all it wrote.
local epoch, run = unpack(ARGV, 6, 7)

local told = redis.call('HMGET', STREAM, 'epoch', 'writer')
if not told[1] then
  return { UNKNOWN }
end
if told[1] == epoch and told[2] == process then
  redis.call('HSET', STREAM, 'run', run)
end
keep()
return { OK }
