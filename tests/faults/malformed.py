"""Jobs that can't be run, of every kind that we could think of, and how each has to end."""

import pickle
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import orjson
from headwater.producer.client import Producer
from headwater.producer.client_queue import JobQueue, job_key
from headwater.schemas import keys, limits

from tests.faults.conftest import ALIAS, job

MALFORMED = "malformed_job"
EXPIRED = "expired"
CANCELLED = "cancelled"
FINISHED = "finished"
UNKNOWN = "no such job"
"""No job at all: an id without a record."""
BROKEN = "a stream of none of ours"
"""Its readers find that; RQ says that it failed."""

_BASE: dict[str, Any] = {
    "job_id": "set for each",
    "model": ALIAS,
    "prompt_token_ids": [40, 41, 42],
    "max_tokens": 2,
}
Plant = Callable[[Any, str], None]
"""Writes what is wrong with a job that is about to be in its queue, into a pipeline."""


class Kind(NamedTuple):
    """One way to be wrong."""

    plant: Plant
    ends_as: str
    """A `failed` event's code, or how else it ends."""
    is_large: bool = False
    """Megabytes each: some will do."""


def submit_wrong(producer: Producer, kind: Kind, *, job_id: str) -> None:
    """Put a job of this kind into the queue, in one step."""
    base = job(job_id=job_id, max_tokens=2)
    pipeline: Any  # redis-py leaves half of it untyped
    with producer.redis.pipeline() as pipeline:
        pipeline.watch(job_key(job_id))
        pipeline.multi()
        JobQueue(producer.redis).push(pipeline, [base])
        kind.plant(pipeline, job_id)
        pipeline.execute()


def _field(name: str, value: bytes) -> Plant:
    return lambda pipeline, job_id: pipeline.hset(job_key(job_id), name, value)


def _data(raw: bytes) -> Plant:
    return _field("data", raw)


def _call(*parts: Any) -> Plant:
    return _data(zlib.compress(orjson.dumps(parts)))


def _written(text: str) -> Plant:
    """Plant a job whose JSON goes on with *text* after its good fields."""

    def plant(pipeline: Any, job_id: str) -> None:
        good = orjson.dumps(_BASE | {"job_id": job_id}).decode().removesuffix("}")
        raw = f'["{keys.JOB_FUNCTION}",null,[{good}{text}}}],{{}}]'.encode()
        pipeline.hset(job_key(job_id), "data", zlib.compress(raw))

    return plant


def _with(**fields: Any) -> Plant:
    """Plant a job with these fields in place of good ones."""

    def plant(pipeline: Any, job_id: str) -> None:
        argument = _BASE | {"job_id": job_id} | fields
        raw = orjson.dumps([keys.JOB_FUNCTION, None, [argument], {}])
        pipeline.hset(job_key(job_id), "data", zlib.compress(raw))

    return plant


def _sampling(**fields: Any) -> Plant:
    return _with(sampling=fields)


def _wrong_key(key: Callable[[str], str]) -> Plant:
    """Plant something of another type where a key of the job's is expected."""

    def plant(pipeline: Any, job_id: str) -> None:
        pipeline.delete(key(job_id))
        pipeline.set(key(job_id), "none of ours", ex=3600)

    return plant


def _no_event(pipeline: Any, job_id: str) -> None:
    pipeline.xadd(keys.stream_key(job_id), {"hello": "world"}, id="0-1")


def _without_record(pipeline: Any, job_id: str) -> None:
    pipeline.delete(job_key(job_id))


def _wish(pipeline: Any, job_id: str) -> None:
    pipeline.set(keys.cancel_key(job_id), b"1", ex=3600)


