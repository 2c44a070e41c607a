"""Jobs that another process cancels at every stage of their lives, with and without pub/sub."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from headwater.producer.client import Producer, new_embedding_job, new_job, new_score_job
from headwater.producer.embedded import EmbeddedServer
from headwater.schemas import Cancelled, Finished, GenerationJob

from tests.faults.conftest import (
    ALIAS,
    ROOT,
    FaultyWorker,
    check_end,
    check_no_lasting_key,
    entries_of,
    job,
    result_of,
    worker_starter,
)

CHUNK = 16
NUM_PROMPT_TOKENS = 300
LONG = 3000
"""New tokens: far more than there are steps between a wish and its effect."""

HOOKS = """
import json
from headwater.worker.booking.finalize import Finalizer
from headwater.worker.engine.engine import Engine
from headwater.worker.engine_thread import EngineThread
from headwater.worker.intake.claimer import Claimer
from headwater.worker.loop import GenerationLoop
from headwater.worker.messages import Cancel
from headwater.worker.publisher import Publisher
from headwater.worker.scheduler import Scheduler

def say(*words):
    print(*words, file=sys.stderr, flush=True)

stages = {}
'''By job id: the stage at which a job's metadata asks to be stopped, until it was.'''

def is_at(job_id, stage):
    return stages.get(job_id) == stage and stages.pop(job_id) == stage

claim = Claimer._claim_of
def note_the_stage(claimer, started, begun):
    job = started.queued.job
    if begun.attempt == 1 and 'stop_at' in job.metadata:
        stages[job.job_id] = job.metadata['stop_at']
    return claim(claimer, started, begun)
Claimer._claim_of = note_the_stage

launches = {}
'''By job id: steps that were begun for it since somebody's wish to cancel it was posted.'''
base = None
last_ended = None

post = EngineThread.post
def post_and_say(thread, message):
    post(thread, message)
    if isinstance(message, Cancel):
        launches[message.job_id] = 0
        say('POSTED', message.job_id)
EngineThread.post = post_and_say

launch = Engine.launch
def launch_and_count(engine, prefill, decode):
    for job_id in {s.job.job_id for s in [*(chunk.sequence for chunk in prefill), *decode]}:
        if job_id in launches:
            launches[job_id] += 1
    return launch(engine, prefill, decode)
Engine.launch = launch_and_count

send_end = GenerationLoop._send_end
def send_end_and_say(loop, job_id, end):
    global last_ended
    last_ended = job_id
    say('ENDED', json.dumps({'job_id': job_id, 'launches': launches.pop(job_id, 0)}))
    send_end(loop, job_id, end)
GenerationLoop._send_end = send_end_and_say

take_messages = EngineThread._take_messages
def take_messages_and_say(thread, loop):
    global base, last_ended
    cache = loop._scheduler._cache
    if base is None:
        base = loop._engine.nbytes
    elif loop.is_idle and loop.num_jobs == 0 and last_ended:
        held = {'rows': loop._engine.nbytes - base, 'pinned': cache.pinned_nbytes}
        cache.evict(2**60)
        say('IDLE', json.dumps(held | {'cache': cache.nbytes, 'after': last_ended}))
        last_ended = None
    return take_messages(thread, loop)
EngineThread._take_messages = take_messages_and_say

def is_amid_its_prompt(chunk):
    row = chunk.sequence
    return 0 < row.num_computed_tokens < row.num_prompt_tokens - chunk.num_tokens

stop_before(Claimer, '_begin', 'booked', always=True,
            when=lambda claimer, started: started.queued.job.metadata.get('stop_at') == 'booked')
stop_before(GenerationLoop, 'admit', 'claimed', always=True,
            when=lambda loop, claim: is_at(claim.job_id, 'claimed'))
stop_before(Scheduler, 'schedule', 'parked', always=True,
            when=lambda scheduler, *_: scheduler.num_parked and any(
                [is_at(row.job.job_id, 'parked') for row in scheduler._placements]))
