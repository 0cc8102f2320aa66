-- Bind a name to a stream, unless another one has it or has reserved it.
local taken = redis.call('GET', KEYS[1])
if taken and taken ~= ARGV[1] and taken ~= '?' .. ARGV[1] then
  return { TAKEN, taken }
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return { OK }
