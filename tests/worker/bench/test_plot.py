"""The picture of a report."""

import sys
from pathlib import Path

import pytest
from headwater.producer.cli.app import main
from headwater.worker.bench.plot import check_target, draw
from headwater.worker.bench.report import BenchReport
from headwater.worker.bench.scenario import BenchError
from matplotlib.image import imread

PEER = {"name": "them", "version": "1.0", "repeat": 1}


def report(ours: dict[str, float], *peers: dict[str, float]) -> BenchReport:
    named = tuple({**PEER, **peer} for peer in peers)
    return BenchReport("unique", {"repeat": 3}, ours, named, {"speedup": 2.0})


def size_of_picture(found: BenchReport, path: Path) -> tuple[int, ...]:
    draw(found, path)
    pixels = imread(path)
    # Both sides have a colour of their own.
    assert len({tuple(pixel) for row in pixels[::7] for pixel in row[::7]}) > 2
    return pixels.shape


def test_every_key_of_both_sides_takes_its_room(tmp_path: Path) -> None:
    keys = [f"key_{index}" for index in range(8)]
    whole = report(dict.fromkeys(keys, 2.0), dict.fromkeys(keys, 3.0))
    half = report(dict.fromkeys(keys, 2.0), dict.fromkeys(keys[:4], 3.0))

    tall, short = (size_of_picture(each, tmp_path / "x.png") for each in (whole, half))
    assert tall[1] == short[1]
    assert tall[0] - short[0] == pytest.approx(4 * 0.42 * 150, abs=2)


def test_figures_of_zero_can_be_drawn(tmp_path: Path) -> None:
    assert size_of_picture(report({"gap": 0.0}, {"gap": 0.0}), tmp_path / "zero.png")


def test_a_report_without_a_peer_says_so(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="no peer"):
        draw(report({"wall_s": 1.0}), tmp_path / "x.png")


@pytest.mark.parametrize(
    ("name", "message"), [("x.pdf", "x.png"), ("nowhere/x.png", "no directory .*nowhere")]
)
def test_a_file_that_cant_be_written_is_told_before_anything_is_measured(
    name: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(BenchError, match=message):
        check_target(tmp_path / name)


def test_without_matplotlib_one_line_says_what_to_install(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "headwater.worker.bench.plot")
    for name in [name for name in sys.modules if name.startswith("matplotlib.")]:
        monkeypatch.delitem(sys.modules, name)

    with pytest.raises(SystemExit) as leaving:
        main(["bench", "unique", "--quick", "--plot", "unique.png"])

    assert leaving.value.code == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "pip install '.[plot]'" in error