stop_before(Engine, 'launch', 'prefill', always=True,
            when=lambda engine, prefill, decode: any(
                [is_amid_its_prompt(chunk) and is_at(chunk.sequence.job.job_id, 'prefill')
                 for chunk in prefill]))
stop_before(GenerationLoop, '_after_tokens', 'decode', always=True,
            when=lambda loop, run, now: len(run.choices[0].sequence.output_token_ids) == 9
            and is_at(run.job.job_id, 'decode'))
stop_before(GenerationLoop, '_send_end', 'finishing', always=True,
            when=lambda loop, job_id, end: is_at(job_id, 'finishing'))
stop_before(Finalizer, '_write', 'finalizing', always=True,
            when=lambda finalizer, pipeline, running, *rest: is_at(running.job_id, 'finalizing'))
stop_before(Publisher, 'forget', 'finalized', always=True,
            when=lambda publisher, job_id: is_at(job_id, 'finalized'))
"""
DEAF = """
from headwater.worker.intake.listener import Listener
Listener._listen = lambda listener: listener._thread.stopping.wait()
"""


@dataclass
class Stage:
    """A worker that stops where a job's metadata says, and tells what it did."""

    server: EmbeddedServer
    producer: Producer
    worker: FaultyWorker
    num_stops: int = field(default=0)

    def submit(self, *jobs: GenerationJob) -> list[str]:
        """Submit jobs, of which one stops the worker somewhere, and wait until it stands."""
        job_ids = self.producer.submit_many(jobs)
        self.num_stops += 1
        self.worker.wait_for_stage(count=self.num_stops)
        return job_ids

    def cancel_elsewhere(self, job_id: str) -> None:
        """Cancel a job from a process of its own."""
        command = [sys.executable, "-m", "headwater.producer.cli", "cancel", job_id]
        subprocess.run(
            [*command, "--redis", self.server.url],
            check=True,
            capture_output=True,
            cwd=ROOT,
            timeout=60,
        )

    def check_cancelled(self, job_id: str) -> None:
        """It ends within the step or chunk that was next when the engine was told."""
        assert isinstance(result_of(self.producer, job_id).end, Cancelled)
        self.worker.wait_for_line(f'ENDED {{"job_id": "{job_id}"')
        ended = next(told for told in self._told("ENDED") if told["job_id"] == job_id)
        assert ended["launches"] <= 1
        check_end(self.producer, job_id)

    def check_nothing_is_held(self, job_id: str) -> None:
        """Every byte of keys and values can be had again when the job, the last one, has ended."""
        self.worker.wait_for_line(f'"after": "{job_id}"')
        held = {"rows": 0, "pinned": 0, "cache": 0}
        assert self._told("IDLE")[-1] == held | {"after": job_id}

    def _told(self, word: str) -> list[dict[str, Any]]:
        lines = [line for line in self.worker.log if line.startswith(word)]
        return [json.loads(line.removeprefix(word)) for line in lines]


@contextmanager
def _stage(model: Path, before: str) -> Iterator[Stage]:
    with (
        EmbeddedServer() as server,
        Producer(server.url) as producer,
        worker_starter(server.url, model) as start,
    ):
        worker = start("--prefill-chunk", str(CHUNK), "--lease-s", "60", before=before)
        yield Stage(server, producer, worker)
        # A tail waits for the next worker for ever.
        assert worker.process.poll() is None, "the worker has ended"
        again = producer.submit(job())
        assert isinstance(result_of(producer, again).end, Finished)
        assert worker.stop() == 0
        check_no_lasting_key(producer)


@pytest.fixture(scope="module")
def hearing(model: Path) -> Iterator[Stage]:
    """A worker that hears the bell."""
    with _stage(model, HOOKS) as stage:
        yield stage


@pytest.fixture
def deaf(model: Path) -> Iterator[Stage]:
    """A worker whose pub/sub is cut off: nothing that is published reaches it."""
    with _stage(model, HOOKS + DEAF) as stage:
        yield stage


