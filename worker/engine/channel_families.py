"""How a model marks reasoning and tool calls, inferred as mlx-lm infers it, or as it is told."""

import json
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final, NamedTuple

from headwater.schemas import TokenizerFiles
from mlx_lm import tokenizer_utils
from tokenizers import Tokenizer

from ..channel_family import ChannelFamily, Mode, ParsedCall, Tools, UnparsableCalls
from ..errors import StartupError

AUTO: Final = "auto"
NONE: Final = "none"
HARMONY: Final = "harmony"

REASONING_MARKERS: Final[Mapping[str, tuple[str, str]]] = {
    "think": ("<think>", "</think>"),
    "longcat": ("<longcat_think>", "</longcat_think>"),
    "think_start": ("<|think:start|>", "<|think:end|>"),
    "gemma4": ("<|channel>thought", "<channel|>"),
    "kimi_k3": ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed": ("<seed:think>", "</seed:think>"),
}
"""By the name that the worker's setting takes; the first five are those that mlx-lm infers."""

_OWN_INFERENCE: Final = ("mistral", "seed")

_HARMONY_TOKENS: Final = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>")
_HARMONY_CALL: Final = " to=functions."
_HARMONY: Final[Mapping[Mode, Mapping[str, Mode]]] = {
    Mode.CONTENT: {"<|start|>": Mode.HEADER, "<|end|>": Mode.HEADER},
    Mode.REASONING: {"<|start|>": Mode.HEADER, "<|end|>": Mode.HEADER},
    Mode.TOOL_CALLS: {"<|start|>": Mode.HEADER, "<|end|>": Mode.HEADER, "<|call|>": Mode.HEADER},
    Mode.HEADER: {
        "<|start|>": Mode.HEADER,
        "<|channel|>analysis": Mode.REASONING_HEADER,
        "<|channel|>commentary": Mode.CONTENT_HEADER,
        "<|channel|>final": Mode.CONTENT_HEADER,
        _HARMONY_CALL: Mode.TOOL_CALLS,
    },
    Mode.REASONING_HEADER: {"<|message|>": Mode.REASONING, _HARMONY_CALL: Mode.TOOL_CALLS},
    Mode.CONTENT_HEADER: {"<|message|>": Mode.CONTENT, _HARMONY_CALL: Mode.TOOL_CALLS},
}
"""A message is a header, `<|message|>` and a body; a tool's name stands in the header."""


_MAX_PARSED_CHARS: Final[Mapping[str, int]] = {
    "gemma4": 8_192,
    "kimi_k3": 16_384,
    "muse_spark": 32_768,
}
"""The expressions of these take time that grows with the square of a nonsensical text: at these
lengths about a second, in which nobody gets a token. Longer calls are content."""
_MAX_CHARS_OF_OTHERS: Final = 262_144


class _ToolSyntax(NamedTuple):
    start: str
    end: str
    """Empty where calls go on to the end of the text."""
    name: str


def infer_family(
    files: TokenizerFiles,
    tokenizer: Tokenizer,
    *,
    reasoning: str = AUTO,
    tool_parser: str = AUTO,
) -> ChannelFamily | None:
    """Return the family of a model's tokenizer; None where it marks nothing.

    *reasoning* is a name of REASONING_MARKERS, *tool_parser* one of mlx_lm.tool_parsers, either
    may be "harmony", "none" or "auto". Raises StartupError for others.
    """
    view = _TokenizerView(files, tokenizer)
    if HARMONY in (reasoning, tool_parser) or (
        AUTO in (reasoning, tool_parser) and view.has_all(_HARMONY_TOKENS)
    ):
        return _harmony(reasoning, tool_parser)
    markers = _reasoning_markers(view, reasoning)
    syntax = _tool_syntax(view, tool_parser)
    transitions = _transitions(markers, syntax)
    if not any(transitions.values()):
        return None
    return ChannelFamily(
        transitions,
        parse_calls=None if syntax is None else _MlxLmParser(syntax.name).parse,
        has_json_calls=syntax is not None and syntax.name == "json_tools",
    )


class _TokenizerView:
    """What mlx-lm's inference asks of a tokenizer."""

    def __init__(self, files: TokenizerFiles, tokenizer: Tokenizer) -> None:
        self.config = files.config
        self.chat_template = files.chat_template
        self._tokenizer = tokenizer
        self._vocab = tokenizer.get_vocab(with_added_tokens=True)

    def get_vocab(self) -> dict[str, int]:
        return self._vocab

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def has_all(self, tokens: tuple[str, ...]) -> bool:
        return all(token in self._vocab for token in tokens)


