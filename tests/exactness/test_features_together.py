"""Everything that jobs can ask for at once, in one batch that they join and leave one by one."""

import random

import pytest
from headwater.schemas import Channel, End, Finished, JobKind, Pooling, SamplingParams, StreamMode
from headwater.worker.channel_family import ChannelFamily, Mode
from headwater.worker.engine.merged_runner import MergedRunner
from headwater.worker.engine.shared_kv.runner import SharedPrefixRunner
from headwater.worker.messages import Claim

from tests.tiny_models import VOCABULARY_SIZE
from tests.worker.test_loop import Bench, claim, text_of

NUM_JOBS = 16
SHARED = tuple(index * 5 % VOCABULARY_SIZE for index in range(40))
FAMILY = ChannelFamily(
    {
        Mode.CONTENT: {text_of([token]): Mode.REASONING for token in range(24)},
        Mode.REASONING: {text_of([token]): Mode.CONTENT for token in range(24, 60)},
    }
)


def generation(job_id: str, draw: random.Random) -> Claim:
    sampling = SamplingParams(
        temperature=draw.choice([0.0, 0.7, 1.3]),
        top_k=draw.choice([0, 5, 40]),
        top_p=draw.choice([1.0, 0.9]),
        min_p=draw.choice([0.0, 0.05]),
        repetition_penalty=draw.choice([1.0, 1.3]),
        frequency_penalty=draw.choice([0.0, 0.5]),
        logit_bias={draw.randrange(VOCABULARY_SIZE): 2.0},
        bad_token_ids=(draw.randrange(VOCABULARY_SIZE),),
        seed=draw.randrange(1000),
        n=draw.choice([1, 1, 2]),
    )
    return claim(
        job_id,
        prompt=(*SHARED, *draw.choices(range(VOCABULARY_SIZE), k=draw.randint(1, 20))),
        sampling=sampling,
        max_tokens=draw.randint(4, 30),
        stop=tuple(text_of(draw.choices(range(VOCABULARY_SIZE), k=1)) for _ in range(3)),
        include_stop_str=draw.random() < 0.5,
        logprobs=draw.choice([None, 0, 3]),
        stream=draw.choice(list(StreamMode)),
        split_channels=draw.random() < 0.8,
    )


def readout(job_id: str, draw: random.Random) -> Claim:
    prompt = (*SHARED, *draw.choices(range(VOCABULARY_SIZE), k=draw.randint(1, 20)))
    if draw.random() < 0.5:
        pooling = draw.choice(list(Pooling))
        fields = {"kind": JobKind.EMBEDDING, "pooling": pooling, "max_tokens": 1}
        return claim(job_id, prompt=prompt, **fields)
    continuations = [
        tuple(draw.choices(range(VOCABULARY_SIZE), k=draw.randint(1, 6))) for _ in range(3)
    ]
    fields = {"kind": JobKind.SCORE, "continuations": continuations, "max_tokens": 1}
    return claim(job_id, prompt=prompt, **fields)


def claims(seed: int) -> list[Claim]:
    draw = random.Random(seed)
    return [
        (readout if index % 5 == 4 else generation)(f"j{index}", draw) for index in range(NUM_JOBS)
    ]


def told(bench: Bench, job_id: str) -> dict:
    """Return all that a reader gets of a job, put together by choice and channel."""
    texts: dict = {}
    for part in bench.sink.parts.get(job_id, []):
        texts.setdefault(("tokens", part.choice), []).extend(part.token_ids)
        for span in part.text:
            key = (part.choice, span.channel)
            texts[key] = texts.get(key, "") + span.text
    return texts


def check_ends(one: End, other: End) -> None:
    assert isinstance(one, Finished)
    assert isinstance(other, Finished)
    for mine, theirs in zip(one.choices, other.choices, strict=True):
        # Their numbers are compared elsewhere.
        left_out = {"logprobs": None}
        assert mine.model_copy(update=left_out) == theirs.model_copy(update=left_out)
    assert one.usage.completion_tokens == other.usage.completion_tokens
    assert one.usage.reasoning_tokens == other.usage.reasoning_tokens
    for mine, theirs in zip(one.scores, other.scores, strict=True):
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-3)
    if one.embedding is not None:
        assert one.embedding.floats() == pytest.approx(other.embedding.floats(), abs=1e-3)


@pytest.mark.parametrize("runner", [MergedRunner, SharedPrefixRunner])
@pytest.mark.parametrize("seed", [1, 2])
def test_each_job_gets_what_it_gets_alone(runner, seed: int) -> None:
    together = Bench(runner=runner, family=FAMILY, max_batch=NUM_JOBS)
    for each in claims(seed):
        together.loop.admit(each)
        together.loop.step()
        together.loop.step()
    together.run()

    for each in claims(seed):
        alone = Bench(runner=runner, family=FAMILY, max_batch=NUM_JOBS)
        alone.loop.admit(each)
        alone.run()
        assert told(together, each.job_id) == told(alone, each.job_id)
        check_ends(together.sink.ends[each.job_id], alone.sink.ends[each.job_id])
    spans = (s for parts in together.sink.parts.values() for part in parts for s in part.text)
    assert {span.channel for span in spans} == {Channel.CONTENT, Channel.REASONING}
