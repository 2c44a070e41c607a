from typing import Any

import orjson
import pytest
from headwater.schemas import (
    Finished,
    GenerationJob,
    SamplingParams,
    SchemaError,
    Timings,
    Usage,
    decode_entry,
    encode_fields,
    limits,
)
from pydantic import ValidationError

VALUES: dict[str, Any] = {
    "job_id": "j1",
    "model": "demo",
    "prompt_token_ids": [1, 2],
    "max_tokens": 4,
}


def parse(**fields: Any) -> GenerationJob:
    return GenerationJob.parse(VALUES | fields)


def test_a_job_survives_its_wire_form() -> None:
    job = parse(
        sampling={"temperature": 0.5, "seed": 3, "logit_bias": {"7": -1.5}, "bad_token_ids": [4]},
        stop=["a", "b"],
        metadata={"a": [1, None]},
        priority="low",
        stream="final",
        deadline_s=1.5,
    )

    assert GenerationJob.decode(job.encode()) == job


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("schema_version", 2, "1"),
        ("job_id", "", "pattern"),
        ("job_id", "a:b", "pattern"),
        ("job_id", "x" * 129, "128"),
        ("model", "a.b", "pattern"),
        ("model", "x" * 65, "64"),
        ("namespace", "a b", "pattern"),
        ("namespace", "a\n", "pattern"),
        ("prompt_token_ids", [], "at least 1"),
        ("prompt_token_ids", "text", "tuple"),
        ("max_tokens", 0, "greater than or equal to 1"),
        ("max_tokens", limits.MAX_NEW_TOKENS + 1, str(limits.MAX_NEW_TOKENS)),
        ("max_tokens", 1.0, "integer"),
        ("max_tokens", "4", "integer"),
        ("max_tokens", True, "integer"),
        ("min_tokens", -1, "greater than or equal to 0"),
        ("stop", ["a"] * 65, "64"),
        ("stop_token_ids", [1] * 1025, "1024"),
        ("priority", "urgent", "'high', 'normal' or 'low'"),
        ("prompt_logprobs", 21, "less than or equal to 20"),
        ("stream", "all", "'deltas' or 'final'"),
        ("deadline_s", 0, "greater than 0"),
        ("deadline_s", float("nan"), "finite"),
        ("expires_at", -5, "greater than 0"),
        ("metadata", {"a": "x" * 5000}, "at most 4096"),
        ("metadata", [1], "dictionary"),
        ("tokenizer_fingerprint", "x" * 129, "128"),
    ],
)
def test_a_bad_value_is_named_with_its_range(field: str, value: Any, expected: str) -> None:
    with pytest.raises(SchemaError) as caught:
        parse(**{field: value})

    message = str(caught.value)
    assert f" {field}: " in message
    assert expected in message
    assert "got " in message
    assert len(message) < 300


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("temperature", -0.1, "greater than or equal to 0"),
        ("temperature", 101, "less than or equal to 100"),
        ("temperature", float("inf"), "finite"),
        ("top_p", 0, "greater than 0"),
        ("top_p", 1.01, "less than or equal to 1"),
        ("top_k", -1, "greater than or equal to 0"),
        ("top_k", 2.5, "integer"),
        ("min_p", 1.0, "less than 1"),
        ("min_p", -0.5, "greater than or equal to 0"),
        ("repetition_penalty", 0, "greater than 0"),
        ("repetition_penalty", 10.5, "less than or equal to 10"),
        ("repetition_window", -1, "greater than or equal to 0"),
        ("presence_penalty", -2.1, "greater than or equal to -2"),
        ("frequency_penalty", 2.1, "less than or equal to 2"),
        ("logit_bias", dict.fromkeys(range(1025), 1.0), "at most 1024"),
        ("bad_token_ids", [1] * 1025, "1024"),
        ("seed", -1, "greater than or equal to 0"),
        ("seed", 2**63, "less than or equal to"),
    ],
)
def test_a_bad_sampling_value_is_named_with_its_range(
    field: str, value: Any, expected: str
) -> None:
    with pytest.raises(SchemaError) as caught:
        parse(sampling={field: value})

    assert f" sampling.{field}: " in str(caught.value)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("sampling", {"logit_bias": {5: 101}}, r"logit_bias.5: .*equal to 100 \(got 101\)"),
        ("sampling", {"logit_bias": {5: float("nan")}}, "logit_bias.5: .*finite"),
        ("sampling", {"logit_bias": {-1: 1}}, r"logit_bias.-1.*equal to 0"),
        ("sampling", {"logit_bias": {"a": 1}}, r"logit_bias.a.*integer"),
        ("sampling", {"bad_token_ids": [1, -1]}, "bad_token_ids.1"),
        ("prompt_token_ids", [1, -1], "prompt_token_ids.1"),
        ("prompt_token_ids", [1, 2**31], "prompt_token_ids.1"),
        ("prompt_token_ids", [1, 1.0], "prompt_token_ids.1"),
        ("prompt_token_ids", [True], "prompt_token_ids.0"),
        ("stop", ["a", ""], "stop.1"),
        ("stop", ["x" * 1025], "stop.0"),
        ("stop_token_ids", [-1], "stop_token_ids.0"),
    ],
)
def test_a_bad_element_is_named_with_its_index(field: str, value: Any, expected: str) -> None:
    with pytest.raises(SchemaError, match=expected):
        parse(**{field: value})


