"""Lookout: what waits for a worker, and which of its jobs should end, in one trip."""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

from headwater.schemas import keys
from redis import Redis
from rq.job import JobStatus

from ..booking.rq_jobs import job_keys
from ..messages import Claim
from .fair_share import QueueId

_SUSPENDED_KEY = "rq:suspended"

_LOOK = f"""
-- KEYS: the model's queues, RQ's suspension; of each job the wish to cancel it, and RQ's hash.
-- ARGV: what RQ puts before a queue's name. Returns names of queues, and places of jobs to end.
local waiting, ending = {{}}, {{}}
if redis.call('EXISTS', KEYS[2]) == 0 then
  for _, name in ipairs(redis.call('SMEMBERS', KEYS[1])) do
    local depth = redis.pcall('LLEN', ARGV[1] .. name)
    if type(depth) == 'number' and depth > 0 then waiting[#waiting + 1] = name end
  end
end
for i = 3, #KEYS, 2 do
  local status = redis.pcall('HGET', KEYS[i + 1], 'status')
  -- RQ cancelled, stopped or deleted it behind our back, or the key is no hash any more.
  local is_gone = type(status) ~= 'string'
    or status == '{JobStatus.CANCELED.value}' or status == '{JobStatus.STOPPED.value}'
  if is_gone or redis.call('EXISTS', KEYS[i]) == 1 then ending[#ending + 1] = (i - 3) / 2 end
end
return {{waiting, ending}}
"""


class Sight(NamedTuple):
    """What one look showed."""

    waiting: list[QueueId]
    """The model's queues that hold something; none while RQ is suspended."""
    ending: list[str]
    """Ids of the watched jobs whose end somebody has asked for."""


class Lookout:
    """Looks at a model's queues, at the durable wishes to cancel, and at RQ's cancel and stop.

    A single script, since it runs many times a second beside an engine that wants every core:
    as commands of a pipeline the looks took a tenth of a core.
    """

    def __init__(self, redis: Redis, model: str) -> None:
        self._model = model
        self._look = redis.register_script(_LOOK)

    def look(self, claims: Iterable[Claim]) -> Sight:
        """Look at the queues, and at the jobs of *claims*."""
        watched = list(claims)
        names: list[str | bytes] = [keys.active_queues_key(self._model), _SUSPENDED_KEY]
        for claim in watched:
            names += _names(claim.job_id, claim.queue_name)
        reply: Any = self._look(keys=names, args=[job_keys("", "").queue])
        members, places = reply
        found = (
            QueueId.parse(member.decode("utf-8", "replace"), self._model) for member in members
        )
        return Sight(
            [queue for queue in found if queue is not None],
            [watched[place].job_id for place in places],
        )


@lru_cache(maxsize=4096)
def _names(job_id: str, queue_name: str) -> tuple[bytes, bytes]:
    """Return what a watched job's keys are called: the same ones, look after look."""
    return keys.cancel_key(job_id).encode(), job_keys(job_id, queue_name).job.encode()
