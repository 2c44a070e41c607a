"""What a worker makes of a model, for whoever wants to know before it serves."""

from typing import Any

from .engine.loading import LoadedModel
from .engine.parity import choose_runner
from .engine.row_runner import RowRunner
from .engine.runner import ModelRunner


def describe_model(loaded: LoadedModel) -> dict[str, Any]:
    """Return its limits, ends, caches, fingerprint, and how its rows will run, as JSON values.

    Runs the checks that a worker runs at its start; raises EngineUnsound as it does.
    """
    runner = choose_runner(loaded.model, loaded.vocab_size, config=loaded.config)
    return loaded.card("demo").model_dump(mode="json", exclude={"alias"}) | {
        "weight_dtypes": loaded.weight_dtypes,
        "cache_kind": runner.cache_kind.name.lower(),
        "cache_classes": loaded.cache_classes,
        "runner": describe_runner(runner),
        "fingerprint": loaded.fingerprint,
    }


def describe_runner(runner: ModelRunner) -> str:
    """Say in one line how rows run, and what prompts that share a prefix save."""
    if runner.shares_prefix:
        return "shared prefixes: rows run together, a prefix is computed once and held once for all"
    if isinstance(runner, RowRunner):
        return "rows alone: one forward a row, a prefix is computed once and each row has a copy"
    return "merged rows: rows run together, a prefix is computed once and each row has a copy"
