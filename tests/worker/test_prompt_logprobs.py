"""Logprobs of prompts: those of one forward, each told once, whatever happens to the job."""

from collections.abc import Iterator
from itertools import chain

import mlx.core as mx
import numpy as np
import pytest
from headwater.schemas import DeltaPart, Failed, Finished, PositionLogprobs, StreamMode
from headwater.worker.engine.merged_runner import MergedRunner
from headwater.worker.engine.row_runner import RowRunner
from headwater.worker.engine.shared_kv.runner import SharedPrefixRunner
from headwater.worker.sequence import PromptReading, Sequence, TokenLogprobs
from headwater.worker.text import PromptLog, Vocabulary
from mlx_lm.models.cache import make_prompt_cache

from tests.tiny_models import VOCABULARY_SIZE, tiny_model
from tests.worker.loop_bench import Bench, claim, one_character_tokenizer, text_of
from tests.worker.test_readouts import count_prefilled_tokens

PROMPT = tuple(index * 13 % VOCABULARY_SIZE for index in range(90))
TOLERANCE = 1e-4


@pytest.fixture(params=[MergedRunner, SharedPrefixRunner, RowRunner])
def bench(request) -> Bench:
    return Bench(runner=request.param)


def asked(job_id: str = "j", prompt=PROMPT, **fields):
    return claim(job_id, prompt=prompt, **({"prompt_logprobs": 3} | fields))


def alone(model, prompt) -> np.ndarray:
    """Return the logprobs after each token of *prompt* but the last, of one forward."""
    logits = model(mx.array([list(prompt)]), cache=make_prompt_cache(model))[0].astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))[:-1]


def told(bench: Bench, job_id: str = "j") -> list[PositionLogprobs]:
    """Return the prompt's entries, checked to be without holes and overlaps."""
    found = [part.prompt for part in bench.sink.parts[job_id] if part.prompt is not None]
    assert [part.start for part in found[1:]] == [part.end for part in found[:-1]]
    return list(chain.from_iterable(part.logprobs for part in found))


def check(bench: Bench, entries: list[PositionLogprobs], prompt=PROMPT, start: int = 1) -> None:
    expected = alone(bench.model, prompt)[start - 1 :]
    assert [entry.token_id for entry in entries] == list(prompt[start:])
    for entry, row in zip(entries, expected, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=TOLERANCE)
        best = np.sort(row)[::-1][: len(entry.top)]
        assert [each.logprob for each in entry.top] == pytest.approx(best.tolist(), abs=TOLERANCE)
        assert all(each.text == text_of([each.token_id]) for each in entry.top)


@pytest.mark.parametrize("num_top", [0, 5])
def test_every_token_but_the_first_has_the_logprob_of_one_forward(bench, num_top: int) -> None:
    """Each entry tells its token, its logprob and as many of the likeliest as are asked for."""
    bench.loop.admit(asked(prompt_logprobs=num_top))
    bench.run()

    check(bench, told(bench))
    assert {len(entry.top) for entry in told(bench)} == {num_top}


def test_the_output_is_the_one_of_the_same_job_without(bench: Bench) -> None:
    """Asking about the prompt changes none of the tokens that follow it."""
    sampling = {"temperature": 1.0, "seed": 3, "n": 2}
    bench.loop.admit(asked(sampling=sampling, logprobs=1))
    bench.loop.admit(claim("plain", prompt=PROMPT, sampling=sampling, logprobs=1))
    bench.run()

    for choice in (0, 1):
        one, other = (
            [t for p in bench.sink.parts[job_id] if p.choice == choice for t in p.token_ids]
            for job_id in ("j", "plain")
        )
        assert one == other
        assert len(one) == 8
    check(bench, told(bench))


def test_the_prompt_stands_before_the_first_token(bench: Bench) -> None:
    """Nothing of the output is told before the whole prompt is."""
    bench.loop.admit(asked(sampling={"n": 3, "temperature": 1.0, "seed": 1}))
    bench.run()

    parts = bench.sink.parts["j"]
    last = max(index for index, part in enumerate(parts) if part.prompt is not None)
    own = [index for index, part in enumerate(parts) if part.token_ids and part.choice == 0]
    assert last <= own[0]


def test_a_cached_prefix_is_computed_again(bench: Bench) -> None:
    """A cache holds no logits: what is to be told is computed, and others reuse it all the same."""
    for job_id in ("cold", "warm"):
        bench.loop.admit(asked(job_id))
        bench.run()
        check(bench, told(bench, job_id))
    bench.loop.admit(claim("reuses", prompt=PROMPT))
    bench.run()

    cached = {job_id: end.usage.cached_tokens for job_id, end in bench.sink.ends.items()}
    assert cached == {"cold": 0, "warm": 0, "reuses": len(PROMPT) - 1}


def test_a_prompt_of_one_token_has_none(bench: Bench) -> None:
    """Nothing precedes it that could tell how likely it was."""
    bench.loop.admit(asked(prompt=(7,)))
    bench.run()

    assert told(bench) == []
    assert len(bench.sink.tokens("j")) == 8


def test_rows_that_ask_and_rows_that_do_not_stand_beside_each_other(bench: Bench) -> None:
    """Every kind of row gets in one batch what it gets alone, read in pieces of a few positions."""
    bench.engine._reader._max_positions = 16
    prompts = {f"j{index}": PROMPT[: 90 - 7 * index] for index in range(6)}
    for index, (job_id, prompt) in enumerate(prompts.items()):
        asks = index % 3 != 2
        bench.loop.admit(asked(job_id, prompt) if asks else claim(job_id, prompt=prompt))
        bench.loop.step()
    bench.run()

    for index, (job_id, prompt) in enumerate(prompts.items()):
        lone = Bench(runner=type(bench.engine._runner))
        lone.loop.admit(claim(job_id, prompt=prompt))
        lone.run()
        assert bench.sink.tokens(job_id) == lone.sink.tokens(job_id)
        if index % 3 != 2:
            check(bench, told(bench, job_id), prompt)


