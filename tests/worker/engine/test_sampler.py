"""Draws: keyed by (seed, choice, index), the same anywhere, distributed as mlx-lm's."""

import math
import random

import mlx.core as mx
import numpy as np
import pytest
from headwater.schemas import SamplingParams
from headwater.worker.engine import filters
from headwater.worker.engine.draws import stream_key, uniforms
from headwater.worker.engine.sampler import NOT_FINITE, Sampler
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from tests.exactness.workload import sequence

VOCABULARY_SIZE = 600
EOS = 7

SETTINGS = {
    "temperature": {"temperature": 0.8},
    "hot": {"temperature": 5.0},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_k over the head": {"temperature": 3.0, "top_k": 300},
    "top_p": {"temperature": 0.9, "top_p": 0.7},
    "flat top_p": {"temperature": 5.0, "top_p": 0.99},
    "min_p": {"temperature": 1.2, "min_p": 0.1},
    "all": {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
}


def row(index: int = 0, choice: int = 0, **sampling):
    """A sequence that is about to get output token *index*."""
    fields = {
        key: sampling.pop(key)
        for key in ("min_tokens", "stop_token_ids", "ignore_eos")
        if key in sampling
    }
    made = sequence([1], 10_000, sampling=SamplingParams(**sampling), **fields)
    made.choice = choice
    made.output_token_ids = [0] * index
    return made


def random_logits(num_rows: int, seed: int = 0, scale: float = 2.0) -> mx.array:
    return scale * mx.random.normal((num_rows, VOCABULARY_SIZE), key=mx.random.key(seed))


def sample(logits: mx.array, rows) -> list[int]:
    return Sampler(VOCABULARY_SIZE, [EOS]).sample(logits, rows).tolist()


def test_greedy_rows_get_the_likeliest_token() -> None:
    logits = random_logits(4)
    assert sample(logits, [row() for _ in range(4)]) == mx.argmax(logits, axis=-1).tolist()


def test_greedy_ties_go_to_the_smallest_token_id() -> None:
    assert sample(mx.zeros((1, VOCABULARY_SIZE)), [row()]) == [0]


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_the_same_job_draws_the_same_token_at_any_row_of_any_batch(settings) -> None:
    logits = random_logits(3)
    wanted = [sample(logits[:1], [row(index, seed=11, **settings)])[0] for index in range(40)]

    for index, token in enumerate(wanted):
        target = row(index, seed=11, **settings)
        others = [row(index, seed=5, temperature=1.0), row(seed=6)]
        for place in range(3):
            rows = [*others[:place], target, *others[place:]]
            order = [1, 2]
            order.insert(place, 0)
            assert sample(logits[mx.array(order)], rows)[place] == token


def test_seed_choice_and_index_each_change_the_draw() -> None:
    logits = random_logits(1, scale=0.5)

    def tokens(**key) -> list[int]:
        return [
            sample(
                logits,
                [
                    row(
                        index + key.get("at", 0),
                        key.get("choice", 0),
                        seed=key.get("seed", 1),
                        temperature=1.0,
                    )
                ],
            )[0]
            for index in range(20)
        ]

    assert tokens() == tokens()
    assert tokens()[1:] == tokens(at=1)[:-1]
    assert tokens() != tokens(seed=2)
    assert tokens() != tokens(choice=1)


def test_two_seeds_in_one_batch_keep_their_tokens_when_they_swap_places() -> None:
    logits = mx.broadcast_to(random_logits(1), (2, VOCABULARY_SIZE))
    one, two = row(seed=1, temperature=1.0), row(seed=2, temperature=1.0)
    assert sample(logits, [one, two]) == sample(logits, [two, one])[::-1]


def test_a_sampler_that_sees_other_rows_forgets_the_old_ones() -> None:
    logits = random_logits(2)
    sampler = Sampler(VOCABULARY_SIZE, [EOS])
    drawing, greedy = row(seed=3, temperature=2.0), row()
    alone = sampler.sample(logits[:1], [drawing]).tolist()
    assert sampler.sample(logits, [drawing, greedy]).tolist()[:1] == alone
    assert sampler.sample(logits[::-1], [greedy, drawing]).tolist()[1:] == alone


@pytest.mark.parametrize("quantum", [0, 0.25, 1.0], ids=["smooth", "ties", "many ties"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_the_head_of_the_order_and_the_whole_vocabulary_give_the_same_token(
    settings, quantum
) -> None:
    params = [SamplingParams(seed=1, **settings)] * 32
    logits = random_logits(32, seed=4)
    if quantum:
        logits = mx.round(logits / quantum) * quantum
    chosen = filters.Filters.of(params, VOCABULARY_SIZE)
    num_sure = 0
    for seed in range(10):
        uniform = mx.random.uniform(shape=(32, 1), key=mx.random.key(seed))
        choice = filters.choose(logits, chosen, uniform)
        whole = filters.choose_among_all(logits, chosen, uniform)
        is_sure = np.array(choice.is_sure)
        num_sure += is_sure.sum()
        assert (np.array(choice.tokens) == np.array(whole))[is_sure].all()
        if chosen.is_head_enough:
            assert is_sure.all()
    assert num_sure or settings["temperature"] >= 3


ADJUSTMENTS = {
    "untouched": {},
    "bias": {"logit_bias": {3: 2.5, 500: -4.0, 77: 3.0}},
    "repetition": {"repetition_penalty": 1.6, "repetition_window": 30},
    "presence and frequency": {"presence_penalty": 1.2, "frequency_penalty": -0.7},
    "all": {
        "logit_bias": {5: 2.0, 9: -3.0},
        "repetition_penalty": 1.4,
        "repetition_window": 25,
        "presence_penalty": -0.8,
        "frequency_penalty": 0.5,
    },
}


def draws_of_mlx_lm(logits: mx.array, num_draws: int, history: list[int], settings) -> np.ndarray:
    """Draw by mlx-lm's own processors and sampler, after *history*."""
    names = ("logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty")
    processors = make_logits_processors(
        **{name: settings[name] for name in names if name in settings},
        repetition_context_size=settings.get("repetition_window", 20),
        presence_context_size=len(history),
        frequency_context_size=len(history),
    )
    for process in processors:
        logits = process(mx.array(history), mx.array(logits))
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    names = ("top_k", "top_p", "min_p")
    sampler = make_sampler(
        settings["temperature"], **{name: settings[name] for name in names if name in settings}
    )
    mx.random.seed(0)
    return np.array(sampler(mx.broadcast_to(logprobs, (num_draws, VOCABULARY_SIZE))))


def check_distribution(settings, num_draws: int) -> None:
    logits = random_logits(1, seed=9)
    history = [index * index % 23 for index in range(40)]
    theirs = draws_of_mlx_lm(logits, num_draws, history, settings)
    rows = [row(40, seed=seed, **settings) for seed in range(num_draws)]
    for each in rows:
        each.output_token_ids = history
    ours = Sampler(VOCABULARY_SIZE, []).sample(
        mx.broadcast_to(logits, (num_draws, VOCABULARY_SIZE)), rows
    )
    counts = [np.bincount(np.array(each), minlength=VOCABULARY_SIZE) for each in (ours, theirs)]
    assert_same_distribution(*counts)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_draws_are_distributed_as_those_of_mlx_lm(settings) -> None:
    check_distribution(settings, 4000)


@pytest.mark.parametrize("adjustment", ADJUSTMENTS.values(), ids=ADJUSTMENTS)
def test_adjusted_draws_are_distributed_as_those_of_mlx_lm(adjustment) -> None:
    check_distribution({**adjustment, "temperature": 0.9, "top_k": 200, "top_p": 0.95}, 4000)


@pytest.mark.long
@pytest.mark.parametrize("adjustment", ADJUSTMENTS.values(), ids=ADJUSTMENTS)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_twenty_thousand_draws_are_distributed_as_those_of_mlx_lm(settings, adjustment) -> None:
    check_distribution({**settings, **adjustment}, 20_000)


def assert_same_distribution(ours, theirs) -> None:
    """Two-sample chi-square over the tokens that are not too rare, five sigmas."""
    often = ours + theirs >= 20
    ours, theirs = (np.append(c[often], c[~often].sum()) for c in (ours, theirs))
    seen = ours + theirs > 0
    statistic = ((ours - theirs)[seen] ** 2 / (ours + theirs)[seen]).sum()
    freedom = int(seen.sum()) - 1
    assert statistic < freedom + 5 * math.sqrt(2 * max(freedom, 1)), (statistic, freedom)


@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0], ids=["flat", "nearly flat", "steep"])
def test_rows_that_need_much_of_a_long_order_get_the_token_of_the_whole_order(scale) -> None:
    size = 20_000
    logits = scale * mx.random.normal((24, size), key=mx.random.key(3))
    settings = [
        {"temperature": 1.0},
        {"temperature": 3.0, "top_p": 0.9},
        {"temperature": 2.0, "min_p": 0.01},
        {"temperature": 1.5, "top_k": 15_000},
        {"temperature": 1.0, "top_p": 0.2, "min_p": 0.001},
        {"temperature": 0.7, "top_k": 30},
    ]
    rows = [row(index, seed=index, **settings[index % 6]) for index in range(24)]
    tokens = Sampler(size, []).sample(logits, rows)
    keys = np.array([stream_key(each.job, 0) for each in rows], np.uint64)
    numbers = mx.array(uniforms(keys, np.arange(24, dtype=np.uint64)))[:, None]
    chosen = filters.Filters.of([each.job.sampling for each in rows], size)

    assert tokens.tolist() == filters.choose_among_all(logits, chosen, numbers).tolist()


def test_filtered_out_tokens_are_never_drawn() -> None:
    logits = random_logits(1, seed=3)
    order = mx.argsort(-logits[0]).tolist()
    rows = [row(seed=seed, temperature=50.0, top_k=3) for seed in range(200)]
    tokens = set(sample(mx.broadcast_to(logits, (200, VOCABULARY_SIZE)), rows))
    assert tokens == set(order[:3])


def test_top_k_of_the_whole_vocabulary_keeps_everything() -> None:
    logits = random_logits(1)
    for index in range(20):
        whole = row(index, seed=2, temperature=1.0, top_k=VOCABULARY_SIZE)
        assert 0 <= sample(logits, [whole])[0] < VOCABULARY_SIZE


def test_min_tokens_masks_end_tokens_for_greedy_and_drawing_rows_until_it_is_reached() -> None:
    logits = mx.zeros((1, VOCABULARY_SIZE)).at[0, EOS].add(50).at[0, 9].add(40)
    for sampling in ({}, {"temperature": 0.5, "seed": 1}, {"temperature": 1.0, "top_k": 1}):
        assert sample(logits, [row(2, min_tokens=3, stop_token_ids=(9,), **sampling)])[0] not in (
            EOS,
            9,
        )
        assert sample(logits, [row(3, min_tokens=3, stop_token_ids=(9,), **sampling)]) == [EOS]


def test_a_row_that_ignores_the_end_may_get_it_at_any_time() -> None:
    logits = mx.zeros((1, VOCABULARY_SIZE)).at[0, EOS].add(50)
    assert sample(logits, [row(0, min_tokens=3, ignore_eos=True)]) == [EOS]


def test_an_end_token_beyond_the_vocabulary_is_no_token_to_mask() -> None:
    logits = random_logits(1)
    sampler = Sampler(VOCABULARY_SIZE, [EOS, VOCABULARY_SIZE + 5])
    best = mx.argmax(logits, axis=-1).tolist()
    assert sampler.sample(logits, [row(0, min_tokens=3)]).tolist() == best


def test_min_tokens_of_one_row_leaves_the_others_alone() -> None:
    logits = mx.broadcast_to(
        mx.zeros((1, VOCABULARY_SIZE)).at[0, EOS].add(50), (3, VOCABULARY_SIZE)
    )
    rows = [row(5, min_tokens=3), row(0), row(0, min_tokens=3)]
    assert sample(logits, rows) == [EOS, EOS, 0]


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 1}], ids=["greedy", "drawn"])
def test_a_row_with_non_finite_logits_is_named_and_its_neighbours_are_not(poison, sampling) -> None:
    logits = random_logits(3)
    clean = sample(logits, [row(**sampling) for _ in range(3)])
    poisoned = mx.array(logits)
    poisoned[1, 17] = poison

    assert sample(poisoned, [row(**sampling) for _ in range(3)]) == [clean[0], NOT_FINITE, clean[2]]


