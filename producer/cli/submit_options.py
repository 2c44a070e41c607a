"""What `headwater submit` takes, in groups: only how each option is told, not what it does."""

from pathlib import Path
from typing import Annotated

from .option_groups import option_group

_prompt = option_group("Prompt")
_chat = option_group("With --messages")
_what = option_group("What is asked for")
_text = option_group("Text")
_draws = option_group("How tokens are drawn")
_queue = option_group("Queue")

Model = Annotated[str, _what(text="The alias that a worker serves.")]

Prompt = Annotated[str | None, _prompt(text="A plain prompt.", metavar="TEXT")]
Messages = Annotated[Path | None, _prompt(text="Chat messages, a JSON list.", metavar="FILE")]
Tokens = Annotated[Path | None, _prompt(text="Token ids, a JSON list.", metavar="FILE")]
TokenizerDirectory = Annotated[
    Path | None,
    _prompt(
        "--tokenizer",
        text="Tokenize with this model directory's files.",
        metavar="DIR",
    ),
]

Tools = Annotated[Path | None, _chat(text="Tools on offer, a JSON list.", metavar="FILE")]
ToolChoice = Annotated[
    str | None,
    _chat(
        text="none, auto, required, or the name of the tool to call.",
        metavar="CHOICE",
    ),
]
TemplateOptions = Annotated[
    str | None,
    _chat(text="What else the chat template reads.", metavar="JSON"),
]
ContinueFinalMessage = Annotated[
    bool,
    _chat("--continue-final-message", text="Write on where the last message ends."),
]

Kind = Annotated[str, _what(text="generate, score or embedding.")]
Continuations = Annotated[
    list[str] | None,
    _what(
        "--continuation",
        text="For score: a text whose likelihood is asked for; may be given again.",
        metavar="TEXT",
    ),
]
ContinuationsFile = Annotated[
    Path | None,
    _what(
        "--continuations",
        text="For score: texts or lists of token ids, a JSON list.",
        metavar="FILE",
    ),
]
Pooling = Annotated[str, _what(text="For embedding: last or mean.")]
Normalize = Annotated[bool, _what("--normalize/--raw", text="For embedding: scale to length 1.")]
Adapter = Annotated[str | None, _what(text="One of the worker's LoRA adapters.", metavar="ALIAS")]

MaxTokens = Annotated[int, _text(text="New tokens at most.")]
Stop = Annotated[list[str] | None, _text(text="End before this text; may be given again.")]
ResponseFormat = Annotated[
    Path | None,
    _text(
        text="What the text has to look like: a JSON schema, or a response_format.", metavar="FILE"
    ),
]
Logprobs = Annotated[int | None, _text(text="Tell each token's, and of so many likeliest.")]
PromptLogprobs = Annotated[int | None, _text(text="The same of the prompt.")]
Options = Annotated[
    Path | None,
    _text(text="More of the job's fields, a JSON object: sampling, min_tokens...", metavar="FILE"),
]

Temperature = Annotated[float, _draws(text="0 is greedy.")]
TopK = Annotated[int, _draws(text="Keep the k likeliest tokens; 0 keeps all.")]
TopP = Annotated[float, _draws(text="Keep the likeliest tokens of this mass.")]
MinP = Annotated[
    float,
    _draws(text="Keep tokens of at least this share of the likeliest one's."),
]
Seed = Annotated[int | None, _draws(text="Same seed, same draws.")]
Choices = Annotated[int, _draws("--n", text="Choices: texts of their own for one prompt.")]

Priority = Annotated[str, _queue(text="high, normal or low.")]
Namespace = Annotated[str, _queue(text="Isolates queue and prefix cache.")]
IdempotencyKey = Annotated[
    str | None,
    _queue(text="Submit once, however often it is repeated.", metavar="KEY"),
]
