"""Listener: what comes over pub/sub: the bell, and RQ's own way to stop a running job.

A message is lost when nobody listens at that moment, so nothing depends on one. The bell only
says when to look; and the durable key that `cancel` sets is the better way to stop a job: RQ's
commands are for tools that know only these.
"""

import threading
from collections.abc import Callable, Iterable
from typing import Any

import orjson
import structlog
from headwater.schemas import keys
from redis import Redis
from redis.exceptions import RedisError
from rq.command import PUBSUB_CHANNEL_TEMPLATE

from ..messages import Cancel, Claim
from ..outages import Outages
from ..watched_thread import WatchedThread

log = structlog.get_logger()

_POLL_S = 0.5
_OUTAGE_PAUSE_S = 1.0


class Listener:
    """Listens on the worker's channel and its model's; subscribes again after every outage."""

    def __init__(
        self,
        redis: Redis,
        worker_id: str,
        model: str,
        *,
        claims: Callable[[], Iterable[Claim]],
        post: Callable[[Cancel], None],
        ring: Callable[[], None],
        hurry: Callable[[], None],
        on_death: Callable[[BaseException], None],
        outages: Outages | None = None,
    ) -> None:
        """*ring* is called when there is something to do, *hurry* when the caches are meant."""
        self._redis = redis
        self._bell = keys.bell_channel(model)
        self._commands = PUBSUB_CHANNEL_TEMPLATE % worker_id
        self._claims = claims
        self._post = post
        self._ring = ring
        self._hurry = hurry
        self.is_subscribed = threading.Event()
        self._outages = outages or Outages()
        self._thread = WatchedThread("listener", self._run, on_death)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._thread.stop()

    def _run(self) -> None:
        while not self._thread.stopping.is_set():
            try:
                self._listen()
            except RedisError as error:
                self.is_subscribed.clear()
                self._outages.note("listener_paused", error)
                self._thread.stopping.wait(_OUTAGE_PAUSE_S)

    def _listen(self) -> None:
        with self._redis.pubsub(ignore_subscribe_messages=True) as pubsub:  # type: ignore[no-untyped-call]
            pubsub.subscribe(self._commands, self._bell)
            self.is_subscribed.set()
            while not self._thread.stopping.is_set():
                message = pubsub.get_message(timeout=_POLL_S)
                if message is None:
                    continue
                if message["channel"] == self._bell.encode():
                    self._hurry() if message["data"] == keys.CACHE_BELL else self._ring()
                else:
                    self._obey(message["data"])

    def _obey(self, data: Any) -> None:
        try:
            command = orjson.loads(data)
            job_ids = {command.get("job_id")} if command["command"] == "stop-job" else set()
            execution_id = command.get("execution_id", "-")
        except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError):
            log.warning("not_a_command", data=str(data)[:200])
            return
        for claim in self._claims():
            if claim.job_id in job_ids or claim.execution_id == execution_id:
                log.info("stop_command", job_id=claim.job_id)
                self._post(Cancel(claim.job_id))
