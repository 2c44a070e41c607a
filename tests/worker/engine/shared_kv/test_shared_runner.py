"""Rows over shared segments get the logits of each alone, and share the segments' memory."""

import math
import random

import mlx.core as mx
import pytest
from headwater.worker.engine.parity import choose_runner
from headwater.worker.engine.row_runner import RowRunner
from headwater.worker.engine.shared_kv import SharedPrefixRunner, attention
from headwater.worker.engine.shared_kv.group import OwnMask

from tests.exactness.reference import ExactnessReport, assert_logits_close, logits_alone
from tests.exactness.workload import Workload, random_prompts, sequence
from tests.tiny_models import TINY_FAMILIES, VOCABULARY_SIZE, tiny_model

FAMILIES = ["llama", "qwen3_moe"]
OTHERS = [family for family in TINY_FAMILIES if family not in FAMILIES]


def draw_tokens(rng: random.Random, num: int) -> list[int]:
    return [rng.randrange(VOCABULARY_SIZE) for _ in range(num)]


class Scene:
    """Six ragged rows: two under a nested segment, one above it, two elsewhere, one alone."""

    def __init__(self, family: str) -> None:
        rng = random.Random(7)
        self.model = tiny_model(family)
        self.runner = SharedPrefixRunner(self.model)
        root, inner, other = (draw_tokens(rng, num) for num in (21, 9, 70))
        prefixes = [[root, inner], [other], [], [root], [other], [root, inner]]
        self.segments = self.compute([root, inner], other)
        self.texts, self.rows = [], []
        for prefix, num_own in zip(prefixes, (5, 80, 12, 1, 3, 10), strict=True):
            text = [token for part in prefix for token in part]
            self.texts.append(text + draw_tokens(rng, num_own))
            self.rows.append(sequence(self.texts[-1]))
            shared = [self.segments[tuple(part)] for part in prefix]
            self.runner.attach(self.rows[-1], shared)
        self.num_shared = [sum(map(len, prefix)) for prefix in prefixes]
        self.rng = rng

    def compute(self, nested, other):
        segments = {}
        for parts in (nested, [other]):
            donor = RowRunner(self.model)
            text = [token for part in parts for token in part]
            row = sequence(text)
            donor.attach(row, ())
            donor.prefill([row], [text])
            first = 0
            for part in parts:
                segments[tuple(part)] = donor.extract(row, first, first + len(part))
                first += len(part)
        return segments

    def prefill(self) -> mx.array:
        chunks = [t[n:] for t, n in zip(self.texts, self.num_shared, strict=True)]
        return self.runner.prefill(self.rows, chunks)

    def decode(self, members) -> mx.array:
        given = draw_tokens(self.rng, len(members))
        for member, token in zip(members, given, strict=True):
            self.texts[member].append(token)
        return self.runner.decode([self.rows[member] for member in members], mx.array(given))

    def check(self, logits, members) -> None:
        for row, member in zip(logits, members, strict=True):
            assert_logits_close(row, logits_alone(self.model, self.texts[member])[-1])


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_rows_over_nested_segments_get_the_logits_of_each_alone(family) -> None:
    scene = Scene(family)
    scene.check(scene.prefill(), range(6))
    for members in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4], [4, 0, 2], [0, 2, 4], range(6)):
        scene.check(scene.decode(members), members)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_leave_and_join_and_outgrow_their_buffers_without_a_trace(family) -> None:
    scene = Scene(family)
    scene.prefill()
    scene.runner.detach(scene.rows[1])
    for _ in range(66):
        logits = scene.decode([0, 3, 5])
        mx.eval(logits, scene.runner.state(scene.rows[:1]))
    scene.check(logits, [0, 3, 5])
    scene.check(scene.decode([4, 0, 2]), [4, 0, 2])


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_extracted_over_segments_and_own_tokens_continues_the_row(family) -> None:
    scene = Scene(family)
    scene.prefill()
    scene.decode([5, 1])
    text = scene.texts[5]
    taker = sequence([*text, 3])
    scene.runner.attach(taker, [scene.runner.extract(scene.rows[5], 0, len(text))])

    logits = scene.runner.prefill([taker], [[3]])

    assert_logits_close(logits[0], logits_alone(scene.model, [*text, 3])[-1])


