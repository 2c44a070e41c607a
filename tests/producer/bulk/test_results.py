from pathlib import Path

import orjson
import pytest
from headwater.producer.bulk.results import LineSet, Ordering, Record, ResultFiles
from headwater.producer.bulk.windows import FirstLines


def record(line: int, *, is_good: bool = True) -> Record:
    return Record(
        line, is_good, {"id": f"bulk-x-{line}", "custom_id": f"c{line}", "text": "é\u2028"}
    )


def open_files(folder: Path) -> ResultFiles:
    return ResultFiles(folder / "out", folder / "err", FirstLines())


def test_rows_that_are_done_are_known_when_the_files_are_opened_again(tmp_path: Path) -> None:
    with open_files(tmp_path) as files:
        files.add([record(3), record(1, is_good=False), record(9)])

    first_lines = FirstLines()
    with ResultFiles(tmp_path / "out", tmp_path / "err", first_lines) as again:
        assert [line for line in range(12) if line in again.done] == [1, 3, 9]
        assert (again.num_good, again.num_errors) == (2, 1)
    assert first_lines.note("c3", 20) == 3


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_torn_last_line_is_cut_off_and_its_row_is_not_done(tmp_path: Path, cut: int) -> None:
    with open_files(tmp_path) as files:
        files.add([record(1), record(2)])
    whole = (tmp_path / "out").read_bytes()
    (tmp_path / "out").write_bytes(whole[:-cut])

    with open_files(tmp_path) as files:
        assert 1 in files.done
        assert 2 not in files.done
        files.add([record(2)])

    assert (tmp_path / "out").read_bytes() == whole


def test_without_errors_there_is_no_error_file(tmp_path: Path) -> None:
    with open_files(tmp_path) as files:
        files.add([record(1)])
    assert not (tmp_path / "err").exists()

    with open_files(tmp_path) as files:
        files.add([record(2, is_good=False)])
    assert (tmp_path / "err").exists()


def test_a_line_of_zeros_as_a_power_cut_leaves_it_is_cut_off(tmp_path: Path) -> None:
    with open_files(tmp_path) as files:
        files.add([record(1)])
    with (tmp_path / "out").open("ab") as file:
        file.write(bytes(100) + b"\n")

    with open_files(tmp_path) as files:
        assert len(files.done) == 1

    assert len((tmp_path / "out").read_bytes().splitlines()) == 1


def test_every_line_of_the_files_is_json_of_one_row(tmp_path: Path) -> None:
    with open_files(tmp_path) as files:
        files.add([record(1), record(2)])

    rows = [orjson.loads(line) for line in (tmp_path / "out").read_bytes().split(b"\n")[:-1]]
    assert [row["custom_id"] for row in rows] == ["c1", "c2"]


def test_a_set_of_lines_counts_each_once() -> None:
    lines = LineSet()
    for line in (5, 1_000_000, 5, 8):
        lines.add(line)

    assert len(lines) == 3
    assert [line in lines for line in (5, 8, 1_000_000, 6, 2_000_000)] == [True] * 3 + [False] * 2


def test_ordering_passes_rows_on_in_the_order_of_their_lines() -> None:
    ordering: Ordering[str] = Ordering()
    ordering.expect([5, 1, 3])

    assert list(ordering.pass_on([(3, "c"), (5, "e")])) == []
    assert ordering.num_behind == 3
    ordering.expect([8])
    assert list(ordering.pass_on([(1, "a")])) == ["a", "c", "e"]
    assert list(ordering.pass_on([(8, "h")])) == ["h"]
    assert ordering.num_behind == 0
