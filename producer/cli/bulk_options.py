"""What `headwater bulk` takes, in groups: only how each option is told, not what it does."""

from pathlib import Path
from typing import Annotated

import typer

from .option_groups import option_group

_where = option_group("Where rows run")
_default = option_group("For rows that don't say")
_rows = option_group("Rows and results")
_flow = option_group("Flow and limits")

Input = Annotated[
    str, typer.Argument(metavar="INPUT", help="Rows, .jsonl or .jsonl.gz; - reads stdin.")
]
Output = Annotated[
    Path | None, typer.Argument(metavar="OUTPUT", help="Where results go, a row a line.")
]

Model = Annotated[
    str, _where(text="Without --redis: directory, hub name, or demo. With it: the alias.")
]
RedisUrl = Annotated[
    str | None,
    _where(
        text="Use the workers there; default: a server and workers of its own.",
        metavar="URL",
        envvar="HEADWATER_REDIS",
    ),
]
Workers = Annotated[int, _where(text="Own workers, one a device; without --redis.", min=1, max=64)]
MaxBatch = Annotated[int | None, _where(text="Rows at once in an own worker (32).", min=1)]
Namespace = Annotated[str, _where(text="Isolates queue and prefix cache.")]

MaxTokens = Annotated[int | None, _default(text="New tokens.", min=1)]
Temperature = Annotated[float | None, _default(text="0 is greedy.", min=0.0)]
TopP = Annotated[float | None, _default(text="Keep the likeliest tokens of this mass.")]
Seed = Annotated[int | None, _default(text="Each gets this plus its line number.", min=0)]
Stop = Annotated[list[str] | None, _default(text="End before this text; may be given again.")]
Priority = Annotated[str, _default(text="high, normal or low.")]

OverrideModel = Annotated[bool, _rows("--override-model", text="Ignore which model the rows name.")]
Errors = Annotated[
    Path | None, _rows(text="Rows that failed; default: OUTPUT.errors.jsonl.", metavar="FILE")
]
Ordered = Annotated[bool, _rows("--ordered", text="Write results in the rows' order.")]
DryRun = Annotated[bool, _rows("--dry-run", text="Check and count the rows; generate nothing.")]
Force = Annotated[bool, _rows("--force", text="Begin anew, whatever an earlier run left.")]

Window = Annotated[int, _flow(text="Rows that are grouped by their common prefixes.", min=1)]
Outstanding = Annotated[int, _flow(text="Jobs submitted and not done, at most.", min=1, max=10_000)]
MaxQueueDepth = Annotated[int | None, _flow(text="Wait while the queue holds so many jobs.", min=1)]
TokenizerProcesses = Annotated[
    int, _flow(text="Processes that tokenize large inputs; 0 chooses.", min=0)
]
MaxRowMb = Annotated[int, _flow(text="Size limit of a row.", min=1)]
