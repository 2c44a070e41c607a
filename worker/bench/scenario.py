"""Scenario: a named comparison of us with peers, and how it is run."""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Generic, Protocol, TypeAlias, TypeVar

from headwater.schemas import GenerationJob, HeadwaterError

from . import memory
from .report import BenchReport, Figures

_MAX_REPEATED_PEER_S = 20.0
"""A peer whose first run takes longer is run once."""

Measure: TypeAlias = Callable[[], Figures]


class BenchError(HeadwaterError):
    """A scenario can't run with these settings."""


class JobQueue(Protocol):
    """A server of its own, and a producer for it; the command line has both, the worker neither."""

    @property
    def url(self) -> str:
        """Where a worker finds the server."""
        ...

    def submit(self, jobs: Seq[GenerationJob]) -> None:
        """Put jobs into their queues."""
        ...


OpenQueue: TypeAlias = Callable[[], AbstractContextManager[JobQueue]]


def no_queue() -> AbstractContextManager[JobQueue]:
    """Stand for a queue where there is none; raises BenchError."""
    raise BenchError("this scenario needs a server: run it as `headwater bench`")


class Settings(Protocol):
    """A frozen dataclass of numbers and strings, each field made by setting()."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


S = TypeVar("S", bound=Settings)


@dataclass(frozen=True)
class Peer:
    """Somebody else's code that does the same work."""

    name: str
    version: str
    measure: Measure


@dataclass(frozen=True)
class Contest:
    """A scenario made ready to be measured; the first peer is the one that ratios are against."""

    ours: Measure
    peers: tuple[Peer, ...]
    ratio: Callable[[Figures, Figures], Figures]
    """From our medians and the first peer's."""
    in_pairs: bool = False
    """Whether every run of ours has one of the peer's beside it, however slow that is, and the
    ratios are medians over the pairs: for small differences on a machine with other work."""


@dataclass(frozen=True)
class Scenario(Generic[S]):
    """A comparison that `headwater bench NAME` runs. Its module imports nothing slow at its top."""

    name: str
    summary: str
    settings: type[S]
    """Each field becomes a flag."""
    prepare: Callable[[S, OpenQueue], Contest]
    quick: Mapping[str, Any]
    """Settings that keep a run under 20 s."""
    repeat: int = 3
    quick_repeat: int = 1
    complete: Callable[[S], S] = lambda settings: settings
    """Fills in settings whose defaults depend on others."""
    measures_memory: bool = False
    """Whether each side runs once more in a process of its own, for its peaks of memory."""


def setting(default: Any, help_text: str) -> Any:
    """Return a field of a scenario's settings."""
    return field(default=default, metadata={"help": help_text})


def run_scenario(
    scenario: Scenario[S],
    settings: S,
    *,
    repeat: int | None = None,
    quick: bool = False,
    measure_memory: bool = True,
    open_queue: OpenQueue = no_queue,
) -> BenchReport:
    """Run us and the peers in turn, *repeat* times, and return the medians.

    *quick* overrides the settings that the scenario names for it, and leaves out the memory keys,
    as *measure_memory* does.
    """
    if quick:
        settings = replace(settings, **scenario.quick)
    settings = scenario.complete(settings)
    num_runs = repeat or (scenario.quick_repeat if quick else scenario.repeat)
    contest = scenario.prepare(settings, open_queue)
    ours, *peers = _run_in_turn(contest, num_runs)
    medians = [median_figures(runs) for runs in (ours, *peers)]
    if scenario.measures_memory and measure_memory and not quick:
        for side in (memory.OURS, memory.PEER):
            medians[side] |= memory.measure_apart(scenario.name, asdict(settings), side)
    named = [
        {"name": peer.name, "version": peer.version, **figures, "repeat": len(runs)}
        for peer, figures, runs in zip(contest.peers, medians[1:], peers, strict=True)
    ]
    return BenchReport(
        scenario=scenario.name,
        settings={**asdict(settings), "quick": quick, "repeat": len(ours)},
        ours=medians[0],
        peers=tuple(named),
        ratio=_ratio(contest, ours, peers, medians),
    )


def median_figures(runs: list[Figures]) -> Figures:
    """Return the median of each key over *runs*, which all have the same keys."""
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def _ratio(
    contest: Contest, ours: list[Figures], peers: list[list[Figures]], medians: list[Figures]
) -> Figures:
    if not peers:
        return {}
    if contest.in_pairs:
        return median_figures(list(map(contest.ratio, ours, peers[0])))
    return contest.ratio(medians[0], medians[1])


def _run_in_turn(contest: Contest, num_runs: int) -> list[list[Figures]]:
    """Return each contestant's runs; one that is slow (and not us) runs once."""
    measures = [contest.ours, *(peer.measure for peer in contest.peers)]
    results: list[list[Figures]] = [[] for _ in measures]
    is_slow = [False] * len(measures)
    for _ in range(num_runs):
        for index, measure in enumerate(measures):
            if is_slow[index]:
                continue
            started = time.perf_counter()
            with _without_collection():
                results[index].append(measure())
            wall_s = time.perf_counter() - started
            is_peer = index > 0 and not contest.in_pairs
            is_slow[index] = is_peer and wall_s > _MAX_REPEATED_PEER_S
    return results


@contextmanager
def _without_collection() -> Iterator[None]:
    """Collect garbage before a measurement instead of inside it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
