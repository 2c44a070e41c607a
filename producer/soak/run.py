"""One soak: undisturbed for a while, then under faults, then left to finish, then judged."""

import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ..client import Producer
from .fleet import Fleet, SoakServer
from .load import Load
from .verdict import Inspection, Verdict

_TURN_S = 0.1
_PAUSE_LEASES = 1.5
_KILLS_PER_PAUSE = 3
_STUCK_LEASES = 20
"""Without any end for so long once the faults have stopped, what is left is stuck."""
_SHORTEST_STUCK_S = 30.0


@dataclass(frozen=True)
class SoakSettings:
    """What a soak does, and for how long."""

    minutes: float = 5.0
    num_workers: int = 2
    kill_every_s: float = 5.0
    redis_restart_every_s: float = 20.0
    seed: int = 0
    lease_s: float = 1.5
    undisturbed_s: float = 20.0


def run_soak(settings: SoakSettings, model: str, logs: Path, say: Callable[[str], None]) -> Verdict:
    """Run a soak with the *model* (a directory or a name) and judge it.

    *logs* is where the workers' logs go. Raises ServerUnavailable, ProducerError.
    """
    with (
        tempfile.TemporaryDirectory(prefix="headwater-soak-") as data_dir,
        SoakServer(Path(data_dir)) as server,
        Fleet(server.url, model, settings.lease_s, logs) as fleet,
    ):
        fleet.start_workers(settings.num_workers)
        with Producer(server.url) as producer:
            soak = _Soak(settings, server, fleet, Load(producer, settings.seed), say)
            return soak.run()


@dataclass
class _Soak:
    settings: SoakSettings
    server: SoakServer
    fleet: Fleet
    load: Load
    say: Callable[[str], None]
    num_kills: int = 0
    num_restarts: int = 0
    num_pauses: int = 0
    _paused: dict[int, float] = field(default_factory=dict)
    """When each paused worker goes on."""

    def __post_init__(self) -> None:
        self._dice = random.Random(self.settings.seed)  # noqa: S311 - no secret

    def run(self) -> Verdict:
        undisturbed = self._phase(self.settings.undisturbed_s, is_disturbed=False)
        self.say(f"undisturbed: {undisturbed:.1f} jobs/s; now the faults begin")
        disturbed = self._phase(60 * self.settings.minutes, is_disturbed=True)
        self.say(f"under faults: {disturbed:.1f} jobs/s; now the rest may finish")
        self._settle()
        self.fleet.stop()
        return self._judge(undisturbed, disturbed)

    def _phase(self, seconds: float, *, is_disturbed: bool) -> float:
        """Keep jobs running for a while; return how many ended per second."""
        start, ended_before = time.monotonic(), self.load.num_ended
        next_kill_s = start + self.settings.kill_every_s
        next_restart_s = start + self.settings.redis_restart_every_s
        while (now := time.monotonic()) < start + seconds:
            if is_disturbed and now >= next_kill_s:
                next_kill_s += self.settings.kill_every_s
                self._kill_one(now)
            if is_disturbed and now >= next_restart_s:
                next_restart_s += self.settings.redis_restart_every_s
                self.server.restart()
                self.num_restarts += 1
            self._turn(now)
        for index in list(self._paused):
            self._wake(index)
        return (self.load.num_ended - ended_before) / (time.monotonic() - start)

    def _kill_one(self, now: float) -> None:
        index = self._dice.randrange(len(self.fleet.workers))
        self._wake(index)
        self.fleet.kill(index)
        self.num_kills += 1
        if self.num_kills % _KILLS_PER_PAUSE == 0 and len(self.fleet.workers) > 1:
            # Another one becomes a zombie: back when its jobs are somebody else's.
            other = (index + 1) % len(self.fleet.workers)
            self.fleet.pause(other)
            self.num_pauses += 1
            self._paused[other] = now + _PAUSE_LEASES * self.settings.lease_s

    def _turn(self, now: float) -> None:
        for index, until_s in list(self._paused.items()):
            if now >= until_s:
                self._wake(index)
        self.fleet.replace_ended()
        self.load.fill()
        self.load.look()
        # The pace of a loop that looks from outside; nothing waits for it.
        time.sleep(_TURN_S)

    def _wake(self, index: int) -> None:
        if self._paused.pop(index, None) is not None:
            self.fleet.resume(index)

    def _settle(self) -> None:
        patience_s = max(_SHORTEST_STUCK_S, _STUCK_LEASES * self.settings.lease_s)
        num_open, since = len(self.load.open_jobs), time.monotonic()
        while num_open and time.monotonic() < since + patience_s:
            self.fleet.replace_ended()
            self.load.look()
            if len(self.load.open_jobs) < num_open:
                num_open, since = len(self.load.open_jobs), time.monotonic()
            time.sleep(_TURN_S)

    def _judge(self, undisturbed: float, disturbed: float) -> Verdict:
        inspection = Inspection(self.load.producer, self.load)
        inspection.run()
        counts = inspection.counts
        return Verdict(
            jobs=len(self.load.submitted),
            lost=counts["lost"],
            duplicated=counts["duplicated"],
            stuck=counts["stuck"],
            keys_without_expiry=counts["lasting"],
            kills=self.num_kills,
            redis_restarts=self.num_restarts,
            resumed_attempts=counts["resumed"],
            different=counts["different"],
            open_in_rq=counts["open_in_rq"],
            pauses=self.num_pauses,
            unexpected_exits=len(self.fleet.last_words),
            lease_s=self.settings.lease_s,
            undisturbed_jobs_per_s=undisturbed,
            jobs_per_s=disturbed,
            complaints=(
                *inspection.complaints,
                *(f"a worker ended: {words}" for words in self.fleet.last_words),
            ),
        )
