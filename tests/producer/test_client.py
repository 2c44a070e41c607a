import threading
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest
from headwater.producer import client_queue
from headwater.producer.client import (
    CancelOutcome,
    Producer,
    SubmitSettings,
    new_job,
    new_score_job,
)
from headwater.producer.client_queue import job_key, queue_keys
from headwater.producer.errors import (
    DuplicateJob,
    IdempotencyConflict,
    InvalidRequest,
    PayloadTooLarge,
    PromptTooLong,
    QueueFull,
    ServerUnavailable,
    UnknownModel,
    UnsupportedToolChoice,
)
from headwater.producer.tail import Ended
from headwater.schemas import (
    Cancelled,
    GenerationJob,
    ModelCard,
    OrjsonSerializer,
    SamplingParams,
    SchemaError,
    Started,
    keys,
    limits,
)
from redis import Redis
from rq import Queue
from rq.job import Job

from tests.announced import announce_model

from .conftest import SetStatus, WriteEntry

CARD = ModelCard(
    alias="demo",
    source="/models/demo",
    vocab_size=100,
    context_length=64,
    tokenizer_fingerprint="sha256:demo",
)
QUEUE = "demo.normal.default"


@pytest.fixture
def producer(redis: Redis) -> Producer:
    announce_model(redis, CARD)
    return Producer(redis)


def job(**fields: object) -> GenerationJob:
    return new_job("demo", [1, 2, 3], **{"max_tokens": 4, **fields})


def queued_ids(redis: Redis, name: str = QUEUE) -> list[str]:
    return [job_id.decode() for job_id in redis.lrange(queue_keys(name).waiting, 0, -1)]


def payload(redis: Redis, job_id: str) -> GenerationJob:
    (value,) = Job.fetch(job_id, connection=redis, serializer=OrjsonSerializer).args
    return GenerationJob.parse(value)


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


