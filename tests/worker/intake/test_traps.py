"""Nothing that came from Redis is unpickled, and nothing is imported by a name from there.

Each trap would create a file when it goes off: a pickle when it is loaded, a module when it is
imported, a function when it is called.
"""

import os
import pickle
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
from headwater.producer.client import Producer
from headwater.producer.status import read_status
from headwater.schemas import Failed, keys
from redis import Redis

from .conftest import Stations, Submit, types_of

MODULE = "headwater_trap"


class _Trap:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self._path),)


@pytest.fixture
def sprung(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the traps leave their mark; a module that can be imported is one of them."""
    mark = tmp_path / "sprung"
    code = f"import os\nos.mkdir({str(mark)!r})\ndef run(*_, **__): pass\n"
    (tmp_path / f"{MODULE}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    return mark


def _payloads(mark: Path) -> dict[str, bytes]:
    trap = pickle.dumps(_Trap(mark))
    return {
        "a pickle": trap,
        "a packed pickle": zlib.compress(trap),
        "a pickled call of RQ's form": zlib.compress(pickle.dumps((keys.JOB_FUNCTION, None, [_Trap(mark)], {}))),
        "a module's function": zlib.compress(orjson.dumps([f"{MODULE}.run", None, [], {}])),
        "a method of an instance": zlib.compress(orjson.dumps(["run", f"{MODULE}.run", [], {}])),
        "a function of the system": zlib.compress(orjson.dumps(["os.mkdir", None, [str(mark)], {}])),
    }  # fmt: skip


def test_the_traps_would_go_off(sprung: Path) -> None:
    pickle.loads(_payloads(sprung)["a pickle"])
    assert sprung.is_dir()
    sprung.rmdir()
    __import__(MODULE)
    del sys.modules[MODULE]
    assert sprung.is_dir()


def test_payloads_that_are_traps_end_as_failed_and_do_not_go_off(
    redis: Redis, station: Stations, submit: Submit, sprung: Path
) -> None:
    worker = station(max_claims=100)
    for payload in _payloads(sprung).values():
        bad = submit()
        redis.hset(f"rq:job:{bad}", "data", payload)

        assert worker.claim_next()

        assert types_of(redis, bad) == ["failed"]
    good = submit()
    assert worker.claim().job_id == good
    assert not sprung.exists()
    assert MODULE not in sys.modules


def test_traps_beside_a_good_payload_do_not_go_off_in_any_transition(
    redis: Redis, station: Stations, submit: Submit, sprung: Path
) -> None:
    trap = pickle.dumps(_Trap(sprung))
    worker = station(max_claims=100)
    jobs = [submit() for _ in range(4)]
    for job_id in jobs:
        _plant_beside(redis, job_id, trap)
        worker.claim()

    ended, released, cancelled, lost = jobs
    worker.publisher.end(ended, Failed(code="x", message="y"))
    worker.publisher.release(released, "drain")
    Producer(redis).cancel(cancelled)
    worker.intake._look()
    redis.delete(keys.worker_key(worker.worker_id))
    station().maintenance.run_once()

    for job_id in jobs:
        _read_as_a_user(redis, job_id)
    assert not sprung.exists()
    assert MODULE not in sys.modules
    assert types_of(redis, lost)[0] == "started"


def _plant_beside(redis: Redis, job_id: str, trap: bytes) -> None:
    """Put traps where RQ itself would unpickle or import."""
    fields = {
        "meta": zlib.compress(trap),
        "result": trap,
        "exc_info": zlib.compress(trap),
        "success_callback_name": f"{MODULE}.run",
        "failure_callback_name": f"{MODULE}.run",
        "stopped_callback_name": f"{MODULE}.run",
        "serializer": f"{MODULE}.run",
    }
    redis.hset(f"rq:job:{job_id}", mapping=fields)
    redis.xadd(f"rq:results:{job_id}", {"type": 1, "return_value": trap})


def _read_as_a_user(redis: Redis, job_id: str) -> None:
    read_status(redis)
    Producer(redis).cancel(job_id)
