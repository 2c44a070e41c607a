"""Penalties and biases: mlx-lm's values, whoever knows the newest token, and bans."""

import random

import mlx.core as mx
import numpy as np
import pytest
from headwater.schemas import SamplingParams
from headwater.worker.engine.adjust import Bans, Biases
from headwater.worker.engine.penalties import Penalties
from headwater.worker.engine.sampler import NO_TOKEN, Sampler
from mlx_lm.sample_utils import make_logits_processors

from tests.exactness.reference import adjust_alone
from tests.exactness.workload import sequence

SIZE = 50


def random_rows(rng: random.Random, num_rows: int = 6):
    rows = []
    for _ in range(num_rows):
        sampling = SamplingParams(
            repetition_penalty=rng.choice([1.0, 1.5, 0.5]),
            repetition_window=rng.choice([0, 1, 3, 20]),
            presence_penalty=rng.choice([0.0, 0.7, -1.0]),
            frequency_penalty=rng.choice([0.0, 0.4, -0.3]),
        )
        prompt = [rng.randrange(SIZE) for _ in range(rng.randint(1, 8))]
        made = sequence(prompt, 10_000, sampling=sampling)
        made.output_token_ids = [rng.randrange(SIZE) for _ in range(rng.randint(0, 6))]
        rows.append(made)
    return rows


def random_logits(num_rows: int, seed: int = 0) -> mx.array:
    return 3 * mx.random.normal((num_rows, SIZE), key=mx.random.key(seed))


def expected(logits: mx.array, rows) -> np.ndarray:
    return np.array(
        [
            adjust_alone(values, row.job.sampling, row.job.prompt_token_ids, row.output_token_ids)
            for values, row in zip(np.array(logits), rows, strict=True)
        ]
    )


@pytest.mark.parametrize("knows_newest", [True, False], ids=["read", "unread"])
def test_every_step_penalizes_by_all_tokens_before_it(knows_newest: bool) -> None:
    rng = random.Random(1)
    rows = random_rows(rng)
    penalties = Penalties(rows)
    for step in range(40):
        logits = random_logits(len(rows), step)
        newest = [rng.randrange(SIZE) for _ in rows]
        for row, token in zip(rows, newest, strict=True):
            row.output_token_ids.append(token)
        wanted = expected(logits, rows)
        if not knows_newest:
            for row in rows:
                row.output_token_ids.pop()
                row.num_unread_tokens = 1
        got = penalties.apply(logits, mx.array(newest))
        assert np.allclose(np.array(got), wanted, atol=1e-5), step
        for row, token in zip(rows, newest, strict=True):
            if row.num_unread_tokens:
                row.output_token_ids.append(token)
                row.num_unread_tokens = 0


def test_a_step_that_is_taken_twice_counts_its_tokens_once() -> None:
    rows = random_rows(random.Random(2))
    penalties = Penalties(rows)
    logits = random_logits(len(rows))
    for _ in range(3):
        got = penalties.apply(logits, mx.array([row.tokens(0, row.num_tokens)[-1] for row in rows]))
        assert np.allclose(np.array(got), expected(logits, rows), atol=1e-5)


def test_penalties_are_those_of_mlx_lm_over_the_same_tokens() -> None:
    history = [3, 7, 3, 3, 9, 41, 7, 3]
    sampling = SamplingParams(
        repetition_penalty=1.7,
        repetition_window=5,
        presence_penalty=0.9,
        frequency_penalty=-0.6,
        logit_bias={3: 4.0, 8: -2.0},
    )
    row = sequence([1], sampling=sampling)
    row.output_token_ids = history
    logits = random_logits(1)
    theirs = mx.array(logits)
    for process in make_logits_processors({3: 4.0, 8: -2.0}, 1.7, 5, 0.9, 99, -0.6, 99):
        theirs = process(mx.array(history), theirs)

    ours = Penalties([row]).apply(Biases([row]).apply(logits), None)

    assert np.allclose(np.array(ours), np.array(theirs), atol=1e-5)


def test_the_prompt_counts_for_the_repetition_penalty_alone() -> None:
    row = sequence([4, 4], sampling=SamplingParams(repetition_penalty=2.0, presence_penalty=1.0))
    logits = mx.ones((1, SIZE))
    changed = np.flatnonzero(np.array(Penalties([row]).apply(logits, None))[0] != 1)
    assert changed.tolist() == [4]
    assert float(Penalties([row]).apply(logits, None)[0, 4]) == 0.5


def test_rows_without_penalties_and_biases_keep_their_logits_bit_for_bit() -> None:
    plain = sequence([1])
    loud = sequence([1], sampling=SamplingParams(frequency_penalty=1.0, logit_bias={0: 1.0, 4: 2}))
    loud.output_token_ids = [0, 1, 2]
    logits = random_logits(3)
    rows = [plain, loud, plain]
    changed = Penalties(rows).apply(Biases(rows).apply(logits), None)
    assert (np.array(changed == logits).all(axis=1) == [True, False, True]).all()


def test_a_banned_token_is_never_the_likeliest() -> None:
    best = int(mx.argmax(random_logits(1)[0]))
    row = sequence([1], sampling=SamplingParams(bad_token_ids=(best, 3)))
    neighbour = sequence([1])
    logits = mx.broadcast_to(random_logits(1), (2, SIZE))
    tokens = Sampler(SIZE, ()).sample(logits, [row, neighbour]).tolist()
    assert tokens[0] != best
    assert tokens[1] == best


def test_a_row_whose_tokens_are_all_banned_is_named() -> None:
    row = sequence([1], sampling=SamplingParams(bad_token_ids=tuple(range(SIZE))))
    drawing = sequence(
        [1], sampling=SamplingParams(temperature=1.0, bad_token_ids=row.job.sampling.bad_token_ids)
    )
    tokens = Sampler(SIZE, ()).sample(random_logits(3), [row, sequence([1]), drawing]).tolist()
    assert tokens[0] == tokens[2] == NO_TOKEN
    assert tokens[1] >= 0


def test_bans_touch_the_asked_rows_only() -> None:
    logits = random_logits(3)
    banned = Bans([[1, 2], [], [5]]).apply(logits, np.array([True, True, False]))
    assert np.argwhere(np.array(banned) == -np.inf).tolist() == [[0, 1], [0, 2]]
    assert not Bans([[1], []]).are_due(np.array([False, True]))
