"""Peaks of memory: each side once more, in a process of its own.

`python -m headwater.worker.bench.memory` runs one side; its argument says which.
"""

import resource
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import orjson

from ..engine import blas
from .report import Figures

_KEYS = ("peak_kv_bytes", "peak_rss_bytes")
OURS = 0
PEER = 1
"""Sides; peers other than the first are not asked."""


def measure_apart(scenario: str, settings: Mapping[str, Any], side: int) -> Figures:
    """Return the peaks of one side of a scenario; raises CalledProcessError when it fails."""
    request = orjson.dumps({"scenario": scenario, "settings": dict(settings), "side": side})
    command = [sys.executable, "-m", "headwater.worker.bench.memory", request.decode()]
    result = subprocess.run(command, stdout=subprocess.PIPE, check=True)  # noqa: S603 - ourselves
    # Whatever a library prints comes before.
    figures: Figures = orjson.loads(result.stdout.splitlines()[-1])
    return figures


def _measure(scenario: str, settings: Mapping[str, Any], side: int) -> Figures:
    from .registry import SCENARIOS
    from .scenario import no_queue

    asked = SCENARIOS[scenario]
    contest = asked.prepare(asked.settings(**settings), no_queue)
    measure = contest.ours if side == OURS else contest.peers[0].measure
    figures = measure()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Kilobytes, but for macOS, which counts bytes.
    figures["peak_rss_bytes"] = float(peak if sys.platform == "darwin" else peak * 1024)
    return {key: figures[key] for key in _KEYS}


if __name__ == "__main__":
    # Before anything imports mlx.
    blas.preload()
    sys.stdout.write(orjson.dumps(_measure(**orjson.loads(sys.argv[1]))).decode() + "\n")
