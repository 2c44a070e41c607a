"""What the demo starts and runs: an embedded server, a worker process, a chat, a batch."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from statistics import median
from types import TracebackType
from typing import NamedTuple, Self

from headwater.schemas import Finished, keys

from ..client import Producer, new_job
from ..embedded import EmbeddedServer
from ..errors import ProducerError
from ..stream_reader import Ended, Output

_ALIAS = "demo"
_READY_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 20.0

_HANDBOOK = (
    "You answer questions from visitors of a small science museum. The museum has four halls."
    " The first hall is about water: rivers, rain, the sea, and how a spring becomes a stream."
    " The second hall is about light: lenses, prisms, mirrors, shadows, and the rainbow."
    " The third hall is about sound: strings, pipes, drums, echoes, and the human ear."
    " The fourth hall is about motion: pendulums, wheels, levers, pulleys, and gears."
    " The museum opens at nine in the morning and closes at five in the afternoon."
    " Children under six enter free of charge, and school classes get a guided tour."
    " The garden behind the museum has a sundial, a weather station and a pond with frogs."
    " Keep every answer short, friendly and correct, and never invent an exhibit."
)
_QUESTIONS = (
    "What is in the first hall?",
    "When does the museum open?",
    "Where can I see a rainbow?",
    "Is there something about gears?",
    "Do children pay?",
    "What is in the garden?",
    "Which hall is about sound?",
    "How does a spring become a stream?",
)


class Report(NamedTuple):
    """Figures of the batch."""

    jobs: int
    ttft_p50_ms: float
    ttft_max_ms: float
    generated_tokens: int
    generated_tokens_per_s: float
    prompt_tokens: int
    prompt_tokens_computed: int
    wall_s: float


class DemoStack:
    """A server and a worker that are gone when this context ends, however it ends."""

    def __init__(self) -> None:
        self._exits = ExitStack()

    def __enter__(self) -> Self:
        # SIGTERM ends us like Ctrl-C, so that what we started goes too.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with self._exits:
            from headwater.worker.engine import blas, demo_model

            blas.preload()
            demo_model.fetch_demo()
            server = self._exits.enter_context(EmbeddedServer())
            worker = self._start_worker(server.url)
            self.producer = Producer(server.url)
            _wait_until_ready(self.producer, worker)
            self._exits = self._exits.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._exits.close()

    def _start_worker(self, url: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "headwater.producer.cli", "worker"]
        options = ["--model", "demo", "--alias", _ALIAS, "--redis", url]
        # A session of its own: Ctrl-C reaches it through us, once, when we stop it.
        worker = subprocess.Popen(  # noqa: S603 - our own command
            [*command, *options, "--log-level", "warning", "--drain-s", "0"],
            start_new_session=True,
        )
        self._exits.callback(_stop, worker)
        return worker


def stream_chat(producer: Producer, question: str) -> Iterator[str]:
    """Ask the model *question*; yield the answer's text as it comes."""
    tokenizer = producer.models.tokenizer(_ALIAS)
    prompt = tokenizer.encode_chat([{"role": "user", "content": question}])
    job_id = producer.submit(new_job(_ALIAS, prompt, max_tokens=48))
    for item in producer.tail(job_id):
        if isinstance(item, Output):
            yield from (span.text for span in item.text)
        elif isinstance(item, Ended):
            _finished(item)


def run_batch(producer: Producer, num_jobs: int) -> Report:
    """Run *num_jobs* chats that share a system prompt, all at once."""
    tokenizer = producer.models.tokenizer(_ALIAS)
    system = {"role": "system", "content": _HANDBOOK}
    jobs = []
    for index in range(num_jobs):
        question = f"{_QUESTIONS[index % len(_QUESTIONS)]} (visitor {index + 1})"
        prompt = tokenizer.encode_chat([system, {"role": "user", "content": question}])
        jobs.append(new_job(_ALIAS, prompt, max_tokens=24))
    start = time.monotonic()
    ends = [_end_of(producer, job_id) for job_id in producer.submit_many(jobs)]
    wall_s = time.monotonic() - start
    ttfts = [end.timings.ttft_ms for end in ends if end.timings.ttft_ms is not None]
    generated = sum(end.usage.completion_tokens for end in ends)
    prompt_tokens = sum(end.usage.prompt_tokens for end in ends)
    return Report(
        jobs=num_jobs,
        ttft_p50_ms=median(ttfts),
        ttft_max_ms=max(ttfts),
        generated_tokens=generated,
        generated_tokens_per_s=generated / wall_s,
        prompt_tokens=prompt_tokens,
        prompt_tokens_computed=prompt_tokens - sum(end.usage.cached_tokens for end in ends),
        wall_s=wall_s,
    )


def _end_of(producer: Producer, job_id: str) -> Finished:
    for item in producer.tail(job_id):
        if isinstance(item, Ended):
            return _finished(item)
    raise ProducerError(f"job {job_id} has no end")


def _finished(ended: Ended) -> Finished:
    if not isinstance(ended.event, Finished):
        raise ProducerError(f"a demo job did not finish: {ended.event}")
    return ended.event


def _wait_until_ready(producer: Producer, worker: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + _READY_TIMEOUT_S
    while not producer.redis.exists(keys.model_card_key(_ALIAS)):
        if worker.poll() is not None:
            raise ProducerError(f"the worker ended with code {worker.returncode}; see above")
        if time.monotonic() > deadline:
            raise ProducerError(f"the worker is not ready after {_READY_TIMEOUT_S:.0f} s")
        time.sleep(0.05)


def _stop(worker: "subprocess.Popen[bytes]") -> None:
    worker.terminate()
    try:
        worker.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        worker.kill()
        worker.wait()
