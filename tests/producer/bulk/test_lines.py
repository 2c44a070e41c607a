import gzip
from pathlib import Path

import pytest
from headwater.producer.bulk.lines import Line, read_lines, survey
from headwater.producer.errors import InvalidRequest

LIMIT = 1000


def read(path: Path, data: bytes) -> list[Line]:
    path.write_bytes(data)
    return list(read_lines(path, LIMIT))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b'{"a":1}\n{"b":2}\n', [(1, b'{"a":1}'), (2, b'{"b":2}')]),
        (b'{"a":1}\n{"b":2}', [(1, b'{"a":1}'), (2, b'{"b":2}')]),
        (b'\xef\xbb\xbf{"a":1}\n', [(1, b'{"a":1}')]),
        (b'{"a":1}\r\n{"b":2}\r\n', [(1, b'{"a":1}'), (2, b'{"b":2}')]),
        (b'\n\n{"a":1}\n \t\n{"b":2}\n\n', [(3, b'{"a":1}'), (5, b'{"b":2}')]),
        ('{"a":"x\u2028y\x85z"}\n'.encode(), [(1, '{"a":"x\u2028y\x85z"}'.encode())]),
        (b"", []),
    ],
    ids=["plain", "no last newline", "BOM", "CRLF", "blank lines", "U+2028", "empty"],
)
def test_lines_end_with_a_line_feed_only_and_keep_their_numbers(
    tmp_path: Path, data: bytes, expected: list[tuple[int, bytes]]
) -> None:
    lines = read(tmp_path / "rows", data)

    assert [(line.number, line.data) for line in lines] == expected
    assert all(line.error is None for line in lines)


def test_gzip_is_known_by_its_content(tmp_path: Path) -> None:
    lines = read(tmp_path / "rows.jsonl", gzip.compress(b"{}\n[]\n"))

    assert [line.data for line in lines] == [b"{}", b"[]"]


@pytest.mark.parametrize("excess", [1, 5000, 3_000_000])
def test_a_line_above_the_limit_is_an_error_with_its_size_and_the_rest_is_read(
    tmp_path: Path, excess: int
) -> None:
    lines = read(tmp_path / "rows", b"{}\n" + b"x" * (LIMIT + excess) + b"\n{}\n")

    assert [line.number for line in lines] == [1, 2, 3]
    assert lines[1].data == b""
    assert f"at most {LIMIT}" in (lines[1].error or "")
    assert lines[2] == Line(3, b"{}")


def test_a_line_of_exactly_the_limit_is_none(tmp_path: Path) -> None:
    assert read(tmp_path / "rows", b"x" * LIMIT) == [Line(1, b"x" * LIMIT)]
    assert read(tmp_path / "rows", b"x" * LIMIT + b"\n") == [Line(1, b"x" * LIMIT)]
    assert read(tmp_path / "rows", b"x" * (LIMIT + 1))[0].error is not None


def test_a_gzip_file_cut_short_gives_its_rows_and_an_error_where_it_ends(tmp_path: Path) -> None:
    whole = b"".join(b'{"prompt":"%d"}\n' % number for number in range(5000))
    packed = gzip.compress(whole)

    lines = read(tmp_path / "rows", packed[: len(packed) // 2])

    assert len(lines) > 100
    assert all(line.error is None for line in lines[:-1])
    assert [line.data for line in lines[:-1]] == whole.split(b"\n")[: len(lines) - 1]
    assert "ends early" in (lines[-1].error or "")
    assert lines[-1].number == len(lines)


def test_damage_in_a_gzip_file_is_an_error_where_it_lies(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(b"".join(b'{"n":%d}\n' % n for n in range(20000))))
    packed[len(packed) // 2 :] = bytes(len(packed) - len(packed) // 2)

    lines = read(tmp_path / "rows", bytes(packed))

    assert "damaged" in (lines[-1].error or "")


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_a_wide_encoding_is_refused_with_what_to_do(tmp_path: Path, encoding: str) -> None:
    with pytest.raises(InvalidRequest, match="convert it first"):
        read(tmp_path / "rows", "\ufeff{}\n".encode(encoding))


def test_the_survey_counts_rows_and_refuses_files_without_any(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_bytes(b"{}\n\n{}\n")
    before = survey(path, LIMIT)
    path.write_bytes(b"{}\n\n[]\n")

    assert before.num_rows == 2
    assert survey(path, LIMIT).sha256 != before.sha256
    for data in (b"", b"\n \n"):
        path.write_bytes(data)
        with pytest.raises(InvalidRequest, match="no rows"):
            survey(path, LIMIT)
    with pytest.raises(InvalidRequest, match="can't read"):
        survey(tmp_path / "none", LIMIT)
