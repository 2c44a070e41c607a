from itertools import count

import orjson
import psutil
import pytest
from headwater.producer.bulk.lines import Line
from headwater.producer.bulk.preparation import Preparation, prepare
from headwater.producer.bulk.rows import RefusedRow
from headwater.producer.errors import ProducerError


def test_processes_give_the_same_rows_in_the_same_order_as_none(preparation: Preparation) -> None:
    lines = [
        Line(number, b"nonsense" if number % 7 == 0 else orjson.dumps({"prompt": f"row {number}"}))
        for number in range(1, 1000)
    ]

    alone = list(prepare(iter(lines), preparation, 0))
    together = list(prepare(iter(lines), preparation, 2))

    def essence(row: object) -> object:
        if isinstance(row, RefusedRow):
            return row
        # A job's id is made anew each time, and replaced when it is submitted.
        return [job.prompt_token_ids for job in row.jobs], row.line, row.custom_id  # type: ignore[attr-defined]

    assert list(map(essence, alone)) == list(map(essence, together))
    assert [row.line for row in together] == [line.number for line in lines]


def test_a_reader_who_leaves_early_finds_few_lines_read_ahead(preparation: Preparation) -> None:
    lines = (Line(number, b'{"prompt":"a"}') for number in range(1, 100_000))

    rows = prepare(lines, preparation, 1)
    first = next(rows)
    rows.close()  # type: ignore[attr-defined]

    assert first.line == 1
    assert next(lines).number < 10_000


def test_a_process_that_is_killed_is_an_error_and_no_wait(preparation: Preparation) -> None:
    rows = prepare((Line(number, b'{"prompt":"a"}') for number in count(1)), preparation, 1)
    next(rows)
    for child in psutil.Process().children():
        if "spawn_main" in " ".join(child.cmdline()):
            child.kill()

    with pytest.raises(ProducerError, match="was killed"):
        for _ in rows:
            pass
