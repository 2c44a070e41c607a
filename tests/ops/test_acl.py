"""Users of the server: each does its whole work, and nothing else."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from headwater.producer.api.server import build_server
from headwater.producer.api.settings import ApiSettings
from headwater.producer.caches import ClearState, clear_caches, read_caches
from headwater.producer.client import Producer, SubmitSettings, new_job
from headwater.producer.client_cancel import CancelOutcome
from headwater.producer.client_forget import forget_jobs
from headwater.producer.errors import JobLost, UnknownJob, UnknownModel
from headwater.producer.overview import read_overview
from headwater.producer.readiness import wait_for_worker
from headwater.producer.result import collect
from headwater.producer.tail import TailSettings, tail
from headwater.schemas import Cancelled, Expired, Finished, GenerationJob, keys
from headwater.worker.booking.rq_jobs import RQBook, job_keys
from headwater.worker.doctor import examine_server
from headwater.worker.engine.random_model import write_random_model
from headwater.worker.redis_client import connect
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError
from redis.retry import Retry

from tests.ops.conftest import OPS, ROOT, USERS, GuardedServer, render_acl
from tests.producer.api.conftest import ALIAS, TEMPLATE, RunningApi, start_worker

SERVICES = tuple(user for user in USERS if user != "admin")
QUEUE = f"{ALIAS}.normal.default"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with a chat template."""
    directory = write_random_model(tmp_path_factory.mktemp("tiny"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture(scope="module")
def worker(guarded: GuardedServer, model: Path) -> Iterator["subprocess.Popen[str]"]:
    """A worker that is logged in as one."""
    process = start_worker(guarded.url("worker"), model, "--lease-s", "1")
    yield process
    refusals(guarded)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert refusals(guarded) == []


@pytest.fixture(scope="module")
def http(
    guarded: GuardedServer, worker: object, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx2.Client]:
    """A client of an HTTP server that is logged in as one."""
    settings = ApiSettings(port=0, data_dir=tmp_path_factory.mktemp("data"))
    api = RunningApi(build_server(guarded.url("api"), settings))
    with httpx2.Client(base_url=api.url, timeout=60) as client:
        yield client
    api.stop()


def producer_as(guarded: GuardedServer, user: str, *, check_model: bool = True) -> Producer:
    return Producer(guarded.url(user), SubmitSettings(check_model=check_model))


def job(**fields: object) -> GenerationJob:
    return new_job(ALIAS, (40, 41, 42), **{"max_tokens": 4, "ignore_eos": True} | fields)


def endless() -> GenerationJob:
    return job(max_tokens=4000)


def refusals(guarded: GuardedServer) -> list[object]:
    """Return what the server has refused since the last call."""
    with guarded.client("admin") as admin:
        found = admin.acl_log(128)
        admin.acl_log_reset()
    return [(entry["username"], entry["reason"], entry["object"]) for entry in found]


def test_a_producer_submits_once_and_many_and_idempotently(
    guarded: GuardedServer, worker: object
) -> None:
    """Whoever may submit may do it in every way there is."""
    refusals(guarded)
    with producer_as(guarded, "producer") as producer:
        producer.submit(job())
        producer.submit_many([job() for _ in range(3)])
        first = producer.submit(job(job_id="once"), idempotency_key="key")
        assert producer.submit(job(job_id="twice"), idempotency_key="key") == first == "once"
        assert producer.models.tokenizer(ALIAS).encode("a")
    limited = Producer(guarded.url("producer"), SubmitSettings(max_queue_depth=1000))
    with limited:
        limited.submit(job())

    assert refusals(guarded) == []


def test_a_producer_is_told_of_an_unknown_model_without_seeing_the_others(
    guarded: GuardedServer,
) -> None:
    """It may not list keys, so the error names nothing but what was asked for."""
    with producer_as(guarded, "producer") as producer:
        with pytest.raises(UnknownModel, match="no worker has announced it"):
            producer.submit(new_job("nobody", (1,), max_tokens=1))
        with pytest.raises(NoPermissionError):
            producer.cancel("once")
        with pytest.raises(NoPermissionError):
            producer.result("once")


def test_a_consumer_reads_what_others_submit(guarded: GuardedServer, worker: object) -> None:
    """It needs the id, and nothing else."""
    with producer_as(guarded, "producer") as producer:
        job_id = producer.submit(job())
    with producer_as(guarded, "consumer", check_model=False) as consumer:
        refusals(guarded)
        result = consumer.result(job_id)
        with pytest.raises(UnknownJob):
            consumer.result("no-such-job")

        assert isinstance(result.end, Finished)
        assert refusals(guarded) == []
        with pytest.raises(NoPermissionError):
            consumer.submit(job())
        with pytest.raises(NoPermissionError):
            consumer.cancel(job_id)


def test_a_consumer_invents_no_end(guarded: GuardedServer) -> None:
    """An expired job that no worker takes is lost for it; whoever may write tells the others."""
    late = new_job("nobody", (1,), max_tokens=1, expires_at=1)
    with producer_as(guarded, "client", check_model=False) as client:
        client.submit(late)
        impatient = TailSettings(block_ms=50)
        with guarded.client("consumer") as consumer, pytest.raises(JobLost):
            collect(tail(consumer, late.job_id, settings=impatient))
        told = collect(tail(client.redis, late.job_id, settings=impatient))

    assert isinstance(told.end, Expired)


def test_a_client_waits_submits_reads_cancels_and_forgets(
    guarded: GuardedServer, worker: object
) -> None:
    """All that the library and the commands do, bulk runs included."""
    refusals(guarded)
    assert wait_for_worker(guarded.url("client"), ALIAS, 0).status.alias == ALIAS
    with producer_as(guarded, "client", check_model=False) as client:
        done, running = client.submit(job()), client.submit(endless())
        queued = client.submit(new_job("nobody", (1,), max_tokens=1))
        assert isinstance(client.result(done).end, Finished)
        assert client.cancel(queued) is CancelOutcome.CANCELLED
        assert client.cancel(running) is CancelOutcome.REQUESTED
        assert isinstance(client.result(running).end, Cancelled)
        forget_jobs(client.redis, [(done, QUEUE)])
        assert not client.redis.exists(keys.stream_key(done))

    assert refusals(guarded) == []


def test_bulk_runs_as_a_client(guarded: GuardedServer, worker: object, tmp_path: Path) -> None:
    """The whole command, with nothing refused on its way."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    refusals(guarded)
    command = [sys.executable, "-m", "headwater.producer.cli", "bulk", str(rows)]
    options = ["--model", ALIAS, "--max-tokens", "3", "--redis", guarded.url("client")]
    done = subprocess.run(
        [*command, str(tmp_path / "out.jsonl"), *options], capture_output=True, text=True, cwd=ROOT
    )

    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2
    assert refusals(guarded) == []


def test_a_worker_recovers_and_quarantines(guarded: GuardedServer, worker: object) -> None:
    """Also what a worker does seldom: a dead one's job, and one that can't be read."""
    refusals(guarded)
    with producer_as(guarded, "client") as client, guarded.client("admin") as admin:
        lost = claim_and_die(guarded, client)
        admin.hset("rq:job:bad", mapping={"data": b"?", "status": "queued", "origin": QUEUE})
        admin.rpush(f"rq:queue:{QUEUE}", "bad")
        admin.sadd(keys.active_queues_key(ALIAS), QUEUE)
        admin.publish(keys.bell_channel(ALIAS), b"")

        assert client.result(lost).end.type == "finished"
        assert client.result("bad").end.type == "failed"
        with guarded.client("ops") as ops:
            assert ops.lrange(keys.quarantine_key(ALIAS), 0, -1) == [b"bad"]

    assert refusals(guarded) == []


def claim_and_die(guarded: GuardedServer, client: Producer) -> str:
    """Submit a job and leave it as a worker does that dies right after its claim."""
    with guarded.client("admin") as admin, connect(guarded.url("worker")) as redis:
        # The living one must not be quicker.
        admin.set("rq:suspended", 1)
        job_id = client.submit(job())
        names = job_keys(job_id, QUEUE)
        redis.lmove(names.queue, names.intermediate)
        with redis.pipeline() as pipeline:
            RQBook(redis, lease_s=1, retention_s=60).start(pipeline, job_id, QUEUE, "dead")
            pipeline.execute()
        admin.delete("rq:suspended")
    return job_id


def test_the_http_server_does_all_its_routes_do(
    guarded: GuardedServer, http: httpx2.Client
) -> None:
    """Every kind of route, with nothing refused on the way."""
    refusals(guarded)
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    submitted = {"model": ALIAS, "prompt_token_ids": [40], "max_tokens": 4000, "ignore_eos": True}
    once = {"Idempotency-Key": "http"}
    answers = [
        http.get("/readyz"),
        http.get("/v1/models"),
        http.post("/v1/chat/completions", json={"model": ALIAS, **chat}),
        http.post("/v1/chat/completions", json={"model": ALIAS, **chat, "stream": True}),
        http.post("/v1/embeddings", json={"model": ALIAS, "input": "Hi"}),
        http.post("/v1/jobs", json=submitted, headers=once),
        http.post("/v1/jobs", json=submitted, headers=once),
        http.get("/v1/status"),
        http.get("/metrics"),
    ]
    job_id = answers[-3].json()["id"]
    answers.append(http.get(f"/v1/jobs/{job_id}"))
    answers.append(http.post(f"/v1/jobs/{job_id}/cancel"))
    answers.append(http.get(f"/v1/jobs/{job_id}/events"))
    answers += _run_batch(http)

    assert [each.status_code // 100 for each in answers] == [2] * len(answers)
    assert refusals(guarded) == []


def _run_batch(http: httpx2.Client) -> list[httpx2.Response]:
    body = {"model": ALIAS, "prompt": "a", "max_tokens": 2}
    row = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    file = {"file": ("in.jsonl", json.dumps(row).encode()), "purpose": (None, "batch")}
    uploaded = http.post("/v1/files", files=file)
    asked = {"endpoint": "/v1/completions", "completion_window": "24h"}
    batch = http.post("/v1/batches", json={**asked, "input_file_id": uploaded.json()["id"]})
    while (found := http.get(f"/v1/batches/{batch.json()['id']}")).json()["status"] != "completed":
        assert found.json()["status"] != "failed"
    return [uploaded, batch, found]


def test_operators_look_without_touching(guarded: GuardedServer, worker: object) -> None:
    """What `status`, `cache` and `doctor` ask the server, and a wish to clear a cache."""
    refusals(guarded)
    with guarded.client("ops") as ops:
        found, findings = read_overview(ops), examine_server(ops)
        cleared = list(clear_caches(ops, read_caches(ops)))

    assert [each.status.alias for each in found.status.workers] == [ALIAS]
    assert found.ended
    assert [finding for finding in findings if finding.advice] == []
    assert [each.state for each in cleared] == [ClearState.CLEARED]
    assert refusals(guarded) == []


FORBIDDEN = {
    "FLUSHALL": SERVICES,
    "FLUSHDB": SERVICES,
    "KEYS *": SERVICES,
    "CONFIG GET requirepass": SERVICES,
    "CONFIG SET maxmemory 1": SERVICES,
    "ACL LIST": SERVICES,
    "CLIENT LIST": SERVICES,
    "MONITOR": SERVICES,
    "SHUTDOWN": SERVICES,
    "SAVE": SERVICES,
    "REPLICAOF NO ONE": SERVICES,
    "SET unrelated 1": SERVICES,
    "GET unrelated": SERVICES,
    "PUBLISH unrelated 1": SERVICES,
    "PUBLISH rq:pubsub:w stop": SERVICES,
    "SUBSCRIBE unrelated": SERVICES,
    "SCAN 0": SERVICES,
    "INFO": ("consumer", "probe"),
    "GET headwater:model:x": ("consumer", "worker", "ops", "probe"),
    "SET headwater:cache-clear:x 1": ("producer", "consumer", "client", "api", "probe"),
    "XREAD STREAMS headwater:events:x 0": ("producer", "worker", "ops", "probe"),
    "XREVRANGE headwater:events:x + -": ("producer", "consumer", "probe"),
    "XADD headwater:events:x 1-0 type x": ("producer", "consumer", "ops"),
    "GET headwater:cancel:x": ("producer",),
    "SET headwater:cancel:x 1": ("consumer", "ops"),
    "SET headwater:worker:x 1": ("producer", "consumer", "client", "api", "ops"),
    "SET headwater:model:x 1": ("producer", "consumer", "client", "api", "ops"),
    "ZADD headwater:models 1 x": ("producer", "consumer", "client", "api", "ops"),
    "ZADD headwater:workers 1 x": ("producer", "consumer", "client", "api", "ops"),
    "ZADD headwater:idle-queues 1 x": ("producer", "consumer", "client", "api", "ops"),
    "ZRANGE headwater:models 0 -1": ("producer", "consumer", "client", "worker", "ops", "probe"),
    "ZRANGE headwater:workers 0 -1": ("producer", "consumer", "worker", "probe"),
    "SREM rq:queues x": ("producer", "consumer", "client", "api", "ops"),
    "GET headwater:idempotency:x": ("consumer", "worker", "ops"),
    "HSET rq:job:x status finished": ("consumer", "ops"),
    "RPUSH rq:queue:x id": ("consumer", "ops"),
    "LMOVE rq:queue:x rq:queue:y LEFT RIGHT": ("producer", "consumer", "client", "api", "ops"),
    "ZADD rq:finished:x 1 y": ("producer", "consumer", "api", "ops"),
    "SADD rq:workers x": ("producer", "consumer", "client", "api", "ops"),
    "EVAL return(1) 0": ("producer", "consumer", "worker", "ops"),
    "FUNCTION LIST": SERVICES,
}


@pytest.fixture(scope="module")
def clients(guarded: GuardedServer) -> Iterator[dict[str, Redis]]:
    """A client of each service."""
    clients = {user: guarded.client(user) for user in SERVICES}
    yield clients
    for client in clients.values():
        client.close()


@pytest.mark.parametrize("command", FORBIDDEN)
def test_what_a_user_does_not_need_is_refused(clients: dict[str, Redis], command: str) -> None:
    """Least rights: a stolen password is worth no more than its program's work."""
    for user in FORBIDDEN[command]:
        with pytest.raises(NoPermissionError):
            clients[user].execute_command(*command.split())


@pytest.mark.parametrize("command", ["FLUSHALL", "FLUSHDB", "KEYS *", "SWAPDB 0 1"])
def test_even_an_administrator_deletes_nothing_at_one_stroke(
    guarded: GuardedServer, command: str
) -> None:
    """A command that loses every job, or stops the server for seconds, is nobody's."""
    with guarded.client("admin") as admin, pytest.raises(NoPermissionError):
        admin.execute_command(*command.split())


def test_nobody_comes_in_without_a_name(guarded: GuardedServer) -> None:
    """The default user is off."""
    once = Retry(NoBackoff(), 0)
    with Redis(port=guarded.port, retry=once) as client, pytest.raises(AuthenticationError):
        client.ping()


def test_no_password_stands_in_the_rendered_file(guarded: GuardedServer) -> None:
    """The file holds hashes only, and no variable is left."""
    rendered = render_acl(guarded.passwords)

    assert not any(password in rendered for password in guarded.passwords.values())
    assert "${" not in rendered
    assert len(rendered.splitlines()) == len(USERS) + 1


def test_a_server_that_is_older_gets_no_command_that_it_does_not_know(
    guarded: GuardedServer,
) -> None:
    """Redis 7.0 refuses to start with a file that names CLIENT SETINFO."""
    assert "client|setinfo" in render_acl(guarded.passwords)
    assert "client|setinfo" not in render_acl(guarded.passwords, "--redis-7.0")


def test_a_missing_password_is_one_line() -> None:
    """An empty password must never become a user's."""
    done = subprocess.run(
        [OPS / "redis/render-acl"], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )

    assert done.returncode != 0
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "REDIS_ADMIN_PASSWORD" in done.stderr
