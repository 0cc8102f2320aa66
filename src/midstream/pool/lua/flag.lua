-- Cancel a request: flag it and its live leases.  The answer is each one's generation and the characters it posted, and
-- what is kept of those that are over.
redis.call('HSET', REQUEST, 'flagged', 1)
redis.call('PEXPIRE', REQUEST, LINGER)

local told = redis.call('HGETALL', REQUEST)
local posted = {}
for at = 1, #told, 2 do
  if told[at] ~= 'flagged' then
    local lease = cjson.decode(told[at + 1])
    if live(lease) then
      lease.cancelled = true
      write(told[at], lease)
    end
    local chars = lease.posted or (lease.cancelled and lease.chars)
    if chars then
      table.insert(posted, told[at])
      table.insert(posted, chars)
    end
  end
end
return posted
