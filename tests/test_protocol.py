"""ops/PROTOCOL.md says all that the code does, and its JavaScript reads a stream exactly once."""

import inspect
import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from headwater.producer.client_queue import job_key
from headwater.schemas import (
    ChoiceEnd,
    Delta,
    DeltaPart,
    EntryId,
    Event,
    Finished,
    FinishReason,
    Restarted,
    Started,
    TextSpan,
    Timings,
    Usage,
    encode_fields,
    keys,
    limits,
    scripts,
)
from redis import Redis

from tests.documents import PROTOCOL, ROOT, first_cells, node, read, sections, write_javascript

TTL_MS = 60_000
FENCE = Started(worker_id="w", sampler_version=1)
FINISHED = Finished(
    choices=(ChoiceEnd(choice=0, finish_reason=FinishReason.STOP),),
    usage=Usage(prompt_tokens=1, completion_tokens=1),
    timings=Timings(total_ms=1.0),
)


def schema_types() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each type of the exported schemas by its name."""
    for path in sorted((ROOT / "schemas" / "json").glob("*.json")):
        schema = json.loads(path.read_text("utf-8"))
        if "properties" in schema:
            yield schema["title"], schema
        yield from schema.get("$defs", {}).items()


def types_by_section() -> dict[str, list[str]]:
    """Return the types that each heading of the document names."""
    return {heading: re.split(r", | and ", heading) for heading in sections(read(PROTOCOL))}


def documented(title: str) -> str:
    """Return the section whose heading names the type."""
    headings = [heading for heading, titles in types_by_section().items() if title in titles]
    assert len(headings) == 1, f"{PROTOCOL} needs one section with {title} in its heading"
    return sections(read(PROTOCOL))[headings[0]]


def fields_of(title: str) -> set[str]:
    """Return the fields of all types that share the section of *title*."""
    neighbours = next(titles for titles in types_by_section().values() if title in titles)
    return {
        name
        for other, schema in schema_types()
        if other in neighbours
        for name in schema.get("properties", ())
    }


@pytest.mark.parametrize("title", sorted({t for t, s in schema_types() if "properties" in s}))
def test_every_field_of_every_type_is_in_the_document_and_no_other(title: str) -> None:
    """A field that is added to a schema, or taken away, has to be told of."""
    assert sorted(first_cells(documented(title))) == sorted(fields_of(title))


@pytest.mark.parametrize(
    ("title", "values"), [(t, s["enum"]) for t, s in schema_types() if "enum" in s]
)
def test_every_value_of_every_enumeration_is_in_one_row(title: str, values: list[str]) -> None:
    """A reader has to know all values that a field may hold."""
    rows = read(PROTOCOL).splitlines()

    assert any(all(f"`{value}`" in row for value in values) for row in rows), title


def test_every_kind_of_entry_is_in_the_document() -> None:
    """The wire's own names of the kinds stand in the sections of their types."""
    for title, schema in schema_types():
        kind = schema.get("properties", {}).get("type", {}).get("const")
        if kind is not None:
            assert f"`{kind}`" in documented(title), title


def test_every_name_in_redis_is_in_the_document() -> None:
    """A new function of keys.py needs a row, or a word where the queue is told of."""
    listed = read(PROTOCOL)
    special = {
        "queue_name": "<model>.<priority>.<namespace>",
        "job_queue_name": "<model>.<priority>.<namespace>",
        "idempotency_key": "headwater:idempotency:<namespace>:<digest>",
    }
    for name, function in inspect.getmembers(keys, inspect.isfunction):
        names = (f"<{parameter}>" for parameter in inspect.signature(function).parameters)
        wanted = special.get(name) or function(*names)
        assert wanted in listed, name
    assert f"`{keys.JOB_FUNCTION}`" in listed


def test_every_limit_is_in_the_document() -> None:
    """The values are the code's."""
    rows = dict(re.findall(r"^\| `(MAX_\w+)` \| (\S+) \|", read(PROTOCOL), re.MULTILINE))

    assert {name: float(value) for name, value in rows.items()} == {
        name: float(value) for name, value in vars(limits).items() if name.startswith("MAX_")
    }


# The reader in JavaScript.