def _stopping(stage: str, kind: str = "text") -> GenerationJob:
    fields: dict[str, Any] = {"metadata": {"stop_at": stage}}
    # Of its own, so that nothing of it is in the prefix cache.
    prompt = [(7 * number + len(kind)) % 256 for number in range(NUM_PROMPT_TOKENS)]
    if kind == "score":
        return new_score_job(ALIAS, prompt, [[1, 2], [3, 4, 5]], **fields)
    if kind == "embedding":
        return new_embedding_job(ALIAS, prompt, **fields)
    fields["sampling"] = {"n": 3 if kind == "choices" else 1}
    return new_job(ALIAS, prompt, max_tokens=LONG, ignore_eos=True, **fields)


STAGES_AND_KINDS = [
    ("claimed", "text"),
    ("prefill", "text"),
    ("decode", "text"),
    ("claimed", "choices"),
    ("prefill", "choices"),
    ("decode", "choices"),
    ("claimed", "score"),
    ("prefill", "score"),
    ("claimed", "embedding"),
    ("prefill", "embedding"),
]


def _cancel_at(stage: Stage, name: str, kind: str) -> None:
    (job_id,) = stage.submit(_stopping(name, kind))
    stage.producer.cancel(job_id)
    stage.worker.wait_for_line(f"POSTED {job_id}")
    stage.worker.go_on()

    stage.check_cancelled(job_id)
    stage.check_nothing_is_held(job_id)


@pytest.mark.parametrize(("name", "kind"), STAGES_AND_KINDS)
def test_a_job_is_cancelled_within_a_step_and_its_memory_is_free(
    hearing: Stage, name: str, kind: str
) -> None:
    """The wish comes while the engine stands at the stage; what follows is counted in launches."""
    _cancel_at(hearing, name, kind)


@pytest.mark.long
def test_without_pub_sub_it_is_all_the_same(deaf: Stage) -> None:
    """Nothing depends on a message that may be lost."""
    for name, kind in STAGES_AND_KINDS:
        _cancel_at(deaf, name, kind)


def test_a_parked_job_is_cancelled_and_the_one_it_waits_for_goes_on(hearing: Stage) -> None:
    """It waits for the prefix that its sibling computes, and never gets a row."""
    sibling = _stopping("nowhere").model_copy(update={"job_id": "sibling", "max_tokens": 4})
    parked = _stopping("parked").model_copy(update={"job_id": "parked"})
    hearing.submit(sibling, parked)
    hearing.cancel_elsewhere("parked")
    hearing.worker.wait_for_line("POSTED parked")
    hearing.worker.go_on()

    assert isinstance(result_of(hearing.producer, "sibling").end, Finished)
    hearing.check_cancelled("parked")
    assert len(entries_of(hearing.producer, "parked")) == 2
    hearing.check_nothing_is_held("sibling")


def test_a_job_that_is_being_claimed_is_cancelled_before_the_engine_hears_of_it(
    hearing: Stage,
) -> None:
    """Its attempt begins, and ends with the next entry."""
    (job_id,) = hearing.submit(_stopping("booked"))
    hearing.producer.cancel(job_id)
    hearing.worker.go_on()

    assert isinstance(result_of(hearing.producer, job_id).end, Cancelled)
    assert len(entries_of(hearing.producer, job_id)) == 2
    check_end(hearing.producer, job_id)


@pytest.mark.parametrize("name", ["finishing", "finalizing", "finalized"])
def test_a_job_that_is_as_good_as_done_keeps_its_one_end(hearing: Stage, name: str) -> None:
    """Whichever of the two it is, all see the same."""
    (job_id,) = hearing.submit(_stopping(name).model_copy(update={"max_tokens": 4}))
    hearing.producer.cancel(job_id)
    hearing.worker.go_on()

    end = result_of(hearing.producer, job_id).end
    assert isinstance(end, (Cancelled, Finished))
    # The worker has let go of it when it has ended another one.
    assert isinstance(result_of(hearing.producer, hearing.producer.submit(job())).end, Finished)
    assert entries_of(hearing.producer, job_id)[-1].event == end
    check_end(hearing.producer, job_id)
