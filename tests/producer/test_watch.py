"""What `headwater status` reads and shows, at one moment and again and again."""

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import orjson
import pytest
from headwater.producer.client_queue import job_key, queue_keys
from headwater.producer.overview import EndedJob, Overview, read_overview
from headwater.producer.overview_text import as_line, as_tables
from headwater.producer.status import LiveWorker, QueueStatus, Status
from headwater.producer.watch import JsonView, LineView, LiveView, watch
from headwater.schemas import (
    ChoiceEnd,
    Event,
    Failed,
    Finished,
    FinishReason,
    Timings,
    Usage,
    WorkerStatus,
)
from redis import Redis
from redis.exceptions import AuthenticationError
from redis.exceptions import ConnectionError as RedisConnectionError
from rich.console import Console
from rich.live import Live

from tests.announced import announce_worker

LINE_UP = "\x1b[1A\x1b[2K"
QUEUE = "demo.normal.default"
FINISHED = Finished(
    choices=(ChoiceEnd(choice=0, finish_reason=FinishReason.STOP, text="private words"),),
    usage=Usage(prompt_tokens=40, cached_tokens=30, completion_tokens=8),
    timings=Timings(total_ms=1500.0),
)


def overview(depth: int = 3, *, name: str = QUEUE, at_s: float = 0.0) -> Overview:
    queues = [QueueStatus(name, depth, 2.0, 1, 5, 1, 2)]
    workers = [
        LiveWorker(
            WorkerStatus(worker_id=f"w{n}", alias="demo", batch=4 + n, tokens_per_s=10.5),
            0.5,
            14.5,
        )
        for n in range(2)
    ]
    ended = [EndedJob("job-1", "demo", "finished", 40, 30, 8, 1500.0)]
    return Overview(Status(queues, workers, at_s), ended)


def looks(*results: Overview | Exception) -> Callable[[], Overview]:
    """Return what reads *results* one by one, then is interrupted."""
    left = iter(results)

    def read() -> Overview:
        result = next(left, KeyboardInterrupt())
        if isinstance(result, BaseException):
            raise result
        return result

    return read


def test_an_overview_holds_totals_and_the_figures_of_ended_jobs_without_their_text(
    redis: Redis, write: Callable[[str, str, Event], None], set_status: Callable[[str, str], None]
) -> None:
    """The newest end comes first; a job whose record and stream are gone is left out."""
    names = queue_keys(QUEUE)
    redis.sadd("headwater:queues:demo", QUEUE)
    redis.sadd("rq:queues", names.waiting)
    write("good", "1-1", FINISHED)
    write("bad", "1-1", Failed(code="x", message="it broke"))
    for job_id in ("good", "bad"):
        set_status(job_id, "finished")
    redis.zadd(names.finished, {"good": 10, "gone": 11})
    redis.zadd(names.failed, {"bad": 12})
    lease = WorkerStatus(worker_id="w", alias="demo", batch=3, tokens_per_s=5.5)
    announce_worker(redis, lease)

    found = read_overview(redis)

    assert [(job.job_id, job.status) for job in found.ended] == [
        ("bad", "failed"),
        ("good", "finished"),
    ]
    assert found.ended[0].message == "it broke"
    assert found.ended[1][3:7] == (40, 30, 8, 1500.0)
    totals = found.totals
    assert (totals.running, totals.workers, totals.finished, totals.failed) == (3, 1, 2, 1)
    assert b"private words" not in orjson.dumps(found.as_json())
    assert redis.exists(job_key("gone")) == 0


def test_the_line_adds_up_queues_and_workers() -> None:
    """One line holds depth, running rows, speed, reuse and the ends."""
    line = as_line(overview())

    for part in ("3 waiting", "9 running on 2 workers", "21.0 tokens/s", "5 finished, 1 failed"):
        assert part in line


def test_names_from_redis_are_neither_markup_nor_escape_sequences() -> None:
    """A queue's name is shown as it is, but for characters that a terminal would obey."""
    console = Console(file=io.StringIO(), width=120)

    console.print(as_tables(overview(name="[red]q\x1b[2J")))

    assert "[red]q\N{REPLACEMENT CHARACTER}[2J" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_watch_shows_each_look_and_waits_for_a_server_that_went_away() -> None:
    """It pauses between looks, tells of an outage, and ends without error when interrupted."""
    lines: list[str] = []
    pauses: list[None] = []
    read = looks(overview(1), RedisConnectionError("gone"), overview(2))

    watch(read, LineView(lines.append), lambda: pauses.append(None))

    assert [line.partition(" ")[2][:9] for line in lines] == ["1 waiting", "gone", "2 waiting"]
    assert len(pauses) == 3


def test_a_watch_that_is_not_let_in_is_an_error() -> None:
    """There is nothing to wait for where the first look fails for good."""
    with pytest.raises(AuthenticationError):
        watch(looks(AuthenticationError("no")), LineView(str), lambda: None)


def test_a_watch_makes_its_first_look_again() -> None:
    """As every look, it waits a little for the server."""
    lines: list[str] = []

    watch(looks(RedisConnectionError("gone"), overview(1)), LineView(lines.append), lambda: None)

    assert len(lines) == 1


def test_json_is_one_object_a_look_also_of_an_outage() -> None:
    """A reader of lines can parse each one."""
    lines: list[str] = []

    read = looks(overview(1, at_s=7.5), RedisConnectionError("a\nb"))
    watch(read, JsonView(lines.append), lambda: None)

    first, second = map(orjson.loads, lines)
    assert (first["at"], first["totals"]["waiting"], first["queues"][0]["depth"]) == (7.5, 1, 1)
    assert first["ended"][0]["job_id"] == "job-1"
    assert second == {"error": "Redis: a b"}


def test_a_terminal_shows_the_last_look_over_the_one_before() -> None:
    """Tables are drawn anew in place, an outage above the last ones that are known."""
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=120)
    with Live(console=console, auto_refresh=False) as live:
        read = looks(overview(11), overview(22), RedisConnectionError("[gone]"))
        watch(read, LiveView(live), lambda: None)

    drawn = console.file.getvalue()  # type: ignore[attr-defined]
    _, up, last = drawn.rpartition(LINE_UP)
    assert up
    assert drawn.index("11 waiting") < drawn.index("22 waiting")
    for shown in ("[gone]", "22 waiting", QUEUE, "w1", "job-1", "1.50 s"):
        assert shown in last
    assert "11 waiting" not in last


@pytest.fixture
def watching(redis_url: str) -> Iterator["subprocess.Popen[bytes]"]:
    """`headwater status --watch --json` in a process of its own."""
    command = [sys.executable, "-m", "headwater.producer.cli", "status", "--watch", "--json"]
    process = subprocess.Popen(
        [*command, "--interval", "0.1"],
        stdout=subprocess.PIPE,
        env=os.environ | {"HEADWATER_REDIS": redis_url},
    )
    assert process.stdout is not None
    with process.stdout:
        yield process
        process.kill()
        process.wait(10)


def test_ctrl_c_ends_a_watch_with_0(watching: "subprocess.Popen[bytes]") -> None:
    """Lines come as they are written, not when a buffer is full."""
    assert watching.stdout is not None
    looks = [orjson.loads(watching.stdout.readline()) for _ in range(2)]

    watching.send_signal(signal.SIGINT)

    assert watching.wait(30) == 0
    assert looks[0]["at"] < looks[1]["at"]