@pytest.mark.parametrize("num_kept", [0, 4])
def test_a_rebased_row_drops_its_own_copy_and_goes_on(num_kept) -> None:
    scene = Scene("llama")
    scene.prefill()
    num_prefix = len(scene.texts[1]) - num_kept
    prefix = scene.runner.extract(scene.rows[1], 0, num_prefix)
    before = scene.runner.nbytes

    scene.runner.rebase(scene.rows[1], [prefix])

    assert scene.runner.nbytes < before
    scene.check(scene.decode([0, 1, 2]), [0, 1, 2])


@pytest.mark.parametrize("member", [0, 2])
def test_a_rebase_onto_nothing_new_changes_nothing(member) -> None:
    scene = Scene("llama")
    scene.prefill()
    before = scene.runner.nbytes
    root = scene.segments[tuple(scene.texts[0][:21])]

    scene.runner.rebase(scene.rows[member], [])
    scene.runner.rebase(scene.rows[0], [root])

    assert scene.runner.nbytes == before
    scene.check(scene.decode(range(6)), range(6))


def test_a_row_whose_shared_segment_is_cut_goes_on_over_the_halves() -> None:
    scene = Scene("llama")
    scene.prefill()
    other = scene.segments[tuple(scene.texts[1][:70])]

    for member in (1, 4):
        scene.runner.rebase(scene.rows[member], other.split(30))

    scene.check(scene.decode(range(6)), range(6))


def test_a_shared_segment_costs_its_rows_no_memory() -> None:
    scene = Scene("llama")
    assert scene.runner.nbytes == 0
    scene.prefill()
    mx.eval(scene.runner.state(scene.rows))
    # Capacity 64 for five rows, 128 for the one with 80 tokens of its own: keys and values
    # of 2 layers, 2 heads, 8 dimensions, 4 bytes.
    assert scene.runner.nbytes == (5 * 64 + 128) * 2 * 2 * 2 * 8 * 4


def test_detached_rows_leave_no_memory_behind() -> None:
    scene = Scene("llama")
    scene.prefill()
    for row in scene.rows:
        scene.runner.detach(row)
        scene.runner.detach(row)
    assert scene.runner.nbytes == 0


def test_pads_of_a_prefill_are_at_most_a_fifth_of_its_tokens() -> None:
    scene = Scene("llama")
    scene.prefill()
    assert 0 < scene.runner.pad_share <= 0.2


@pytest.mark.parametrize("family", OTHERS)
def test_a_model_with_windows_or_recurrence_is_refused(family) -> None:
    with pytest.raises(TypeError, match="can't be shared"):
        SharedPrefixRunner(tiny_model(family))


def test_a_model_that_touches_the_mask_raises() -> None:
    mask = OwnMask(mx.array([True]))
    for touch in (bool, lambda m: m + 1, lambda m: m[0], lambda m: m.dtype):
        with pytest.raises((TypeError, AttributeError)):
            touch(mask)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_check_at_load_lets_a_plain_model_have_it(family) -> None:
    model = tiny_model(family)
    assert type(choose_runner(model, VOCABULARY_SIZE, (SharedPrefixRunner,))) is SharedPrefixRunner


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_of_scheduled_rows_are_those_of_each_prompt_alone(family) -> None:
    model = tiny_model(family)
    report = ExactnessReport()
    for seed in range(10):
        rng = random.Random(seed)
        pending = [sequence(prompt, rng.randint(1, 16)) for prompt in random_prompts(rng, 8)]
        runner = SharedPrefixRunner(model)
        ended = Workload(runner, rng, list(pending)).run()
        assert len(ended) == len(pending)
        assert runner.nbytes == 0
        for row in ended:
            report.compare(model, row.job.prompt_token_ids, row.output_token_ids, f"seed {seed}")
    report.check()


def test_a_long_segment_does_not_overflow_sixteen_bits() -> None:
    num_keys, dim = 70_000, 8
    scores = mx.zeros((1, 1, num_keys), mx.float16)
    values = mx.full((1, num_keys, dim), 5.0, mx.float16)

    output, log_weight = attention._weigh(scores, values)

    assert mx.allclose(output, mx.full((1, 1, dim), 5.0, mx.float16), rtol=1e-2)
    assert log_weight.item() == pytest.approx(math.log(num_keys), rel=1e-5)
