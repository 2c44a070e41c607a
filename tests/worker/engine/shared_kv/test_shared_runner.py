"""Rows over shared segments get the logits of each alone, and share the segments' memory."""

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
import pytest
from headwater.worker.engine.parity import choose_runner
from headwater.worker.engine.segments import KVSegment, LayerKV
from headwater.worker.engine.shared_kv import SharedPrefixRunner
from headwater.worker.engine.shared_kv.batch import OwnMask
from headwater.worker.engine.shared_kv.decode import TAIL_TOKENS
from headwater.worker.engine.shared_kv.pages import MIN_SLAB_PAGES, PAGE_TOKENS
from headwater.worker.engine.shared_kv.parts import weights_of

from tests.device_memory import settled_active_memory
from tests.exactness.reference import ExactnessReport, assert_logits_close, logits_alone
from tests.exactness.workload import Workload, random_prompts, sequence
from tests.tiny_models import TINY_FAMILIES, VOCABULARY_SIZE, tiny_model, tiny_variant

PLAIN = ["llama", "qwen3_moe"]
WINDOWED = ["gemma3_text", "gpt_oss"]
HYBRID = ["qwen3_5", "qwen3_next"]
FAMILIES = [*PLAIN, *WINDOWED, *HYBRID]
OTHERS = [family for family in TINY_FAMILIES if family not in FAMILIES]


def draw_tokens(rng: random.Random, num: int) -> list[int]:
    return [rng.randrange(VOCABULARY_SIZE) for _ in range(num)]


@contextmanager
def counted_calls(model) -> Iterator[list[int]]:
    """Note how many tokens, pads included, each call of *model* gets."""
    calls = []

    class Counted(type(model)):
        def __call__(self, tokens, **rest):
            calls.append(tokens.size)
            return super().__call__(tokens, **rest)

    own, model.__class__ = type(model), Counted
    try:
        yield calls
    finally:
        model.__class__ = own


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
            donor = SharedPrefixRunner(self.model)
            row = sequence([token for part in parts for token in part])
            donor.attach(row, ())
            first = 0
            for part in parts:
                donor.prefill([row], [part])
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
def test_chunks_and_next_tokens_of_one_forward_are_those_of_each_alone(family) -> None:
    scene = Scene(family)
    decoding, prefilling = [5, 1, 3], [0, 4, 2]
    starts = scene.num_shared
    early = [scene.texts[member][starts[member] :] for member in decoding]
    scene.runner.prefill([scene.rows[member] for member in decoding], early)
    given = draw_tokens(scene.rng, len(decoding))
    for member, token in zip(decoding, given, strict=True):
        scene.texts[member].append(token)

    with counted_calls(scene.model) as calls:
        logits = scene.runner.prefill_and_decode(
            [scene.rows[member] for member in prefilling],
            [scene.texts[member][starts[member] :] for member in prefilling],
            [scene.rows[member] for member in decoding],
            mx.array(given),
        )

    num_tokens = sum(len(scene.texts[member]) - starts[member] for member in prefilling)
    # Recurrent layers take a row's tokens in order: no token can be a row of its own.
    assert family in HYBRID or calls == [num_tokens + len(decoding)]
    scene.check(logits, [*prefilling, *decoding])
    scene.check(scene.decode(range(6)), range(6))


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


def test_rows_hold_what_they_compute_and_no_copy_of_what_they_share() -> None:
    """Shared segments cost nothing, prefills no padding, a decoding row a tail and pages."""
    scene = Scene("llama")
    token_nbytes = 2 * 2 * 2 * 8 * 4  # keys and values of 2 layers, 2 heads, 8 dimensions, float32
    assert scene.runner.nbytes == 0

    scene.prefill()
    mx.eval(scene.runner.state(scene.rows))

    assert scene.runner.nbytes == (5 + 80 + 12 + 1 + 3 + 10) * token_nbytes

    scene.decode(range(6))
    mx.eval(scene.runner.state(scene.rows))

    # The row with 80 tokens has one of the slab's pages, and the rest in its tail.
    assert scene.runner.nbytes == (6 * TAIL_TOKENS + MIN_SLAB_PAGES * PAGE_TOKENS) * token_nbytes


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
    assert 0 < scene.runner.padding.prefill_share <= 0.2


@pytest.mark.parametrize("family", OTHERS)
def test_a_model_without_keys_and_values_is_refused(family) -> None:
    with pytest.raises(TypeError, match="no prefix to share"):
        SharedPrefixRunner(tiny_model(family))


