"""What jobs that generate nothing may say."""

import struct

import pytest
from headwater.producer.client import new_embedding_job, new_job, new_score_job
from headwater.schemas import Embedding, GenerationJob, JobKind, Pooling, SchemaError, Score


def test_a_scoring_job_survives_the_wire() -> None:
    job = new_score_job("m", [1, 2], [[3], [4, 5]])

    assert GenerationJob.decode(job.encode()) == job
    assert (job.kind, job.continuations) == (JobKind.SCORE, ((3,), (4, 5)))


def test_an_embedding_job_survives_the_wire() -> None:
    job = new_embedding_job("m", [1, 2], pooling="mean", normalize=False)

    assert GenerationJob.decode(job.encode()) == job
    assert (job.kind, job.pooling, job.normalize) == (JobKind.EMBEDDING, Pooling.MEAN, False)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"kind": "score"}, "one at least"),
        ({"kind": "score", "continuations": [[]]}, "at least 1"),
        ({"continuations": [[1]]}, 'kind "score"'),
        ({"kind": "embedding", "continuations": [[1]]}, 'kind "score"'),
        ({"kind": "embedding", "max_tokens": 2}, "must be 1"),
        ({"kind": "embedding", "sampling": {"n": 2}}, "must be 1"),
        ({"kind": "embedding", "stop": ["x"]}, "stop means nothing"),
        ({"kind": "embedding", "logprobs": 1}, "logprobs means nothing"),
        ({"kind": "score", "continuations": [[1]], "prompt_logprobs": 0}, "prompt_logprobs means"),
        ({"kind": "embeddings"}, "kind"),
    ],
)
def test_what_a_kind_does_not_take_is_refused_by_name(fields, problem) -> None:
    with pytest.raises(SchemaError, match=problem):
        GenerationJob.parse(
            {"job_id": "j", "model": "m", "prompt_token_ids": (1,), "max_tokens": 1} | fields
        )


def test_the_context_must_hold_the_longest_continuation_and_the_share_counts_all() -> None:
    job = new_score_job("m", [1, 2], [[3], [4, 5, 6]])

    assert (job.num_tokens_at_most, job.num_tokens_in_all) == (5, 6)


def test_every_choice_counts_for_the_share_and_the_prompt_once() -> None:
    """A namespace pays for eight texts when it asks for eight, for one prompt all the same."""
    one, eight = (new_job("m", [1] * 100, max_tokens=10, sampling={"n": n}) for n in (1, 8))
    assert (one.num_tokens_in_all, eight.num_tokens_in_all) == (110, 180)
    assert eight.num_tokens_at_most == one.num_tokens_at_most == 110


def test_a_vector_is_float32_in_base64() -> None:
    embedding = Embedding.of(struct.pack("<3f", 0.5, -2.0, 0.0))

    assert (embedding.dimensions, embedding.floats()) == (3, [0.5, -2.0, 0.0])
    assert embedding.vector == "AAAAPwAAAMAAAAAA"


def test_a_continuations_logprob_is_its_tokens_together() -> None:
    assert Score(continuation=0, logprobs=(-1.5, -0.5), is_greedy=False).logprob == -2.0
