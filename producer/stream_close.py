"""Writing the end of a job that no worker can end: a new attempt that holds nothing else."""

from typing import Any

from headwater.schemas import End, encode_fields, keys

STREAM_TTL_S = 3600
"""How long an ended stream is kept."""

_CLOSE = """
local stream, counter = KEYS[1], KEYS[2]
local last = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)[1]
local last_attempt = 0
if last then
    for index = 1, #last[2], 2 do
        if last[2][index] == 'end' then return last[1] end
    end
    last_attempt = tonumber(string.match(last[1], '^(%d+)-'))
end
local attempt = math.max(redis.call('INCR', counter), last_attempt + 1)
redis.call('SET', counter, attempt, 'PX', 2 * tonumber(ARGV[1]))
local id = redis.call('XADD', stream, attempt .. '-0', unpack(ARGV, 2))
redis.call('PEXPIRE', stream, ARGV[1])
return id
"""


def close_command(job_id: str, end: End) -> tuple[Any, ...]:
    """Return the command that ends the job's stream with *end*, unless it has an end already.

    Its reply is the id of the entry that ends the stream.
    """
    fields = [part for item in encode_fields(end).items() for part in item]
    stream_keys = (keys.stream_key(job_id), keys.attempt_key(job_id))
    return ("EVAL", _CLOSE, len(stream_keys), *stream_keys, STREAM_TTL_S * 1000, *fields)
