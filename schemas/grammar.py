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


def grammar_text(response_format: ResponseFormat) -> str:
    """Return the grammar of *response_format*; start_matcher() tells whether it is any good.

    Raises GrammarError for a schema that no end can be come to, ValueError for what the library
    can't read.
    """
    match response_format:
        case JsonSchemaFormat():
            _check_end(response_format.json_schema)
            return LLMatcher.grammar_from_json_schema(response_format.json_schema, overrides=_JSON)
        case JsonObjectFormat():
            return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=_JSON)
        case RegexFormat():
            return LLMatcher.grammar_from_regex(response_format.regex)
        case ChoiceFormat():
            # Lark's strings are JSON's.
            choices = " | ".join(map(json.dumps, response_format.choices))
            return LLMatcher.grammar_from_lark(f"start: {choices}")


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
