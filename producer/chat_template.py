"""Chat templates: messages to prompt text, as transformers (and so mlx-lm) render them."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from .errors import TokenizationError

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names under which a message's reasoning is passed; the first is the one templates read."""

# Templates are foreign programs: besides Jinja's own errors they run into type errors, missing
# keys and endless recursion on messages that they did not expect.
_TEMPLATE_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    RecursionError,
)

_CONTINUE_HERE = "CONTINUE_FINAL_MESSAGE_TAG "


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> str:
    """Return the prompt text of *messages*.

    With *continue_final_message* it ends where the last message's text ends, so that the model
    writes on; it excludes *add_generation_prompt*. *variables* are what else the template may
    read (special tokens, enable_thinking, ...). Raises TokenizationError.
    """
    chat = [_prepare(message) for message in messages]
    if not chat:
        raise TokenizationError("the conversation is empty: give at least one message")
    if continue_final_message and add_generation_prompt:
        raise TokenizationError("a final message is continued without a generation prompt")
    final_text = _mark_final_text(chat[-1]) if continue_final_message else ""
    try:
        text = compile_template(template).render(
            messages=chat,
            tools=_plain(tools),
            documents=_plain(documents),
            add_generation_prompt=add_generation_prompt,
            **_plain(variables),
        )
    except _TEMPLATE_ERRORS as error:
        raise TokenizationError(f"the chat template refuses these messages: {error}") from error
    return _cut_at_mark(text, final_text) if continue_final_message else text


@lru_cache(maxsize=16)
def compile_template(source: str) -> Template:
    """Return the compiled template; raises TokenizationError for a syntax error."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=_strftime_now,
        dict=_Dict(),
        namespace=_Namespace,
    )
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise TokenizationError(f"the chat template is damaged: {error}") from error


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's own text for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's interface)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block, not a bare scope: names set inside stay inside, as with transformers.
        call = self.call_method("_render")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _render(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """`dict` without the attributes that lead out of the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace` that refuses names with a leading underscore, as transformers' does."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        own, *values = args
        attributes = dict(*values, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(own, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace can't hold {name!r}")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which a prompt must not.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _prepare(message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise TokenizationError(f"a chat message must be an object, not {message!r}")
    # Many templates print a None, and treat a missing field well.
    prepared = {key: _plain(value) for key, value in message.items() if value is not None}
    field = next((name for name in _REASONING_FIELDS if name in prepared), None)
    if field is None:
        return prepared
    reasoning = prepared[field]
    return {"thinking": reasoning, **prepared, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """Return *value* rebuilt of plain JSON types: templates are foreign programs."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    raise TokenizationError(f"chat templates take JSON values, not {type(value).__name__}")


def _mark_final_text(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _CONTINUE_HERE
        return content
    for block in reversed(content or ()):
        if isinstance(block, dict) and isinstance(block.get("text"), str):
            text: str = block["text"]
            block["text"] = text + _CONTINUE_HERE
            return text
    raise TokenizationError("the final message has no text to continue")


def _cut_at_mark(text: str, final_text: str) -> str:
    position = text.rfind(_CONTINUE_HERE.strip())
    if position < 0 or final_text.strip() not in text:
        raise TokenizationError("the chat template drops the text of the final message")
    # Where the template trims a message's end, its trailing space is not wanted either.
    keeps_spaces = text.startswith(_CONTINUE_HERE, position)
    return text[:position] if keeps_spaces else text[:position].rstrip()
