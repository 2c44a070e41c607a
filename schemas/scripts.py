"""The Lua scripts of the stream protocol, and the arguments that they take.

They are a part of the wire format: whoever writes to a stream writes through them, or in a
transaction that watches the stream. Nothing here talks to Redis. Sent twice, each does its work
once.
"""

from collections.abc import Sequence
from typing import NamedTuple

from . import keys
from .events import End, EntryId, Event, Fence, encode_fields

_OPEN_ATTEMPT = """
local function fields_of(entry)
  local fields = {}
  for i = 1, #entry[2], 2 do fields[entry[2][i]] = entry[2][i + 1] end
  return fields
end
-- Attempts only ever grow, also when the counter or the stream was lost.
local function next_attempt(last_id)
  local last = last_id and tonumber(string.match(last_id, '^(%d+)-')) or 0
  local attempt = redis.call('INCR', KEYS[2])
  if attempt <= last then
    attempt = last + 1
    redis.call('SET', KEYS[2], attempt)
  end
  return attempt
end
local function set_expiries(stream_ms)
  redis.call('PEXPIRE', KEYS[1], stream_ms)
  redis.call('PEXPIRE', KEYS[2], 2 * stream_ms)
end
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
local fields = last and fields_of(last) or {}
"""

BEGIN = (
    _OPEN_ATTEMPT
    + """
-- KEYS: stream, attempt counter. ARGV: execution id, stream's time to live in ms, data.
if fields['end'] then return {'ended', last[1]} end
if fields['execution'] == ARGV[1] then
  -- Our own fence: the reply to the first call was lost.
  return {'begun', string.match(last[1], '^(%d+)-'), fields['at']}
end
local attempt = next_attempt(last and last[1])
local kind = 'started'
if last then kind = 'resumed' elseif attempt > 1 then kind = 'restarted' end
local time = redis.call('TIME')
local at = time[1] .. string.format('%03d', math.floor(time[2] / 1000))
redis.call('XADD', KEYS[1], attempt .. '-0',
  'type', kind, 'execution', ARGV[1], 'at', at, 'data', ARGV[3])
set_expiries(ARGV[2])
return {'begun', tostring(attempt), at}
"""
)
"""Opens an attempt for one claimant, unless the stream has ended."""

CLOSE = (
    _OPEN_ATTEMPT
    + """
-- KEYS: stream, attempt counter. ARGV: stream's time to live in ms, then the end's fields.
if fields['end'] then return last[1] end
local attempt = next_attempt(last and last[1])
local id = redis.call('XADD', KEYS[1], attempt .. '-0', unpack(ARGV, 2))
set_expiries(ARGV[1])
return id
"""
)
"""Ends a stream that no worker writes to, as the next attempt; an end that is there stays."""

APPEND = """
-- KEYS: streams, each once. ARGV: their time to live in ms, then of each entry id, type, data.
local function append(stream, id, kind, data)
  local newest = redis.pcall('XREVRANGE', stream, '+', '-', 'COUNT', 1)
  if newest.err then return newest end
  if not newest[1] then return {'gone', ''} end
  -- Only on its predecessor: a server that lost confirmed entries must not get a gap.
  local attempt, seq = string.match(id, '^(%d+)-(%d+)$')
  if newest[1][1] ~= attempt .. '-' .. string.format('%d', tonumber(seq) - 1) then
    return {'rejected', newest[1][1]}
  end
  local added = redis.pcall('XADD', stream, 'NOMKSTREAM', id, 'type', kind, 'data', data)
  if type(added) == 'table' and added.err then return added end
  redis.call('PEXPIRE', stream, ARGV[1])
  return {'written', added}
end
local outcomes = {}
for i, stream in ipairs(KEYS) do
  outcomes[i] = append(stream, ARGV[3 * i - 1], ARGV[3 * i], ARGV[3 * i + 1])
end
return outcomes
"""
"""Adds an entry to each stream under an id of the writer's, right after the one numbered before it.

For many streams at once: called for each by itself, it would take several times as long.
"""


class ScriptCall(NamedTuple):
    """What a script is called with."""

    keys: tuple[str, ...]
    args: tuple[str | bytes | int, ...]


def begin(job_id: str, execution_id: str, fence: Fence, ttl_ms: int) -> ScriptCall:
    """Return the call that opens an attempt; the script decides the fence's type.

    It replies `[b"begun", attempt, Redis' time in ms]` or `[b"ended", id of the end]`.
    """
    data = encode_fields(fence)["data"]
    return ScriptCall(_keys(job_id), (execution_id, ttl_ms, data))


def append(entries: Sequence[tuple[str, EntryId, Event]], ttl_ms: int) -> ScriptCall:
    """Return the call that adds (job id, entry id, event), at most one a job; no ends.

    It replies for each with `[b"written", id]`, `[b"gone", b""]` (no such stream),
    `[b"rejected", last id]`, or the server's error.
    """
    arguments: list[str | bytes | int] = [ttl_ms]
    for _, entry_id, event in entries:
        fields = encode_fields(event)
        arguments += (str(entry_id), fields["type"], fields["data"])
    return ScriptCall(tuple(keys.stream_key(entry[0]) for entry in entries), tuple(arguments))


def close(job_id: str, end: End, ttl_ms: int) -> ScriptCall:
    """Return the call that ends a stream; it replies with the id of the stream's end."""
    return ScriptCall(_keys(job_id), (ttl_ms, *_flat(end)))


def _keys(job_id: str) -> tuple[str, str]:
    return keys.stream_key(job_id), keys.attempt_key(job_id)


def _flat(event: Event) -> tuple[str | bytes, ...]:
    return tuple(part for field in encode_fields(event).items() for part in field)
