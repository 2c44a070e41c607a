import random

import orjson
from headwater.producer.bulk.lines import Line
from headwater.producer.bulk.rows import RefusedRow, RowParser
from headwater.producer.bulk.windows import FirstLines, windows, without_repeats


def test_rows_of_a_window_stand_by_their_prefixes(parser: RowParser) -> None:
    prompts = ["b1", "a1", "b2", "a2", "c", "a3"]
    rows = [parser.parse(Line(n, orjson.dumps({"prompt": p}))) for n, p in enumerate(prompts, 1)]

    found = list(windows(rows, max_rows=4))

    assert [[prompts[row.line - 1] for row in window.ready] for window in found] == [
        ["a1", "a2", "b1", "b2"],
        ["a3", "c"],
    ]


def test_refused_rows_count_and_long_prompts_close_a_window(parser: RowParser) -> None:
    texts = [b"{", b'{"prompt":"aaaaaaaaaa"}', b'{"prompt":"b"}', b"{"]
    rows = [parser.parse(Line(number, text)) for number, text in enumerate(texts, 1)]

    found = list(windows(rows, max_rows=100, max_tokens=10))

    assert [(len(window.refused), len(window.ready)) for window in found] == [(1, 1), (1, 1)]


def test_a_custom_id_that_comes_again_is_refused_with_both_lines(parser: RowParser) -> None:
    texts = [
        b'{"prompt":"a","custom_id":"x"}',
        b'{"prompt":"b"}',
        b'{"prompt":"c","custom_id":"x"}',
    ]
    rows = [parser.parse(Line(number, text)) for number, text in enumerate(texts, 1)]

    *_, last = without_repeats(rows, FirstLines())

    assert isinstance(last, RefusedRow)
    assert last.body["error"]["message"] == "line 3: its custom_id stands in line 1 already"


def test_a_repeat_that_was_done_before_its_first_does_not_win(parser: RowParser) -> None:
    known = FirstLines()
    known.note("x", 3)

    (row,) = without_repeats([parser.parse(Line(1, b'{"prompt":"a","custom_id":"x"}'))], known)

    assert not isinstance(row, RefusedRow)
    assert known.note("x", 3) == 1


def test_first_lines_says_what_a_dictionary_says() -> None:
    dice = random.Random(0)
    known, oracle = FirstLines(), dict[str, int]()

    for line in range(1, 30_000):
        name = f"id-{dice.randrange(12_000)}"
        assert known.note(name, line) == oracle.setdefault(name, line)
