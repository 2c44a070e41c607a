"""BenchReport: what a scenario measured, as one JSON object or as a table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from rich.table import Table

from .environment import commit, environment

Figures: TypeAlias = dict[str, float]


@dataclass(frozen=True)
class BenchReport:
    """Medians of us and of the peers."""

    scenario: str
    settings: Mapping[str, Any]
    ours: Figures
    peers: tuple[Mapping[str, Any], ...]
    """Each with its name, version and number of runs; the ratios are against the first."""
    ratio: Figures

    def to_json(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        first, *others = self.peers or ({},)
        return {
            "scenario": self.scenario,
            "commit": commit(),
            "environment": environment(),
            "settings": dict(self.settings),
            "ours": self.ours,
            "peer": {**first, **({"others": others} if others else {})},
            "ratio": self.ratio,
        }

    def to_table(self) -> Table:
        """Return the figures side by side."""
        title = f"{self.scenario}: medians"
        table = Table(title=title, title_justify="left")
        table.add_column("")
        table.add_column(f"ours\n{told_runs(self.settings)}", justify="right")
        for peer in self.peers:
            table.add_column(
                f"{peer['name']} {peer['version']}\n{told_runs(peer)}", justify="right"
            )
        for key in self.ours:
            cells = (shown(side.get(key)) for side in (self.ours, *self.peers))
            table.add_row(key, *cells)
        table.add_section()
        for key, value in self.ratio.items():
            table.add_row(f"ratio: {key}", shown(value))
        return table


def told_runs(counted: Mapping[str, Any]) -> str:
    """Return how often the settings, or a peer, say that a side ran."""
    num_runs = counted["repeat"]
    return "1 run" if num_runs == 1 else f"{num_runs} runs"


def shown(value: Any) -> str:
    """Return a figure for people to read."""
    return "" if value is None else f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"
