"""Windows: rows in groups that share prefixes, and the check that no custom_id comes twice."""

from array import array
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ..openai_protocol.errors import ApiError
from .rows import ReadyRow, RefusedRow, Row, refuse

MAX_TOKENS = 500_000
"""Prompt tokens of one window: what bounds its memory."""
_SLOTS = 1 << 12


class Window(NamedTuple):
    """Consecutive rows."""

    refused: list[RefusedRow]
    ready: list[ReadyRow]
    """By their token ids, so that rows with a prefix in common come to the worker together."""


def windows(rows: Iterable[Row], max_rows: int, max_tokens: int = MAX_TOKENS) -> Iterator[Window]:
    """Yield the rows in windows of at most *max_rows*, and of about *max_tokens* at most."""
    window, num_tokens = Window([], []), 0
    for row in rows:
        if isinstance(row, RefusedRow):
            window.refused.append(row)
        else:
            window.ready.append(row)
            num_tokens += sum(len(job.prompt_token_ids) for job in row.jobs)
        if len(window.refused) + len(window.ready) >= max_rows or num_tokens >= max_tokens:
            yield _sorted(window)
            window, num_tokens = Window([], []), 0
    if window.refused or window.ready:
        yield _sorted(window)


def _sorted(window: Window) -> Window:
    window.ready.sort(key=lambda row: row.jobs[0].prompt_token_ids)
    return window


def without_repeats(rows: Iterable[Row], first_lines: "FirstLines") -> Iterator[Row]:
    """Yield *rows*, with a refusal for each whose custom_id an earlier line has."""
    for row in rows:
        first = first_lines.note(row.custom_id, row.line)
        if first < row.line:
            error = ApiError(
                400, f"its custom_id stands in line {first} already", param="custom_id"
            )
            yield refuse(row.line, row.custom_id, error)
        else:
            yield row


class FirstLines:
    """The first line of each custom_id, at 32 bytes or less for each: files have millions.

    An open-addressed table of 64-bit hashes. Two ids of a million share one once in 40 million
    files.
    """

    def __init__(self) -> None:
        self._num_known = 0
        self._make_table(_SLOTS)

    def note(self, custom_id: str, line: int) -> int:
        """Return the first line that *custom_id* is known to stand in, *line* included."""
        if 2 * self._num_known >= len(self._lines):
            self._grow()
        key = hash(custom_id) & 0xFFFF_FFFF_FFFF_FFFF
        slot = self._slot_of(key)
        known = self._lines[slot]
        if not known:
            self._num_known += 1
            self._hashes[slot] = key
        if not known or line < known:
            self._lines[slot] = line
            return line
        return known

    def _slot_of(self, key: int) -> int:
        """Return where *key* stands, or the free slot for it."""
        mask = len(self._lines) - 1
        slot = key & mask
        while self._lines[slot] and self._hashes[slot] != key:
            slot = (slot + 1) & mask
        return slot

    def _grow(self) -> None:
        old = zip(self._hashes, self._lines, strict=True)
        self._make_table(2 * len(self._lines))
        for key, line in old:
            if line:
                slot = self._slot_of(key)
                self._hashes[slot], self._lines[slot] = key, line

    def _make_table(self, num_slots: int) -> None:
        self._hashes = array("Q", bytes(8 * num_slots))
        self._lines = array("Q", bytes(8 * num_slots))
