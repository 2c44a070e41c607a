"""Scores and embeddings: read off prompts, batched and over shared prefixes, as if alone."""

from itertools import pairwise, product

import mlx.core as mx
import numpy as np
import pytest
from headwater.schemas import Failed, Finished, JobKind, Pooling
from headwater.worker.engine.merged_runner import MergedRunner
from headwater.worker.engine.row_runner import RowRunner
from headwater.worker.engine.shared_kv.runner import SharedPrefixRunner
from mlx_lm.models.cache import make_prompt_cache

from tests.tiny_models import VOCABULARY_SIZE, tiny_model
from tests.worker.loop_bench import Bench, claim

PROMPT = (5, 9, 17, 3, 44, 9, 61, 2, 8, 8, 30, 12)
CONTINUATIONS = ((7,), (7, 3), (1, 2, 3, 4, 5, 6, 7, 8, 9), (100, 7, 3), (7,))
TOLERANCE = 1e-4


@pytest.fixture(params=[MergedRunner, SharedPrefixRunner, RowRunner])
def bench(request) -> Bench:
    return Bench(runner=request.param)


def score(job_id: str = "j", prompt=PROMPT, continuations=CONTINUATIONS, **fields):
    fields = {"kind": JobKind.SCORE, "max_tokens": 1} | fields
    return claim(job_id, prompt=prompt, continuations=continuations, **fields)


def embedding(job_id: str = "j", prompt=PROMPT, **fields):
    return claim(job_id, prompt=prompt, **({"kind": JobKind.EMBEDDING, "max_tokens": 1} | fields))


def alone_logprobs(model, prompt, continuation) -> list[float]:
    """Return what one forward over the whole text says of each token of *continuation*."""
    tokens = [*prompt, *continuation]
    logits = model(mx.array([tokens]), cache=make_prompt_cache(model))[0].astype(mx.float32)
    logprobs = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    places = list(enumerate(pairwise(tokens)))[len(prompt) - 1 :]
    return [float(logprobs[place, token]) for place, (_, token) in places]


def alone_states(model, prompt) -> np.ndarray:
    """Return the last layer's states, (tokens, size)."""
    states = model.model(mx.array([list(prompt)]), make_prompt_cache(model))
    return np.array(states[0].astype(mx.float32))


def finished(bench: Bench, job_id: str = "j") -> Finished:
    end = bench.sink.ends[job_id]
    assert isinstance(end, Finished), end
    return end


def floats(bench: Bench, job_id: str = "j") -> np.ndarray:
    return np.array(finished(bench, job_id).embedding.floats())


def test_continuations_are_scored_as_one_forward_over_each_text_scores_them(bench: Bench) -> None:
    bench.loop.admit(score())
    bench.run()

    scores = finished(bench).scores
    assert [each.continuation for each in scores] == list(range(len(CONTINUATIONS)))
    for each, continuation in zip(scores, CONTINUATIONS, strict=True):
        expected = alone_logprobs(bench.model, PROMPT, continuation)
        assert each.logprobs == pytest.approx(expected, abs=TOLERANCE)
        assert each.logprob == pytest.approx(sum(expected), abs=10 * TOLERANCE)


def test_the_shared_prompt_is_computed_once(bench: Bench) -> None:
    computed = count_prefilled_tokens(bench)
    prompt = PROMPT * 4
    bench.loop.admit(score(prompt=prompt))
    bench.run()

    # All but the prompt's last token, and that one and the rest for each continuation.
    assert computed() <= len(prompt) - 1 + sum(map(len, CONTINUATIONS))


def count_prefilled_tokens(bench: Bench):
    runner = bench.engine._runner
    plain, lengths = runner.prefill, []

    def prefill(rows, chunks, reader=None):
        lengths.extend(map(len, chunks))
        return plain(rows, chunks, reader)

    runner.prefill = prefill
    return lambda: sum(lengths)


def test_greedy_continuations_are_recognized(bench: Bench) -> None:
    bench.loop.admit(claim("greedy", prompt=PROMPT, max_tokens=3))
    bench.run()
    greedy = tuple(bench.sink.tokens("greedy"))
    other = (*greedy[:2], (greedy[2] + 1) % VOCABULARY_SIZE)

    bench.loop.admit(score(continuations=(greedy, other)))
    bench.run()

    assert [each.is_greedy for each in finished(bench).scores] == [True, False]


