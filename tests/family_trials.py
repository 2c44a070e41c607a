"""Try shared prefixes with every model family of mlx-lm, as tiny random instances."""

import contextlib
import importlib
import io
import pkgutil
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx_lm.models
from headwater.worker.engine.rehearsal import SMALL, rehearse, rehearse_alone
from headwater.worker.engine.shared_kv import SharedPrefixRunner
from headwater.worker.engine.shrinking import VOCABULARY_SIZE, NotShrinkable, small_model

from tests.family_configs import NOT_TRIED, config_of

MAX_ERROR = 1e-3
"""In units of the logits' spread; a wrong key or position is off by a tenth and more."""


def modules() -> Iterator[tuple[str, ModuleType | None]]:
    """Yield mlx-lm's families; None for those that can't be tried."""
    for found in sorted(pkgutil.iter_modules(mlx_lm.models.__path__), key=lambda each: each.name):
        if found.name in NOT_TRIED:
            yield found.name, None
            continue
        with contextlib.redirect_stdout(io.StringIO()):
            module = importlib.import_module(f"mlx_lm.models.{found.name}")
        if hasattr(module, "Model") and hasattr(module, "ModelArgs"):
            yield found.name, module


def try_all() -> dict[str, Any]:
    """Return the list as `families.json` has it."""
    found: dict[str, Any] = {"right": [], "wrong": {}, "untested": {}}
    for name, module in modules():
        if module is None:
            found["untested"][name] = NOT_TRIED[name]
            continue
        try:
            fault = fault_of(name, module)
        except NotShrinkable as error:
            raise AssertionError(f"say what {name} needs in family_configs: {error}") from error
        if fault is None:
            found["right"].append(name)
        else:
            found["wrong"][name] = fault
    return found


def fault_of(name: str, module: ModuleType) -> str | None:
    """Say what is wrong with shared prefixes of a family, None if nothing is.

    Raises NotShrinkable when no small instance can be built.
    """
    model = small_model(module, config_of(name, module))
    expected = rehearse_alone(model, SMALL, VOCABULARY_SIZE)
    try:
        runner = SharedPrefixRunner(model)
    except TypeError as error:
        return str(error)
    try:
        actual = rehearse(runner, SMALL, VOCABULARY_SIZE)
        error = float(mx.max(mx.abs(actual - expected)))
    except Exception as error:  # what a family raises
        return f"it raises {type(error).__name__}"
    return None if error <= MAX_ERROR * float(mx.std(expected)) else "its logits are off"
