"""A batch's rows: read from its input file, written to its output and error files."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from ..openai_protocol.errors import ApiError
from ..openai_protocol.routes import FileRequest, parse_request

_BOM = b"\xef\xbb\xbf"


class Row(NamedTuple):
    """One line of the input."""

    line: int
    """From 1."""
    custom_id: str | None
    request: FileRequest | None
    error: ApiError | None
    """Why it can't run; then there is no request."""


def read_rows(path: Path, endpoint: str, max_row_bytes: int) -> Iterator[Row]:
    """Yield the rows of an input file; blank lines are none. A bad line harms no other."""
    first_lines: dict[str, int] = {}
    with path.open("rb") as file:
        for line, data in enumerate(file, 1):
            text = (data.removeprefix(_BOM) if line == 1 else data).strip()
            if text:
                yield _parse(line, text, endpoint, max_row_bytes, first_lines)


def _parse(
    line: int, text: bytes, endpoint: str, max_row_bytes: int, first_lines: dict[str, int]
) -> Row:
    custom_id: str | None = None
    try:
        fields = _object(line, text, max_row_bytes)
        custom_id = _custom_id(line, fields)
        _check_first(line, first_lines.setdefault(custom_id, line))
        return Row(line, custom_id, _request(line, fields, endpoint), None)
    except ApiError as error:
        return Row(line, custom_id, None, error)


def _check_first(line: int, first: int) -> None:
    if first != line:
        raise ApiError(
            400, f"line {line}: its custom_id stands in line {first} already", param="custom_id"
        )


def _object(line: int, text: bytes, max_bytes: int) -> dict[str, Any]:
    if len(text) > max_bytes:
        raise ApiError(413, f"line {line} is {len(text)} bytes; at most {max_bytes}")
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"line {line} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ApiError(400, f"line {line} must hold an object, not {type(value).__name__}")
    return value


def _custom_id(line: int, fields: dict[str, Any]) -> str:
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise ApiError(400, f"line {line}: custom_id must be a text", param="custom_id")
    return custom_id


def _request(line: int, fields: dict[str, Any], endpoint: str) -> FileRequest:
    unknown = fields.keys() - {"custom_id", "method", "url", "body"}
    if unknown:
        raise ApiError(400, f"line {line}: unknown field {min(unknown)!r}")
    if fields.get("method") != "POST":
        raise ApiError(400, f"line {line}: method must be POST", param="method")
    if fields.get("url") != endpoint:
        raise ApiError(400, f"line {line}: url must be the batch's, {endpoint}", param="url")
    body = fields.get("body")
    if not isinstance(body, dict):
        raise ApiError(400, f"line {line}: body must be an object", param="body")
    if body.get("stream"):
        raise ApiError(400, f"line {line}: a batch has no streams", param="stream")
    try:
        return parse_request(endpoint, body)
    except ApiError as error:
        raise ApiError(error.status, f"line {line}: {error}", param=error.param) from error


class RowFile:
    """A file of finished rows that grows; a line torn by a crash is cut off when it is opened."""

    def __init__(self, path: Path) -> None:
        self.lines: set[int] = set()
        """Input lines that have their row here."""
        end = 0
        if path.exists():
            with path.open("rb") as file:
                for data in file:
                    line = _line_of(data)
                    if line is None:
                        break
                    self.lines.add(line)
                    end += len(data)
        self._file = path.open("ab")
        self._file.truncate(end)

    def add(self, line: int, record: Mapping[str, Any]) -> None:
        """Append a row."""
        self._file.write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))
        self._file.flush()
        self.lines.add(line)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def row_id(batch_id: str, line: int) -> str:
    """Return the id of a row, which is its job's, too: a restarted server finds the job again."""
    return f"{batch_id}-{line}"


def _line_of(data: bytes) -> int | None:
    """Return which input line a finished row belongs to; None for a torn one."""
    try:
        return int(orjson.loads(data)["id"].rpartition("-")[2]) if data.endswith(b"\n") else None
    except (orjson.JSONDecodeError, TypeError, KeyError, ValueError):
        return None
