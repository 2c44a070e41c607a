"""Every scenario of `headwater bench`, by name."""

from collections.abc import Mapping
from typing import Any

from . import (
    batch_scenarios,
    budget,
    bulk,
    chat_scenarios,
    decode,
    detok,
    features,
    kv_bits,
    overhead,
    restart,
    scheduler,
)
from .scenario import Scenario

_ALL: tuple[Scenario[Any], ...] = (
    detok.SCENARIO,
    overhead.SCENARIO,
    scheduler.SCENARIO,
    batch_scenarios.UNIQUE,
    batch_scenarios.SHARED_PREFIX,
    batch_scenarios.NESTED_PREFIX,
    batch_scenarios.SAMPLES,
    chat_scenarios.MULTI_TURN,
    chat_scenarios.MIXED,
    decode.SCENARIO,
    features.SCENARIO,
    budget.SCENARIO,
    restart.SCENARIO,
    kv_bits.SCENARIO,
    bulk.SCENARIO,
)
SCENARIOS: Mapping[str, Scenario[Any]] = {scenario.name: scenario for scenario in _ALL}
