"""A ResponseFormat as llguidance compiles it: the same text and limits for all who do.

Not imported by the package itself: only who checks or enforces a format needs llguidance.
"""

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import orjson
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from .errors import HeadwaterError
from .response_format import (
    ChoiceFormat,
    JsonObjectFormat,
    JsonSchemaFormat,
    RegexFormat,
    ResponseFormat,
)
from .schema_ends import endless_reference
from .schema_load import excess

if TYPE_CHECKING:  # only the library's stubs have it
    from llguidance._lib import JsonCompileOptions

_MAX_ERROR_CHARS: Final = 200
_NUM_KEPT: Final = 256
"""Jobs of one application share their schemas; each is judged once."""

_LIMITS: Final = LLParserLimits(
    max_grammar_size=10_000,  # symbols; compiling takes their square, with these 0.1 s at most
    max_lexer_states=20_000,  # about 2 kB each
    verbose_errors=False,
)

_JSON: "Final[JsonCompileOptions]" = {
    # A model that may write any number of blanks may write nothing else until it is cut off.
    "whitespace_pattern": r"(\x20|\x0A\x20{0,16})",
    # Neither may a schema's own "x-guidance" make it so: a keyword that is not enforced, or
    # oneOf taken as anyOf, gives values that the schema does not allow.
    "lenient": False,
    "coerce_one_of": False,
}


class GrammarError(HeadwaterError):
    """A format that can't be enforced, or that no text can satisfy."""


def combine(start: dict[str, Any], **named: dict[str, Any]) -> str:
    """Return the grammar *start*, which may refer to the *named* ones as @name.

    Raises GrammarError for schemas that take too long to compile; whether it is any good
    start_matcher() tells.
    """
    rest = ({"name": name, **entry} for name, entry in named.items())
    grammar = json.dumps({"grammars": [start, *rest]})
    reason = _excess(grammar)
    if reason is not None:
        raise GrammarError(reason)
    return grammar


@lru_cache(maxsize=_NUM_KEPT)
def _excess(grammar: str) -> str | None:
    entries = json.loads(grammar)["grammars"]
    return excess(entry["json_schema"] for entry in entries if "json_schema" in entry)


def grammar_text(response_format: ResponseFormat) -> str:
    """Return the grammar of a text that is a value of *response_format* and nothing else."""
    return combine(format_entry(response_format))


def format_entry(response_format: ResponseFormat) -> dict[str, Any]:
    """Return *response_format* as a part of a grammar.

    Raises GrammarError for a schema that no end can be come to, ValueError for what the library
    can't read.
    """
    match response_format:
        case JsonSchemaFormat():
            return json_entry(response_format.json_schema)
        case JsonObjectFormat():
            return json_entry({"type": "object"})
        case RegexFormat():
            text = LLMatcher.grammar_from_regex(response_format.regex)
            (entry,) = json.loads(text)["grammars"]
            return {"lark_grammar": entry["lark_grammar"]}
        case ChoiceFormat():
            # Lark's strings are JSON's.
            choices = " | ".join(map(json.dumps, response_format.choices))
            return {"lark_grammar": f"start: {choices}"}


def json_entry(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a JSON schema as a part of a grammar; raises as format_entry does."""
    _check_end(schema)
    return {"json_schema": {**schema, "x-guidance": _JSON}}


def _check_end(schema: dict[str, Any]) -> None:
    reference = _endless_reference(orjson.dumps(schema))
    if reference is not None:
        raise GrammarError(
            f"{reference} requires itself without end; give it a way out: leave it out of"
            ' "required" or "minItems", or offer something else in "anyOf"'
        )


@lru_cache(maxsize=_NUM_KEPT)
def _endless_reference(schema: bytes) -> str | None:
    return endless_reference(orjson.loads(schema))


def start_matcher(grammar: str, tokenizer: LLTokenizer) -> LLMatcher:
    """Compile *grammar* for a vocabulary; raises GrammarError. Its time is bounded."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
    check(matcher)
    return matcher


def check(matcher: LLMatcher) -> None:
    """Raise GrammarError if something went wrong in *matcher*."""
    if matcher.is_error():
        reason = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())
        if reason == "NoExtensionBias":
            reason = "no text satisfies it"
        raise GrammarError(reason[:_MAX_ERROR_CHARS])
