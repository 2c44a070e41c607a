"""DiskIndex: which entries there are, by name; what is in them is read when they are wanted."""

import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence

from .folder import Entry
from .prefix_keys import PrefixKeys


class DiskIndex:
    """Entries by key. May be used from any thread."""

    def __init__(self, fingerprint: str) -> None:
        self._fingerprint = fingerprint
        self._lock = threading.Lock()
        self._entries: dict[str, Entry] = {}
        self._num_ends: Counter[int] = Counter()
        self._ends: list[int] = []

    def __len__(self) -> int:
        return len(self._entries)

    def entries(self) -> list[Entry]:
        """Return all entries."""
        with self._lock:
            return list(self._entries.values())

    def add(self, entries: Iterable[Entry]) -> None:
        """Take in entries; one with a known key is left out."""
        with self._lock:
            for entry in entries:
                if entry.start < entry.end and entry.key not in self._entries:
                    self._entries[entry.key] = entry
                    self._num_ends[entry.end] += 1
            self._ends = sorted(self._num_ends)

    def remove(self, entry: Entry) -> None:
        """Forget an entry; unknown ones are ignored."""
        with self._lock:
            if self._entries.pop(entry.key, None) is None:
                return
            self._num_ends[entry.end] -= 1
            if not self._num_ends[entry.end]:
                del self._num_ends[entry.end]
                self._ends = sorted(self._num_ends)

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._entries.clear()
            self._num_ends.clear()
            self._ends = []

    def find(self, namespace: str, token_ids: Sequence[int], max_tokens: int) -> list[Entry]:
        """Return the adjacent entries from token 0 that reach deepest, at most *max_tokens*."""
        with self._lock:
            ends = self._ends[: bisect_right(self._ends, max_tokens)]
            keys = PrefixKeys(self._fingerprint, namespace, token_ids).at(ends)
            for end in reversed(ends):
                chain = self._chain(keys, end)
                if chain:
                    return chain
        return []

    def missing(self, namespace: str, token_ids: Sequence[int], ends: Sequence[int]) -> list[Entry]:
        """Return the entries that would make all *ends* (ascending) reachable."""
        keys = PrefixKeys(self._fingerprint, namespace, token_ids).at(ends)
        with self._lock:
            starts = [0, *ends[:-1]]
            return [
                Entry(keys[end], start, end)
                for start, end in zip(starts, ends, strict=True)
                if keys[end] not in self._entries
            ]

    def _chain(self, keys: dict[int, str], end: int) -> list[Entry]:
        chain: list[Entry] = []
        while end:
            entry = self._entries.get(keys.get(end, ""))
            if entry is None or entry.end != end:
                return []
            chain.append(entry)
            end = entry.start
        return chain[::-1]
