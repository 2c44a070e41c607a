"""What `headwater submit` takes, in groups: only how each option is told, not what it does."""

from pathlib import Path
from typing import Annotated, Any

import typer


def _option(*flags: str, text: str, metavar: str | None = None) -> Any:
    return typer.Option(*flags, help=text, metavar=metavar)


def _file(text: str) -> Any:
    return _option(text=text, metavar="FILE")


# The prompt.

Prompt = Annotated[str | None, _option(text="A plain prompt.", metavar="TEXT")]
Messages = Annotated[Path | None, _file("Chat messages, a JSON list.")]
Tokens = Annotated[Path | None, _file("Token ids, a JSON list.")]
TokenizerDirectory = Annotated[
    Path | None,
    _option(
        "--tokenizer",
        text="Tokenize with this model directory's files.",
        metavar="DIR",
    ),
]

# With --messages.
Tools = Annotated[Path | None, _file("Tools on offer, a JSON list.")]
ToolChoice = Annotated[
    str | None,
    _option(
        text="none, auto, required, or the name of the tool to call.",
        metavar="CHOICE",
    ),
]
TemplateOptions = Annotated[
    str | None,
    _option(text="What else the chat template reads.", metavar="JSON"),
]
ContinueFinalMessage = Annotated[
    bool,
    _option("--continue-final-message", text="Write on where the last message ends."),
]

# What is asked for, and of which model.
Kind = Annotated[str, _option(text="generate, score or embedding.")]
Continuations = Annotated[
    list[str] | None,
    _option(
        "--continuation",
        text="For score: a text whose likelihood is asked for; may be given again.",
        metavar="TEXT",
    ),
]
ContinuationsFile = Annotated[
    Path | None,
    _option(
        "--continuations",
        text="For score: texts or lists of token ids, a JSON list.",
        metavar="FILE",
    ),
]
Pooling = Annotated[str, _option(text="For embedding: last or mean.")]
Normalize = Annotated[bool, _option("--normalize/--raw", text="For embedding: scale to length 1.")]
Adapter = Annotated[str | None, _option(text="One of the worker's LoRA adapters.", metavar="ALIAS")]

# The text.
MaxTokens = Annotated[int, _option(text="New tokens at most.")]
Stop = Annotated[list[str] | None, _option(text="End before this text; may be given again.")]
ResponseFormat = Annotated[
    Path | None,
    _file("What the text has to look like: a JSON schema, or a response_format."),
]
Logprobs = Annotated[int | None, _option(text="Tell each token's, and of so many likeliest.")]
PromptLogprobs = Annotated[int | None, _option(text="The same of the prompt.")]
Options = Annotated[
    Path | None, _file("More of the job's fields, a JSON object: sampling, min_tokens...")
]

# How tokens are drawn.
Temperature = Annotated[float, _option(text="0 is greedy.")]
TopK = Annotated[int, _option(text="Keep the k likeliest tokens; 0 keeps all.")]
TopP = Annotated[float, _option(text="Keep the likeliest tokens of this mass.")]
MinP = Annotated[
    float,
    _option(text="Keep tokens of at least this share of the likeliest one's."),
]
Seed = Annotated[int | None, _option(text="Same seed, same draws.")]
Choices = Annotated[int, _option("--n", text="Choices: texts of their own for one prompt.")]

# The queue.
Priority = Annotated[str, _option(text="high, normal or low.")]
Namespace = Annotated[str, _option(text="Isolates queue and prefix cache.")]
IdempotencyKey = Annotated[
    str | None,
    _option(text="Submit once, however often it is repeated.", metavar="KEY"),
]
