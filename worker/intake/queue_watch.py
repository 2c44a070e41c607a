"""QueueWatch: the queues of a model that hold something."""

from typing import Any

from headwater.schemas import keys
from redis import Redis

from ..booking.rq_jobs import job_keys
from .fair_share import QueueId

_SUSPENDED_KEY = "rq:suspended"

_FIND_WAITING = """
-- KEYS: the model's queues, RQ's suspension. ARGV: what RQ puts before a queue's name.
local waiting = {}
if redis.call('EXISTS', KEYS[2]) == 1 then return waiting end
for _, name in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local depth = redis.pcall('LLEN', ARGV[1] .. name)
  if type(depth) == 'number' and depth > 0 then waiting[#waiting + 1] = name end
end
return waiting
"""


class QueueWatch:
    """Looks at all of a model's queues in one trip."""

    def __init__(self, redis: Redis, model: str) -> None:
        self._model = model
        self._find = redis.register_script(_FIND_WAITING)

    def waiting(self) -> list[QueueId]:
        """Return the queues that hold something; none while RQ is suspended."""
        names = [keys.active_queues_key(self._model), _SUSPENDED_KEY]
        members: Any = self._find(keys=names, args=[job_keys("", "").queue])
        found = (
            QueueId.parse(member.decode("utf-8", "replace"), self._model) for member in members
        )
        return [queue for queue in found if queue is not None]
