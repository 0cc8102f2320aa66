-- The writer's process is alive, though it has nothing to write: its stream does not expire.
if redis.call('EXISTS', STREAM) == 0 then
  return { UNKNOWN }
end
keep()
return { OK }
