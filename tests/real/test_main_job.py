"""The main job: real jobs through a real server, worker process and model."""

import random
import threading
from dataclasses import dataclass, field
from typing import Any

import orjson
import pytest
from headwater.producer.cli import main
from headwater.producer.client import Producer, SubmitSettings, new_job
from headwater.producer.embedded import EmbeddedServer
from headwater.producer.result import collect
from headwater.producer.status import read_status
from headwater.schemas import (
    Cancelled,
    Delta,
    Failed,
    Finished,
    FinishReason,
    GenerationJob,
    Priority,
    StreamEntry,
    decode_entry,
    keys,
)
from headwater.worker.engine.loading import LoadedModel, load_model
from rq import Queue

from tests.exactness.reference import ExactnessReport
from tests.real.conftest import WorkerProcess

NUM_JOBS = 180
NUM_CANCELLED = 10
NUM_MALFORMED = 10

SUBJECTS = ("rivers", "lenses", "pendulums", "frogs", "sundials", "echoes", "gears", "springs")
OPENINGS = (
    "Tell me one fact about {}.",
    "You are a guide in a science museum, kind and brief. Say something about {}.",
    "Write a short line on {} (한국어 and 🌶 are welcome).",
)


@dataclass
class Run:
    """What was submitted."""

    jobs: list[GenerationJob] = field(default_factory=list)
    to_cancel: list[GenerationJob] = field(default_factory=list)
    malformed: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def reference() -> LoadedModel:
    """The same weights in this process."""
    return load_model("demo")


def _make_jobs(producer: Producer, rng: random.Random, count: int) -> list[GenerationJob]:
    tokenizer = producer.models.tokenizer("demo")
    jobs = []
    for _ in range(count):
        text = rng.choice(OPENINGS).format(rng.choice(SUBJECTS))
        prompt = tokenizer.encode_chat([{"role": "user", "content": text}])
        jobs.append(
            new_job(
                "demo",
                prompt,
                max_tokens=rng.randint(1, 10),
                priority=rng.choice(["normal", "high"]),
                stream=rng.choice(["deltas", "deltas", "final"]),
            )
        )
    return jobs


def _submit_all(producer: Producer, rng: random.Random) -> Run:
    jobs = _make_jobs(producer, rng, NUM_JOBS)
    to_cancel = [
        job.model_copy(update={"max_tokens": 400, "ignore_eos": True})
        for job in _make_jobs(producer, rng, NUM_CANCELLED)
    ]
    broken = _make_jobs(producer, rng, NUM_MALFORMED)
    mixed = [*jobs, *to_cancel, *broken]
    rng.shuffle(mixed)
    # Held back until all stand in their queues, so that the broken ones can be broken in peace.
    producer.redis.set("rq:suspended", 1)
    producer.submit_many(mixed)
    for index, job in enumerate(broken):
        payload = orjson.dumps([keys.JOB_FUNCTION, None, [{"broken": index}], {}])
        producer.redis.hset(f"rq:job:{job.job_id}", "data", payload)
    producer.redis.delete("rq:suspended")
    return Run(jobs, to_cancel, [job.job_id for job in broken])


def _cancel_later(producer: Producer, run: Run, rng: random.Random) -> None:
    """Cancel each at a moment of its own: when some other job has got so far."""
    others = rng.sample(run.jobs, len(run.to_cancel))
    for job, other in zip(run.to_cancel, others, strict=True):
        collect(producer.tail(other.job_id))
        producer.cancel(job.job_id)


def _entries(producer: Producer, job_id: str) -> list[StreamEntry]:
    found = producer.redis.xrange(keys.stream_key(job_id))
    return [decode_entry(entry_id, fields) for entry_id, fields in found]


def _end(entries: list[StreamEntry]) -> StreamEntry:
    ends = [entry for entry in entries if entry.is_end]
    assert len(ends) == 1
    assert entries[-1] is ends[0]
    return ends[0]


def _token_ids(entries: list[StreamEntry]) -> list[int]:
    deltas = [entry.event for entry in entries if isinstance(entry.event, Delta)]
    return [token for delta in deltas for part in delta.parts for token in part.token_ids]


def _text(entries: list[StreamEntry], end: Finished) -> str:
    if end.choices[0].text is not None:
        return end.choices[0].text
    deltas = [entry.event for entry in entries if isinstance(entry.event, Delta)]
    return "".join(span.text for delta in deltas for part in delta.parts for span in part.text)


def test_200_jobs_end_once_each_and_exactly(producer: Producer, reference: LoadedModel) -> None:
    rng = random.Random(7)
    run = _submit_all(producer, rng)
    canceller = threading.Thread(target=_cancel_later, args=(producer, run, rng))
    canceller.start()
    for job in [*run.jobs, *run.to_cancel]:
        for _ in producer.tail(job.job_id):
            pass
    canceller.join()

    report = ExactnessReport()
    seen: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    for job in run.jobs:
        entries = _entries(producer, job.job_id)
        end = _end(entries).event
        assert isinstance(end, Finished)
        output = _token_ids(entries)
        assert end.usage.completion_tokens == len(output) <= job.max_tokens
        _check_text(reference, job, output, _text(entries, end), end)
        if (job.prompt_token_ids, tuple(output)) not in seen:
            seen.add((job.prompt_token_ids, tuple(output)))
            report.compare(reference.model, job.prompt_token_ids, output, job.job_id)
    report.check()
    for job in run.to_cancel:
        assert isinstance(_end(_entries(producer, job.job_id)).event, Cancelled)
    for job_id in run.malformed:
        event = _end(_entries(producer, job_id)).event
        assert isinstance(event, Failed)
        assert event.code == "malformed_job"
    _check_books(producer)


