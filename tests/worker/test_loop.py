"""The engine thread's loop: what each job gets, and what it costs the others."""

from typing import Any

import mlx.core as mx
import pytest
from headwater.schemas import (
    Cancelled,
    Channel,
    Failed,
    Finished,
    FinishReason,
    SamplingParams,
    StreamMode,
)
from headwater.worker.channel_family import ChannelFamily, Mode
from headwater.worker.job_opening import JobOpener
from headwater.worker.messages import Claim
from headwater.worker.text import SequenceText

from tests.exactness.reference import greedy_alone
from tests.tiny_models import VOCABULARY_SIZE

from .loop_bench import PROMPT, Bench, by_choice, claim, logprobs_of, text_of


def test_a_job_gives_what_its_prompt_alone_gives(bench: Bench) -> None:
    bench.loop.admit(claim())
    bench.run()

    expected = greedy_alone(bench.model, PROMPT, 8)
    assert bench.sink.tokens("j") == expected
    assert bench.sink.text("j") == text_of(expected)
    end = bench.sink.ends["j"]
    assert isinstance(end, Finished)
    assert end.choices[0].finish_reason is FinishReason.LENGTH
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (6, 8)


def test_more_jobs_than_rows_all_end_and_reuse_the_prefix(bench: Bench) -> None:
    prompts = {f"j{index}": (*PROMPT * 4, index) for index in range(12)}
    for job_id, prompt in prompts.items():
        bench.loop.admit(claim(job_id, prompt=prompt))
    bench.run()

    for job_id, prompt in prompts.items():
        assert bench.sink.tokens(job_id) == greedy_alone(bench.model, prompt, 8)
    cached = [end.usage.cached_tokens for end in bench.sink.ends.values()]
    assert sorted(cached) == [0] + [24] * 11
    assert bench.loop.figures.cache_hit_share == pytest.approx(24 * 11 / (25 * 12))


def test_a_stop_string_ends_a_job_and_shows_nowhere(bench: Bench) -> None:
    expected = greedy_alone(bench.model, PROMPT, 8)
    stop = text_of(expected[3:5])

    bench.loop.admit(claim(stop=(stop,)))
    bench.run()

    end = bench.sink.ends["j"]
    assert isinstance(end, Finished)
    assert end.choices[0].matched_stop == stop
    assert bench.sink.text("j") == text_of(expected[:3])
    assert end.usage.completion_tokens == len(bench.sink.tokens("j")) == 5


@pytest.mark.parametrize("stream", list(StreamMode))
def test_channels_reach_the_deltas_the_end_and_the_usage(stream: StreamMode) -> None:
    expected = text_of(greedy_alone(Bench().model, PROMPT, 8))
    first, second = expected[1], expected[4]
    edges = {Mode.CONTENT: {first: Mode.REASONING}, Mode.REASONING: {second: Mode.CONTENT}}
    bench = Bench(family=ChannelFamily(edges))

    bench.loop.admit(claim(stream=stream))
    bench.run()

    end = bench.sink.ends["j"]
    assert isinstance(end, Finished)
    assert end.usage.reasoning_tokens == 2
    spans = [span for part in bench.sink.parts["j"] for span in part.text]
    content = "".join(span.text for span in spans if span.channel is Channel.CONTENT)
    reasoning = "".join(span.text for span in spans if span.channel is Channel.REASONING)
    if stream is StreamMode.FINAL:
        content, reasoning = end.choices[0].text, end.choices[0].reasoning
    assert (content, reasoning) == (expected[0] + expected[5:], expected[2:4])


def test_a_final_job_tells_its_text_at_the_end_only(bench: Bench) -> None:
    bench.loop.admit(claim(stream=StreamMode.FINAL))
    bench.run()

    end = bench.sink.ends["j"]
    assert isinstance(end, Finished)
    assert end.choices[0].text == text_of(greedy_alone(bench.model, PROMPT, 8))
    assert bench.sink.text("j") == ""


