"""Submitting: what is refused, and what a job that is taken looks like."""

import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest
from headwater.producer import client_queue
from headwater.producer.client import Producer, SubmitSettings, new_job, new_score_job
from headwater.producer.errors import (
    DuplicateJob,
    InvalidRequest,
    PayloadTooLarge,
    PromptTooLong,
    QueueFull,
    ServerUnavailable,
    UnknownModel,
    UnsupportedToolChoice,
)
from headwater.schemas import OrjsonSerializer, SamplingParams, SchemaError, keys, limits
from redis import Redis
from rq import Queue
from rq.job import Job

from .demo_queue import CARD, job, payload, queued_ids


def test_a_job_lies_in_its_queue_as_the_protocol_says(redis: Redis, producer: Producer) -> None:
    job_id = producer.submit(job(priority="high", namespace="team"))

    rq_job = Job.fetch(job_id, connection=redis, serializer=OrjsonSerializer)
    assert queued_ids(redis, "demo.high.team") == [job_id]
    assert redis.smembers(keys.active_queues_key("demo")) == {b"demo.high.team"}
    assert Queue.all(connection=redis) == [Queue("demo.high.team", connection=redis)]
    assert rq_job.func_name == keys.JOB_FUNCTION
    assert rq_job.description == f"generate {job_id}"
    assert rq_job.timeout == -1
    assert rq_job.retries_left == 1_000_000
    assert rq_job.enqueue_at_front_on_retry
    assert rq_job.get_status() == "queued"
    assert 3600 < rq_job.result_ttl == rq_job.failure_ttl < 10 * 24 * 3600


def test_submit_fills_in_seed_and_fingerprint(redis: Redis, producer: Producer) -> None:
    first = payload(redis, producer.submit(job()))
    second = payload(redis, producer.submit(job()))

    assert first.sampling.seed is not None
    assert first.sampling.seed != second.sampling.seed
    assert first.tokenizer_fingerprint == CARD.tokenizer_fingerprint


def test_a_seed_that_was_given_is_kept(redis: Redis, producer: Producer) -> None:
    assert payload(redis, producer.submit(job(sampling={"seed": 0}))).sampling.seed == 0


def test_an_unknown_model_lists_the_known_ones(producer: Producer) -> None:
    with pytest.raises(UnknownModel, match="'dmeo'; known: demo"):
        producer.submit(new_job("dmeo", [1], max_tokens=1))


def test_without_any_worker_the_error_says_to_start_one(redis: Redis) -> None:
    with pytest.raises(UnknownModel, match="start one first"):
        Producer(redis).submit(job())


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        (
            {"prompt_token_ids": (1, 100)},
            InvalidRequest,
            r"prompt_token_ids\[1\] is 100; .* 0 to 99",
        ),
        ({"stop_token_ids": (7, 200)}, InvalidRequest, r"stop_token_ids\[1\] is 200"),
        (
            {"sampling": SamplingParams(bad_token_ids=(100,))},
            InvalidRequest,
            r"bad_token_ids\[0\] is 100",
        ),
        (
            {"sampling": SamplingParams(logit_bias={100: 1})},
            InvalidRequest,
            "logit_bias names token 100",
        ),
        (
            {"max_tokens": 62},
            PromptTooLong,
            r"prompt \(3 tokens\) \+ max_tokens \(62\) .*\(64 tokens\)",
        ),
        ({"tokenizer_fingerprint": "sha256:other"}, InvalidRequest, "another tokenizer"),
    ],
)
def test_a_job_that_does_not_fit_the_model_is_refused(
    redis: Redis, producer: Producer, fields: dict[str, object], error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        producer.submit(job().model_copy(update=fields))
    assert queued_ids(redis) == []


def test_a_worker_that_came_back_with_another_model_is_noticed(
    redis: Redis, producer: Producer
) -> None:
    producer.submit(job())
    larger = CARD.model_copy(update={"context_length": 1000})
    redis.set(keys.model_card_key("demo"), larger.encode())

    producer.submit(job(max_tokens=500))


def test_a_job_that_fills_the_context_exactly_is_taken(producer: Producer) -> None:
    producer.submit(job(max_tokens=61))


def test_the_check_can_be_left_out_or_made_with_a_card_of_ones_own(redis: Redis) -> None:
    Producer(redis, SubmitSettings(check_model=False)).submit(job())
    Producer(redis).submit(job(), card=CARD)

    assert len(queued_ids(redis)) == 2


@pytest.mark.parametrize("value", ["x", 1.5, -1, True, 2**31])
def test_a_bad_token_id_is_refused_before_anything_is_sent(value: object) -> None:
    with pytest.raises(SchemaError, match=r"prompt_token_ids\.1"):
        new_job("demo", [1, value], max_tokens=1)  # type: ignore[list-item]


def test_a_job_id_is_used_once(redis: Redis, producer: Producer) -> None:
    producer.submit(job(job_id="mine"))

    with pytest.raises(DuplicateJob, match="mine"):
        producer.submit(job(job_id="mine", max_tokens=9))
    assert queued_ids(redis) == ["mine"]
    assert payload(redis, "mine").max_tokens == 4


def test_of_many_submits_of_one_id_at_once_one_wins(redis: Redis, producer: Producer) -> None:
    def submit(number: int) -> bool:
        try:
            producer.submit(job(job_id="mine", metadata={"n": number}))
        except DuplicateJob:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(submit, range(32))) == 1
    assert queued_ids(redis) == ["mine"]


