"""A report as a picture: a pair of bars for every key that both sides have."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .report import BenchReport, shown, told_runs
from .scenario import BenchError

_OURS, _PEER = "#1b6ca8", "#b9b9b9"
_WIDTH_INCHES, _INCHES_PER_KEY = 8.0, 0.42
_BAR = 0.38


def check_target(path: Path) -> None:
    """Raise BenchError unless a picture can be written to *path*: before hours of measuring."""
    if path.suffix.lower() != ".png":
        raise BenchError(f"--plot writes a PNG: name the file {path.stem or 'bench'}.png")
    if not path.absolute().parent.is_dir():
        raise BenchError(f"--plot can't write {path}: there is no directory {path.parent}")


def draw(report: BenchReport, path: Path) -> None:
    """Write the picture of *report*, us against its first peer, to *path*.

    Keys differ in unit and size, so each pair has a scale of its own: the longer bar is whole.
    Raises BenchError when the report has no peer, or the file can't be written.
    """
    if not report.peers:
        raise BenchError(f"scenario {report.scenario} has no peer to plot against")
    peer = report.peers[0]
    keys = [key for key in report.ours if key in peer]
    figure = Figure(figsize=(_WIDTH_INCHES, 1.2 + _INCHES_PER_KEY * len(keys)), layout="tight")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    name = f"{peer['name']} {peer['version']}"
    labels = (f"ours ({told_runs(report.settings)})", f"{name} ({told_runs(peer)})")
    for index, key in enumerate(keys):
        _draw_pair(axes, index, (report.ours[key], float(peer[key])))
    axes.set_yticks(range(len(keys)), keys)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25)
    axes.set_xticks([])
    axes.spines[:].set_visible(False)
    axes.legend(axes.containers[:2], labels, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=2)
    axes.set_title(_title(report), loc="left")
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise BenchError(f"can't write {path}: {error.strerror or error}") from error


def _draw_pair(axes: Axes, index: int, values: tuple[float, float]) -> None:
    largest = max(values) or 1.0
    for value, place, color in zip(values, (-_BAR / 2, _BAR / 2), (_OURS, _PEER), strict=True):
        bars = axes.barh(index + place, value / largest, height=_BAR, color=color)
        axes.bar_label(bars, [shown(value)], padding=4, fontsize=8)


def _title(report: BenchReport) -> str:
    ratios = ", ".join(f"{key} {shown(value)}" for key, value in report.ratio.items())
    return f"headwater bench {report.scenario}\n{ratios}" if ratios else report.scenario
