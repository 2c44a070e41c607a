"""generate and agenerate: prompts in, texts out, from a script or a notebook."""

import asyncio
import threading
import uuid
from collections.abc import AsyncGenerator, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import orjson
from headwater.schemas import Finished, Usage

from .bulk.flight import Flight, RowOutcome
from .bulk.lines import Line
from .bulk.order import order_rows
from .bulk.pipeline import run_rows
from .bulk.preparation import Preparation, prepare
from .bulk.results import Ordering
from .bulk.rows import RefusedRow, Row
from .bulk.stack import OwnStack
from .bulk.windows import windows
from .client import Producer, SubmitSettings
from .openai_protocol.errors import of_any, of_end
from .result import ChoiceResult

Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text, token ids, or chat messages."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What one prompt came to."""

    index: int
    """Of the prompt, from 0."""
    choices: tuple[ChoiceResult, ...]
    """Empty where *error* says why."""
    usage: Usage | None
    error: str | None = None

    @property
    def text(self) -> str:
        """The first choice's text; raises ValueError where there is none."""
        if not self.choices:
            raise ValueError(self.error or "there is no text")
        return self.choices[0].text


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """How the prompts are run."""

    ordered: bool = True
    """Yield in the prompts' order; otherwise as they come."""
    window: int = 256
    """Prompts that are read ahead and grouped by their common prefixes."""
    outstanding: int = 256
    """Jobs that are submitted and not done, at most."""
    namespace: str = "default"


def generate(
    prompts: Iterable[Prompt],
    *,
    model: str,
    redis: str | None = None,
    options: GenerateOptions | None = None,
    **fields: Any,
) -> Generator[Generation, None, None]:
    """Yield what each of *prompts* comes to; one that fails has an `error`, the others go on.

    With *redis*, *model* is an alias that workers there serve; without it, a directory, a hub
    name or `demo`, run by a server and a worker of our own until the iterator ends or is closed.
    *fields* are a job's or OpenAI's: max_tokens (256), temperature (0), stop, n, priority (low),
    ...; prompt number i draws with *seed* + i. Left early, it cancels what it has submitted.
    Raises ProducerError's kinds.
    """
    yield from _generate(prompts, model, redis, options, fields, threading.Event())


async def agenerate(
    prompts: Iterable[Prompt],
    *,
    model: str,
    redis: str | None = None,
    options: GenerateOptions | None = None,
    **fields: Any,
) -> AsyncGenerator[Generation, None]:
    """Do what generate does, for asyncio; *prompts* is iterated in a thread.

    Close it (aclose) where it is left before its end.
    """
    stopped = threading.Event()
    items = _generate(prompts, model, redis, options, fields, stopped)
    step: asyncio.Future[Generation | None] | None = None
    try:
        while True:
            step = asyncio.ensure_future(asyncio.to_thread(next, items, None))
            # A caller that is cancelled must not leave the generator in the middle of a step.
            item = await asyncio.shield(step)
            if item is None:
                return
            yield item
    finally:
        stopped.set()
        if step is not None:
            await asyncio.wait([step])
        await asyncio.to_thread(items.close)


def _generate(
    prompts: Iterable[Prompt],
    model: str,
    redis: str | None,
    options: GenerateOptions | None,
    fields: dict[str, Any],
    stopped: threading.Event,
) -> Generator[Generation, None, None]:
    options = options or GenerateOptions()
    seed, priority = fields.pop("seed", None), fields.pop("priority", "low")
    settings = order_rows(
        model, redis, priority=priority, namespace=options.namespace, defaults=fields, seed=seed
    )
    with ExitStack() as exits:
        url = redis or exits.enter_context(_own_stack(model)).url
        producer = exits.enter_context(Producer(url, SubmitSettings(check_model=False)))
        card = producer.models.card(settings.alias)
        files = producer.models.tokenizer(settings.alias).files
        # In this process: a script without a main guard would be run again by every other one.
        rows = prepare(_lines(prompts), Preparation(settings, card, files), num_processes=0)
        flight = Flight(producer, card, f"generate-{uuid.uuid4().hex}", size=options.outstanding)
        exits.callback(flight.close)
        exits.callback(flight.cancel_all)
        yield from _collect(rows, flight, options, stopped)


def _collect(
    rows: Iterator[Row], flight: Flight, options: GenerateOptions, stopped: threading.Event
) -> Iterator[Generation]:
    ordering: Ordering[Generation] | None = Ordering() if options.ordered else None
    batches = run_rows(
        windows(rows, options.window),
        flight,
        is_stopped=stopped.is_set,
        is_behind=lambda: ordering is not None and ordering.num_behind > 2 * options.window,
    )
    for batch in batches:
        finished = [_refused(row) for row in batch.refused]
        finished += [_finished(outcome) for outcome in batch.finished]
        flight.forget(job for outcome in batch.finished for job in outcome.jobs)
        if ordering is None:
            yield from finished
        else:
            ordering.expect(batch.begun)
            yield from ordering.pass_on((each.index + 1, each) for each in finished)


@contextmanager
def _own_stack(model: str) -> Iterator[OwnStack]:
    with (
        TemporaryDirectory(prefix="headwater-generate-") as folder,
        OwnStack(model, Path(folder), 1, None) as stack,
    ):
        stack.wait_until_ready()
        yield stack


def _lines(prompts: Iterable[Prompt]) -> Iterator[Line]:
    for index, prompt in enumerate(prompts):
        try:
            yield Line(index + 1, orjson.dumps({_kind_of(prompt): prompt}))
        except orjson.JSONEncodeError as error:
            yield Line(index + 1, b"", f"not a prompt: {error}")


def _kind_of(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return "prompt"
    is_chat = bool(prompt) and isinstance(prompt[0], Mapping)
    return "messages" if is_chat else "prompt_token_ids"


def _refused(row: RefusedRow) -> Generation:
    message = str(row.body["error"]["message"])
    return Generation(row.line - 1, (), None, message.partition(": ")[2])


def _finished(outcome: RowOutcome) -> Generation:
    index = outcome.row.line - 1
    if outcome.error is not None:
        return Generation(index, (), None, str(of_any(outcome.error)))
    (result,) = outcome.results
    if not isinstance(result.end, Finished):
        return Generation(index, (), None, str(of_end(result.end)))
    choices = tuple(result.choices[number] for number in sorted(result.choices))
    return Generation(index, choices, result.end.usage)
