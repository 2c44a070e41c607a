"""Commands that only look, while their server is killed or still loads."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from headwater.producer import connection, patience
from headwater.producer.cli import main
from headwater.schemas import Cancelled, Started, encode_fields, keys
from headwater.worker import doctor

from tests.faults.test_server_states import STATES, Server

LOOKS = {
    "status": ("status", "--json"),
    "cache": ("cache",),
    "doctor": ("doctor", "--json"),
    "tail": ("tail", "job"),
}
CODES = {"tail": 4}
"""Of those that don't end with 0: the job was cancelled."""
CASES = [*((name, "killed") for name in LOOKS), ("status", "loading")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with an ended job that can be in bad states."""
    own = Server(tmp_path_factory.mktemp("server"))
    for seq, event in enumerate((Started(worker_id="w", sampler_version=1), Cancelled())):
        own.redis.xadd(keys.stream_key("job"), encode_fields(event), id=f"1-{seq}")
    yield own
    own.close()


@pytest.fixture
def run(server: Server, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run a command in this process and return its exit code."""
    monkeypatch.setenv("HEADWATER_REDIS", server.url)
    monkeypatch.setattr(doctor, "examine_machine", list)

    def run(*arguments: str) -> int:
        with pytest.raises(SystemExit) as leaving:
            main(arguments)
        return int(leaving.value.code or 0)

    return run


@pytest.fixture
def has_waited(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Is set at the first pause before another try."""
    event = threading.Event()

    def note_the_pause(pause_s: float) -> float:
        event.set()
        return pause_s

    monkeypatch.setattr(patience, "jittered", note_the_pause)
    return event


@pytest.mark.parametrize(("name", "state"), CASES)
def test_a_look_waits_for_a_server_that_is_back_soon(
    server: Server,
    run: Callable[..., int],
    has_waited: threading.Event,
    capsys: pytest.CaptureFixture[str],
    name: str,
    state: str,
) -> None:
    """It tells what it would have told, and nothing of the outage."""
    with ThreadPoolExecutor(1) as pool:
        with STATES[state](server):
            code = pool.submit(run, *LOOKS[name])
            assert has_waited.wait(30)

        assert code.result(30) == CODES.get(name, 0)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(("name", "state"), CASES)
def test_a_look_at_a_server_that_stays_away_ends_in_one_line(
    server: Server,
    run: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    state: str,
) -> None:
    """It names the server, and says what is wrong with it."""
    monkeypatch.setattr(connection, "OUTAGE_S", 0.1)
    with STATES[state](server):
        assert run(*LOOKS[name]) == 1

    out, err = capsys.readouterr()
    (line,) = (out if name == "doctor" else err).splitlines()
    assert server.url in line
    assert ("loading its data" if state == "loading" else "is the server running?") in line
