#!lua name=tidegate
--
-- Tidegate's log on Redis, revision 1: publish, read, beacon, revoke. For Redis 7.0 and later.
--
-- Decides: which id an event gets, what a stream keeps, when the log has begun a new life
-- (incarnation), and what a reader is told of all that at one instant. Decides nothing about
-- sessions or gaps: readers judge from the facts that `tidegate_read_1` returns.
--
-- Every function takes one key, `<prefix>:log`; all other keys are derived from it (see README.md
-- beside this file). A name with a number is for nodes and never changes its arguments or replies;
-- a name without one is for back ends and never changes its meaning. A later migration holds these
-- functions again and raises REVISION: libraries are replaced whole and shared by all prefixes.

local REVISION = 1

-- Streams outlive the history's TTL by this much, so that a step back of the clock costs nobody an
-- event that the gap rule still counts as kept.
local SLACK_MS = 300000
-- A log without events moves its position on this often (or with an eighth of the history's TTL).
local QUIET_MS = 30000
-- How many ended incarnations are remembered: so many clean restarts a cursor may survive.
local MAX_ENDS = 16
-- How many logs (prefixes) this process remembers at a time. Forgetting one is harmless.
local MAX_SEEN = 256
-- Ids are counted in doubles.
local EXACT = 9007199254740992
-- An id's n: sequence within the millisecond, times this, plus the incarnation's tag.
local TAGS = 65536

-- What this very process last did to each log. Gone after a restart, never there on a promoted
-- replica: that is how a rolled-back log is told from a continued one.
local seen, n_seen = {}, 0

local DEFAULTS = { history_size = 1000, history_ttl_ms = 86400000, idempotency_ttl_ms = 300000, max_message = 65536 }

-- Ids ---------------------------------------------------------------------------------------------

local function text(ms, n)
  return string.format('%.0f-%.0f', ms, n)
end

local function parse(id)
  local ms, n = string.match(id, '^(%d+)%-(%d+)$')
  if not ms then return nil end
  return tonumber(ms), tonumber(n)
end

local function after(ams, an, bms, bn)
  return ams > bms or (ams == bms and an > bn)
end

local function next_id(ms, n, now, tag)
  if now > ms then return now, tag end
  return ms, (math.floor(n / TAGS) + 1) * TAGS + tag
end

-- The log's state ---------------------------------------------------------------------------------

local function base_of(keys)
  if #keys ~= 1 then return nil end
  return string.match(keys[1], '^(.+):log$')
end

local function now_ms()
  local t = redis.call('TIME')
  return tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end

local function conf_of(base)
  local c = redis.call('HMGET', base .. ':conf', 'history_size', 'history_ttl_ms', 'idempotency_ttl_ms', 'max_message')
  return {
    history_size = tonumber(c[1]) or DEFAULTS.history_size,
    history_ttl_ms = tonumber(c[2]) or DEFAULTS.history_ttl_ms,
    idempotency_ttl_ms = tonumber(c[3]) or DEFAULTS.idempotency_ttl_ms,
    max_message = tonumber(c[4]) or DEFAULTS.max_message,
  }
end

-- One field of INFO; '' where the user may not ask.
local function info(section, field)
  local reply = redis.pcall('INFO', section)
  if type(reply) ~= 'string' then return '' end
  return string.match('\n' .. reply, '\n' .. field .. ':([^\r\n]*)') or ''
end

local function remember(log, st)
  if not seen[log] then
    if n_seen >= MAX_SEEN then seen, n_seen = {}, 0 end
    n_seen = n_seen + 1
  end
  seen[log] = { tag = st.tag, ms = st.ms, n = st.n }
end

local function fresh_tag(log, st, run, ends)
  local t = redis.call('TIME')
  local salt = 0
  while true do
    local hash = redis.sha1hex(table.concat({ t[1], t[2], log, run, salt }, ' '))
    local tag = tonumber(string.sub(hash, 1, 4), 16)
    local taken = tag == 0 or tag == st.tag or string.find(',' .. ends, ',' .. tag .. ':', 1, true)
    if not taken then return tag end
    salt = salt + 1
  end
end

-- The ended incarnations with this one in front, if its end is certain: everything it ever
-- acknowledged is here. Otherwise nothing older than now can be vouched for.
local function ends_with(base, st, promoted)
  if not st.tag or promoted then return '' end
  if redis.call('HGET', base .. ':conf', 'fsync') ~= 'always' or info('persistence', 'aof_enabled') ~= '1' then return '' end
  local kept = { string.format('%d:%s', st.tag, text(st.ms, st.n)) }
  for one in string.gmatch(st.ends, '[^,]+') do
    if #kept < MAX_ENDS then kept[#kept + 1] = one end
  end
  return table.concat(kept, ',')
end

-- Begins every call: the log as it stands, in a new incarnation where the old one's memory is lost.
local function enter(log, base)
  local h = redis.call('HMGET', log, 'last', 'tag', 'ends', 'run')
  local st = { now = now_ms(), ends = h[3] or '' }
  if h[1] and h[2] then
    st.ms, st.n = parse(h[1])
    st.tag = tonumber(h[2])
  end
  local mem = seen[log]
  if mem and mem.tag == st.tag and mem.ms == st.ms and mem.n == st.n then return st end
  local run = info('server', 'run_id')
  local promoted = info('replication', 'second_repl_offset') ~= '-1'
  if not mem and st.tag and run ~= '' and h[4] == run and not promoted then
    -- The same process, only this library was loaded again: nothing was lost.
    remember(log, st)
    return st
  end
  local ends = ends_with(base, st, promoted)
  local tag = fresh_tag(log, st, run, ends)
  st.ms, st.n = next_id(st.ms or 0, st.n or 0, st.now, tag)
  st.tag, st.ends = tag, ends
  local id = text(st.ms, st.n)
  redis.call('HSET', log, 'last', id, 'tag', string.format('%d', tag), 'start', id, 'ends', ends, 'run', run)
  remember(log, st)
  return st
end

-- Does this position lie in what the log knows completely?
local function known(st, ms, n)
  if ms >= EXACT or n >= EXACT then return false end
  local tag = n % TAGS
  if tag == st.tag then return not after(ms, n, st.ms, st.n) end
  for t, ems, en in string.gmatch(st.ends, '(%d+):(%d+)%-(%d+)') do
    if tonumber(t) == tag then return not after(ms, n, tonumber(ems), tonumber(en)) end
  end
  return false
end

-- Publish -----------------------------------------------------------------------------------------

-- Every well-formed sequence becomes a space (RFC 3629 table 3-7); a high byte left over is a fault.
local UTF8 = {
  '\240[\144-\191][\128-\191][\128-\191]', '[\241-\243][\128-\191][\128-\191][\128-\191]', '\244[\128-\143][\128-\191][\128-\191]',
  '\224[\160-\191][\128-\191]', '[\225-\236\238\239][\128-\191][\128-\191]', '\237[\128-\159][\128-\191]',
  '[\194-\223][\128-\191]',
}

local function is_utf8(s)
  if not string.find(s, '[\128-\255]') then return true end
  for _, pattern in ipairs(UTF8) do
    s = string.gsub(s, pattern, ' ')
  end
  return not string.find(s, '[\128-\255]')
end

local function is_channel(s)
  return #s <= 200 and string.find(s, '^[A-Za-z0-9_%-%.:+@=,/|~%%]+$') ~= nil
end

local function is_event_name(s)
  return #s <= 64 and string.find(s, '^[A-Za-z0-9_%-%.:]+$') ~= nil
end

-- channel data [EVENT name] [KEY k] [EPHEMERAL] → the wish, or nil and why not.
local function wish_of(args)
  local wish = { channel = args[1], data = args[2], name = '' }
  if not wish.data then return nil, 'BADARGS expected <channel> <data> [EVENT name] [KEY k] [EPHEMERAL]' end
  local i = 3
  while args[i] do
    local word = string.upper(args[i])
    if word == 'EPHEMERAL' then
      wish.ephemeral = true
      i = i + 1
    elseif (word == 'EVENT' or word == 'KEY') and args[i + 1] then
      if word == 'EVENT' then wish.name = args[i + 1] else wish.key = args[i + 1] end
      if word == 'EVENT' and not is_event_name(wish.name) then
        return nil, 'BADEVENT an event name has 1 to 64 bytes of A-Z a-z 0-9 _ - . :'
      end
      i = i + 2
    else
      return nil, 'BADARGS expected <channel> <data> [EVENT name] [KEY k] [EPHEMERAL]'
    end
  end
  if not is_channel(wish.channel) then
    return nil, 'BADCHANNEL a channel name has 1 to 200 bytes of A-Z a-z 0-9 _ - . : + @ = , / | ~ %'
  end
  if wish.key and (#wish.key == 0 or #wish.key > 128) then return nil, 'BADKEY a key has 1 to 128 bytes' end
  return wish
end

-- Fields of an entry: d data, n name, s how many the channel had with it, e highest id pushed out.
local FIELDS = { d = 'data', n = 'name', s = 'count', e = 'evicted' }

local function fields_of(entry)
  local f = { id = entry[1] }
  f.ms, f.n = parse(entry[1])
  local flat = entry[2]
  for i = 1, #flat, 2 do
    local field = FIELDS[flat[i]]
    if field then f[field] = flat[i + 1] end
  end
  return f
end

local function edge_of(stream, command, from, to)
  local got = redis.call(command, stream, from, to, 'COUNT', 1)
  return got[1] and fields_of(got[1])
end

-- The highest id that an append to a stream of this length pushes out; nil: none.
local function pushed_out(stream, length, size)
  local over = length + 1 - size
  if over <= 0 then return nil end
  if over > 8 then
    -- Only after the history size was lowered: reading all that goes would block Redis.
    redis.call('XTRIM', stream, 'MAXLEN', '=', size)
    over = 1
  end
  local oldest = redis.call('XRANGE', stream, '-', '+', 'COUNT', over)
  return oldest[#oldest][1]
end

local function append(stream, id, wish, conf, expires)
  local length = redis.call('XLEN', stream)
  local count, evicted = 1, nil
  if length > 0 then
    local newest = edge_of(stream, 'XREVRANGE', '+', '-')
    count = (tonumber(newest.count) or length) + 1
    evicted = pushed_out(stream, length, conf.history_size) or newest.evicted
  end
  local command = { 'XADD', stream, 'MAXLEN', '=', conf.history_size, id, 'd', wish.data, 's', string.format('%.0f', count) }
  if wish.name ~= '' then
    command[#command + 1], command[#command + 2] = 'n', wish.name
  end
  if evicted then
    command[#command + 1], command[#command + 2] = 'e', evicted
  end
  local added = redis.pcall(unpack(command))
  if type(added) == 'table' and added.err then
    if not string.find(added.err, 'equal or smaller', 1, true) then return added end
    -- Left over from a log that was ahead of this one: no position of this log reaches into it.
    redis.call('DEL', stream)
    redis.call('XADD', stream, id, unpack(command, 7))
  end
  redis.call('PEXPIREAT', stream, expires)
end

local function publish(keys, args)
  local base = base_of(keys)
  if not base then return nil, redis.error_reply('BADKEYS expected one key, <prefix>:log') end
  local wish, why = wish_of(args)
  if not wish then return nil, redis.error_reply(why) end
  local conf = conf_of(base)
  if #wish.data > conf.max_message then
    return nil, redis.error_reply(string.format('TOOLARGE data has %d bytes, at most %.0f are allowed', #wish.data, conf.max_message))
  end
  if not is_utf8(wish.data) then return nil, redis.error_reply('BADDATA data is not UTF-8') end

  local log = keys[1]
  local st = enter(log, base)
  -- '#' is in no channel's name, so that no two pairs of channel and key share a Redis key.
  local idem = wish.key and (base .. ':idem:' .. wish.channel .. '#' .. wish.key)
  local earlier = idem and redis.call('GET', idem)
  if earlier then return { earlier == '-' and '' or earlier, 1 } end

  local id = '-'
  if not wish.ephemeral then
    local ms, n = next_id(st.ms, st.n, st.now, st.tag)
    id = text(ms, n)
    if conf.history_size > 0 then
      local expires = string.format('%.0f', ms + conf.history_ttl_ms + SLACK_MS)
      local failed = append(base .. ':ch:' .. wish.channel, id, wish, conf, expires)
      if failed then return nil, failed end
    end
    redis.call('HSET', log, 'last', id)
    st.ms, st.n = ms, n
    remember(log, st)
  end
  if idem then redis.call('SET', idem, id, 'PX', string.format('%.0f', conf.idempotency_ttl_ms)) end
  redis.call('PUBLISH', base .. ':live:' .. wish.channel, id .. ' ' .. wish.name .. '\n' .. wish.data)
  return { wish.ephemeral and '' or id, 0 }
end

local function publish_1(keys, args)
  local done, failed = publish(keys, args)
  return done or failed
end

local function publish_for_back_ends(keys, args)
  local done, failed = publish(keys, args)
  return done and done[1] or failed
end

-- Read --------------------------------------------------------------------------------------------

local function lower(a, b)
  return after(b.ms, b.n, a.ms, a.n)
end

local function higher(a, b)
  return after(a.ms, a.n, b.ms, b.n)
end

-- A binary heap of channels, ordered by each one's `head`.
local function sift_down(heap, i, first)
  while true do
    local child, best = 2 * i, i
    if heap[child] and first(heap[child].head, heap[best].head) then best = child end
    if heap[child + 1] and first(heap[child + 1].head, heap[best].head) then best = child + 1 end
    if best == i then return end
    heap[i], heap[best] = heap[best], heap[i]
    i = best
  end
end

local function heap_of(channels, first)
  local heap = {}
  for _, ch in ipairs(channels) do
    if ch.head then heap[#heap + 1] = ch end
  end
  for i = math.floor(#heap / 2), 1, -1 do
    sift_down(heap, i, first)
  end
  return heap
end

-- Moves the first channel of the heap to its next entry, or out of the heap.
local function advance(heap, first, fetch)
  local ch = heap[1]
  ch.at = ch.at + 1
  if not ch.buf[ch.at] then
    ch.buf, ch.at = fetch(ch), 1
  end
  local entry = ch.buf[ch.at]
  if entry then
    ch.head = fields_of(entry)
  else
    ch.head = nil
    heap[1] = heap[#heap]
    heap[#heap] = nil
  end
  if heap[1] then sift_down(heap, 1, first) end
end

-- Entries are fetched in chunks that grow, so that a page costs about what it holds.
local function grow(ch)
  ch.chunk = math.min((ch.chunk or 2) * 2, 64)
  return ch.chunk
end

local function fetch_forward(ch)
  return redis.call('XRANGE', ch.stream, '(' .. ch.head.id, '+', 'COUNT', grow(ch))
end

local function fetch_backward(ch)
  return redis.call('XREVRANGE', ch.stream, '(' .. ch.head.id, ch.bottom, 'COUNT', grow(ch))
end

-- What a channel's stream holds, and the first entry that is asked for (`head`).
local function look(ch)
  local newest = edge_of(ch.stream, 'XREVRANGE', '+', '-')
  if not newest then return 0 end
  local oldest = edge_of(ch.stream, 'XRANGE', '-', '+')
  ch.first, ch.evicted = oldest.id, newest.evicted or ''
  if ch.from == 'here' then return 0 end
  ch.bottom = '-'
  if ch.from == 'start' or after(oldest.ms, oldest.n, ch.ms, ch.n) then
    ch.head = oldest
  elseif after(newest.ms, newest.n, ch.ms, ch.n) then
    ch.bottom = '(' .. ch.from
    ch.head = edge_of(ch.stream, 'XRANGE', ch.bottom, '+')
  end
  if not ch.head then return 0 end
  ch.newest, ch.buf, ch.at = newest, { ch.head }, 1
  local from, to = tonumber(ch.head.count), tonumber(newest.count)
  return from and to and to - from + 1 or redis.call('XLEN', ch.stream)
end

-- Leaves the newest `cap` entries over all channels; a channel that lost some is marked.
local function cut(channels, cap)
  for _, ch in ipairs(channels) do
    if ch.head then
      ch.head, ch.lowest = ch.newest, nil
      ch.buf, ch.at = { ch.newest }, 1
    end
  end
  local heap = heap_of(channels, higher)
  local n = 0
  while heap[1] and n < cap do
    heap[1].lowest = heap[1].head
    n = n + 1
    advance(heap, higher, fetch_backward)
  end
  for _, ch in ipairs(heap) do
    ch.cut = 1
  end
  for _, ch in ipairs(channels) do
    ch.head, ch.chunk = ch.lowest, nil
    ch.buf, ch.at = { ch.lowest }, 1
  end
end

-- The first page of what is left, merged in id order.
local function page(channels, max_events, max_bytes)
  local out, n, bytes = {}, 0, 0
  local heap = heap_of(channels, lower)
  while heap[1] do
    local ch = heap[1]
    local e = ch.head
    if e.data then
      if n >= max_events or (n > 0 and bytes + #e.data > max_bytes) then return out, 1 end
      local i = 4 * n
      out[i + 1], out[i + 2], out[i + 3], out[i + 4] = ch.index, e.id, e.name or '', e.data
      n, bytes = n + 1, bytes + #e.data
    end
    advance(heap, lower, fetch_forward)
  end
  return out, 0
end

-- cap page_events page_bytes check|'' then pairs: channel here|start|<id>
-- → position now_ms ttl_ms has_history broken more facts(first evicted cut)… events(index id name data)…
local function read_1(keys, args)
  local base = base_of(keys)
  if not base then return redis.error_reply('BADKEYS expected one key, <prefix>:log') end
  local cap, max_events, max_bytes = tonumber(args[1]), tonumber(args[2]), tonumber(args[3])
  if not (cap and max_events and max_bytes and args[4]) or #args % 2 ~= 0 then
    return redis.error_reply("BADARGS expected <cap> <page events> <page bytes> <check or ''> [<channel> here|start|<id>]…")
  end
  local st = enter(keys[1], base)
  local conf = conf_of(base)
  local channels, broken = {}, ''
  local function test(id)
    local ms, n = parse(id)
    if not ms or not known(st, ms, n) then broken = 'reset' end
    return ms, n
  end
  if args[4] ~= '' then test(args[4]) end
  for i = 5, #args, 2 do
    local ch = { index = #channels, stream = base .. ':ch:' .. args[i], from = args[i + 1], first = '', evicted = '', cut = 0 }
    if ch.from ~= 'here' and ch.from ~= 'start' then ch.ms, ch.n = test(ch.from) end
    channels[#channels + 1] = ch
  end

  local events, more, facts = {}, 0, {}
  if broken == '' and conf.history_size > 0 then
    local total = 0
    for _, ch in ipairs(channels) do
      total = total + look(ch)
    end
    if total > cap then cut(channels, cap) end
    events, more = page(channels, math.max(max_events, 1), max_bytes)
  end
  for i, ch in ipairs(channels) do
    facts[3 * i - 2], facts[3 * i - 1], facts[3 * i] = ch.first, ch.evicted, ch.cut
  end
  local has_history = conf.history_size > 0 and 1 or 0
  return { text(st.ms, st.n), st.now, conf.history_ttl_ms, has_history, broken, more, facts, events }
end

-- Beacon, revocation, version ---------------------------------------------------------------------

-- node [nonce] → position, which also goes out on the node's beacon channel.
local function beacon_1(keys, args)
  local base = base_of(keys)
  if not base then return redis.error_reply('BADKEYS expected one key, <prefix>:log') end
  if not args[1] or args[1] == '' then return redis.error_reply('BADARGS expected <node> [nonce]') end
  local st = enter(keys[1], base)
  -- The position of a quiet log moves on with the time: else the cursors of everybody who has
  -- missed nothing would grow older than the history, and they would be told of a gap.
  if st.now - st.ms >= math.min(conf_of(base).history_ttl_ms / 8, QUIET_MS) then
    st.ms, st.n = next_id(st.ms, st.n, st.now, st.tag)
    redis.call('HSET', keys[1], 'last', text(st.ms, st.n))
    remember(keys[1], st)
  end
  local position = text(st.ms, st.n)
  redis.call('PUBLISH', base .. ':beacon:' .. args[1], position .. ' ' .. (args[2] or ''))
  return position
end

local function whole(s, low, high)
  if not s or not string.find(s, '^%d+$') or #s > 15 then return nil end
  local x = tonumber(s)
  return x >= low and x <= high and x or nil
end

-- jti|sid|sub value ttl_s [before] → OK. Revoking again never shortens or weakens.
local function revoke(keys, args)
  local base = base_of(keys)
  if not base then return redis.error_reply('BADKEYS expected one key, <prefix>:log') end
  local kind, value = args[1], args[2]
  if kind ~= 'jti' and kind ~= 'sid' and kind ~= 'sub' then return redis.error_reply('BADARGS expected jti, sid or sub') end
  if not value or #value == 0 or #value > 256 then return redis.error_reply('BADARGS a value has 1 to 256 bytes') end
  if not is_utf8(value) then return redis.error_reply('BADARGS the value is not UTF-8') end
  local ttl = whole(args[3], 1, 3155760000)
  if not ttl then return redis.error_reply('BADARGS a TTL is 1 to 3155760000 seconds') end
  local before = 0
  if kind == 'sub' then
    before = args[4] and whole(args[4], 0, EXACT) or (not args[4] and tonumber(redis.call('TIME')[1]))
    if not before then return redis.error_reply('BADARGS before is a Unix time in seconds') end
  end
  local key = base .. ':revoked:' .. kind .. ':' .. value
  local left = redis.call('TTL', key)
  if left ~= -2 and kind == 'sub' then
    before = math.max(before, tonumber(redis.call('GET', key)) or 0)
  end
  local stored = kind == 'sub' and string.format('%.0f', before) or '1'
  if left == -1 then
    redis.call('SET', key, stored)
  else
    redis.call('SET', key, stored, 'EX', string.format('%.0f', math.max(ttl, left)))
  end
  redis.call('PUBLISH', base .. ':ctl', 'revoked ' .. kind .. ' ' .. string.format('%.0f', before) .. ' ' .. value)
  return redis.status_reply('OK')
end

redis.register_function('tidegate_publish', publish_for_back_ends)
redis.register_function('tidegate_publish_1', publish_1)
redis.register_function { function_name = 'tidegate_read_1', callback = read_1, flags = { 'allow-oom' } }
redis.register_function { function_name = 'tidegate_beacon_1', callback = beacon_1, flags = { 'allow-oom' } }
redis.register_function { function_name = 'tidegate_revoke', callback = revoke, flags = { 'allow-oom' } }
redis.register_function { function_name = 'tidegate_revoke_1', callback = revoke, flags = { 'allow-oom' } }
redis.register_function { function_name = 'tidegate_version', callback = function() return REVISION end, flags = { 'no-writes' } }