@pytest.mark.parametrize("stream", list(StreamMode))
@pytest.mark.parametrize("cut", [1, 3, 5])
def test_a_later_attempt_tells_what_is_left(bench: Bench, cut: int, stream: StreamMode) -> None:
    """What an earlier attempt published is neither lost nor told again, nor computed if cached."""
    whole = Bench(runner=type(bench.engine._runner))
    whole.scheduler._budget._max_tokens = 32
    whole.loop.admit(asked(stream=stream))
    whole.run()
    # As coarse as a stream may be, and finer.
    *parts, _ = _split(whole.sink.parts["j"])
    history = tuple(parts[:cut])

    bench.loop.admit(claim("before", prompt=PROMPT))
    bench.run()
    bench.loop.admit(asked(stream=stream, history=history, sampler_version=1))
    bench.run()

    num_told = sum(len(part.prompt.logprobs) for part in history if part.prompt)
    check(bench, told(bench), start=1 + num_told)
    tokens = [token for part in history for token in part.token_ids]
    assert tokens + bench.sink.tokens("j") == whole.sink.tokens("j")
    end = bench.sink.ends["j"]
    assert isinstance(end, Finished)
    assert end.usage.cached_tokens in ([num_told] if num_told < 89 else [89, 90])


def _split(parts: list[DeltaPart]) -> Iterator[DeltaPart]:
    """Take parts that tell of the prompt and of the output apart."""
    for part in parts:
        if part.prompt is not None:
            yield DeltaPart(choice=0, start=0, token_ids=(), prompt=part.prompt)
        if part.token_ids or part.text:
            yield part.model_copy(update={"prompt": None})


def test_a_row_that_is_taken_away_is_told_of_once(bench: Bench) -> None:
    """A preempted prompt goes on where its told part ends; nothing is told or computed twice."""
    computed = count_prefilled_tokens(bench)
    bench.scheduler._budget._max_tokens = 32
    bench.loop.admit(asked())
    bench.loop.step()
    bench.loop.step()
    # It sends all others away until its first token.
    bench.loop.admit(claim("struck", prompt=(8, 8, 8), strikes=1))
    bench.loop.step()
    assert bench.loop.figures.num_running == 1
    bench.run()

    check(bench, told(bench))
    # Its last token may come with a decode step.
    assert computed() <= len(PROMPT) + 3


def test_positions_that_are_read_twice_are_told_once() -> None:
    """What is known already is left out, what would leave a hole waits to be read again."""
    vocabulary = Vocabulary(one_character_tokenizer())
    log = PromptLog(vocabulary, PROMPT)
    sequence = Sequence(claim().job)

    def read(first: int, last: int) -> None:
        logprobs = [TokenLogprobs(-float(place), [], []) for place in range(first, last)]
        log.push(PromptReading(sequence, first, logprobs))

    read(0, 4)
    assert log.take().end == 5
    read(2, 7)
    read(9, 12)
    part = log.take()
    assert (part.start, part.end) == (5, 8)
    assert [each.logprob for each in part.logprobs] == [-4.0, -5.0, -6.0]
    assert log.take() is None


def test_rows_that_are_computed_apart_after_a_fault_are_told_of_once(bench: Bench) -> None:
    """A forward that raises is computed row by row; each position still comes once."""
    plain = bench.engine._runner.prefill

    def faulty(rows, chunks, reader=None):
        result = plain(rows, chunks, reader)
        if len(rows) > 1:
            raise RuntimeError("too many rows")
        return result

    bench.engine._runner.prefill = faulty
    bench.scheduler._budget._max_tokens = 64
    bench.loop.admit(asked("one"))
    bench.loop.admit(asked("two", prompt=PROMPT[::-1]))
    bench.run()

    check(bench, told(bench, "one"))
    check(bench, told(bench, "two"), PROMPT[::-1])


def test_logits_that_are_no_numbers_fail_the_job_and_nothing_else(bench: Bench) -> None:
    """A prompt on which the model breaks down is an error, not an entry."""
    embed = bench.model.model.embed_tokens

    def poisoned(tokens):
        states = embed(tokens)
        return mx.where((tokens == 99)[..., None], mx.array(float("nan")), states)

    bench.model.model.embed_tokens = poisoned
    bench.loop.admit(asked("bad", prompt=(99, 5, 9)))
    bench.loop.admit(asked("good", prompt=(5, 9, 17)))
    bench.run()

    assert isinstance(bench.sink.ends["bad"], Failed)
    assert len(told(bench, "good")) == 2


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_5", "mamba2"])
def test_models_whose_state_cannot_be_cut_tell_the_same(family: str) -> None:
    """Chunks end at snapshots there, and a warm cache changes nothing."""
    bench = Bench(runner=MergedRunner, alter=lambda _: tiny_model(family))
    for job_id in ("cold", "warm"):
        bench.loop.admit(asked(job_id))
        bench.loop.admit(claim(f"{job_id}-plain", prompt=PROMPT))
        bench.run()
        expected = alone(bench.model, PROMPT)
        for entry, row in zip(told(bench, job_id), expected, strict=True):
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-3)
