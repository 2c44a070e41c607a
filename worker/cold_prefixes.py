"""ColdPrefixes: moves prefixes between the prefix cache and the disk tier, on the engine thread."""

from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import structlog

from .disk_tier import DiskTier, Entry, Loaded
from .engine.runner import DeviceSegment
from .engine.segment_codec import ForeignSegment, SegmentCodec, is_finite
from .host_segment import HostSegment
from .prefix_cache import Match, Node, PrefixCache
from .scheduler import Scheduler
from .segment import CacheKind
from .sequence import Sequence

log = structlog.get_logger()

BLOCK_TOKENS: Final = 128
"""Keys and values that could be cut anywhere in memory are cut at multiples of this on disk."""
_MIN_GAIN_TOKENS: Final = 16
"""What a load must bring beyond what memory holds to be worth a wait."""
_STEP_BYTES: Final = 64 * 2**20
"""Copied at most in one step, each way: decoding goes on beside it."""
_SETTLED_AFTER_STEPS: Final = 2
"""A commit's arrays are computed for sure when the step behind its own has been launched."""


class _Root(NamedTuple):
    """What has to be equal where keys and values are shared, but for the tokens."""

    model_key: Hashable
    """Of the model, or of the model with an adapter."""
    namespace: str

    @property
    def name(self) -> str:
        """The same for the disk."""
        return f"{self.model_key} {self.namespace}"


@dataclass(slots=True, eq=False)
class _Load:
    """A prefix on its way into memory, and who waits for it."""

    root: _Root
    tokens: tuple[int, ...]
    num_held: int
    """Tokens that the prefix cache held when it began."""
    num_brought: int
    """Tokens that it holds now, those from the disk included."""
    pinned: Node[DeviceSegment] | None
    future: "Future[list[Loaded]]"
    waiting: list[Sequence] = field(default_factory=list)
    next: int = 0
    """Number of the loaded entry that is inserted next."""


class _Copy(NamedTuple):
    """A prefix that the prefix cache got, to be written."""

    root: _Root
    tokens: tuple[int, ...]
    due_step: int


