"""DiskTier: reads and writes entries on threads of its own, and keeps to a budget."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, NamedTuple

import structlog

from ..host_segment import HostSegment
from .folder import DiskFolder, Entry
from .index import DiskIndex
from .sidecar import BadEntry

log = structlog.get_logger()

_MAX_PENDING_BYTES: Final = 512 * 2**20
"""Host copies that wait to be written; what comes on top is not kept."""
_WRITES_BETWEEN_COUNTS: Final = 32
_SHARE_OF_ROOM: Final = 0.5
"""Other workers write into the same directory: everything is counted again after so many writes,
or when so much of the room is used that was left at the last count."""


class Loaded(NamedTuple):
    """One entry in host memory."""

    entry: Entry
    segment: HostSegment


class DiskTier:
    """Prefixes of one model on disk.

    Nothing here raises: a file that can't be used is a miss, one that is damaged goes with a
    warning, and an error of the disk itself switches the tier off with one.
    """

    def __init__(self, folder: DiskFolder, fingerprint: str, max_bytes: int) -> None:
        """*max_bytes* is the budget of the whole directory."""
        self._folder = folder
        self.fingerprint = fingerprint
        """What entries are named by, beside their tokens."""
        self._max_bytes = max_bytes
        self._index = DiskIndex(fingerprint)
        self._reader = ThreadPoolExecutor(1, "disk-reader")
        self._writer = ThreadPoolExecutor(1, "disk-writer")
        self._lock = threading.Lock()
        self._pending: dict[Entry, int] = {}
        """Entries that wait to be written, and their bytes."""
        self._nbytes = 0
        self._num_writes = 0
        self._next_count_nbytes = 0.0
        """Counted again above."""
        self._is_off = False
        self._guarded(self._open)

    @property
    def is_off(self) -> bool:
        """Whether the disk failed."""
        return self._is_off

    @property
    def max_bytes(self) -> int:
        """Budget of the directory."""
        return self._max_bytes

    @property
    def nbytes(self) -> int:
        """Bytes in the directory, as last counted, and what we have written since."""
        return self._nbytes

    @property
    def num_entries(self) -> int:
        """Entries of our model that we know of."""
        return len(self._index)

    def find(self, namespace: str, token_ids: Sequence[int], max_tokens: int) -> list[Entry]:
        """Return the adjacent entries from token 0 that reach deepest, at most *max_tokens*."""
        return [] if self._is_off else self._index.find(namespace, token_ids, max_tokens)

    def load(
        self, chain: Sequence[Entry], first: int, done: Callable[[], None]
    ) -> "Future[list[Loaded]]":
        """Read the entries of *chain* from number *first* on; call *done* from another thread.

        The result ends before the first entry that can't be used.
        """
        future = self._reader.submit(self._read, list(chain), first)
        future.add_done_callback(lambda _: done())
        return future

    def missing(self, namespace: str, token_ids: Sequence[int], ends: Sequence[int]) -> list[Entry]:
        """Return the entries still to be stored for prefixes that end at *ends* (ascending)."""
        return [] if self._is_off else self._index.missing(namespace, token_ids, ends)

    def store(self, entry: Entry, segment: HostSegment) -> bool:
        """Write an entry soon; False when too much is waiting already."""
        with self._lock:
            waiting = sum(self._pending.values()) + segment.nbytes
            if self._is_off or waiting > _MAX_PENDING_BYTES:
                return False
            self._pending[entry] = segment.nbytes
        self._index.add([entry])
        self._writer.submit(self._write, entry, segment)
        return True

    def use(self, chain: Sequence[Entry]) -> None:
        """Note that a prefix was used, from memory or from here."""
        self._writer.submit(self._guarded, lambda: self._folder.touch(list(chain)))

    def drop(self, entry: Entry) -> None:
        """Remove an entry that is of no use."""
        self._index.remove(entry)
        self._guarded(lambda: self._folder.remove(entry))

    def clear(self) -> "Future[None]":
        """Remove every entry of the model, those that wait to be written included."""
        self._index.clear()
        return self._writer.submit(self._guarded, self._clear)

    def flush(self) -> None:
        """Wait until everything stored so far has been written."""
        self._writer.submit(lambda: None).result()

    def close(self) -> None:
        """Write what waits, and end the threads."""
        self._reader.shutdown(wait=True, cancel_futures=True)
        self._writer.shutdown(wait=True)

    def _open(self) -> None:
        self._index.add(self._folder.entries())
        self._writer.submit(self._guarded, self._count)

    def _read(self, chain: list[Entry], first: int) -> list[Loaded]:
        loaded: list[Loaded] = []
        for entry in chain[first:]:
            try:
                loaded.append(Loaded(entry, self._folder.read(entry)))
            except FileNotFoundError:
                self.drop(entry)  # Another worker needed the room.
                break
            except BadEntry as error:
                log.warning("disk_entry_dropped", file=entry.stem, reason=str(error))
                self.drop(entry)
                break
            except OSError as error:
                self._switch_off(error)
                break
        self.use(chain[: first + len(loaded)])
        return loaded

    def _write(self, entry: Entry, segment: HostSegment) -> None:
        try:
            self._guarded(lambda: self._write_one(entry, segment))
        finally:
            with self._lock:
                self._pending.pop(entry, None)

    def _write_one(self, entry: Entry, segment: HostSegment) -> None:
        if self._is_off:
            return
        self._nbytes += self._folder.write(entry, segment)
        self._num_writes += 1
        is_due = self._num_writes % _WRITES_BETWEEN_COUNTS == 0
        if is_due or self._nbytes > self._next_count_nbytes:
            self._count()

    def _clear(self) -> None:
        self._folder.clear()
        self._count()

    def _count(self) -> None:
        """Count all bytes, and remove what is over the budget."""
        self._nbytes = self._folder.shrink(self._max_bytes)
        self._next_count_nbytes = self._nbytes + _SHARE_OF_ROOM * (self._max_bytes - self._nbytes)
        with self._lock:
            # Before the folder is listed: an entry is in one of the two at any time.
            left = set(self._pending)
        left |= set(self._folder.entries())
        for entry in self._index.entries():
            if entry not in left:
                self._index.remove(entry)

    def _guarded(self, act: Callable[[], object]) -> None:
        if self._is_off:
            return
        try:
            act()
        except OSError as error:
            self._switch_off(error)

    def _switch_off(self, error: OSError) -> None:
        with self._lock:
            is_first, self._is_off = not self._is_off, True
        if is_first:
            log.warning(
                "disk_tier_off",
                error=str(error),
                advice="prefixes are kept in memory only; make room and restart the worker",
            )
