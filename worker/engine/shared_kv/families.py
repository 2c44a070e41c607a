"""Which of mlx-lm's model families may use shared prefixes: what a test of them all has found.

`families.json` names every module of mlx_lm.models once: those whose rows agree with rows alone,
those whose rows don't, with the reason, and those that nobody could try. `make test-long` tries
them anew and fails where the file says otherwise.
"""

import json
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from mlx.nn.layers.base import Module

from .runner import SharedPrefixRunner

PATH: Final = Path(__file__).with_name("families.json")

_PACKAGE: Final = "mlx_lm.models."


def shared_prefix_runner(model: Module) -> SharedPrefixRunner:
    """Return a SharedPrefixRunner; TypeError for a family that is not on the list."""
    family = _name(model)
    if family in families()["untested"]:
        raise TypeError(f"nobody has tried shared prefixes with {family}")
    if family not in families()["right"]:
        reason = families()["wrong"].get(family, "no family of mlx-lm")
        raise TypeError(f"{family} can't use shared prefixes: {reason}")
    return SharedPrefixRunner(model)


def is_built_small(model: Module) -> bool:
    """Whether small instances of the model's family have been built and run."""
    known = families()
    return _name(model) in {**dict.fromkeys(known["right"]), **known["wrong"]}


def family_of(model: Module) -> ModuleType:
    """Return the module that the model's class is from."""
    return sys.modules[type(model).__module__]


@cache
def families() -> dict[str, Any]:
    """Return the list: `right` names, `wrong` and `untested` ones with reasons."""
    listed: dict[str, Any] = json.loads(PATH.read_text("utf-8"))
    return listed


def _name(model: Module) -> str:
    return type(model).__module__.removeprefix(_PACKAGE)