def test_a_payload_above_the_limit_is_refused(
    redis: Redis, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_PAYLOAD_BYTES", 100)

    with pytest.raises(PayloadTooLarge, match="at most 100"):
        producer.submit(job())
    assert queued_ids(redis) == []


def test_submit_many_keeps_the_order_over_its_chunks(redis: Redis, producer: Producer) -> None:
    ids = producer.submit_many(job() for _ in range(600))

    assert queued_ids(redis) == ids


def test_an_error_in_submit_many_names_what_is_on_its_way(redis: Redis, producer: Producer) -> None:
    jobs = [job() for _ in range(300)]
    jobs[290] = jobs[290].model_copy(update={"max_tokens": 100})

    with pytest.raises(PromptTooLong) as caught:
        producer.submit_many(jobs)
    assert list(caught.value.submitted) == queued_ids(redis)
    assert len(caught.value.submitted) == 256


def test_the_same_id_twice_in_one_batch_is_refused(redis: Redis, producer: Producer) -> None:
    with pytest.raises(DuplicateJob, match="twice"):
        producer.submit_many([job(job_id="a"), job(job_id="a")])
    assert queued_ids(redis) == []


def test_a_full_queue_refuses_and_others_go_on(redis: Redis, producer: Producer) -> None:
    limited = Producer(redis, SubmitSettings(max_queue_depth=3))
    limited.submit_many([job(), job()])

    with pytest.raises(QueueFull, match="holds 2 jobs; 2 more"):
        limited.submit_many([job(), job()])
    limited.submit(job())
    with pytest.raises(QueueFull):
        limited.submit(job())
    limited.submit(job(priority="low"))
    assert len(queued_ids(redis)) == 3


def test_a_lost_reply_to_a_submit_neither_doubles_nor_refuses_the_job(
    redis: Redis, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from redis.client import Pipeline
    from redis.exceptions import WatchError

    execute, lost = Pipeline.execute, []

    def execute_and_lose_the_reply(pipeline: Pipeline, raise_on_error: bool = True) -> object:
        reply = execute(pipeline, raise_on_error)
        if not lost:
            lost.append(reply)
            # What redis-py raises where a watching connection breaks.
            raise WatchError("A ConnectionError occurred on while watching one or more keys")
        return reply

    monkeypatch.setattr(Pipeline, "execute", execute_and_lose_the_reply)
    ids = producer.submit_many([job(), job()])

    assert lost
    assert queued_ids(redis) == ids


def test_a_connection_that_breaks_before_a_submit_is_sent_costs_nothing(
    redis: Redis, producer: Producer, broken_watches: list[str]
) -> None:
    ids = producer.submit_many([job(), job()])
    ids.append(producer.submit(job(), idempotency_key="k"))
    with pytest.raises(DuplicateJob):
        producer.submit(job(job_id=ids[0]))

    assert broken_watches == ["EXISTS", "GET"]
    assert queued_ids(redis) == ids


def test_rq_job_states_are_known() -> None:
    states = {
        status: client_queue.parse_rq_job([status.encode(), b"q"])
        for status in ("queued", "started", "stopped")
    }

    assert [job.state for job in states.values() if job] == ["queued", "running", "ended"]
    assert client_queue.parse_rq_job([None, None]) is None


def test_a_client_that_decodes_replies_is_refused(redis_url: str) -> None:
    with (
        Redis.from_url(redis_url, decode_responses=True) as client,
        pytest.raises(ServerUnavailable, match="decode_responses"),
    ):
        Producer(client)


def test_a_payload_that_is_none_is_read_as_nothing() -> None:
    bomb = zlib.compress(b"[" * (limits.MAX_PAYLOAD_BYTES + 1))

    for data in (
        None,
        b"",
        b"junk",
        zlib.compress(b"[1]"),
        zlib.compress(b'["os.system",null,[],{}]'),
        bomb,
    ):
        assert client_queue.read_payload(data) is None


def test_an_adapter_that_the_model_does_not_have_is_refused(redis: Redis) -> None:
    card = CARD.model_copy(update={"adapters": ("legal", "tone")})

    with pytest.raises(InvalidRequest, match="no adapter 'tune'; it has: legal, tone"):
        Producer(redis).submit(job(adapter="tune"), card=card)
    assert queued_ids(redis) == []
    Producer(redis).submit(job(adapter="tone"), card=card)


def test_continuations_must_fit_the_context_and_the_vocabulary(producer: Producer) -> None:
    with pytest.raises(PromptTooLong, match="longest continuation"):
        producer.submit(new_score_job("demo", [1] * 60, [[1], [2] * 5]))
    with pytest.raises(InvalidRequest, match=r"continuations\[1\]\[0\] is 100"):
        producer.submit(new_score_job("demo", [1], [[1], [100]]))


def test_a_call_is_forced_only_where_the_model_lets_it_be(redis: Redis, producer: Producer) -> None:
    """Models that write their calls otherwise are known by their card."""
    forced = job(tools=[{"name": "f"}], tool_choice="required")
    with pytest.raises(UnsupportedToolChoice, match='leave tool_choice at "auto"'):
        producer.submit(forced)

    card = CARD.model_copy(update={"enforces_tool_calls": True})
    redis.set(keys.model_card_key("demo"), card.encode())
    assert producer.submit(forced)
