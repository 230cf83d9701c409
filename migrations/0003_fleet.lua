#!lua name=tidegate_fleet
--
-- Tidegate's fleet on Redis, revision 3: what nodes say of themselves, the hold on them, and the
-- places of a user's sessions. For Redis 7.0 and later. Stands beside the log's library and calls nothing of it.
--
-- Decides: which report is too old, which hold is one, which place a session gets, and which session is one too many.
-- Decides nothing about what a report says, nor what becomes of a session that lost its place.
--
-- Every function takes one key, `<prefix>:log`; all other keys are derived from it (see README.md
-- beside this file). Names are for nodes, and never change their arguments or replies.

local REVISION = 3

-- How long a user's places are kept after the last claim. Nodes renew every half minute or so.
local PLACES_MS = 600000
-- How long it is remembered of a process that it reported at all: far longer than a server keeps the connection of a
-- host that vanished (`tcp-keepalive`: 5 to 10 minutes by default).
local LIVES_MS = 86400000
-- The longest hold of the fleet, and the longest reason for it.
local HOLD_MS = 86400000
local REASON_BYTES = 200
-- Places are counted in doubles.
local EXACT = 9007199254740992

local function base_of(keys)
  if #keys ~= 1 then return nil end
  return string.match(keys[1], '^(.+):log$')
end

local function whole(s, low, high)
  if not s or not string.find(s, '^%d+$') or #s > 16 then return nil end
  local x = tonumber(s)
  return x >= low and x <= high and x or nil
end

local function digits(x)
  return string.format('%.0f', x)
end

local function now_us()
  local t = redis.call('TIME')
  return tonumber(t[1]) * 1000000 + tonumber(t[2])
end

-- Reports -----------------------------------------------------------------------------------------

-- When the log was born: the first id of the first incarnation that a report met. Kept in the log's
-- own hash, so that it ends with it and only with it; 0: there is no log yet.
local function birth_of(log)
  local h = redis.call('HMGET', log, 'born', 'start')
  if h[1] then return tonumber(h[1]) or 0 end
  local ms = string.match(h[2] or '', '^(%d+)%-%d+$')
  if not ms then return 0 end
  redis.call('HSET', log, 'born', ms)
  return tonumber(ms)
end

-- The hold in force: {until ms, node, reason}. What anybody else wrote there, or what should have
-- ended, is none.
local function hold_of(base, now)
  local v = redis.pcall('GET', base .. ':fleet:hold')
  -- `false`: no key. A table: an error, the key is no string.
  if type(v) ~= 'string' then return false end
  local until_ms, node, reason = string.match(v, '^(%d+) (%S+) (.*)$')
  until_ms = whole(until_ms, now + 1, now + HOLD_MS)
  if not until_ms or #reason > REASON_BYTES then return false end
  return { until_ms, node, reason }
end

-- Until when a process counts by its reports alone, in ms since 1970.
local function life_of(base, life)
  return base .. ':fleet:life:' .. life
end

