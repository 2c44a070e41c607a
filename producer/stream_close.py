"""Writing the end of a job that no worker can end: a new attempt that holds nothing else."""

from typing import Any

from headwater.schemas import End, scripts

STREAM_TTL_S = 3600
"""How long a stream that we end is kept."""


def close_command(job_id: str, end: End) -> tuple[Any, ...]:
    """Return the command that ends the job's stream with *end*, unless it has an end already.

    Its reply is the id of the entry that ends the stream.
    """
    call = scripts.close(job_id, end, STREAM_TTL_S * 1000)
    return ("EVAL", scripts.CLOSE, len(call.keys), *call.keys, *call.args)