_PAYLOADS = {
    "no payload": _data(b""),
    "neither zlib nor JSON": _data(b"\x80\x04K\x01."),
    "JSON cut short": _data(zlib.compress(b'["headwater.generate",null,[{')),
    "zlib cut short": _data(zlib.compress(b"[" + b"1," * 999)[:20]),
    "a list that is no call": _call(1),
    "an object": _data(zlib.compress(b'{"a":1}')),
    "a pickle": _data(pickle.dumps({"job": 1})),
    "a packed pickle": _data(zlib.compress(pickle.dumps((keys.JOB_FUNCTION, None, [1], {})))),
    "another function": _call("os.system", None, ["true"], {}),
    "a function that is a deep list": _data(b"[" * 900 + b"]" * 900 + b",null,[1],{}]"),
    "an instance": _call(keys.JOB_FUNCTION, "builtins.object", [_BASE], {}),
    "keywords": _call(keys.JOB_FUNCTION, None, [{}], {"a": 1}),
    "two arguments": _call(keys.JOB_FUNCTION, None, [_BASE, _BASE], {}),
    "an argument that is no object": _call(keys.JOB_FUNCTION, None, ["x"], {}),
    "an empty argument": _call(keys.JOB_FUNCTION, None, [{}], {}),
    "another job's payload": _with(job_id="another"),
    "another model's job": _with(model="another"),
    "another namespace's job": _with(namespace="another"),
    "a lone surrogate": _written(r', "metadata": {"a": "\ud800"}'),
    "a number that JSON has not": _written(', "deadline_s": NaN'),
    "a number too large": _written(', "deadline_s": 1e999'),
    "nested without end": _written(', "metadata": ' + "[" * 100_000),
    "a deep list as a number": _written(', "max_tokens": ' + "[" * 900 + "]" * 900),
    "metadata nested deep": _written(', "metadata": {"a": ' + "[" * 250 + "]" * 250 + "}"),
    "a status that RQ has not": _field("status", b"weird"),
    "a status that is no text": _field("status", b"\xff\xfe"),
    "another schema version": _with(schema_version=2),
    "an unknown field": _with(no_such_field=1),
    "an unknown sampling field": _sampling(no_such_field=1),
}
_LARGE = {
    "a bomb": _data(zlib.compress(b" " * (limits.MAX_PAYLOAD_BYTES + 1))),
    "a payload above the limit": _data(b" " * (limits.MAX_COMPRESSED_PAYLOAD_BYTES + 1)),
    "a million lists": _written(', "metadata": {"a": [' + "[]," * 10**6 + "1]}"),
    "many unknown fields": _written("".join(f', "k{i}": 1' for i in range(20_000))),
    "a field with a long name": _written(f', "{"x" * 10**6}": 1'),
    "many wrong token ids": _with(prompt_token_ids=["a"] * 20_000),
    "many wrong continuations": _with(kind="score", continuations=[["a"]] * 20_000),
    "many wrong biases": _sampling(logit_bias={f"k{i}": 1 for i in range(20_000)}),
    "many wrong choices": _with(response_format={"type": "choice", "choices": [1] * 20_000}),
}
_TYPES: dict[str, Any] = {
    "schema_version": "one",
    "job_id": 7,
    "model": None,
    "kind": "poem",
    "adapter": "a b",
    "prompt_token_ids": "text",
    "continuations": [[1]],
    "pooling": 1,
    "normalize": "perhaps",
    "sampling": [1],
    "max_tokens": "4",
    "min_tokens": 1.5,
    "stop": "x",
    "include_stop_str": "perhaps",
    "stop_token_ids": {"1": 2},
    "ignore_eos": [],
    "logprobs": "all",
    "response_format": "json",
    "priority": "urgent",
    "deadline_s": "soon",
    "expires_at": "never",
    "namespace": 5,
    "stream": "all",
    "split_channels": "perhaps",
    "tools": [1],
    "metadata": [1],
    "tokenizer_fingerprint": 1,
}
"""Of each field of a job, a value of a type that it does not have."""
_RANGES: dict[str, Plant] = {
    "an empty prompt": _with(prompt_token_ids=[]),
    "a negative token id": _with(prompt_token_ids=[1, -1]),
    "a token id beyond any": _with(prompt_token_ids=[2**31]),
    "a fraction of a token id": _with(prompt_token_ids=[1.0]),
    "no tokens": _with(max_tokens=0),
    "too many tokens": _with(max_tokens=limits.MAX_NEW_TOKENS + 1),
    "more at least than at most": _with(min_tokens=3),
    "too many logprobs": _with(logprobs=limits.MAX_TOP_LOGPROBS + 1),
    "an empty stop string": _with(stop=[""]),
    "too many stop strings": _with(stop=["x"] * (limits.MAX_STOP_STRINGS + 1)),
    "too much metadata": _with(metadata={"a": "x" * limits.MAX_METADATA_BYTES}),
    "no time at all": _with(deadline_s=0),
    "less than no time": _with(deadline_s=-1),
    "expired before 1970": _with(expires_at=-1),
    "nothing to score": _with(kind="score", max_tokens=1),
    "a vector of new tokens": _with(kind="embedding", max_tokens=2),
    "a name with a dot": _with(adapter="a.b"),
    "a format of no type": _with(response_format={}),
    "a format of another type": _with(response_format={"type": "poem"}),
    "a format and ignore_eos": _with(response_format={"type": "json_object"}, ignore_eos=True),
    "temperature": _sampling(temperature=-1),
    "top_k": _sampling(top_k=-1),
    "top_p 0": _sampling(top_p=0),
    "top_p 2": _sampling(top_p=2),
    "min_p": _sampling(min_p=1),
    "repetition_penalty": _sampling(repetition_penalty=0),
    "presence_penalty": _sampling(presence_penalty=limits.MAX_PENALTY + 1),
    "seed": _sampling(seed=-1),
    "n 0": _sampling(n=0),
    "n": _sampling(n=limits.MAX_CHOICES + 1),
    "a bias": _sampling(logit_bias={"1": 1000}),
}
_REFUSED: dict[str, tuple[Plant, str]] = {
    "a prompt token of another vocabulary": (
        _with(prompt_token_ids=[40, 257]),
        "token_id_out_of_range",
    ),
    "a stop token of another vocabulary": (_with(stop_token_ids=[257]), "token_id_out_of_range"),
    "a bias of another vocabulary": (_sampling(logit_bias={"257": 1}), "token_id_out_of_range"),
    "a bad token of another vocabulary": (_sampling(bad_token_ids=[999]), "token_id_out_of_range"),
    "a continuation of another vocabulary": (
        _with(kind="score", max_tokens=1, continuations=[[257]]),
        "token_id_out_of_range",
    ),
    "too long": (_with(prompt_token_ids=[40] * 4096), "context_length_exceeded"),
    "too long in the end": (_with(max_tokens=4096), "context_length_exceeded"),
    "another tokenizer": (_with(tokenizer_fingerprint="sha256:other"), "tokenizer_mismatch"),
    "an unknown adapter": (_with(adapter="none-such"), "unknown_adapter"),
    "a format that is no expression": (
        _with(response_format={"type": "regex", "regex": "("}),
        "bad_response_format",
    ),
    "a format that no text has": (
        _with(
            response_format={
                "type": "json_schema",
                "json_schema": {"type": "string", "minLength": 3, "maxLength": 2},
            }
        ),
        "bad_response_format",
    ),
    "a format of an unknown type": (
        _with(response_format={"type": "json_schema", "json_schema": {"type": "poem"}}),
        "bad_response_format",
    ),
    "a deadline that has passed": (_with(deadline_s=1e-9), "deadline_exceeded"),
    "expired": (_with(expires_at=1), EXPIRED),
    "cancelled before": (_wish, CANCELLED),
    # RQ would import or load these; for us they are not there.
    "a callback": (_field("success_callback_name", b"os.getcwd"), FINISHED),
    "webhooks": (_field("webhooks", b'[{"url":"http://127.0.0.1:1/"}]'), FINISHED),
    "a pickled meta": (_field("meta", zlib.compress(pickle.dumps({"a": 1}))), FINISHED),
    "a date that is none": (_field("enqueued_at", b"yesterday"), FINISHED),
    "a timeout that is none": (_field("timeout", b"never"), FINISHED),
    "no record": (_without_record, UNKNOWN),
    "a record that is none": (_wrong_key(job_key), MALFORMED),
    "an attempt counter that is none": (_wrong_key(keys.attempt_key), BROKEN),
    "a stream that is none": (_wrong_key(keys.stream_key), BROKEN),
    "a stream of something else": (_no_event, BROKEN),
}


def _all_kinds() -> Iterator[tuple[str, Kind]]:
    for name, plant in (_PAYLOADS | _RANGES).items():
        yield name, Kind(plant, MALFORMED)
    for name, value in _TYPES.items():
        yield f"the type of {name}", Kind(_with(**{name: value}), MALFORMED)
    for name, plant in _LARGE.items():
        yield name, Kind(plant, MALFORMED, is_large=True)
    for name, (plant, ends_as) in _REFUSED.items():
        yield name, Kind(plant, ends_as)


KINDS: dict[str, Kind] = dict(_all_kinds())