def _check_text(
    reference: LoadedModel, job: GenerationJob, output: list[int], text: str, end: Finished
) -> None:
    is_stop = end.choices[0].finish_reason is FinishReason.STOP
    assert (output[-1] in reference.eos_token_ids) is is_stop
    kept = output[:-1] if is_stop else output
    prompt = list(job.prompt_token_ids)
    decode = reference.tokenizer.decode
    assert decode(prompt) + text == decode(prompt + kept)


def _check_books(producer: Producer) -> None:
    """RQ's registries hold what happened, and nothing is left running."""
    names = [keys.queue_name("demo", priority, "default") for priority in Priority]
    queues = [Queue(name, connection=producer.redis) for name in names]
    assert sum(queue.count + queue.started_job_registry.count for queue in queues) == 0
    assert sum(queue.finished_job_registry.count for queue in queues) == NUM_JOBS
    assert sum(queue.failed_job_registry.count for queue in queues) == NUM_MALFORMED
    assert sum(queue.canceled_job_registry.count for queue in queues) == NUM_CANCELLED


def test_sampled_jobs_repeat_under_their_seed(producer: Producer) -> None:
    tokenizer = producer.models.tokenizer("demo")
    prompt = tokenizer.encode_chat([{"role": "user", "content": "Name a colour."}])
    sampling = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "seed": 11}
    jobs = [new_job("demo", prompt, max_tokens=8, sampling=sampling) for _ in range(3)]

    outputs = [_token_ids(_entries_of(producer, job)) for job in jobs]

    assert outputs[0] == outputs[1] == outputs[2]


def _entries_of(producer: Producer, job: GenerationJob) -> list[StreamEntry]:
    collect(producer.tail(producer.submit(job)))
    return _entries(producer, job.job_id)


def test_a_stop_string_never_shows(producer: Producer) -> None:
    tokenizer = producer.models.tokenizer("demo")
    question = "What is the capital of France?"
    prompt = tokenizer.encode_chat([{"role": "user", "content": question}])
    job = new_job("demo", prompt, max_tokens=16, stop=("Paris",))

    entries = _entries_of(producer, job)
    end = _end(entries).event

    assert isinstance(end, Finished)
    assert end.choices[0].matched_stop == "Paris"
    assert _text(entries, end) == "The capital of France is "


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"prompt_token_ids": (49152,)}, "token_id_out_of_range"),
        ({"prompt_token_ids": (1,), "max_tokens": 9000}, "context_length_exceeded"),
        ({"tokenizer_fingerprint": "sha256:other"}, "tokenizer_mismatch"),
        ({"stop_token_ids": (99999,)}, "token_id_out_of_range"),
    ],
)
def test_what_a_careless_producer_let_through_is_refused_by_the_worker(
    producer: Producer, fields: dict[str, object], code: str
) -> None:
    careless = Producer(producer.redis, SubmitSettings(check_model=False))
    job = new_job("demo", [1], max_tokens=4).model_copy(update=fields)

    collect(careless.tail(careless.submit(job)))
    event = _end(_entries(producer, job.job_id)).event

    assert isinstance(event, Failed)
    assert event.code == code


def test_a_deadline_ends_a_running_job(producer: Producer) -> None:
    job = new_job("demo", [1, 2, 3], max_tokens=4000, ignore_eos=True, deadline_s=0.5)

    event = _end(_entries_of(producer, job)).event

    assert isinstance(event, Failed)
    assert event.code == "deadline_exceeded"


def test_the_worker_is_in_the_status(producer: Producer, worker: WorkerProcess) -> None:
    (live,) = read_status(producer.redis).workers

    assert live.status.pid == worker.process.pid
    assert live.status.alias == "demo"


def test_the_workers_caches_are_shown_and_cleared_from_the_command_line(
    producer: Producer,
    worker: WorkerProcess,
    server: EmbeddedServer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(*arguments: str) -> dict[str, Any]:
        with pytest.raises(SystemExit) as leaving:
            main(["cache", *arguments, "--redis", server.url, "--json"])
        assert not leaving.value.code
        (shown,) = orjson.loads(capsys.readouterr().out)["workers"]
        assert shown["worker_id"].split("-")[-2] == str(worker.process.pid)
        return shown

    def num_cached() -> int:
        job = new_job("demo", range(100, 180), max_tokens=1)
        end = _end(_entries_of(producer, job)).event
        assert isinstance(end, Finished)
        return end.usage.cached_tokens

    before = [num_cached(), num_cached()]
    cleared = run("clear")
    report = run()["report"]

    assert before == [0, 79]
    assert cleared["state"] == "cleared"
    assert cleared["memory_freed_nbytes"] > 0
    assert report["memory"]["nbytes"] == 0
    assert report["memory"]["num_hits"] > 0
    assert num_cached() == 0
