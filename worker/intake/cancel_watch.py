"""CancelWatch: jobs of ours whose end somebody has asked for."""

from collections.abc import Iterable
from typing import Any

from headwater.schemas import keys
from redis import Redis
from rq.job import JobStatus

from ..booking.rq_jobs import job_keys
from ..messages import Claim

_FIND_CANCELLED = f"""
-- KEYS: of each job the wish to cancel it, and RQ's hash. Returns the places of those to end.
local found = {{}}
for i = 1, #KEYS, 2 do
  local status = redis.pcall('HGET', KEYS[i + 1], 'status')
  -- RQ cancelled, stopped or deleted it behind our back, or the key is no hash any more.
  local is_gone = type(status) ~= 'string'
    or status == '{JobStatus.CANCELED.value}' or status == '{JobStatus.STOPPED.value}'
  if is_gone or redis.call('EXISTS', KEYS[i]) == 1 then found[#found + 1] = (i - 1) / 2 end
end
return found
"""


class CancelWatch:
    """Looks at the durable wishes, and at RQ's own cancel and stop.

    A script, since it looks at every running job many times a second: as single commands of a
    pipeline that took a tenth of a core from the engine.
    """

    def __init__(self, redis: Redis) -> None:
        self._find = redis.register_script(_FIND_CANCELLED)

    def cancelled(self, claims: Iterable[Claim]) -> list[str]:
        """Return the ids of those *claims* that should end now."""
        watched = list(claims)
        if not watched:
            return []
        names = [
            name
            for claim in watched
            for name in (
                keys.cancel_key(claim.job_id),
                job_keys(claim.job_id, claim.queue_name).job,
            )
        ]
        places: Any = self._find(keys=names)
        return [watched[place].job_id for place in places]
