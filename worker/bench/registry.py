"""Every scenario of `headwater bench`, by name."""

from collections.abc import Mapping
from typing import Any

from . import detok, overhead, scheduler
from .scenario import Scenario

SCENARIOS: Mapping[str, Scenario[Any]] = {
    scenario.name: scenario for scenario in (detok.SCENARIO, overhead.SCENARIO, scheduler.SCENARIO)
}