def test_sixteen_bit_logits_are_sampled_in_float32() -> None:
    logits = random_logits(8).astype(mx.bfloat16)
    rows = [row(seed=seed, temperature=1.0) for seed in range(8)]
    assert sample(logits, rows) == sample(logits.astype(mx.float32), rows)


def test_uniforms_are_flat_and_below_one() -> None:
    keys = np.array(
        [stream_key(row(seed=seed, temperature=1.0).job, 0) for seed in range(200)], np.uint64
    )
    values = np.concatenate(
        [uniforms(keys, np.full(200, index, np.uint64)) for index in range(200)]
    )

    assert values.min() >= 0
    assert values.max() < 1
    counts = np.histogram(values, bins=50, range=(0, 1))[0]
    assert ((counts - 800) ** 2 / 800).sum() < 49 + 5 * math.sqrt(98)


def test_a_job_without_a_seed_draws_by_its_id() -> None:
    first, again = (row(temperature=1.0).job for _ in range(2))
    other = first.model_copy(update={"job_id": "other"})
    assert stream_key(first, 0) == stream_key(again, 0)
    assert stream_key(first, 0) != stream_key(other, 0)


def test_a_random_mixture_of_settings_gives_each_row_its_own_token() -> None:
    rng = random.Random(0)
    logits = random_logits(12, seed=8)
    for _ in range(10):
        rows = [
            row(
                rng.randrange(50),
                seed=rng.randrange(99),
                **rng.choice([{}, *SETTINGS.values()]),
                **rng.choice(list(ADJUSTMENTS.values())),
            )
            if rng.random() < 0.8
            else row()
            for _ in range(12)
        ]
        together = sample(logits, rows)
        alone = [sample(logits[index : index + 1], [each])[0] for index, each in enumerate(rows)]
        assert together == alone
