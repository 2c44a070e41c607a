"""The lines of an input file, whatever is wrong with it: each one is bounded, none harms others."""

import gzip
import hashlib
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from ..errors import InvalidRequest

_BOM = b"\xef\xbb\xbf"
_GZIP = b"\x1f\x8b"
_WIDE = (b"\xff\xfe", b"\xfe\xff")
"""The byte order marks of UTF-16 and UTF-32."""
_BLOCK = 1 << 20


class Line(NamedTuple):
    """One line that is not blank."""

    number: int
    """From 1; blank lines count, too."""
    data: bytes
    """Without white space around it; empty where *error* says why it can't be used."""
    error: str | None = None


class Survey(NamedTuple):
    """What is known of an input before its rows run."""

    sha256: str
    """Of the file's bytes as they lie there."""
    num_rows: int


def survey(path: Path, max_row_bytes: int) -> Survey:
    """Read *path* once; raises InvalidRequest for a file that can't be an input at all."""
    digest = hashlib.sha256()
    with _open(path) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    num_rows = sum(1 for _ in read_lines(path, max_row_bytes))
    if not num_rows:
        raise InvalidRequest(f"{path} holds no rows")
    return Survey(digest.hexdigest(), num_rows)


def read_lines(path: Path, max_row_bytes: int) -> Iterator[Line]:
    """Yield the lines of *path*, packed with gzip or plain; raises InvalidRequest.

    Lines end with a line feed only: U+2028 and its like belong to a row's text.
    """
    with _open(path) as raw:
        start = raw.read(len(_GZIP))
        raw.seek(0)
        if start in _WIDE:
            raise InvalidRequest(f"{path} is UTF-16 or UTF-32; rows are UTF-8: convert it first")
        if start != _GZIP:
            yield from _lines(raw, max_row_bytes)
            return
        with gzip.GzipFile(fileobj=raw) as unpacked:
            yield from _lines(unpacked, max_row_bytes)


def _lines(file: IO[bytes] | gzip.GzipFile, max_row_bytes: int) -> Iterator[Line]:
    number = 0
    while True:
        number += 1
        try:
            data = file.readline(max_row_bytes + 1)
            excess = _skip_rest(file, data, max_row_bytes)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            reason = f"the gzip file ends early or is damaged here ({error}): later rows are lost"
            yield Line(number, b"", reason)
            return
        if not data:
            return
        if excess:
            size = len(data) + excess
            yield Line(number, b"", f"the line has {size} bytes; at most {max_row_bytes}")
            continue
        text = (data.removeprefix(_BOM) if number == 1 else data).strip()
        if text:
            yield Line(number, text)


def _skip_rest(file: IO[bytes] | gzip.GzipFile, data: bytes, max_row_bytes: int) -> int:
    """Read past what a line has beyond the limit, without keeping it; return its bytes."""
    if len(data) <= max_row_bytes or data.endswith(b"\n"):
        return 0
    num_bytes = 0
    while piece := file.readline(_BLOCK):
        num_bytes += len(piece)
        if piece.endswith(b"\n"):
            break
    # A last line of exactly one byte too much has no rest.
    return max(1, num_bytes)


def _open(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except OSError as error:
        raise InvalidRequest(f"can't read {path}: {error.strerror or error}") from error
