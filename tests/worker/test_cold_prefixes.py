"""Prefixes that survive a restart of the worker: whole loops on tiny models, over one directory."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from headwater.schemas import CachedTokens, GenerationJob
from headwater.worker.assembly import LoopSettings, build_loop
from headwater.worker.bench.random_kinds import CONFIGS
from headwater.worker.cold_prefixes import BLOCK_TOKENS
from headwater.worker.engine.loading import LoadedModel, load_model
from headwater.worker.engine.random_model import write_random_model
from headwater.worker.engine.row_runner import RowRunner
from headwater.worker.loop import GenerationLoop
from headwater.worker.messages import Claim
from headwater.worker.metrics import WorkerMetrics
from headwater.worker.sequence import Sequence
from prometheus_client import generate_latest
from structlog.testing import capture_logs

from tests.worker.loop_bench import ListSink

KINDS = ["plain", *CONFIGS]
_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "head_dim": 8,
    "vocab_size": 257,
    "query_pre_attn_scalar": 8,
    "sliding_window": 32,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "state_size": 8,
}


def small(config: dict[str, Any]) -> dict[str, Any]:
    changed = {name: _SMALL.get(name, value) for name, value in config.items()}
    if config["model_type"] == "mamba2":
        changed |= {"num_heads": 4, "head_dim": 16}
    return {
        name: small(value) if name == "text_config" else value for name, value in changed.items()
    }


@pytest.fixture(scope="module")
def loaded_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedModel]:
    models = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp(kind)
        config = {} if kind == "plain" else {"config": small(CONFIGS[kind])}
        models[kind] = load_model(str(write_random_model(folder, **config)))
    return models


@pytest.fixture(params=KINDS)
def loaded(request: pytest.FixtureRequest, loaded_models: dict[str, LoadedModel]) -> LoadedModel:
    return loaded_models[request.param]


@pytest.fixture
def plain(loaded_models: dict[str, LoadedModel]) -> LoadedModel:
    return loaded_models["plain"]


class Worker:
    """A loop that lives until it is closed, over a directory that others had before it."""

    def __init__(
        self,
        loaded: LoadedModel,
        directory: Path | None,
        runner: RowRunner | None = None,
        **settings: Any,
    ) -> None:
        self.sink = ListSink()
        self.metrics = WorkerMetrics()
        settings = {"alias": "m", "snapshot_stride": 64, "cache_dir": directory, **settings}
        self.loop: GenerationLoop = build_loop(
            loaded, LoopSettings(**settings), self.sink, self.metrics, runner=runner
        )

    def admit(self, job: GenerationJob) -> None:
        self.loop.admit(Claim(job=job, queue_name="", execution_id="", attempt=1))

    def run(self, *jobs: GenerationJob) -> None:
        for job in jobs:
            self.admit(job)
        self.finish()

    def finish(self) -> None:
        while self.loop.num_jobs or not self.loop.is_idle:
            if self.loop.is_idle:
                self.loop.cold.wait()
            else:
                self.loop.step()

    def cached(self, job: GenerationJob) -> CachedTokens:
        usage = self.sink.ends[job.job_id].usage
        assert usage.cached_tokens == sum(usage.cached_from.model_dump().values())
        return usage.cached_from

    def close(self) -> None:
        if self.loop.cold is not None:
            self.loop.cold.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    started: list[Worker] = []

    def start_one(loaded: LoadedModel, **settings: Any) -> Worker:
        for worker in started:
            worker.close()
        started.append(Worker(loaded, tmp_path / "cache", **settings))
        return started[-1]

    yield start_one
    for worker in started:
        worker.close()


def tokens(seed: int, num_tokens: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(256) for _ in range(num_tokens))


def job(job_id: str, prompt: tuple[int, ...], **fields: Any) -> GenerationJob:
    fields = {"max_tokens": 6, "ignore_eos": True, **fields}
    return GenerationJob(job_id=job_id, model="m", prompt_token_ids=prompt, **fields)


def test_the_next_worker_goes_on_from_the_disk_with_the_same_tokens(
    start: Any, loaded: LoadedModel
) -> None:
    system = tokens(1, 2 * BLOCK_TOKENS)
    first, again = job("first", system + tokens(2, 9)), job("again", system + tokens(2, 9))
    other = job("other", system + tokens(3, 9))
    before = start(loaded)
    before.run(first)
    after = start(loaded)
    after.run(again)
    after.run(other)
    cold = Worker(loaded, None)
    cold.run(other)

    assert before.cached(first) == CachedTokens()
    # All but the last token, whose logits somebody has to compute.
    assert after.cached(again).disk == len(system) + 8
    assert sum(after.cached(other).model_dump().values()) == len(system)
    assert after.sink.tokens("again") == before.sink.tokens("first")
    assert after.sink.tokens("other") == cold.sink.tokens("other")


def test_a_prefix_of_another_continuation_is_found_by_jobs_that_arrive_together(
    start: Any, loaded: LoadedModel
) -> None:
    system = tokens(1, 2 * BLOCK_TOKENS)
    start(loaded).run(job("first", system + tokens(2, 20)))
    jobs = [job(f"job-{seed}", system + tokens(seed, 20)) for seed in range(3, 7)]
    after = start(loaded)
    after.run(*jobs)
    cold = Worker(loaded, None)
    cold.run(*jobs)

    for each in jobs:
        assert after.cached(each).disk == len(system)
        assert after.sink.tokens(each.job_id) == cold.sink.tokens(each.job_id)


def test_a_chat_goes_on_after_a_restart_where_its_last_answer_ended(
    start: Any, loaded: LoadedModel
) -> None:
    first = job("first", tokens(1, BLOCK_TOKENS), max_tokens=20)
    before = start(loaded)
    before.run(first)
    answer = tuple(before.sink.tokens("first"))
    after = start(loaded)
    second = job("second", first.prompt_token_ids + answer + tokens(2, 5))
    after.run(second)

    # The answer's last token was never fed back.
    assert after.cached(second).disk == BLOCK_TOKENS + len(answer) - 1


@pytest.mark.parametrize("stride", [32, 64])
def test_every_prefix_on_disk_gives_bit_identical_logits(
    start: Any, loaded: LoadedModel, stride: int
) -> None:
    """With fixed chunks a warm row does what the cold one did behind the same position."""
    system = tokens(1, 4 * stride)
    settings = {"prefill_chunk": stride, "snapshot_stride": stride}
    runner = RowRunner(loaded.model)
    before = start(loaded, runner=runner, **settings)
    before.run(job("first", system + tokens(2, 5), max_tokens=2))
    after = start(loaded, runner=runner, **settings)
    prompt = system + tokens(3, 5)
    root = f"{loaded.fingerprint} default"
    chain = after.loop.cold._tier.find(root, prompt, len(prompt))
    loads = after.loop.cold._tier.load(chain, 0, lambda: None).result()
    segments = [after.loop.cold._codec.from_host(segment) for _, segment in loads]

    assert chain
    for count in range(1, len(segments) + 1):
        position = chain[count - 1].end
        straight, restored = (Sequence(job("row", prompt)) for _ in range(2))
        runner.attach(straight, ())
        for start_ in range(0, position, stride):
            chunk = prompt[start_ : min(start_ + stride, position)]
            runner.prefill([straight], [chunk])
        runner.attach(restored, segments[:count])
        for chunk in (prompt[position:-1], prompt[-1:]):
            ours, theirs = (runner.prefill([row], [chunk]) for row in (restored, straight))
            assert mx.array_equal(ours, theirs)


def test_namespaces_do_not_see_each_other_on_disk(start: Any, plain: LoadedModel) -> None:
    prompt = tokens(1, BLOCK_TOKENS + 5)
    start(plain).run(job("first", prompt, namespace="tenant-a"))
    after = start(plain)
    theirs, ours = job("b", prompt, namespace="tenant-b"), job("a", prompt, namespace="tenant-a")
    after.run(theirs)
    after.run(ours)

    assert after.cached(theirs) == CachedTokens()
    assert after.cached(ours).disk == len(prompt) - 1


def test_another_models_files_are_not_found(
    start: Any, loaded_models: dict[str, LoadedModel], tmp_path_factory: pytest.TempPathFactory
) -> None:
    prompt = tokens(1, BLOCK_TOKENS + 5)
    start(loaded_models["plain"]).run(job("first", prompt))
    other = load_model(str(write_random_model(tmp_path_factory.mktemp("other"), seed=1)))
    after = start(other)
    again = job("again", prompt)
    after.run(again)

    assert after.cached(again) == CachedTokens()


def test_damaged_files_are_misses_and_the_tokens_stay_right(
    start: Any, loaded: LoadedModel
) -> None:
    prompt = tokens(1, 3 * BLOCK_TOKENS)
    before = start(loaded)
    before.run(job("first", prompt))
    before.close()
    rng = random.Random(0)
    folder = before.loop.cold._tier._folder.path
    for path in sorted(folder.glob("*.safetensors"))[::2]:
        content = bytearray(path.read_bytes())
        content[rng.randrange(len(content))] ^= 16
        path.write_bytes(content)
    with capture_logs() as logs:
        after = start(loaded)
        after.run(job("again", prompt))

    assert after.sink.tokens("again") == before.sink.tokens("first")
    assert [line["event"] for line in logs].count("disk_entry_dropped") > 0


def test_a_job_cancelled_while_the_disk_is_read_is_gone_and_the_others_go_on(
    start: Any, plain: LoadedModel
) -> None:
    prompt = tokens(1, BLOCK_TOKENS)
    start(plain).run(job("first", prompt))
    after = start(plain)
    for name in ("one", "two"):
        after.admit(job(name, prompt))
    assert after.loop.cold.num_waiting == 2
    after.loop.cancel("one")
    after.finish()

    assert after.sink.ends["one"].type == "cancelled"
    assert after.sink.ends["two"].usage.cached_from.disk == len(prompt) - 1
    assert after.loop.cold.num_waiting == 0


def test_what_memory_holds_is_not_read_again(start: Any, plain: LoadedModel) -> None:
    prompt = tokens(1, BLOCK_TOKENS)
    worker = start(plain)
    worker.run(job("first", prompt))
    again = job("again", prompt)
    worker.run(again)

    assert worker.cached(again) == CachedTokens(memory=len(prompt) - 1)


def test_waiting_for_another_jobs_prefix_counts_as_in_flight(
    start: Any, plain: LoadedModel
) -> None:
    jobs = [job(f"job-{seed}", tokens(1, 100) + tokens(seed, 9)) for seed in (2, 3)]
    worker = start(plain)
    worker.run(*jobs)
    text = generate_metrics(worker)

    assert [worker.cached(each) for each in jobs] == [
        CachedTokens(),
        CachedTokens(in_flight=100),
    ]
    assert 'headwater_cached_tokens_total{source="in_flight"} 100.0' in text


def generate_metrics(worker: Worker) -> str:
    return generate_latest(worker.metrics.registry).decode()
