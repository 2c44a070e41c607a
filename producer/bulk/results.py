"""The files of finished rows: append only, safe on disk before anything relies on them."""

import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import orjson

from .windows import FirstLines

T = TypeVar("T")


class Record(NamedTuple):
    """A finished row as it is written."""

    line: int
    is_good: bool
    """Whether it belongs into the output file; the others have a file of their own."""
    fields: Mapping[str, Any]


class LineSet:
    """A set of line numbers, at one bit each."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, line: int) -> bool:
        index, bit = divmod(line, 8)
        return index < len(self._bits) and bool(self._bits[index] >> bit & 1)

    def add(self, line: int) -> None:
        """Put a line number in; harmless when repeated."""
        if line in self:
            return
        index, bit = divmod(line, 8)
        if index >= len(self._bits):
            self._bits.extend(bytes(index + 1 - len(self._bits)))
        self._bits[index] |= 1 << bit
        self._count += 1


class ResultFiles:
    """The output file and the error file of one run; a context manager.

    A line torn by a crash is cut off when they are opened; its row runs again.
    """

    def __init__(self, output: Path, errors: Path, first_lines: FirstLines) -> None:
        """Open both, and learn from them which rows are done; *first_lines* learns their ids."""
        self.done = LineSet()
        """Rows that stand in one of the files."""
        self.num_errors = 0
        self._output = self._open(output, first_lines)
        self.num_good = len(self.done)
        self._errors = self._open(errors, first_lines)
        self.num_errors = len(self.done) - self.num_good

    def __enter__(self) -> "ResultFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self._output.close()
        self._errors.close()
        if not self.num_errors:
            Path(self._errors.name).unlink(missing_ok=True)

    def add(self, records: Iterable[Record]) -> None:
        """Append *records*; they are on the disk when this returns."""
        touched = set()
        for record in records:
            file = self._output if record.is_good else self._errors
            file.write(orjson.dumps(record.fields, option=orjson.OPT_APPEND_NEWLINE))
            touched.add(file)
            self.done.add(record.line)
            self.num_good += record.is_good
            self.num_errors += not record.is_good
        for file in touched:
            file.flush()
            os.fsync(file.fileno())

    def _open(self, path: Path, first_lines: FirstLines) -> Any:
        end = 0
        file = path.open("a+b")
        file.seek(0)
        for data in file:
            known = _parse(data)
            if known is None or known.line in self.done:
                break
            self.done.add(known.line)
            first_lines.note(known.custom_id, known.line)
            end += len(data)
        file.truncate(end)
        return file


class Ordering(Generic[T]):
    """Puts what finished into its rows' order, by line."""

    def __init__(self) -> None:
        self._expected: deque[int] = deque()
        self._held: dict[int, T] = {}

    @property
    def num_behind(self) -> int:
        """Rows that are expected and not passed on."""
        return len(self._expected)

    def expect(self, lines: Iterable[int]) -> None:
        """Take note of the lines that come next; all greater than those before."""
        self._expected.extend(sorted(lines))

    def pass_on(self, finished: Iterable[tuple[int, T]]) -> Iterator[T]:
        """Yield what is next in order, of *finished* and of what was held back."""
        self._held.update(finished)
        while self._expected and self._expected[0] in self._held:
            yield self._held.pop(self._expected.popleft())


class _Known(NamedTuple):
    line: int
    custom_id: str


def _parse(data: bytes) -> _Known | None:
    """Return which input line a finished row belongs to; None for a torn one."""
    if not data.endswith(b"\n"):
        return None
    try:
        row = orjson.loads(data)
        return _Known(int(row["id"].rpartition("-")[2]), str(row["custom_id"]))
    except (orjson.JSONDecodeError, AttributeError, TypeError, KeyError, ValueError):
        return None