class ColdPrefixes:
    """A sequence whose prefix is on disk waits for it before it is scheduled; the others go on.

    Reading, checking and writing happen on the tier's threads. Here is only what needs the
    device: arrays made of host memory and copied to it, a bounded amount in each step.
    """

    def __init__(
        self,
        tier: DiskTier,
        codec: SegmentCodec,
        cache: PrefixCache[DeviceSegment],
        scheduler: Scheduler[DeviceSegment],
        wake: Callable[[], None],
    ) -> None:
        """*wake* is called from another thread when a load is there."""
        self._tier = tier
        self._codec = codec
        self._cache = cache
        self._scheduler = scheduler
        self._wake = wake
        self._loads: dict[str, _Load] = {}
        self._copies: deque[_Copy] = deque()
        self._num_steps = 0

    @property
    def tier(self) -> DiskTier:
        """Where they are; its figures may be read."""
        return self._tier

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a load."""
        return sum(len(load.waiting) for load in self._loads.values())

    @property
    def is_off(self) -> bool:
        """Whether the disk failed."""
        return self._tier.is_off

    @property
    def nbytes(self) -> int:
        """Bytes of all files, as last counted."""
        return self._tier.nbytes

    @property
    def is_due(self) -> bool:
        """Whether a step has something to do."""
        return bool(self._copies) or any(load.future.done() for load in self._loads.values())

    def keeps_waiting(self, sequence: Sequence) -> bool:
        """Whether *sequence* has to wait for the disk; step() returns it later."""
        root = _Root(*self._scheduler.root_key(sequence))
        tokens = tuple(sequence.tokens(0, sequence.num_known_tokens))
        held = self._cache.match(root, tokens, sequence.max_reused_tokens)
        chain = self._tier.find(root.name, tokens, sequence.max_reused_tokens)
        if not chain or chain[-1].end < held.num_tokens + _MIN_GAIN_TOKENS:
            return False
        load = self._loads.get(chain[-1].key)
        if load is None:
            load = self._loads[chain[-1].key] = self._begin(root, tokens, chain, held)
        load.waiting.append(sequence)
        return True

    def committed(self, sequence: Sequence, end: int) -> None:
        """Note that the prefix cache holds the first *end* tokens of a sequence."""
        tokens = tuple(sequence.tokens(0, end))
        due_step = self._num_steps + _SETTLED_AFTER_STEPS
        self._copies.append(_Copy(_Root(*self._scheduler.root_key(sequence)), tokens, due_step))

    def step(self, *, is_idle: bool) -> list[Sequence]:
        """Take in what was loaded and hand on what is to be written; return who may go on.

        *is_idle* says that the device has nothing to do, so that all commits are computed.
        """
        self._num_steps += 1
        ready: list[Sequence] = []
        for key in [key for key, load in self._loads.items() if load.future.done()]:
            if self._take_in(self._loads[key]):
                ready += self._loads.pop(key).waiting
        self._write(is_idle=is_idle)
        return ready

    def wait(self) -> None:
        """Wait until a load is there, where there is one: for callers without an inbox."""
        wait([load.future for load in self._loads.values()], return_when="FIRST_COMPLETED")

    def clear(self) -> "Future[None]":
        """Drop everything of the model on disk; the result is there when it is gone."""
        self._copies.clear()
        return self._tier.clear()

    def close(self) -> None:
        """Write what was handed over, and end the tier's threads; from any thread."""
        self._tier.close()

    def _begin(
        self,
        root: _Root,
        tokens: tuple[int, ...],
        chain: list[Entry],
        held: Match[DeviceSegment],
    ) -> _Load:
        if held.node is not None:
            # Without what comes before them the loaded entries would be of no use.
            self._cache.pin_node(held.node)
        first = sum(entry.end <= held.num_tokens for entry in chain)
        future = self._tier.load(chain, first, self._wake)
        return _Load(root, tokens, held.num_tokens, held.num_tokens, held.node, future)

    def _take_in(self, load: _Load) -> bool:
        """Insert some of a load's entries; return whether it is done with."""
        loaded, copied = load.future.result(), 0
        while load.next < len(loaded) and copied < _STEP_BYTES:
            entry, segment = loaded[load.next]
            load.next += 1
            copied += segment.nbytes
            if not self._insert(load, entry, segment):
                load.next = len(loaded)
        if load.next < len(loaded):
            return False
        self._cache.unpin(load.pinned)
        for sequence in load.waiting:
            sequence.loaded_span = load.num_held, load.num_brought
        return True

    def _insert(self, load: _Load, entry: Entry, host: HostSegment) -> bool:
        """Put an entry into the prefix cache; False when what follows it is of no use."""
        try:
            segment = self._codec.from_host(host)
        except ForeignSegment as error:
            log.warning("disk_entry_dropped", file=entry.stem, reason=str(error))
            self._tier.drop(entry)
            return False
        tokens = load.tokens[: entry.end]
        node = self._scheduler.insert(load.root, tokens, entry.start, segment)
        if node is None:
            return False
        self._cache.pin_node(node)
        self._cache.unpin(load.pinned)
        load.pinned, load.num_brought = node, entry.end
        return True

    def _write(self, *, is_idle: bool) -> None:
        """Hand what was committed some steps ago to the tier, so much as one step may copy."""
        copied = 0
        while self._copies and copied < _STEP_BYTES:
            copy = self._copies[0]
            if copy.due_step > self._num_steps and not is_idle:
                return
            num_bytes = self._write_next(copy)
            copied += num_bytes
            if not num_bytes:
                self._copies.popleft()

    def _write_next(self, copy: _Copy) -> int:
        """Hand over the first missing entry of a prefix; return its bytes, 0 if that was all."""
        held = self._cache.match(copy.root, copy.tokens, len(copy.tokens))
        path = self._cache.path(held.node)
        ends = self._ends(path, held.num_tokens)
        missing = self._tier.missing(copy.root.name, copy.tokens, ends)
        if not missing:
            self._tier.use(self._tier.find(copy.root.name, copy.tokens, held.num_tokens))
            return 0
        entry = missing[0]
        segments = [node.held for node in path if node.start < entry.end and node.held is not None]
        host = self._codec.to_host(segments, entry.start, entry.end)
        # What made a job fail must not come back after a restart.
        is_stored = is_finite(host) and self._tier.store(entry, host)
        return host.nbytes if is_stored else 0

    def _ends(self, path: list[Node[DeviceSegment]], num_tokens: int) -> list[int]:
        """Return where entries of a prefix end on disk."""
        if not num_tokens:
            return []
        if self._cache.kind is CacheKind.SNAPSHOTS:
            return [node.end for node in path if node.is_resumable]
        return [*range(BLOCK_TOKENS, num_tokens, BLOCK_TOKENS), num_tokens]