def test_a_model_that_touches_the_mask_raises() -> None:
    mask = OwnMask(None)
    for touch in (bool, lambda m: m + 1, lambda m: m[0], lambda m: m.dtype):
        with pytest.raises((TypeError, AttributeError)):
            touch(mask)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_check_at_load_lets_a_model_have_it(family) -> None:
    model = tiny_model(family)
    assert type(choose_runner(model, VOCABULARY_SIZE, (SharedPrefixRunner,))) is SharedPrefixRunner


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_of_scheduled_rows_are_those_of_each_prompt_alone(family) -> None:
    model = tiny_model(family)
    report = ExactnessReport()
    for seed in range(10 if family in PLAIN else 1):
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

    weights, log_weight = weights_of(scores)
    output = weights.astype(mx.float16) @ values

    assert mx.allclose(output, mx.full((1, 1, dim), 5.0, mx.float16), rtol=1e-2)
    assert log_weight.item() == pytest.approx(math.log(num_keys), rel=1e-5)


def grown(num_own, num_steps=1, num_layers=2):
    """Return a runner with rows of *num_own* tokens of their own each, which have decoded."""
    rng = random.Random(3)
    model = tiny_variant(
        "qwen3", num_hidden_layers=num_layers, tie_word_embeddings=True, rope_theta=1e4
    )
    runner = SharedPrefixRunner(model)
    rows = [sequence([0] * num) for num in num_own]
    for row, num in zip(rows, num_own, strict=True):
        runner.attach(row, ())
        runner.prefill([row], [draw_tokens(rng, num)])
        mx.eval(runner.state([row]))
    for _ in range(num_steps):
        mx.eval(runner.decode(rows, mx.array(draw_tokens(rng, len(rows)))), runner.state(rows))
    return runner, rows


TOKEN_NBYTES = 2 * 2 * 2 * 8 * 4
"""Keys and values of 2 layers, 2 heads, 8 dimensions, 4 bytes."""


@pytest.mark.parametrize("is_join", [True, False])
def test_rows_join_and_leave_without_a_copy_of_the_others(is_join) -> None:
    """One row more or less beside 16 long ones takes no memory that grows with their length.

    But for the scores of one layer at a time: little beside the keys and values of many.
    """
    num_layers = 8
    runner, rows = grown([500] * 16, num_layers=num_layers)
    other = sequence([0] * 40)
    runner.attach(other, ())
    runner.prefill([other], [[0] * 40])
    together = [*rows, other]
    if not is_join:
        runner.decode(together, mx.zeros(17, mx.int32))
    mx.eval(runner.state(together))
    before = settled_active_memory()
    mx.reset_peak_memory()

    after = together if is_join else rows
    mx.eval(runner.decode(after, mx.zeros(len(after), mx.int32)), runner.state(after))

    own = 16 * 500 * TOKEN_NBYTES * num_layers // 2
    assert mx.get_peak_memory() - before < own / 3  # a copy takes half at a join


@pytest.mark.parametrize("seed", range(3))
def test_what_decoding_rows_hold_is_bounded_by_what_they_use(seed) -> None:
    """A quarter for free pages, or a slab's least, and a tail for each row; in all, 1.5 times."""
    rng = random.Random(seed)
    num_own = [rng.choice([1, 40, 70, 130, 300, 1000]) + rng.randrange(64) for _ in range(12)]
    runner, rows = grown(num_own, num_steps=40)
    num_own = [num + 40 for num in num_own]
    for _ in range(3):
        used = sum(num_own)
        held = runner.nbytes // TOKEN_NBYTES
        assert runner.padding[:2] == (held, used)
        assert used < held <= 1.25 * used + TAIL_TOKENS * len(rows) + MIN_SLAB_PAGES * PAGE_TOKENS
        if used > 256 * len(rows):
            assert held <= 1.5 * used
        leaving = rng.randrange(len(rows))
        runner.detach(rows.pop(leaving))
        num_own.pop(leaving)
        num_own = [num + 1 for num in num_own]
        mx.eval(runner.decode(rows, mx.zeros(len(rows), mx.int32)), runner.state(rows))


