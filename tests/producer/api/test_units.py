"""The server's parts that decide something by themselves."""

from pathlib import Path

import pytest
from headwater.producer.api.api_keys import KeyFile, KeyFileError, new_key
from headwater.producer.api.batch_rows import RowFile
from headwater.producer.api.rate_limit import RateLimit
from headwater.producer.api.steady_text import SteadyText
from headwater.producer.errors import StreamDiverged
from headwater.schemas import TextSpan


def span(text: str, start: int = 0) -> TextSpan:
    return TextSpan(text_start=start, text=text)


def test_a_rate_lets_the_first_requests_through_at_once_and_then_one_by_one() -> None:
    limit = RateLimit()

    assert [limit.wait_s("a", 3, 100.0) for _ in range(3)] == [0, 0, 0]
    assert limit.wait_s("a", 3, 100.0) == pytest.approx(20)
    assert limit.wait_s("a", 3, 110.0) == pytest.approx(10)
    assert limit.wait_s("a", 3, 120.0) == 0
    assert limit.wait_s("a", 3, 120.0) > 0
    assert limit.wait_s("b", 3, 120.0) == 0


def test_a_quiet_caller_saves_up_no_more_than_a_minutes_worth() -> None:
    limit = RateLimit()
    limit.wait_s("a", 2, 0.0)

    assert [limit.wait_s("a", 2, 1e6) > 0 for _ in range(3)] == [False, False, True]


def test_text_that_repeats_after_a_restart_is_sent_once() -> None:
    steady = SteadyText()
    assert steady.take(0, span("Hello")) == span("Hello")

    steady.restart()

    assert steady.take(0, span("Hel")) is None
    assert steady.take(0, span("lo you", 3)) == span(" you", 5)
    assert steady.take(1, span("x")) == span("x")
    steady.restart()
    steady.take(0, span("Hello you"))
    steady.take(1, span("x"))
    steady.finish()


def test_another_text_after_a_restart_is_an_error() -> None:
    steady = SteadyText()
    steady.take(0, span("Hello"))
    steady.restart()

    with pytest.raises(StreamDiverged):
        steady.take(0, span("Help"))


def test_a_shorter_text_after_a_restart_is_an_error() -> None:
    steady = SteadyText()
    steady.take(0, span("Hello"))
    steady.restart()
    steady.take(0, span("Hell"))

    with pytest.raises(StreamDiverged):
        steady.finish()


def test_a_torn_last_row_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    whole = b'{"id":"batch_x-3"}\n{"id":"batch_x-7"}\n'
    for torn in (b"", b'{"id":"batch_x-9"}', b'{"id":"bat', b"\n", b"\x00\n"):
        path.write_bytes(whole + torn)
        rows = RowFile(path)
        assert rows.lines == {3, 7}
        rows.add(9, {"id": "batch_x-9"})
        rows.close()

        assert path.read_bytes() == whole + b'{"id":"batch_x-9"}\n'


def test_a_key_file_with_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(new_key("a")[1] + '\n{"name": "b"}\n')

    with pytest.raises(KeyFileError, match=r"line 2: .*sha256"):
        KeyFile(path)
    with pytest.raises(KeyFileError, match="can't read"):
        KeyFile(tmp_path / "none")
