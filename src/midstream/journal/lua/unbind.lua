-- Free a name that is this stream's, or reserved for it.
local taken = redis.call('GET', KEYS[1])
if taken == ARGV[1] or taken == '?' .. ARGV[1] then
  redis.call('DEL', KEYS[1])
end
return { OK }