def test_a_final_job_publishes_its_tokens_at_checkpoints(bench: Bench) -> None:
    bench.loop.admit(claim(stream=StreamMode.FINAL, max_tokens=40))
    for _ in range(10):
        bench.loop.step()
    first = bench.sink.tokens("j")
    bench.now = 6.0
    bench.loop.step()
    second = bench.sink.tokens("j")
    bench.run()

    assert len(first) == 1
    assert 1 < len(second) < 40
    assert bench.sink.tokens("j") == greedy_alone(bench.model, PROMPT, 40)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_a_cancelled_job_ends_with_the_text_it_has(bench: Bench, num_steps: int) -> None:
    bench.loop.admit(claim(max_tokens=40))
    bench.loop.admit(claim("other"))
    for _ in range(num_steps):
        bench.loop.step()
    bench.loop.cancel("j")
    bench.run()

    expected = greedy_alone(bench.model, PROMPT, 40)
    assert isinstance(bench.sink.ends["j"], Cancelled)
    tokens = bench.sink.tokens("j")
    assert tokens == expected[: len(tokens)]
    assert len(tokens) < 40
    assert bench.sink.tokens("other") == expected[:8]


def test_a_dropped_job_publishes_nothing_more(bench: Bench) -> None:
    bench.loop.admit(claim(max_tokens=40))
    for _ in range(4):
        bench.loop.step()
    before = bench.sink.tokens("j")
    bench.loop.drop("j")
    bench.run()

    assert bench.sink.tokens("j") == before
    assert bench.sink.ends == {}


def test_a_job_past_its_deadline_fails_and_frees_its_row(bench: Bench) -> None:
    bench.loop.admit(
        claim(max_tokens=100, deadline_s=10.0, first_started_ms=1000, begun_at_ms=4000)
    )
    bench.loop.step()
    bench.now = 6.9
    bench.loop.step()
    assert bench.sink.ends == {}
    bench.now = 7.0
    bench.run()

    end = bench.sink.ends["j"]
    assert isinstance(end, Failed)
    assert end.code == "deadline_exceeded"


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"prompt": (VOCABULARY_SIZE,)}, "token_id_out_of_range"),
        ({"stop_token_ids": (VOCABULARY_SIZE,)}, "token_id_out_of_range"),
        ({"sampling": {"bad_token_ids": (VOCABULARY_SIZE,)}}, "token_id_out_of_range"),
        ({"sampling": {"logit_bias": {VOCABULARY_SIZE: 1.0}}}, "token_id_out_of_range"),
        ({"max_tokens": 251}, "context_length_exceeded"),
        ({"tokenizer_fingerprint": "sha256:other"}, "tokenizer_mismatch"),
    ],
)
def test_a_job_that_does_not_fit_the_model_fails_at_once(
    bench: Bench, fields: dict[str, Any], code: str
) -> None:
    bench.loop.admit(claim(**fields))

    end = bench.sink.ends["j"]
    assert isinstance(end, Failed)
    assert end.code == code
    assert bench.loop.is_idle


def test_a_job_without_any_token_left_fails_and_says_so(bench: Bench) -> None:
    sampling = SamplingParams(bad_token_ids=tuple(range(VOCABULARY_SIZE)))
    bench.loop.admit(claim("bad", sampling=sampling))
    bench.loop.admit(claim("good"))
    bench.run()

    end = bench.sink.ends["bad"]
    assert isinstance(end, Failed)
    assert end.code == "no_token_allowed"
    assert bench.sink.tokens("good") == greedy_alone(bench.model, PROMPT, 8)


def test_every_token_comes_with_its_logprobs(bench: Bench) -> None:
    bench.loop.admit(claim(logprobs=3))
    bench.loop.admit(claim("plain"))
    bench.run()

    tokens = greedy_alone(bench.model, PROMPT, 8)
    told = logprobs_of(bench.sink.parts["j"])
    assert [each.token_id for each in told] == tokens
    assert [each.text for each in told] == list(text_of(tokens))
    assert all(len(each.top) == 3 and each.top[0].token_id == each.token_id for each in told)
    assert all(part.logprobs is None for part in bench.sink.parts["plain"])
    end = bench.sink.ends["j"]
    assert isinstance(end, Finished)
    assert end.choices[0].logprobs is None