def test_a_prompt_of_one_token_can_be_scored_on(bench: Bench) -> None:
    bench.loop.admit(score(prompt=(5,), continuations=((9,), (9, 17))))
    bench.run()

    for each, continuation in zip(finished(bench).scores, ((9,), (9, 17)), strict=True):
        expected = alone_logprobs(bench.model, (5,), continuation)
        assert each.logprobs == pytest.approx(expected, abs=TOLERANCE)


def test_the_same_job_again_scores_the_same_from_the_cache(bench: Bench) -> None:
    bench.loop.admit(score("first"))
    bench.run()
    bench.loop.admit(score("second"))
    bench.run()

    first, second = finished(bench, "first"), finished(bench, "second")
    for one, other in zip(first.scores, second.scores, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=TOLERANCE)
    assert second.usage.cached_tokens == len(PROMPT) - 1


def test_a_long_continuation_is_read_in_pieces(monkeypatch, bench: Bench) -> None:
    monkeypatch.setattr("headwater.worker.engine.prompt_reader._MAX_POSITIONS", 8)
    long = tuple(index * 7 % VOCABULARY_SIZE for index in range(50))
    bench.loop.admit(score(continuations=(long, long[:21], (3,))))
    bench.run()

    for each, continuation in zip(finished(bench).scores, (long, long[:21], (3,)), strict=True):
        expected = alone_logprobs(bench.model, PROMPT, continuation)
        assert each.logprobs == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("pooling", list(Pooling))
def test_an_embedding_is_the_pooled_state_of_the_last_layer(bench: Bench, pooling) -> None:
    bench.loop.admit(embedding(pooling=pooling, normalize=False))
    bench.run()

    states = alone_states(bench.model, PROMPT)
    expected = states[-1] if pooling is Pooling.LAST else states.mean(axis=0)
    assert floats(bench) == pytest.approx(expected, abs=TOLERANCE)


def test_a_normalized_embedding_has_length_one(bench: Bench) -> None:
    bench.loop.admit(embedding("unit"))
    bench.loop.admit(embedding("raw", normalize=False))
    bench.run()

    unit, raw = floats(bench, "unit"), floats(bench, "raw")
    assert np.linalg.norm(unit) == pytest.approx(1.0, abs=1e-6)
    assert unit * np.linalg.norm(raw) == pytest.approx(raw, abs=TOLERANCE)


@pytest.mark.parametrize("pooling", list(Pooling))
def test_embeddings_of_prompts_that_share_a_prefix_are_each_ones_own(bench, pooling) -> None:
    prompts = {f"j{index}": (*PROMPT, *range(index)) for index in range(6)}
    for job_id, prompt in prompts.items():
        bench.loop.admit(embedding(job_id, prompt=prompt, pooling=pooling, normalize=False))
    bench.run()

    for job_id, prompt in prompts.items():
        states = alone_states(bench.model, prompt)
        expected = states[-1] if pooling is Pooling.LAST else states.mean(axis=0)
        assert floats(bench, job_id) == pytest.approx(expected, abs=TOLERANCE)


def test_all_kinds_run_beside_each_other(bench: Bench) -> None:
    alone = Bench(runner=type(bench.engine._runner))
    alone.loop.admit(claim("text", prompt=PROMPT))
    alone.run()

    bench.loop.admit(claim("text", prompt=PROMPT))
    bench.loop.step()
    bench.loop.admit(score("score"))
    bench.loop.admit(embedding("vector", pooling=Pooling.MEAN))
    bench.run()

    assert bench.sink.tokens("text") == alone.sink.tokens("text")
    expected = alone_logprobs(bench.model, PROMPT, CONTINUATIONS[2])
    assert finished(bench, "score").scores[2].logprobs == pytest.approx(expected, abs=TOLERANCE)
    assert np.linalg.norm(floats(bench, "vector")) == pytest.approx(1.0, abs=1e-6)


def test_the_usage_counts_prompt_and_continuations(bench: Bench) -> None:
    bench.loop.admit(score())
    bench.run()

    usage = finished(bench).usage
    assert usage.prompt_tokens == len(PROMPT)
    assert usage.completion_tokens == sum(map(len, CONTINUATIONS))
    assert finished(bench).choices == ()


def test_a_cancelled_scoring_job_leaves_nothing_behind(bench: Bench) -> None:
    bench.loop.admit(score())
    bench.loop.step()
    bench.loop.cancel("j")
    bench.run()

    assert bench.sink.ends["j"].type == "cancelled"
    assert bench.engine._reader._notes == {}


