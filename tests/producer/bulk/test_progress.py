import io
import os
import signal
import sys

import pytest
from headwater.producer.bulk.progress import PlainLines, Tally, display
from headwater.producer.bulk.stopping import StopSignal


def test_costs_and_what_is_left_count_this_process_rows_only() -> None:
    tally = Tally(100, rows_before=40, good=55, errors=5)
    tally.started_at -= 10

    assert tally.done == 60
    assert tally.s_per_1000_rows == pytest.approx(500, rel=0.01)
    assert tally.eta_s == pytest.approx(20, rel=0.01)


def test_nothing_is_known_before_the_first_row() -> None:
    tally = Tally(100, rows_before=40, good=40)

    assert tally.s_per_1000_rows is None
    assert tally.eta_s is None
    assert tally.summary()["s_per_1000_rows"] is None


def test_a_line_says_rows_errors_speed_reuse_and_time_to_go() -> None:
    tally = Tally(7300, good=99, errors=1, prompt_tokens=400, cached_tokens=300)
    tally.generated_tokens = 1000
    tally.started_at -= 100

    line = tally.line()

    assert line.startswith("100/7300 rows, 1 errors, ")
    assert "tokens/s, 75% of prompt tokens reused, 2:00:" in line


def test_plain_lines_come_now_and_then() -> None:
    now = 0.0
    said: list[str] = []
    lines = PlainLines(said.append, clock=lambda: now)
    for now in (1.0, 9.0, 11.0, 12.0, 20.0, 22.0):  # noqa: B007 - the clock reads it
        lines.show(Tally(3))

    assert len(said) == 2


def test_the_first_signal_is_a_wish_and_the_second_one_an_order() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignal() as stop:
        assert not stop.is_set
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.is_set
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)

    assert signal.getsignal(signal.SIGTERM) is before


class Terminal(io.StringIO):
    """Standard error on a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_with_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")

    with display() as shown:
        shown.say("starting [1]")
        shown.show(Tally(200, good=50))

    assert "starting [1]" in terminal.getvalue()
    assert "50/200 rows, 0 errors" in terminal.getvalue()
