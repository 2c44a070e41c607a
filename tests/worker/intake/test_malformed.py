"""Jobs that cannot be read: each gets an end, and the worker goes on."""

import zlib
from collections.abc import Callable

import orjson
import pytest
from headwater.schemas import (
    Failed,
    keys,
)
from headwater.worker.streams import JobStreams
from redis import Redis

from .conftest import (
    QUEUE,
    Stations,
    Submit,
    rq_counts,
    status_of,
    types_of,
)

MALFORMED = {
    "no payload": {"data": b""},
    "not zlib, not JSON": {"data": b"\x80\x04K\x01."},
    "a pickle": {"data": zlib.compress(b"\x80\x04cos\nsystem\n(S'true'\ntR.")},
    "not a call": {"data": zlib.compress(b"[1]")},
    "not a list": {"data": zlib.compress(b'{"a":1}')},
    "another function": {"data": zlib.compress(orjson.dumps(["os.system", None, ["true"], {}]))},
    "keywords": {"data": zlib.compress(orjson.dumps([keys.JOB_FUNCTION, None, [{}], {"a": 1}]))},
    "two arguments": {"data": zlib.compress(orjson.dumps([keys.JOB_FUNCTION, None, [1, 2], {}]))},
    "no job": {"data": zlib.compress(orjson.dumps([keys.JOB_FUNCTION, None, ["x"], {}]))},
    "an empty job": {"data": zlib.compress(orjson.dumps([keys.JOB_FUNCTION, None, [{}], {}]))},
    "cut short": {"data": zlib.compress(b"[" + b"1," * 999)[:20]},
    "a bomb": {"data": zlib.compress(b" " * (33 * 2**20))},
    "a weird status": {"status": b"weird"},
    "a status that is not text": {"status": b"\xff\xfe"},
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_job_ends_as_failed_and_the_next_one_runs(
    redis: Redis, station: Stations, submit: Submit, kind: str
) -> None:
    bad = submit()
    redis.hset(f"rq:job:{bad}", mapping=MALFORMED[kind])
    good = submit()
    worker = station()

    assert worker.claim_next()
    assert worker.claim().job_id == good

    end = JobStreams(redis).read(bad)[-1].event
    assert isinstance(end, Failed)
    assert end.code == "malformed_job"
    assert status_of(redis, bad) == "failed"
    assert redis.lrange(keys.quarantine_key("m"), 0, -1) == [bad.encode()]
    assert redis.lrange(f"rq:queue:{QUEUE}:intermediate", 0, -1) == []


@pytest.mark.parametrize("raw", [b"\xff\xfe", b"a:b", b"", b"x" * 200, "ж".encode()])
def test_an_id_that_is_none_of_ours_is_quarantined(
    redis: Redis, station: Stations, submit: Submit, raw: bytes
) -> None:
    good = submit()
    redis.lpush(f"rq:queue:{QUEUE}", raw)
    worker = station()

    assert worker.claim_next()

    assert worker.claim().job_id == good
    assert redis.lrange(keys.quarantine_key("m"), 0, -1) == [raw]


def test_a_callback_that_a_job_names_is_never_imported(
    redis: Redis, station: Stations, submit: Submit
) -> None:
    job_id = submit()
    redis.hset(f"rq:job:{job_id}", "failure_callback_name", "no_such_module.explode")
    worker = station()
    worker.claim()
    worker.publisher.end(job_id, Failed(code="x", message="y"))

    assert worker.publisher.wait_until_closed(10)
    assert status_of(redis, job_id) == "failed"


def _plant(redis: Redis, key: str) -> None:
    """Put something of another type where a job's key should be."""
    redis.delete(key)
    redis.set(key, "none of ours")


def test_a_job_whose_record_is_no_hash_is_quarantined(
    redis: Redis, station: Stations, submit: Submit
) -> None:
    bad = submit()
    _plant(redis, f"rq:job:{bad}")
    good = submit()
    worker = station()

    assert worker.claim_next()

    assert worker.claim().job_id == good
    assert types_of(redis, bad) == ["failed"]
    assert redis.lrange(keys.quarantine_key("m"), 0, -1) == [bad.encode()]


@pytest.mark.parametrize("key", [keys.stream_key, keys.attempt_key])
def test_a_job_whose_stream_or_counter_is_none_is_failed(
    redis: Redis, station: Stations, submit: Submit, key: Callable[[str], str]
) -> None:
    bad = submit()
    _plant(redis, key(bad))
    good = submit()
    worker = station()

    assert worker.claim_next()

    assert worker.claim().job_id == good
    assert status_of(redis, bad) == "failed"
    worker.maintenance.run_once()
    assert rq_counts(redis)["started"] == 1


def test_a_stream_with_an_entry_that_is_no_event_ends_as_failed(
    redis: Redis, station: Stations, submit: Submit
) -> None:
    bad = submit()
    redis.xadd(keys.stream_key(bad), {"hello": "world"}, id="0-1")
    worker = station()

    assert worker.claim_next()

    assert worker.inbox.empty()
    last = redis.xrevrange(keys.stream_key(bad), count=1)[0][1]
    assert last[b"type"] == b"failed"
    assert status_of(redis, bad) == "failed"