Run = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture(scope="session")
def scripts_in_javascript(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The document's JavaScript, each block in the file that its first line names."""
    folder = tmp_path_factory.mktemp("javascript")
    write_javascript(folder)
    return folder


@pytest.fixture
def start_reader(scripts_in_javascript: Path, redis_url: str) -> Iterator[Run]:
    """Start the document's reader of a job in a process of its own."""
    program = node()
    port = redis_url.rpartition(":")[2].partition("/")[0]
    started: list[subprocess.Popen[str]] = []

    def start(job_id: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [program, str(scripts_in_javascript / "tail.mjs"), job_id, port],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


class Writer:
    """A worker's hand on the stream of one job."""

    def __init__(self, redis: Redis, job_id: str, execution_id: str) -> None:
        self._redis = redis
        self._job_id = job_id
        redis.hset(job_key(job_id), mapping={"status": "started", "origin": "demo.normal.default"})
        call = scripts.begin(job_id, execution_id, FENCE, TTL_MS)
        _, attempt, *_ = redis.eval(scripts.BEGIN, len(call.keys), *call.keys, *call.args)  # type: ignore[misc]
        self._id = EntryId(int(attempt), 0)

    def write(self, event: Event) -> None:
        """Append the next entry."""
        self._id = self._id._replace(seq=self._id.seq + 1)
        self._redis.xadd(keys.stream_key(self._job_id), encode_fields(event), id=str(self._id))  # type: ignore[arg-type]

    def say(self, text: str, start: int = 0, *, choice: int = 0, skip: int = 0) -> None:
        """Publish *text*, a token a character; *skip* leaves numbers of entries out."""
        self._id = self._id._replace(seq=self._id.seq + skip)
        span = TextSpan(text_start=start, text=text)
        tokens = tuple(map(ord, text))
        self.write(
            Delta(parts=(DeltaPart(choice=choice, start=start, token_ids=tokens, text=(span,)),))
        )


def lines_of(process: "subprocess.Popen[str]") -> list[dict[str, Any]]:
    """Return what a reader printed; it has to end by itself, and well."""
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return [json.loads(line) for line in out.splitlines()]


def text_of(lines: list[dict[str, Any]], choice: int = 0) -> str:
    """Return a choice's text as a user of the lines has it at the end."""
    text = ""
    for line in lines:
        text = "" if line.get("type") == "restarted" else text
        text += line["text"] if line.get("choice") == choice else ""
    return text


def test_the_reader_gives_each_character_once_also_over_takeovers(
    redis: Redis, start_reader: Run
) -> None:
    """One reader is there from the start, one comes late; characters beyond UTF-16 count once."""
    first = Writer(redis, "job", "one")
    early = start_reader("job")
    first.say("He\N{GRINNING FACE}l")
    first.say("other", choice=1)
    assert early.stdout is not None
    seen = [json.loads(early.stdout.readline()) for _ in range(3)]
    second = Writer(redis, "job", "two")
    second.say("\N{GRINNING FACE}lo", 2)  # what the first one had said, and more
    second.say("o!", 4)
    late = start_reader("job")
    Writer(redis, "job", "three").write(FINISHED)

    told = seen + lines_of(early)

    kinds = [line["type"] for line in told if "type" in line]
    assert kinds == ["started", "resumed", "resumed", "finished"]
    assert text_of(told) == text_of(lines_of(late)) == "He\N{GRINNING FACE}lo!"
    assert text_of(told, choice=1) == "other"


def test_the_reader_forgets_what_came_before_a_restart(redis: Redis, start_reader: Run) -> None:
    """What comes after it is compared with nothing from before."""
    Writer(redis, "job", "one").say("Hello")
    writer = Writer(redis, "job", "two")
    writer.write(Restarted(worker_id="w", sampler_version=2))
    writer.say("Help")
    writer.write(FINISHED)

    lines = lines_of(start_reader("job"))

    kinds = [line.get("type") for line in lines]
    assert kinds == ["started", None, "resumed", "restarted", None, "finished"]
    assert [line["text"] for line in lines if "text" in line] == ["Hello", "Help"]
    assert text_of(lines) == "Help"


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda writer: writer.say("lo", 3, skip=1), "came after"),
        (lambda writer: writer.say("o", 4), "a hole before 4"),
        (lambda writer: writer.say("xyz", 1), "differs at 1"),
    ],
    ids=["number", "position", "overlap"],
)
def test_the_reader_stops_at_a_hole_and_at_a_contradiction(
    redis: Redis, start_reader: Run, spoil: Callable[[Writer], None], says: str
) -> None:
    """Nothing is shown of what does not fit."""
    writer = Writer(redis, "job", "one")
    writer.say("Hel")
    spoil(writer)
    writer.write(FINISHED)

    out, errors = start_reader("job").communicate(timeout=60)

    assert says in errors
    assert text_of([json.loads(line) for line in out.splitlines()]) == "Hel"


def test_the_reader_does_not_wait_for_a_job_that_never_was(start_reader: Run) -> None:
    """An idle read looks at RQ's record."""
    reader = start_reader("nobody")

    _, errors = reader.communicate(timeout=60)

    assert reader.returncode != 0
    assert "nobody: unknown" in errors
