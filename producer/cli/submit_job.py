"""The job that `headwater submit` is asked for, made of its options and the files they name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import orjson
import typer
from headwater.schemas import GenerationJob, JobKind

from ..client import Producer, new_job
from ..errors import InvalidRequest
from ..tokenization import Tokenizer

_FORMATS = ("json_schema", "json_object", "regex", "choice")
_T = TypeVar("_T", list[Any], dict[str, Any])


class _Prompt(NamedTuple):
    token_ids: list[int]
    tokenizer: Tokenizer | None = None
    """None where the caller tokenized it."""
    text: str | None = None
    """Where it is a plain one."""


def check_forms(given: Mapping[str, Any]) -> None:
    """Raise BadParameter for options that don't go together, before anything is read."""
    forms = [given[form] for form in ("prompt", "messages", "tokens")]
    if sum(form is not None for form in forms) != 1:
        raise typer.BadParameter("give exactly one of --prompt, --messages and --tokens")
    chat = ("tools", "tool_choice", "template_options", "continue_final_message")
    if given["messages"] is None and any(given[name] for name in chat):
        raise typer.BadParameter(
            "--tools, --tool-choice, --template-options and --continue-final-message go with"
            " --messages"
        )
    is_score = given["kind"] == JobKind.SCORE
    if is_score != any(given[name] for name in ("continuation", "continuations")):
        raise typer.BadParameter("--continuation and --continuations go with --kind score")


def job_of(given: Mapping[str, Any], producer: Producer) -> GenerationJob:
    """Return the job; raises ProducerError's kinds, SchemaError and BadParameter."""
    tools = _read_json(given["tools"], list) if given["tools"] is not None else []
    # Tools that must not be called are best not shown.
    offered = [] if given["tool_choice"] == "none" else tools
    prompt = _prompt(given, producer, offered)
    fields: dict[str, Any] = {
        "kind": given["kind"],
        "adapter": given["adapter"],
        "sampling": {
            name: given[name] for name in ("temperature", "top_k", "top_p", "min_p", "seed", "n")
        },
        "max_tokens": given["max_tokens"] if given["kind"] == JobKind.GENERATE else 1,
        "stop": tuple(given["stop"] or ()),
        "priority": given["priority"],
        "namespace": given["namespace"],
        "tools": tuple(offered),
        "tokenizer_fingerprint": prompt.tokenizer and prompt.tokenizer.fingerprint,
        "logprobs": given["logprobs"],
        "prompt_logprobs": given["prompt_logprobs"],
        **_choice_of_tool(given["tool_choice"]),
        **_kinds_own(given, prompt),
    }
    if given["response_format"] is not None:
        fields["response_format"] = _response_format(_read_json(given["response_format"], dict))
    if given["options"] is not None:
        fields = _merged(fields, _read_json(given["options"], dict))
    return new_job(given["model"], prompt.token_ids, **fields)


def _choice_of_tool(choice: str | None) -> dict[str, Any]:
    if choice is None:
        return {}
    is_word = choice in ("none", "auto", "required")
    named = {"type": "function", "function": {"name": choice}}
    return {"tool_choice": choice if is_word else named}


def _kinds_own(given: Mapping[str, Any], prompt: _Prompt) -> dict[str, Any]:
    if given["kind"] == JobKind.EMBEDDING:
        return {"pooling": given["pooling"], "normalize": given["normalize"]}
    if given["kind"] != JobKind.SCORE:
        return {}
    texts: list[Any] = list(given["continuation"] or ())
    if given["continuations"] is not None:
        texts += _read_json(given["continuations"], list)
    return {"continuations": tuple(_continuation(prompt, text) for text in texts)}


def _continuation(prompt: _Prompt, text: Any) -> tuple[Any, ...]:
    """Return the token ids of a text behind the prompt; ids pass as they are."""
    if not isinstance(text, str):
        return tuple(text) if isinstance(text, list) else (text,)
    if prompt.tokenizer is None:
        raise typer.BadParameter("with --tokens, give --continuations as lists of token ids, too")
    if prompt.text is None:
        return tuple(prompt.tokenizer.encode_continuation(text))
    whole = prompt.tokenizer.encode(prompt.text + text)
    num_prompt = len(prompt.token_ids)
    if whole[:num_prompt] != prompt.token_ids:
        raise typer.BadParameter(
            f"the continuation {text!r} changes the tokens at the prompt's end: cut the prompt"
            " elsewhere, or give token ids"
        )
    return tuple(whole[num_prompt:])


def _prompt(given: Mapping[str, Any], producer: Producer, tools: list[Any]) -> _Prompt:
    if given["tokens"] is not None:
        return _Prompt(_read_json(given["tokens"], list))
    directory, text = given["tokenizer"], given["prompt"]
    messages = _read_json(given["messages"], list) if given["messages"] is not None else None
    chat = _chat_options(given, tools)
    if directory is None:
        tokenizer = producer.models.tokenizer(given["model"])
    else:
        tokenizer = Tokenizer.from_directory(directory)
    if messages is None:
        return _Prompt(tokenizer.encode(text), tokenizer, text)
    try:
        return _Prompt(tokenizer.encode_chat(messages, **chat), tokenizer)
    except TypeError as error:
        # A template option named like a parameter of ours.
        raise typer.BadParameter(f"--template-options: {error}") from error


def _chat_options(given: Mapping[str, Any], tools: list[Any]) -> dict[str, Any]:
    """Return encode_chat's options."""
    chat: dict[str, Any] = {}
    if given["template_options"] is not None:
        try:
            chat = orjson.loads(given["template_options"])
        except orjson.JSONDecodeError as error:
            raise typer.BadParameter(f"--template-options is no JSON: {error}") from error
        if not isinstance(chat, dict):
            raise typer.BadParameter('--template-options must be an object: {"name": value}')
    if tools:
        chat["tools"] = tools
    if given["continue_final_message"]:
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    return chat


def _response_format(value: dict[str, Any]) -> dict[str, Any]:
    """Return a response format; what is none is the JSON schema of one."""
    if value.get("type") in _FORMATS:
        return value
    return {"type": "json_schema", "json_schema": value}


def _merged(fields: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return *fields* with those of *options*, which win; sampling is merged field by field."""
    sampling = options.get("sampling", {})
    if isinstance(sampling, dict):
        sampling = {**fields["sampling"], **sampling}
    return {**fields, **options, "sampling": sampling}


def _read_json(path: Path, kind: type[_T]) -> _T:
    try:
        value = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise InvalidRequest(f"can't read {path}: {error}") from error
    if not isinstance(value, kind):
        wanted = "list" if kind is list else "object"
        raise InvalidRequest(f"{path} must hold a JSON {wanted}, not {type(value).__name__}")
    return value