POISON = 77


class PoisonedModel:
    """Computes NaN for whoever has the poison token in its prompt."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, inputs: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        logits = self._model(inputs, *args, **kwargs)
        is_poisoned = mx.any(inputs == POISON, axis=-1)[:, None, None]
        return mx.where(is_poisoned, mx.nan, logits)


def test_a_row_that_cannot_be_computed_fails_alone(bench: Bench) -> None:
    poisoned = Bench(pipelined=bench.pipelined, runner=bench.runner, alter=PoisonedModel)
    poisoned.loop.admit(claim("bad", prompt=(1, 2, POISON)))
    poisoned.loop.admit(claim("good"))
    poisoned.run()

    end = poisoned.sink.ends["bad"]
    assert isinstance(end, Failed)
    assert end.code == "engine_error"
    assert poisoned.sink.tokens("good") == greedy_alone(bench.model, PROMPT, 8)


def test_a_job_whose_opening_raises_fails_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_job = JobOpener.open

    def open_or_raise(self: JobOpener, wanted: Claim) -> Any:
        if wanted.job_id == "bad":
            raise KeyError("no such thing")
        return open_job(self, wanted)

    monkeypatch.setattr(JobOpener, "open", open_or_raise)
    bench.loop.admit(claim("good"))
    bench.loop.admit(claim("bad"))
    bench.run()

    end = bench.sink.ends["bad"]
    assert isinstance(end, Failed)
    assert end.code == "engine_error"
    assert bench.sink.tokens("good") == greedy_alone(bench.model, PROMPT, 8)


def test_a_job_whose_text_raises_fails_alone_with_the_text_before(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    push = SequenceText.push

    def push_or_raise(self: SequenceText, token_id: int) -> Any:
        if self is bad_text and len(bench.sink.tokens("bad")) == 3:
            raise ValueError("no character")
        return push(self, token_id)

    bench.loop.admit(claim("good"))
    bench.loop.admit(claim("bad", prompt=(8, 8, 8)))
    bad_text = bench.loop._runs["bad"].choices[0].text
    monkeypatch.setattr(SequenceText, "push", push_or_raise)
    bench.run()

    assert isinstance(bench.sink.ends["bad"], Failed)
    assert bench.sink.tokens("bad") == greedy_alone(bench.model, (8, 8, 8), 3)
    assert bench.sink.tokens("good") == greedy_alone(bench.model, PROMPT, 8)


def test_a_struck_job_runs_beside_nobody_until_its_first_token(bench: Bench) -> None:
    bench.loop.admit(claim("other", max_tokens=30))
    for _ in range(5):
        bench.loop.step()
    bench.loop.admit(claim("struck", prompt=(8, 8, 8), strikes=1))
    while not bench.sink.tokens("struck"):
        bench.loop.step()
        if bench.sink.tokens("struck"):
            break
        assert bench.loop.figures.num_running <= 1
    bench.run()

    assert bench.sink.tokens("other") == greedy_alone(bench.model, PROMPT, 30)
    assert bench.sink.tokens("struck") == greedy_alone(bench.model, (8, 8, 8), 8)


def test_choices_draw_for_themselves_and_share_the_prompt(bench: Bench) -> None:
    prompt = PROMPT * 4
    sampling = SamplingParams(temperature=1.0, seed=3, n=3)
    bench.loop.admit(claim(prompt=prompt, sampling=sampling))
    bench.run()

    outputs = by_choice(bench.sink.parts["j"])
    assert sorted(outputs) == [0, 1, 2]
    assert all(len(tokens) == 8 for tokens in outputs.values())
    assert len({tuple(tokens) for tokens in outputs.values()}) == 3
    end = bench.sink.ends["j"]
    assert isinstance(end, Finished)
    assert [choice.choice for choice in end.choices] == [0, 1, 2]
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (24, 24)
    assert bench.cache.statistics.num_reused_tokens >= 2 * 23