def test_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(SchemaError, match=r"min_tokens \(5\) must not exceed max_tokens \(4\)"):
        parse(min_tokens=5)


@pytest.mark.parametrize(
    ("fields", "name"),
    [({"n_samples": 2}, "n_samples"), ({"sampling": {"temprature": 1}}, "sampling.temprature")],
)
def test_an_unknown_field_is_named(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(SchemaError, match=f"unknown field '{name}'"):
        parse(**fields)


@pytest.mark.parametrize("field", VALUES)
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(SchemaError, match=f"{field}: required"):
        GenerationJob.parse({key: value for key, value in VALUES.items() if key != field})


def test_every_wrong_field_is_named_at_once() -> None:
    with pytest.raises(SchemaError) as caught:
        parse(max_tokens=0, model="", priority="x")

    assert all(f" {name}: " in str(caught.value) for name in ("max_tokens", "model", "priority"))


@pytest.mark.parametrize("data", [b"", b"{", b"null", b"[1]", b'"x"', b"\xff"])
def test_what_is_no_job_is_refused(data: bytes) -> None:
    with pytest.raises(SchemaError, match="not a GenerationJob"):
        GenerationJob.decode(data)


def test_a_job_cannot_be_changed() -> None:
    job = parse()

    with pytest.raises(ValidationError, match="frozen"):
        job.max_tokens = 5
    with pytest.raises(ValidationError, match="frozen"):
        job.sampling.top_k = 5


def test_a_long_value_is_shortened_in_the_message() -> None:
    with pytest.raises(SchemaError) as caught:
        parse(prompt_token_ids="x" * 100_000)

    assert len(str(caught.value)) < 300


def test_the_limits_themselves_are_allowed() -> None:
    parse(
        job_id="x" * 128,
        model="m" * 64,
        prompt_token_ids=[0, limits.MAX_TOKEN_ID],
        max_tokens=limits.MAX_NEW_TOKENS,
        min_tokens=limits.MAX_NEW_TOKENS,
        stop=["x" * 1024] * 7 + ["x" * 17] * 56 + ["x" * 72],
        stop_token_ids=[1] * 1024,
        sampling={"temperature": 100, "top_p": 1, "top_k": 0, "min_p": 0, "seed": limits.MAX_SEED},
    )


def test_the_defaults_are_greedy() -> None:
    assert parse().sampling == SamplingParams()
    assert parse().sampling.temperature == 0
    assert orjson.loads(parse().encode())["sampling"] == {
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "repetition_window": 20,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "bad_token_ids": [],
        "n": 1,
    }


@pytest.mark.parametrize(
    "fields",
    [
        {f"k{number}": 1 for number in range(20_000)},
        {"x" * 100_000: 1},
        {"prompt_token_ids": ["a"] * 20_000},
        {"kind": "score", "continuations": [["a"]] * 20_000},
        {"sampling": {"logit_bias": {f"k{number}": 1 for number in range(20_000)}}},
        {"response_format": {"type": "choice", "choices": [1] * 20_000}},
        {"stop": [1] * 20_000},
        {"metadata": {"a": "x" * 100_000}},
        {"max_tokens": orjson.loads("[" * 1000 + "]" * 1000)},
    ],
    ids=["fields", "name", "tokens", "continuations", "biases", "choices", "stops", "text", "deep"],
)
def test_whatever_is_wrong_is_told_in_a_short_line(fields: dict[str, Any]) -> None:
    """What somebody sends who may be anybody is neither repeated whole nor counted to its end."""
    with pytest.raises(SchemaError) as caught:
        parse(**fields)

    assert len(str(caught.value)) < 500
    cause = caught.value.__cause__
    assert isinstance(cause, ValidationError)
    assert cause.error_count() < 20


def test_what_passes_as_metadata_can_be_written_wherever_it_goes() -> None:
    """JSON writers have a finite depth; an event holds the metadata deeper than the job does."""
    passed = [job for depth in range(300) if (job := _with_metadata_of(depth)) is not None]
    assert 100 < len(passed) < 300
    job = passed[-1]
    event = Finished(
        choices=(),
        usage=Usage(prompt_tokens=1, completion_tokens=1),
        timings=Timings(total_ms=1.0),
        metadata=job.metadata,
    )
    orjson.dumps(["function", None, [job.model_dump(mode="json")], {}])

    fields = {name.encode(): value for name, value in encode_fields(event).items()}
    assert decode_entry(b"1-1", fields).event == event


def _with_metadata_of(depth: int) -> GenerationJob | None:
    metadata: dict[str, Any] = {}
    for _ in range(depth):
        metadata = {"a": metadata}
    try:
        return parse(metadata=metadata)
    except SchemaError:
        return None