def _reasoning_markers(view: _TokenizerView, name: str) -> tuple[str, str] | None:
    if name == NONE:
        return None
    if name == AUTO:
        # mlx-lm offers no public name for it that takes a plain tokenizer.
        infer_thinking: Any = tokenizer_utils._infer_thinking
        start, end, *_ = infer_thinking(view)
        if start is not None:
            return start, end
        pairs = (REASONING_MARKERS[own] for own in _OWN_INFERENCE)
        return next((pair for pair in pairs if view.has_all(pair)), None)
    if name not in REASONING_MARKERS:
        raise StartupError(
            f"no reasoning markers named {name!r}; give {AUTO}, {NONE}, {HARMONY} or one of"
            f" {', '.join(sorted(REASONING_MARKERS))}"
        )
    return REASONING_MARKERS[name]


def _tool_syntax(view: _TokenizerView, name: str) -> _ToolSyntax | None:
    if name == AUTO:
        declared = view.config.get("tool_parser_type")
        infer_parser: Any = tokenizer_utils._infer_tool_parser
        name = declared or infer_parser(view) or NONE
    if name == NONE:
        return None
    module = _parser_module(name)
    return _ToolSyntax(module.tool_call_start, module.tool_call_end, name)


def _parser_module(name: str) -> Any:
    try:
        return import_module(f"mlx_lm.tool_parsers.{name}")
    except (ImportError, ValueError) as error:
        raise StartupError(
            f"mlx-lm has no tool parser {name!r} ({error}); give {AUTO}, {NONE}, {HARMONY} or the"
            " name of a module of mlx_lm.tool_parsers"
        ) from error


def _transitions(
    markers: tuple[str, str] | None, syntax: _ToolSyntax | None
) -> dict[Mode, dict[str, Mode]]:
    content: dict[str, Mode] = {}
    reasoning: dict[str, Mode] = {}
    calls: dict[str, Mode] = {}
    if markers is not None:
        content[markers[0]] = Mode.REASONING
        reasoning[markers[1]] = Mode.CONTENT
    if syntax is not None:
        content[syntax.start] = reasoning[syntax.start] = Mode.TOOL_CALLS
        if syntax.end:
            calls[syntax.end] = Mode.CONTENT
        if syntax.name == "kimi_k3":
            # The answer has a wrapping of its own.
            for wrapping in ("<|open|>response<|sep|>", "<|close|>response<|sep|>"):
                content[wrapping] = Mode.CONTENT
            content["<|close|>message<|sep|>"] = Mode.CONTENT
    return {Mode.CONTENT: content, Mode.REASONING: reasoning, Mode.TOOL_CALLS: calls}


def _harmony(reasoning: str, tool_parser: str) -> ChannelFamily | None:
    edges = {mode: dict(to) for mode, to in _HARMONY.items()}
    if NONE in (reasoning, tool_parser):
        raise StartupError(
            "this model's messages carry their channel in a header: reasoning and tool_parser can"
            f" both be {AUTO}, {HARMONY} or {NONE}, not differ"
        )
    return ChannelFamily(
        edges, parse_calls=_parse_harmony, header_starts=("<|start|>", "<|channel|>")
    )


def _parse_harmony(text: str, tools: Tools) -> list[ParsedCall]:
    """Parse `NAME <header rest><|message|>JSON`."""
    del tools
    header, _, arguments = text.partition("<|message|>")
    name = header.replace("<", " <").split(maxsplit=1)[:1]
    return [_call({"name": name[0] if name else "", "arguments": _json_object(arguments)})]


class _MlxLmParser:
    """A parser of mlx_lm.tool_parsers behind our signature."""

    def __init__(self, name: str) -> None:
        self._module = _parser_module(name)
        self._max_chars = _MAX_PARSED_CHARS.get(name, _MAX_CHARS_OF_OTHERS)

    def parse(self, text: str, tools: Tools) -> list[ParsedCall]:
        """Return the calls in *text*; raises UnparsableCalls."""
        if len(text) > self._max_chars:
            raise UnparsableCalls(f"{len(text)} characters; at most {self._max_chars}")
        try:
            parsed = self._module.parse_tool_call(text, list(tools) or None)
        except Exception as error:  # foreign parsers over a model's free text raise anything
            raise UnparsableCalls(f"{type(error).__name__}: {error}") from error
        calls = parsed if isinstance(parsed, list) else [parsed]
        if not calls:
            raise UnparsableCalls("no call")
        return [_call(call) for call in calls]


def _call(call: Any) -> ParsedCall:
    if not isinstance(call, Mapping):
        raise UnparsableCalls("a call is an object")
    name = call.get("name")
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _json_object(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, Mapping):
        raise UnparsableCalls("a call has a name, and an object of arguments")
    call_id = call.get("id")
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        # Python literals that are no JSON: sets, bytes, complex numbers.
        raise UnparsableCalls(f"arguments are no JSON: {error}") from error
    return ParsedCall(name, text, call_id if isinstance(call_id, str) else None)


def _json_object(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnparsableCalls(f"arguments are no JSON: {error}") from error
