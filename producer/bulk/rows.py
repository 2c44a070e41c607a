"""RowParser: a line of the input becomes jobs, or the reason why it can't run."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import orjson
from headwater.schemas import GenerationJob, HeadwaterError, ModelCard, Priority

from ..models import fit_to_card
from ..openai_protocol.caller import ANYONE
from ..openai_protocol.embeddings import Encoding
from ..openai_protocol.errors import ApiError, of_any
from ..openai_protocol.routes import (
    CHAT,
    EMBEDDING,
    ROUTES,
    TEXT,
    encoding_of,
    file_jobs,
    parse_request,
)
from ..tokenization import Tokenizer
from .lines import Line

_PLAIN = {"messages": CHAT, "prompt": TEXT, "prompt_token_ids": TEXT}
"""The field that makes a plain row, and whose route's reply it gets."""
_GREEDY = {"temperature": 0.0}
"""A plain row is as greedy as `headwater submit`; OpenAI's rows have OpenAI's temperature."""
_PLAIN_MAX_TOKENS = 256


@dataclass(frozen=True, slots=True)
class RowSettings:
    """What all rows of a run have in common."""

    alias: str
    other_names: tuple[str, ...] = ()
    """Other names by which a row may call the run's model."""
    override_model: bool = False
    """Run every row on the run's model, whatever model it names."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Fields of a request's body for rows that don't have them."""
    seed: int | None = None
    """Rows without a seed get this plus their line's number."""
    namespace: str = "default"
    priority: Priority = Priority.LOW


class ReadyRow(NamedTuple):
    """A row whose jobs can be submitted; they have no ids yet that mean anything."""

    line: int
    custom_id: str
    route: str
    """Whose reply it gets."""
    jobs: tuple[GenerationJob, ...]
    encoding: Encoding = "float"
    """Of an embedding's numbers."""


class RefusedRow(NamedTuple):
    """A row that can't run."""

    line: int
    custom_id: str
    status: int
    """As HTTP has it."""
    body: dict[str, Any]
    """OpenAI's error object."""


Row: TypeAlias = ReadyRow | RefusedRow


def refuse(line: int, custom_id: str | None, error: HeadwaterError) -> RefusedRow:
    """Return the row that says *error*, with its line's number."""
    told = of_any(error)
    body = told.body()
    body["error"]["message"] = f"line {line}: {told}"
    return RefusedRow(line, custom_id or default_id(line), told.status, body)


def default_id(line: int) -> str:
    """Return the custom_id of a row that has none."""
    return f"line-{line}"


class RowParser:
    """Parses, checks and tokenizes rows of one run."""

    def __init__(self, settings: RowSettings, card: ModelCard, tokenizer: Tokenizer) -> None:
        self._settings = settings
        self._models = _OneModel(card, tokenizer)
        self._caller = ANYONE.model_copy(update={"namespace": settings.namespace})

    def parse(self, line: Line) -> Row:
        """Return the line's row; never raises for what stands in the line."""
        custom_id: str | None = None
        try:
            fields = _object(line)
            custom_id = _custom_id(fields)
            url, body = self._request(fields, line.number)
            request = parse_request(url, body)
            jobs = file_jobs(request, self._models, self._caller)
            fitted = tuple(fit_to_card(job, self._models.card(job.model)) for job in jobs)
        except HeadwaterError as error:
            return refuse(line.number, custom_id, error)
        own_id = custom_id or default_id(line.number)
        return ReadyRow(line.number, own_id, url, fitted, encoding_of(request))

    def _request(self, fields: dict[str, Any], line: int) -> tuple[str, dict[str, Any]]:
        """Return the route and the body that a row asks for."""
        fields.pop("custom_id", None)
        if "body" in fields or "url" in fields:
            url, body = _openai_row(fields)
            defaults = self._settings.defaults
        else:
            url, body = _plain_row(fields)
            defaults = _GREEDY | {"max_tokens": _PLAIN_MAX_TOKENS} | self._settings.defaults
        if body.get("stream"):
            raise ApiError(400, "a file has no streams: leave `stream` out", param="stream")
        self._check_model(body)
        given = {name for name, value in body.items() if value is not None}
        if "max_completion_tokens" in given:
            given.add("max_tokens")
        if url == EMBEDDING:
            defaults = {}  # all the others are about the text
        defaults = {"priority": self._settings.priority, **defaults}
        body |= {name: value for name, value in defaults.items() if name not in given}
        if self._settings.seed is not None and "seed" not in given and url != EMBEDDING:
            body["seed"] = self._settings.seed + line
        return url, body | {"model": self._settings.alias}

    def _check_model(self, body: dict[str, Any]) -> None:
        settings, named = self._settings, body.get("model")
        known = (None, settings.alias, *settings.other_names)
        if not settings.override_model and named not in known:
            raise ApiError(
                400,
                f"the row asks for model {named!r}, the run is for {settings.alias!r}: give"
                " --override-model to run it all the same",
                code="model_mismatch",
                param="model",
            )


class _OneModel:
    """What jobs_of asks of a directory of models."""

    def __init__(self, card: ModelCard, tokenizer: Tokenizer) -> None:
        self._card = card
        self._tokenizer = tokenizer

    def card(self, alias: str, *, refresh: bool = False) -> ModelCard:
        del alias, refresh  # there is one, and it stays
        return self._card

    def tokenizer(self, alias: str) -> Tokenizer:
        del alias
        return self._tokenizer


def _object(line: Line) -> dict[str, Any]:
    if line.error is not None:
        raise ApiError(400, line.error, code="unreadable_line")
    try:
        value = orjson.loads(line.data)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"not JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise ApiError(400, f"must hold an object, not {type(value).__name__}", code="invalid_json")
    return value


def _custom_id(fields: dict[str, Any]) -> str | None:
    custom_id = fields.get("custom_id")
    if custom_id is None:
        return None
    if not isinstance(custom_id, str) or not custom_id:
        raise ApiError(400, "custom_id must be a text", param="custom_id")
    return custom_id


def _openai_row(fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    unknown = fields.keys() - {"method", "url", "body"}
    if unknown:
        raise ApiError(400, f"unknown field {min(unknown)!r}", param=min(unknown))
    if fields.get("method", "POST") != "POST":
        raise ApiError(400, "method must be POST", param="method")
    url = fields.get("url")
    if not isinstance(url, str) or url not in ROUTES:
        raise ApiError(
            400,
            f"url {url!r} is not supported; there are {', '.join(ROUTES)}",
            code="unsupported_url",
            param="url",
        )
    body = fields.get("body")
    if not isinstance(body, dict):
        raise ApiError(400, "body must be an object", param="body")
    return url, body


def _plain_row(fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    given = [name for name in _PLAIN if name in fields]
    if len(given) != 1:
        names = ", ".join(_PLAIN)
        raise ApiError(400, f"a row has either url and body, or exactly one of {names}")
    if given == ["prompt_token_ids"]:
        fields["prompt"] = [fields.pop("prompt_token_ids")]
    return _PLAIN[given[0]], fields
