"""`headwater submit`: put one job into the queue."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import orjson
import typer

from .options import JsonOption, RedisOption, print_json

if TYPE_CHECKING:  # the help must not pay for importing redis and tokenizers
    from ..client import Producer


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog='Example: headwater submit --model demo --prompt "Once upon a time" --follow'
    )(submit)


def submit(
    model: Annotated[str, typer.Option(help="The alias that a worker serves.")],
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="A plain prompt.")] = None,
    messages: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Chat messages, a JSON list.")
    ] = None,
    tokens: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Token ids, a JSON list.")
    ] = None,
    tools: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --messages: tools on offer, a JSON list."),
    ] = None,
    template_options: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="With --messages: what else the chat template reads."),
    ] = None,
    continue_final_message: Annotated[
        bool,
        typer.Option("--continue-final-message", help="Write on where the last message ends."),
    ] = False,
    max_tokens: Annotated[int, typer.Option(help="New tokens at most.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens of this mass.")] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Keep tokens of at least this share of the likeliest one's.")
    ] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same draws.")] = None,
    n: Annotated[int, typer.Option(help="Choices: texts of their own for one prompt.")] = 1,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text; may be given again.")
    ] = None,
    options: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="More of the job's fields, a JSON object: logprobs, response_format, sampling...",
        ),
    ] = None,
    priority: Annotated[str, typer.Option(help="high, normal or low.")] = "normal",
    namespace: Annotated[str, typer.Option(help="Isolates queue and prefix cache.")] = "default",
    tokenizer: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Tokenize with this model directory's files."),
    ] = None,
    idempotency_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="Submit once, however often it is repeated.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Print the text as it comes.")] = False,
    redis: RedisOption = None,
    json: JsonOption = False,
) -> None:
    """Submit one prompt and print the job's id.

    With --follow: print its text as it comes, with the exit codes of `headwater tail`.
    """
    from ..client import Producer, new_job
    from .following import follow as follow_items

    given = [form for form in (prompt, messages, tokens) if form is not None]
    if len(given) != 1:
        raise typer.BadParameter("give exactly one of --prompt, --messages and --tokens")
    offered = _read_json(tools, list) if tools is not None else None
    chat = _chat_options(offered, template_options, continue_final_message)
    if chat and messages is None:
        raise typer.BadParameter(
            "--tools, --template-options and --continue-final-message go with --messages"
        )
    producer = Producer(redis)
    if tokens is not None:
        token_ids, fingerprint = _read_json(tokens, list), None
    else:
        content = _read_json(messages, list) if messages is not None else (prompt or "")
        token_ids, fingerprint = _tokenize(producer, model, tokenizer, content, chat)
    fields = {
        "sampling": {
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "seed": seed,
            "n": n,
        },
        "max_tokens": max_tokens,
        "stop": tuple(stop or ()),
        "priority": priority,
        "namespace": namespace,
        "tools": tuple(offered or ()),
        "tokenizer_fingerprint": fingerprint,
    }
    if options is not None:
        fields = _merged(fields, _read_json(options, dict))
    job = new_job(model, token_ids, **fields)
    job_id = producer.submit(job, idempotency_key=idempotency_key)
    if json:
        print_json({"job_id": job_id, "model": model, "prompt_tokens": len(token_ids)})
    elif not follow:
        typer.echo(job_id)
    if follow:
        if not json:
            typer.echo(f"job {job_id}", err=True)
        follow_items(producer.tail(job_id), as_json=json)


def _tokenize(
    producer: "Producer",
    model: str,
    directory: Path | None,
    content: str | list[Any],
    chat: dict[str, Any],
) -> tuple[list[int], str]:
    """Return the token ids of a text or of chat messages, and the tokenizer's fingerprint.

    *chat* are encode_chat's options.
    """
    from ..tokenization import Tokenizer

    if directory is None:
        tokenizer = producer.models.tokenizer(model)
    else:
        tokenizer = Tokenizer.from_directory(directory)
    if isinstance(content, str):
        return tokenizer.encode(content), tokenizer.fingerprint
    try:
        return tokenizer.encode_chat(content, **chat), tokenizer.fingerprint
    except TypeError as error:
        # A template option named like a parameter of ours.
        raise typer.BadParameter(f"--template-options: {error}") from error


def _chat_options(
    tools: list[Any] | None, template_options: str | None, continue_final_message: bool
) -> dict[str, Any]:
    chat: dict[str, Any] = {}
    if template_options is not None:
        try:
            chat = orjson.loads(template_options)
        except orjson.JSONDecodeError as error:
            raise typer.BadParameter(f"--template-options is no JSON: {error}") from error
        if not isinstance(chat, dict):
            raise typer.BadParameter('--template-options must be an object: {"name": value}')
    if tools is not None:
        chat["tools"] = tools
    if continue_final_message:
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    return chat


def _merged(fields: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return *fields* with those of *options*, which win; sampling is merged field by field."""
    sampling = options.get("sampling", {})
    if isinstance(sampling, dict):
        sampling = {**fields["sampling"], **sampling}
    return {**fields, **options, "sampling": sampling}


_T = TypeVar("_T", list[Any], dict[str, Any])


def _read_json(path: Path, kind: type[_T]) -> _T:
    from ..errors import InvalidRequest

    try:
        value = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise InvalidRequest(f"can't read {path}: {error}") from error
    if not isinstance(value, kind):
        wanted = "list" if kind is list else "object"
        raise InvalidRequest(f"{path} must hold a JSON {wanted}, not {type(value).__name__}")
    return value
