"""What `headwater worker` takes, in groups: only how each option is told, not what it does."""

from pathlib import Path
from typing import Annotated, Any

from .option_groups import option_group


def _flags(title: str) -> Any:
    """Return what makes the options of a group whose defaults WorkerSettings has."""
    option = option_group(title)
    return lambda name, text: option(name, text=text, show_default=False)


_model = _flags("The model")
_speed = _flags("Speed and memory")
_life = _flags("Operation")

Model = Annotated[
    str, option_group("The model")(text="Directory, hub name, or demo.", envvar="HEADWATER_MODEL")
]
Alias = Annotated[
    str | None,
    option_group("The model")(
        "--alias",
        text="The name that jobs ask for; default: the model's own name.",
        envvar="HEADWATER_ALIAS",
    ),
]
Adapters = Annotated[
    list[str] | None,
    _model("--adapter", "A LoRA adapter, ALIAS=DIRECTORY; may be given again."),
]
Reasoning = Annotated[
    str | None, _model("--reasoning", "Markers of the reasoning; default: the model's own.")
]
ToolParser = Annotated[
    str | None, _model("--tool-parser", "Form of the tool calls; default: the model's own.")
]

MaxBatch = Annotated[int | None, _speed("--max-batch", "Sequences at once (32).")]
TargetItlMs = Annotated[
    float | None,
    _speed("--target-itl-ms", "A running sequence waits at most about this long (400)."),
]
PrefillChunk = Annotated[
    int | None, _speed("--prefill-chunk", "Fixed prefill chunk in tokens; default: adaptive.")
]
KvBudgetMb = Annotated[
    int | None, _speed("--kv-budget-mb", "Running KV and prefix cache together, in MiB.")
]
KvBits = Annotated[
    int | None,
    _speed("--kv-bits", "8 or 4 bits a stored key or value, rows one at a time; default: off."),
]
CacheDir = Annotated[
    Path | None,
    _speed("--cache-dir", "Directory of prefixes that survive restarts; default: none."),
]
CpuThreads = Annotated[
    int | None, _speed("--cpu-threads", "Threads of the BLAS on a CPU; default: all cores.")
]

LeaseS = Annotated[
    float | None, _life("--lease-s", "Seconds of silence after which jobs are lost (15).")
]
DrainS = Annotated[
    float | None, _life("--drain-s", "Seconds that SIGTERM waits for running jobs (30).")
]
MetricsPort = Annotated[
    int | None, _life("--metrics-port", "Port of /metrics, /healthz, /readyz; default: off.")
]
LogLevel = Annotated[str | None, _life("--log-level", "debug, info (default), warning or error.")]
