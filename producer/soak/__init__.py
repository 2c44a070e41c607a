"""The soak: jobs under random faults against real processes, then a verdict on every stream."""

from .run import SoakSettings, run_soak
from .verdict import Verdict

__all__ = ["SoakSettings", "Verdict", "run_soak"]
