"""`headwater submit`: put one job into the queue."""

from typing import Annotated

import typer

from . import submit_options as options_of
from .option_groups import GroupedCommand
from .options import JsonOption, RedisOption, print_json


def register(app: typer.Typer) -> None:
    """Add the command."""
    example = 'Example: headwater submit --model demo --prompt "Once upon a time" --follow'
    app.command(cls=GroupedCommand, epilog=example)(submit)


def submit(
    model: options_of.Model,
    prompt: options_of.Prompt = None,
    messages: options_of.Messages = None,
    tokens: options_of.Tokens = None,
    tokenizer: options_of.TokenizerDirectory = None,
    tools: options_of.Tools = None,
    tool_choice: options_of.ToolChoice = None,
    template_options: options_of.TemplateOptions = None,
    continue_final_message: options_of.ContinueFinalMessage = False,
    kind: options_of.Kind = "generate",
    continuation: options_of.Continuations = None,
    continuations: options_of.ContinuationsFile = None,
    pooling: options_of.Pooling = "last",
    normalize: options_of.Normalize = True,
    adapter: options_of.Adapter = None,
    max_tokens: options_of.MaxTokens = 256,
    stop: options_of.Stop = None,
    response_format: options_of.ResponseFormat = None,
    logprobs: options_of.Logprobs = None,
    prompt_logprobs: options_of.PromptLogprobs = None,
    options: options_of.Options = None,
    temperature: options_of.Temperature = 0.0,
    top_k: options_of.TopK = 0,
    top_p: options_of.TopP = 1.0,
    min_p: options_of.MinP = 0.0,
    seed: options_of.Seed = None,
    n: options_of.Choices = 1,
    priority: options_of.Priority = "normal",
    namespace: options_of.Namespace = "default",
    idempotency_key: options_of.IdempotencyKey = None,
    follow: Annotated[bool, typer.Option("--follow", help="Print the text as it comes.")] = False,
    redis: RedisOption = None,
    json: JsonOption = False,
) -> None:
    """Submit one prompt and print the job's id.

    With --follow: print its text as it comes, with the exit codes of `headwater tail`.
    """
    given = dict(locals())
    # Imported here: the help must not pay for redis and tokenizers.
    from ..client import Producer
    from .following import follow as follow_items
    from .submit_job import check_forms, job_of

    check_forms(given)
    producer = Producer(redis)
    job = job_of(given, producer)
    job_id = producer.submit(job, idempotency_key=idempotency_key)
    if json:
        num_tokens = len(job.prompt_token_ids)
        print_json({"job_id": job_id, "model": model, "prompt_tokens": num_tokens})
    elif not follow:
        typer.echo(job_id)
    if follow:
        if not json:
            typer.echo(f"job {job_id}", err=True)
        follow_items(producer.tail(job_id), as_json=json)
