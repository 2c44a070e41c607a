"""The engine thread's loop, going on where an earlier attempt stood."""

import pytest
from headwater.schemas import DeltaPart, Failed, Finished, SamplingParams, StreamMode
from headwater.worker.engine.sampler import SAMPLER_VERSION

from tests.exactness.reference import greedy_alone
from tests.tiny_models import VOCABULARY_SIZE

from .loop_bench import PROMPT, Bench, by_choice, claim, logprobs_of, text_of


def test_what_is_handed_back_is_gone_on_with_at_the_next_token(bench: Bench) -> None:
    bench.loop.admit(claim(max_tokens=20))
    for _ in range(8):
        bench.loop.step()
    bench.loop.hand_back("drain")
    bench.run()
    history = tuple(bench.sink.parts["j"])
    assert bench.sink.released == ["j"]
    assert 0 < len(bench.sink.tokens("j")) < 20

    heir = Bench(pipelined=bench.pipelined, runner=bench.runner)
    heir.loop.admit(claim(max_tokens=20, history=history, sampler_version=SAMPLER_VERSION))
    heir.run()

    expected = greedy_alone(bench.model, PROMPT, 20)
    assert bench.sink.tokens("j") + heir.sink.tokens("j") == expected
    assert bench.sink.text("j") + heir.sink.text("j") == text_of(expected)
    assert heir.sink.restarted == []
    assert heir.sink.parts["j"][0].start == len(bench.sink.tokens("j"))


def _history(
    token_ids: list[int], text: str | None = None, choice: int = 0
) -> tuple[DeltaPart, ...]:
    span = {"text_start": 0, "text": text_of(token_ids) if text is None else text}
    return (DeltaPart(choice=choice, start=0, token_ids=token_ids, text=(span,)),)


def test_a_job_that_had_only_its_end_left_ends_without_generating(bench: Bench) -> None:
    tokens = greedy_alone(bench.model, PROMPT, 8)
    bench.loop.admit(claim(history=_history(tokens)))

    assert isinstance(bench.sink.ends["j"], Finished)
    assert bench.sink.tokens("j") == []
    assert bench.loop.is_idle


def test_text_that_cannot_be_continued_is_restarted(bench: Bench) -> None:
    bench.loop.admit(claim(history=_history([1, 2], text="other text")))
    bench.run()

    assert bench.sink.restarted == ["j"]
    assert bench.sink.tokens("j") == greedy_alone(bench.model, PROMPT, 8)


def test_tokens_that_the_model_does_not_have_are_not_continued(bench: Bench) -> None:
    bench.loop.admit(claim(history=_history([1, VOCABULARY_SIZE], text="")))
    bench.run()

    assert bench.sink.restarted == ["j"]
    assert bench.sink.tokens("j") == greedy_alone(bench.model, PROMPT, 8)


def test_a_deadline_that_passed_between_attempts_leaves_the_text_as_it_is(bench: Bench) -> None:
    # The last attempt let its held text out and died before it had written the end.
    history = _history([1, 2], text=text_of([1, 2]) + "held")
    bench.loop.admit(
        claim(history=history, deadline_s=2.0, first_started_ms=1000, begun_at_ms=4000)
    )

    end = bench.sink.ends["j"]
    assert isinstance(end, Failed)
    assert end.code == "deadline_exceeded"
    assert bench.sink.restarted == []


@pytest.mark.parametrize(("temperature", "restarts"), [(0.0, False), (0.8, True)])
def test_another_samplers_draws_are_not_continued(
    bench: Bench, temperature: float, restarts: bool
) -> None:
    sampling = SamplingParams(temperature=temperature, seed=1)
    history = _history(greedy_alone(bench.model, PROMPT, 2))
    bench.loop.admit(claim(history=history, sampler_version=SAMPLER_VERSION + 1, sampling=sampling))
    bench.run()

    assert (bench.sink.restarted == ["j"]) is restarts


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_penalties_after_a_resume_count_the_published_tokens(
    bench: Bench, temperature: float
) -> None:
    sampling = SamplingParams(
        temperature=temperature,
        seed=5,
        repetition_penalty=1.8,
        repetition_window=6,
        presence_penalty=1.5,
        frequency_penalty=1.0,
    )
    bench.loop.admit(claim(sampling=sampling, max_tokens=24))
    bench.loop.admit(claim("other", max_tokens=9))
    bench.run()
    whole = bench.sink.tokens("j")

    heir = Bench(pipelined=bench.pipelined, runner=bench.runner)
    history = _history(whole[:11])
    heir.loop.admit(
        claim(sampling=sampling, max_tokens=24, history=history, sampler_version=SAMPLER_VERSION)
    )
    heir.run()

    assert heir.sink.tokens("j") == whole[11:]
    assert len(set(whole)) > len(set(greedy_alone(bench.model, PROMPT, 24)))


def test_logprobs_are_told_once_across_a_hand_over_and_whole_at_a_final_jobs_end(
    bench: Bench,
) -> None:
    bench.loop.admit(claim(logprobs=1, stream=StreamMode.FINAL, max_tokens=20))
    for _ in range(8):
        bench.loop.step()
    bench.loop.hand_back("drain")
    bench.run()
    history = tuple(bench.sink.parts["j"])
    heir = Bench(pipelined=bench.pipelined, runner=bench.runner)
    heir.loop.admit(claim(logprobs=1, stream=StreamMode.FINAL, max_tokens=20, history=history))
    heir.run()

    expected = greedy_alone(bench.model, PROMPT, 20)
    told = [*logprobs_of(history), *logprobs_of(heir.sink.parts["j"])]
    assert [each.token_id for each in told] == expected
    end = heir.sink.ends["j"]
    assert isinstance(end, Finished)
    assert end.choices[0].logprobs == tuple(told)


def test_choices_are_resumed_each_at_its_own_token(bench: Bench) -> None:
    sampling = SamplingParams(temperature=1.0, seed=3, n=2)
    bench.loop.admit(claim(sampling=sampling))
    bench.run()
    whole = by_choice(bench.sink.parts["j"])
    history = tuple(
        _history(whole[choice][:cut], choice=choice)[0] for choice, cut in ((0, 5), (1, 2))
    )

    heir = Bench(pipelined=bench.pipelined, runner=bench.runner)
    heir.loop.admit(claim(sampling=sampling, history=history, sampler_version=SAMPLER_VERSION))
    heir.run()

    rest = by_choice(heir.sink.parts["j"])
    assert rest == {0: whole[0][5:], 1: whole[1][2:]}