-- Writes the report. Gives now ms, birth ms, {node, age ms, body} of each whose report is no older than that, the
-- hold in force or nil, and what stood under this name until now: {age ms, body} or nil.
local function report(log, base, node, body, ttl)
  local now = math.floor(now_us() / 1000)
  local idx, of = base .. ':fleet:idx', base .. ':fleet:n:'
  redis.call('ZREMRANGEBYSCORE', idx, '-inf', '(' .. digits(now - ttl))
  local listed, reports, before = redis.call('ZRANGE', idx, 0, -1, 'WITHSCORES'), {}, false
  for i = 1, #listed, 2 do
    local said, age = redis.call('GET', of .. listed[i]), math.max(0, now - tonumber(listed[i + 1]))
    if not said then
      -- Its writer keeps reports for a shorter time than we do.
      redis.call('ZREM', idx, listed[i])
    elseif listed[i] == node then
      before = { age, said }
    else
      reports[#reports + 1] = { listed[i], age, said }
    end
  end
  reports[#reports + 1] = { node, 0, body }
  redis.call('SET', of .. node, body, 'PXAT', digits(now + ttl))
  redis.call('ZADD', idx, digits(now), node)
  if redis.call('PTTL', idx) < ttl then redis.call('PEXPIRE', idx, digits(ttl)) end
  return now, birth_of(log), reports, hold_of(base, now), before
end

-- node body ttl_ms → now ms, birth ms, reports, hold, as above.
local function report_1(keys, args)
  local base = base_of(keys)
  if not base then return redis.error_reply('BADKEYS expected one key, <prefix>:log') end
  local node, body, ttl = args[1], args[2], whole(args[3], 1, 3155760000000)
  if not node or node == '' or not ttl then return redis.error_reply('BADARGS expected <node> <body> <ttl ms>') end
  local now, birth, reports, hold = report(keys[1], base, node, body, ttl)
  return { now, birth, reports, hold }
end

-- life node body ttl_ms → now ms, birth ms, reports, hold, before, as above.
local function report_2(keys, args)
  local base = base_of(keys)
  if not base then return redis.error_reply('BADKEYS expected one key, <prefix>:log') end
  local life, node, body, ttl = args[1], args[2], args[3], whole(args[4], 1, 3155760000000)
  if not life or life == '' or not node or node == '' or not ttl then
    return redis.error_reply('BADARGS expected <life> <node> <body> <ttl ms>')
  end
  local now, birth, reports, hold, before = report(keys[1], base, node, body, ttl)
  redis.call('SET', life_of(base, life), digits(now + ttl), 'PX', digits(ttl + LIVES_MS))
  return { now, birth, reports, hold, before }
end

local function retire(base, node)
  redis.call('ZREM', base .. ':fleet:idx', node)
  redis.call('DEL', base .. ':fleet:n:' .. node)
end

-- node → OK.
local function retire_1(keys, args)
  local base = base_of(keys)
  if not base then return redis.error_reply('BADKEYS expected one key, <prefix>:log') end
  if not args[1] or args[1] == '' then return redis.error_reply('BADARGS expected <node>') end
  retire(base, args[1])
  return redis.status_reply('OK')
end

-- life node → OK.
local function retire_2(keys, args)
  local base = base_of(keys)
  if not base then return redis.error_reply('BADKEYS expected one key, <prefix>:log') end
  if not args[1] or args[1] == '' or not args[2] or args[2] == '' then
    return redis.error_reply('BADARGS expected <life> <node>')
  end
  retire(base, args[2])
  redis.call('DEL', life_of(base, args[1]))
  return redis.status_reply('OK')
end

-- node then ttl_ms reason, or nothing: the end of any hold → {until ms, node, reason} or nil.
local function hold_1(keys, args)
  local base = base_of(keys)
  if not base then return redis.error_reply('BADKEYS expected one key, <prefix>:log') end
  local node, ttl, reason = args[1], whole(args[2], 1000, HOLD_MS), args[3]
  local is_hold = #args == 3 and ttl and #reason <= REASON_BYTES
  if not string.find(node or '', '^%S+$') or not (is_hold or #args == 1) then
    return redis.error_reply('BADARGS expected <node> [<ttl ms> <reason>]')
  end
  local key, hold = base .. ':fleet:hold', false
  if is_hold then
    hold = { math.floor(now_us() / 1000) + ttl, node, reason }
    redis.call('SET', key, digits(hold[1]) .. ' ' .. node .. ' ' .. reason, 'PXAT', digits(hold[1]))
  else
    redis.call('DEL', key)
  end
  redis.call('PUBLISH', base .. ':ctl', 'fleet')
  return hold
end

-- Places ------------------------------------------------------------------------------------------

-- A member of a user's set is `<session> <life>`; a session's name has no white space. A life is a
-- node's process: the node's name and something that no earlier process under that name had.
local function parts(member)
  return string.match(member, '^(%S+) (.+)$')
end

-- Has this life reported, but not within the time that its last report was to be kept? Its host is gone or cut off, whatever
-- connections of it the server still holds. One that never reported (an earlier version, a flushed server, a
-- process that has just begun) is not silent.
local function is_silent(base, life, now_ms)
  local v = redis.pcall('GET', life_of(base, life))
  local until_ms = type(v) == 'string' and whole(v, 0, EXACT)
  return until_ms and until_ms <= now_ms
end

-- Is this life going on? Whoever lives listens on its own beacon channel, and reports. Asked once a call and life.
-- Where nodes may not ask who listens, only silence tells the dead.
local function is_there(base, known, life, now_ms)
  if not life then return false end
  if known[life] == nil then
    local n = redis.pcall('PUBSUB', 'NUMSUB', base .. ':beacon:' .. life)
    known[life] = (n.err ~= nil or n[2] ~= 0) and not is_silent(base, life, now_ms)
  end
  return known[life]
end

-- Leaves at most `max` in the set: who is gone goes first, then the lowest; gives those lowest.
local function make_room(base, set, max, known, now_ms)
  if redis.call('ZCARD', set) <= max then return {} end
  local left, replaced = {}, {}
  for _, member in ipairs(redis.call('ZRANGE', set, 0, -1)) do
    local _, life = parts(member)
    if is_there(base, known, life, now_ms) then
      left[#left + 1] = member
    else
      redis.call('ZREM', set, member)
    end
  end
  for i = 1, #left - max do
    redis.call('ZREM', set, left[i])
    replaced[i] = left[i]
  end
  return replaced
end

-- Puts the session at its place, or above all, whatever place it had.
local function place(set, member, since, now)
  if not since then
    local highest = redis.call('ZRANGE', set, 0, 0, 'REV', 'WITHSCORES')
    since = math.max(now, (tonumber(highest[2]) or 0) + 1)
  end
  redis.call('ZADD', set, digits(since), member)
  redis.call('PEXPIRE', set, PLACES_MS)
  return since
end

local CLAIM = 'BADARGS expected <life> <max> [<user> <session> <since or nothing>]…'

-- Nothing is changed before everything is understood.
local function are_claims(args)
  if #args % 3 ~= 2 or args[1] == '' or not whole(args[2], 1, 4294967295) then return false end
  for i = 3, #args, 3 do
    if not string.find(args[i + 1], '^%S+$') then return false end
    if args[i + 2] ~= '' and not whole(args[i + 2], 0, EXACT) then return false end
  end
  return true
end

-- life max then triples: user session since|'' → a pair each: since, 1 if it is itself one too many.
local function claim_1(keys, args)
  local base = base_of(keys)
  if not base then return redis.error_reply('BADKEYS expected one key, <prefix>:log') end
  if not are_claims(args) then return redis.error_reply(CLAIM) end
  local life, max, now = args[1], tonumber(args[2]), now_us()
  -- Whoever calls is there, even while it makes its link anew.
  local known, lost, out = { [life] = true }, {}, {}
  for i = 3, #args, 3 do
    local user, session = args[i], args[i + 1]
    local set = base .. ':sessions:' .. user
    out[#out + 1] = place(set, session .. ' ' .. life, tonumber(args[i + 2]), now)
    out[#out + 1] = 0
    lost[session .. ' ' .. life .. ' ' .. user] = nil
    for _, member in ipairs(make_room(base, set, max, known, math.floor(now / 1000))) do
      lost[member .. ' ' .. user] = true
      redis.call('PUBLISH', base .. ':ctl', 'replaced ' .. parts(member) .. ' ' .. user)
    end
  end
  -- Whoever came later in the batch may have replaced one that came earlier.
  local at = 0
  for i = 3, #args, 3 do
    at = at + 2
    if lost[args[i + 1] .. ' ' .. life .. ' ' .. args[i]] then out[at] = 1 end
  end
  return out
end

-- life then pairs: user session → OK, whether they had places or not.
local function release_1(keys, args)
  local base = base_of(keys)
  if not base then return redis.error_reply('BADKEYS expected one key, <prefix>:log') end
  if #args % 2 ~= 1 or args[1] == '' then return redis.error_reply('BADARGS expected <life> [<user> <session>]…') end
  for i = 2, #args, 2 do
    redis.call('ZREM', base .. ':sessions:' .. args[i], args[i + 1] .. ' ' .. args[1])
  end
  return redis.status_reply('OK')
end

redis.register_function { function_name = 'tidegate_report_1', callback = report_1, flags = { 'allow-oom' } }
redis.register_function { function_name = 'tidegate_report_2', callback = report_2, flags = { 'allow-oom' } }
redis.register_function { function_name = 'tidegate_retire_1', callback = retire_1, flags = { 'allow-oom' } }
redis.register_function { function_name = 'tidegate_retire_2', callback = retire_2, flags = { 'allow-oom' } }
redis.register_function { function_name = 'tidegate_hold_1', callback = hold_1, flags = { 'allow-oom' } }
redis.register_function { function_name = 'tidegate_claim_1', callback = claim_1, flags = { 'allow-oom' } }
redis.register_function { function_name = 'tidegate_release_1', callback = release_1, flags = { 'allow-oom' } }
redis.register_function { function_name = 'tidegate_fleet_version', callback = function() return REVISION end, flags = { 'no-writes' } }
