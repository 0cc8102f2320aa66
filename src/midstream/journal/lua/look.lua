-- Which of these processes have no lease, and which of these streams are not as they were known.
-- KEYS: so many leases (ARGV[1]), then hashes of streams; ARGV: then for each stream what was known of it.
local leases = tonumber(ARGV[1])
local gone, changed = {}, {}
for at = 1, leases do
  if redis.call('EXISTS', KEYS[at]) == 0 then
    gone[#gone + 1] = at - 1
  end
end
for at = leases + 1, #KEYS do
  local told = redis.call('HMGET', KEYS[at], 'highest', 'epoch', 'status')
  local now = told[1] and told[1] .. ' ' .. told[2] .. ' ' .. told[3] or ''
  if now ~= ARGV[at - leases + 1] then
    changed[#changed + 1] = at - leases - 1
  end
end
return { gone, changed }