class Texts:
    """Rows without a prefix, and all their tokens, to be compared with each alone."""

    def __init__(self, lengths) -> None:
        self.rng = random.Random(11)
        self.model = tiny_model("llama")
        self.runner = SharedPrefixRunner(self.model)
        self.texts = [draw_tokens(self.rng, length) for length in lengths]
        self.rows = [sequence(text) for text in self.texts]
        for row, text in zip(self.rows, self.texts, strict=True):
            self.runner.attach(row, ())
            self.runner.prefill([row], [text])

    def decode(self, members) -> mx.array:
        given = draw_tokens(self.rng, len(members))
        for member, token in zip(members, given, strict=True):
            self.texts[member] = [*self.texts[member], token]
        logits = self.runner.decode([self.rows[each] for each in members], mx.array(given))
        mx.eval(logits, self.runner.state([self.rows[each] for each in members]))
        return logits

    def check(self, logits, members) -> None:
        for row, member in zip(logits, members, strict=True):
            assert_logits_close(row, logits_alone(self.model, self.texts[member])[-1])


def test_pages_that_move_keep_their_rows_tokens() -> None:
    """Slabs that are put together when rows leave still hold what the others have computed."""
    scene = Texts([200, 400, 40, 300, 150])
    for _ in range(40):
        scene.decode(range(5))
    scene.runner.detach(scene.rows[1])
    scene.runner.detach(scene.rows[3])
    scene.check(scene.decode([0, 2, 4]), [0, 2, 4])
    assert scene.runner._pool.num_moved_pages > 0

    text = scene.texts[4]
    taker = sequence([*text, 3])
    scene.runner.attach(taker, [scene.runner.extract(scene.rows[4], 0, len(text))])
    logits = scene.runner.prefill([taker], [[3]])
    assert_logits_close(logits[0], logits_alone(scene.model, [*text, 3])[-1])


@pytest.mark.parametrize("num_shared", [130, 190, 240])
def test_a_row_that_has_decoded_can_be_rebased_and_prefilled_further(num_shared) -> None:
    """What a new prefix does not cover of pages and tail goes on as the row's own."""
    scene = Texts([150, 70])
    for _ in range(100):
        scene.decode([0, 1])
    prefix = scene.runner.extract(scene.rows[0], 0, num_shared)
    scene.runner.rebase(scene.rows[0], [prefix])

    more = draw_tokens(scene.rng, 7)
    for member in (0, 1):
        scene.texts[member] = [*scene.texts[member], *more]
    scene.check(scene.runner.prefill(scene.rows, [more, more]), [0, 1])
    scene.check(scene.decode([1, 0]), [1, 0])


def test_short_segments_of_one_row_are_taken_as_its_own_within_a_bound() -> None:
    """Nodes that a long chat leaves behind are copied up to a limit, the nearest ones first."""
    scene = Texts([1000])
    text = scene.texts[0]
    nodes = [scene.runner.extract(scene.rows[0], at, at + 100) for at in range(0, 1000, 100)]
    taker = sequence([*text, 3])
    scene.runner.attach(taker, nodes)

    logits = scene.runner.decode([taker], mx.array([3]))

    assert_logits_close(logits[0], logits_alone(scene.model, [*text, 3])[-1])
    assert scene.runner._rows[taker].num_own == 501
    assert sum(len(level) for level in scene.runner._group.depths) == 1


def test_decoding_rows_let_go_of_a_segment_that_was_cut() -> None:
    """The prefix cache has the halves then; who held the whole would hold the tokens twice."""
    scene = Texts([300, 300])
    whole = scene.runner.extract(scene.rows[0], 0, 300)
    scene.texts[1] = scene.texts[0]
    for member in (0, 1):
        scene.runner.detach(scene.rows[member])
        scene.runner.attach(scene.rows[member], [whole])
    scene.decode([0, 1])

    halves = whole.split(140)
    for row in scene.rows:
        scene.runner.rebase(row, halves)

    scene.check(scene.decode([0, 1]), [0, 1])
    held = [span.segment for level in scene.runner._group.depths for span in level]
    assert held == list(halves)


def test_a_row_whose_keys_and_values_are_not_finite_spoils_no_other() -> None:
    """Rows share slabs and passes: what is wrong in one must not reach the others' sums."""
    scene = Texts([120, 70, 40])
    prefixes = [
        scene.runner.extract(row, 0, len(text))
        for row, text in zip(scene.rows, scene.texts, strict=True)
    ]
    layers = [LayerKV(*(array * mx.nan for array in layer)) for layer in prefixes[0].layers]
    prefixes[0] = KVSegment(tuple(layers))
    for row, prefix in zip(scene.rows, prefixes, strict=True):
        scene.runner.detach(row)
        scene.runner.attach(row, [prefix])

    logits = scene.decode([0, 1, 2])

    assert mx.all(mx.isnan(logits[0]))
    scene.check(logits[1:], [1, 2])