def test_what_is_not_finite_fails_the_job_and_nothing_else(bench: Bench) -> None:
    model = bench.model
    embed = model.model.embed_tokens

    def poisoned(tokens):
        states = embed(tokens)
        return mx.where((tokens == 99)[..., None], mx.array(float("nan")), states)

    model.model.embed_tokens = poisoned
    bench.loop.admit(score("bad", prompt=(99, 5, 9)))
    bench.loop.admit(embedding("good", prompt=PROMPT))
    bench.run()

    assert isinstance(bench.sink.ends["bad"], Failed)
    assert finished(bench, "good").embedding is not None


@pytest.mark.parametrize(
    ("family", "runner"),
    [
        *product(["gemma3_text", "qwen3_5", "mamba2", "gpt_oss"], [RowRunner, MergedRunner]),
        *product(["gemma3_text", "qwen3_5", "gpt_oss"], [SharedPrefixRunner]),
    ],
)
def test_models_with_windows_and_states_are_read_the_same(family: str, runner) -> None:
    bench = Bench(runner=runner, alter=lambda _: tiny_model(family))
    prompt = PROMPT * 4
    for job_id in ("cold", "warm"):
        bench.loop.admit(score(job_id, prompt=prompt))
        bench.loop.admit(embedding(f"{job_id}-vector", prompt=prompt))
        bench.run()

    for job_id in ("cold", "warm"):
        for each, continuation in zip(finished(bench, job_id).scores, CONTINUATIONS, strict=True):
            expected = alone_logprobs(bench.model, prompt, continuation)
            assert each.logprobs == pytest.approx(expected, abs=1e-3)
    vectors = [floats(bench, f"{job_id}-vector") for job_id in ("cold", "warm")]
    assert vectors[0] == pytest.approx(vectors[1], abs=TOLERANCE)


def test_a_reading_that_was_interrupted_is_read_anew(bench: Bench) -> None:
    prompt = PROMPT * 6
    long = tuple(index * 7 % VOCABULARY_SIZE for index in range(150))
    bench.loop.admit(score("score", prompt=prompt, continuations=(long,)))
    bench.loop.admit(embedding("vector", prompt=(*prompt, *long), pooling=Pooling.MEAN))
    bench.loop.step()
    bench.loop.step()
    # It sends all others away until its first token.
    bench.loop.admit(claim("struck", prompt=(8, 8, 8), strikes=1))
    bench.loop.step()
    assert bench.loop.figures.num_running == 1
    bench.run()

    expected = alone_logprobs(bench.model, prompt, long)
    assert finished(bench, "score").scores[0].logprobs == pytest.approx(expected, abs=TOLERANCE)
    mean = alone_states(bench.model, (*prompt, *long)).mean(axis=0)
    assert floats(bench, "vector") == pytest.approx(mean / np.linalg.norm(mean), abs=TOLERANCE)


def test_rows_that_are_computed_apart_after_a_fault_are_read_once(bench: Bench) -> None:
    runner = bench.engine._runner
    plain = runner.prefill

    def faulty(rows, chunks, reader=None):
        result = plain(rows, chunks, reader)
        if len(rows) > 1:
            raise RuntimeError("too many rows")
        return result

    runner.prefill = faulty
    prompts = {"one": PROMPT, "two": (*PROMPT[::-1], 3, 4)}
    for job_id, prompt in prompts.items():
        bench.loop.admit(embedding(job_id, prompt=prompt, pooling=Pooling.MEAN, normalize=False))
    bench.loop.admit(score("score"))
    bench.run()

    for job_id, prompt in prompts.items():
        mean = alone_states(bench.model, prompt).mean(axis=0)
        assert floats(bench, job_id) == pytest.approx(mean, abs=TOLERANCE)
    for each, continuation in zip(finished(bench, "score").scores, CONTINUATIONS, strict=True):
        expected = alone_logprobs(bench.model, PROMPT, continuation)
        assert each.logprobs == pytest.approx(expected, abs=TOLERANCE)


def test_a_model_that_hides_its_states_refuses_embeddings_and_scores_all_the_same() -> None:
    bench = Bench(runner=RowRunner)
    bench.engine._runner._projection._layer = None
    bench.loop.admit(embedding("vector"))
    bench.loop.admit(score("score"))
    bench.run()

    end = bench.sink.ends["vector"]
    assert isinstance(end, Failed)
    assert end.code == "unsupported_kind"
    expected = alone_logprobs(bench.model, PROMPT, CONTINUATIONS[2])
    assert finished(bench, "score").scores[2].logprobs == pytest.approx(expected, abs=TOLERANCE)