@pytest.fixture
def broken_watches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Break each command that first reads on a watching connection once; return their names."""
    from redis.client import Pipeline
    from redis.exceptions import WatchError

    immediate, broken = Pipeline.immediate_execute_command, []

    def execute_or_break(pipeline: Pipeline, *args: str, **options: object) -> object:
        if args[0] != "WATCH" and args[0] not in broken:
            broken.append(args[0])
            pipeline.reset()
            # What redis-py raises where a watching connection breaks.
            raise WatchError("A ConnectionError occurred on while watching one or more keys")
        return immediate(pipeline, *args, **options)

    monkeypatch.setattr(Pipeline, "immediate_execute_command", execute_or_break)
    return broken


def test_a_connection_that_breaks_before_a_submit_is_sent_costs_nothing(
    redis: Redis, producer: Producer, broken_watches: list[str]
) -> None:
    ids = producer.submit_many([job(), job()])
    ids.append(producer.submit(job(), idempotency_key="k"))
    with pytest.raises(DuplicateJob):
        producer.submit(job(job_id=ids[0]))

    assert broken_watches == ["EXISTS", "GET"]
    assert queued_ids(redis) == ids


def test_a_connection_that_breaks_before_a_cancel_is_sent_costs_nothing(
    producer: Producer, broken_watches: list[str]
) -> None:
    job_id = producer.submit(job())

    assert producer.cancel(job_id) is CancelOutcome.CANCELLED
    assert len(broken_watches) > 1


def test_the_same_request_under_one_key_is_one_job(redis: Redis, producer: Producer) -> None:
    first = producer.submit(job(), idempotency_key="k")

    assert producer.submit(job(), idempotency_key="k") == first
    assert queued_ids(redis) == [first]
    assert redis.ttl(keys.idempotency_key("default", "k")) > 0


def test_another_request_under_one_key_is_a_conflict(redis: Redis, producer: Producer) -> None:
    first = producer.submit(job(), idempotency_key="k")

    for other in (job(max_tokens=5), job(sampling={"seed": 3}), job(stop=("x",))):
        with pytest.raises(IdempotencyConflict, match=first):
            producer.submit(other, idempotency_key="k")
    assert queued_ids(redis) == [first]


def test_namespaces_have_keys_of_their_own(producer: Producer) -> None:
    first = producer.submit(job(namespace="a"), idempotency_key="k")

    assert producer.submit(job(namespace="b"), idempotency_key="k") != first


def test_a_hit_whose_job_is_gone_is_enqueued_again_under_the_same_id(
    redis: Redis, producer: Producer
) -> None:
    first = producer.submit(job(), idempotency_key="k")
    redis.delete(job_key(first), queue_keys(QUEUE).waiting)

    assert producer.submit(job(), idempotency_key="k") == first
    assert queued_ids(redis) == [first]


def test_a_wish_to_cancel_does_not_outlive_its_job(redis: Redis, producer: Producer) -> None:
    first = producer.submit(job(), idempotency_key="k")
    producer.cancel(first)
    redis.delete(job_key(first), keys.stream_key(first))  # they lapse days before the wish

    assert producer.submit(job(), idempotency_key="k") == first
    assert not redis.exists(keys.cancel_key(first))


def test_under_a_full_queue_a_hit_is_still_a_hit(redis: Redis, producer: Producer) -> None:
    limited = Producer(redis, SubmitSettings(max_queue_depth=1))
    first = limited.submit(job(), idempotency_key="k")

    assert limited.submit(job(), idempotency_key="k") == first


def test_many_submits_under_one_key_at_once_make_one_job(redis: Redis, producer: Producer) -> None:
    ready = threading.Barrier(8)

    def submit(_: int) -> str:
        ready.wait(10)
        return producer.submit(job(), idempotency_key="k")

    for _ in range(5):
        with ThreadPoolExecutor(8) as pool:
            ids = set(pool.map(submit, range(8)))
        assert queued_ids(redis) == list(ids)
        assert len(ids) == 1


def test_a_queued_job_is_cancelled_at_once(redis: Redis, producer: Producer) -> None:
    kept, job_id = producer.submit_many([job(), job()])

    assert producer.cancel(job_id) is CancelOutcome.CANCELLED
    assert queued_ids(redis) == [kept]
    (*_, end) = producer.tail(job_id)
    assert isinstance(end, Ended)
    assert isinstance(end.event, Cancelled)
    assert Job.fetch(job_id, connection=redis, serializer=OrjsonSerializer).is_canceled


def test_a_cancelled_job_leaves_nothing_without_an_expiry(redis: Redis, producer: Producer) -> None:
    before = set(redis.keys())
    producer.cancel(producer.submit(job()))

    lasting = {b"rq:queues", keys.active_queues_key("demo").encode()}
    new = set(redis.keys()) - before - lasting
    assert len(new) >= 4
    assert [key for key in new if redis.ttl(key) < 0] == []


def test_a_running_job_is_asked_to_end(
    redis: Redis, producer: Producer, set_status: SetStatus
) -> None:
    set_status("job", "started")

    assert producer.cancel("job") is CancelOutcome.REQUESTED
    assert producer.cancel("job") is CancelOutcome.REQUESTED
    assert redis.ttl(keys.cancel_key("job")) > 0
    assert not redis.exists(keys.stream_key("job"))


def test_an_ended_job_stays_as_it_ended(
    redis: Redis, producer: Producer, write: WriteEntry, set_status: SetStatus
) -> None:
    set_status("job", "started")
    write("job", "1-0", Started(worker_id="w", sampler_version=1))
    write("job", "1-1", Cancelled())

    assert producer.cancel("job") is CancelOutcome.ALREADY_ENDED
    assert redis.xlen(keys.stream_key("job")) == 2


def test_cancelling_again_changes_nothing(redis: Redis, producer: Producer) -> None:
    job_id = producer.submit(job())
    producer.cancel(job_id)
    entries = redis.xrange(keys.stream_key(job_id))

    assert producer.cancel(job_id) is CancelOutcome.ALREADY_ENDED
    assert redis.xrange(keys.stream_key(job_id)) == entries


def test_cancelling_an_unknown_job_says_so(redis: Redis, producer: Producer) -> None:
    assert producer.cancel("nobody") is CancelOutcome.UNKNOWN
    assert not redis.exists(keys.cancel_key("nobody"))


def test_many_cancels_at_once_leave_one_end(redis: Redis, producer: Producer) -> None:
    for _ in range(10):
        job_id = producer.submit(job())
        with ThreadPoolExecutor(6) as pool:
            outcomes = list(pool.map(producer.cancel, [job_id] * 6))
        assert outcomes.count(CancelOutcome.CANCELLED) == 1
        ends = [e for e in redis.xrange(keys.stream_key(job_id)) if b"end" in e[1]]
        assert len(ends) == 1


def test_a_cancelled_job_that_is_resumed_ends_behind_its_text(
    redis: Redis, producer: Producer, write: WriteEntry
) -> None:
    job_id = producer.submit(job())
    write(job_id, "3-0", Started(worker_id="w", sampler_version=1))

    producer.cancel(job_id)

    assert [item.id.attempt for item in producer.tail(job_id)][-1] == 4


def test_rq_job_states_are_known() -> None:
    states = {
        status: client_queue.parse_rq_job([status.encode(), b"q"])
        for status in ("queued", "started", "stopped")
    }

    assert [job.state for job in states.values() if job] == ["queued", "running", "ended"]
    assert client_queue.parse_rq_job([None, None]) is None


def test_an_end_that_a_cancel_writes_echoes_the_jobs_metadata(producer: Producer) -> None:
    job_id = producer.submit(job(metadata={"row": 7}))
    producer.cancel(job_id)

    assert producer.result(job_id).end == Cancelled(metadata={"row": 7})


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
