"""Rows that go on from stored states give what they would have given without a break."""

import random
from dataclasses import dataclass, field
from importlib import import_module

import mlx.core as mx
import pytest
from headwater.worker.engine.merged_runner import MergedRunner
from headwater.worker.engine.row_runner import RowRunner
from headwater.worker.engine.shared_kv import SharedPrefixRunner
from headwater.worker.engine.shrinking import small_model
from headwater.worker.scheduler import Footprint, SchedulerSettings
from headwater.worker.sequence import Sequence

from tests.exactness.reference import ExactnessReport
from tests.exactness.test_scheduled import ScheduledWorkload
from tests.exactness.workload import sequence
from tests.family_configs import config_of
from tests.tiny_models import VOCABULARY_SIZE, tiny_model

FAMILIES = ["qwen3_5", "qwen3_next", "gemma3_text", "gpt_oss", "mamba2", "llama"]
HYBRIDS = ["qwen3_5", "qwen3_next", "granitemoehybrid", "falcon_h1", "lfm2"]


def tokens(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(VOCABULARY_SIZE) for _ in range(num_tokens)]


def logits_of(runner, row, chunks: list[list[int]], decoded: list[int]) -> list[mx.array]:
    logits = [runner.prefill([row], [chunk]) for chunk in chunks]
    return logits + [runner.decode([row], mx.array([token])) for token in decoded]


@pytest.mark.parametrize("stride", [4, 16])
@pytest.mark.parametrize("runner_class", [RowRunner, MergedRunner])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_restored_at_any_stride_gives_bit_identical_logits(
    family, runner_class, stride
) -> None:
    rng = random.Random(stride)
    prompt, decoded = tokens(rng, 48), tokens(rng, 12)
    chunks = [prompt[start : start + stride] for start in range(0, len(prompt), stride)]
    runner = runner_class(tiny_model(family))
    straight = sequence(prompt)
    runner.attach(straight, ())
    stored, expected = [], []
    for index, chunk in enumerate(chunks):
        expected.append(runner.prefill([straight], [chunk]))
        stored.append(runner.extract(straight, index * stride, (index + 1) * stride))
    expected += logits_of(runner, straight, [], decoded)

    for index in range(1, len(chunks) + 1):
        restored = sequence(prompt)
        runner.attach(restored, stored[:index])
        actual = logits_of(runner, restored, chunks[index:], decoded)
        runner.detach(restored)
        for ours, theirs in zip(actual, expected[index:], strict=True):
            assert mx.array_equal(ours, theirs)


@dataclass
class Chats(ScheduledWorkload):
    """Every end of a row may be followed by the chat's next turn, its answer cut here and there."""

    num_turns_left: int = 0
    served: list[Sequence] = field(default_factory=list)

    def _end(self, row: Sequence) -> None:
        if row.is_finished:
            return
        super()._end(row)
        self.served.append(row)
        if self.num_turns_left > 0:
            self.num_turns_left -= 1
            answer = row.output_token_ids[self.rng.choice([0, 0, 0, 2]) :]
            own = tokens(self.rng, self.rng.randrange(1, 12))
            prompt = [*row.job.prompt_token_ids, *answer, *own]
            self.arriving.append(sequence(prompt, self.rng.randint(1, 10)))


def chat_settings(rng: random.Random) -> SchedulerSettings:
    return SchedulerSettings(
        max_batch=rng.choice([2, 4]),
        prefill_chunk=rng.choice([None, 5, 16]),
        max_prefill_tokens=rng.choice([16, 64]),
        snapshot_stride=rng.choice([4, 8, 16]),
        min_shared_tokens=rng.choice([2, 8]),
        growth_tokens=4,
        max_bytes=rng.choice([None, 60_000]),
        footprint=Footprint(bytes_per_token=256),
    )


def check_chats(model, runner_class, seeds) -> None:
    """Compare every turn with the same prompt alone and cold."""
    report = ExactnessReport()
    num_reused = 0
    for seed in seeds:
        rng = random.Random(seed)
        system = tokens(rng, rng.randrange(8, 24))
        first = [sequence([*system, *tokens(rng, rng.randrange(1, 9))], 6) for _ in range(3)]
        runner = runner_class(model)
        chats = Chats(runner, chat_settings(rng), rng, first, num_turns_left=6)
        chats.run()

        assert len(chats.served) == 9
        assert runner.nbytes == 0
        num_reused += chats.cache.statistics.num_reused_tokens
        for row in chats.served:
            report.compare(model, row.job.prompt_token_ids, row.output_token_ids, f"seed {seed}")
    report.check()
    assert num_reused > 50 * len(seeds)


@pytest.mark.parametrize("family", FAMILIES)
def test_chats_over_stored_states_get_the_tokens_of_their_prompts_alone(family) -> None:
    check_chats(tiny_model(family), MergedRunner, range(10))


@pytest.mark.parametrize("family", [*HYBRIDS[:2], "gemma3_text"])
def test_chats_over_shared_segments_and_states_get_those_tokens_too(family) -> None:
    check_chats(tiny_model(family), SharedPrefixRunner, range(1))


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_a_hundred_chat_workloads_over_stored_states_are_exact(family) -> None:
    check_chats(tiny_model(family), MergedRunner, range(100, 200))


@pytest.mark.long
@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", *HYBRIDS])
def test_a_hundred_chat_workloads_over_shared_segments_and_states_are_exact(family) -> None:
    module = import_module(f"mlx_lm.models.{family}")
    model = small_model(module, config_of(family, module))
    check_chats(model, SharedPrefixRunner, range(100, 200))
