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
        title = f"{self.scenario}: medians of {self.settings['repeat']} runs"
        table = Table(title=title, title_justify="left")
        table.add_column("")
        for heading in ("ours", *(f"{peer['name']} {peer['version']}" for peer in self.peers)):
            table.add_column(heading, justify="right")
        for key in self.ours:
            cells = (_shown(side.get(key)) for side in (self.ours, *self.peers))
            table.add_row(key, *cells)
        table.add_section()
        for key, value in self.ratio.items():
            table.add_row(f"ratio: {key}", _shown(value))
        return table


def _shown(value: Any) -> str:
    return "" if value is None else f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"
