"""How scenarios run: in turn, medians, quick sizes."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from headwater.worker.bench import scenario as scenario_module
from headwater.worker.bench.registry import SCENARIOS
from headwater.worker.bench.report import Figures
from headwater.worker.bench.scenario import (
    Contest,
    OpenQueue,
    Peer,
    Scenario,
    median_figures,
    run_scenario,
    setting,
)


@dataclass(frozen=True)
class CountSettings:
    size: int = setting(100, "How much.")


class Recorder:
    """A scenario whose contestants note when they ran and give figures of that."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.sizes: list[int] = []
        self.scenario = Scenario(
            name="count",
            summary="Counts.",
            settings=CountSettings,
            prepare=self.prepare,
            quick={"size": 7},
            repeat=3,
        )

    def prepare(self, settings: CountSettings, _: OpenQueue) -> Contest:
        self.sizes.append(settings.size)
        peers = tuple(Peer(name, "1.0", self.measure(name)) for name in ("peer", "other"))
        return Contest(self.measure("ours"), peers, lambda ours, peer: {"speedup": peer["wall_s"]})

    def measure(self, name: str) -> Callable[[], Figures]:
        def run() -> Figures:
            self.calls.append(name)
            return {"wall_s": float(len(self.calls))}

        return run


def test_contestants_run_in_turn_and_medians_are_reported() -> None:
    recorder = Recorder()
    report = run_scenario(recorder.scenario, CountSettings())
    assert recorder.calls == ["ours", "peer", "other"] * 3
    assert report.ours == {"wall_s": 4.0}
    assert report.peers[0] == {"name": "peer", "version": "1.0", "wall_s": 5.0, "repeat": 3}
    assert report.ratio == {"speedup": 5.0}


def test_quick_takes_the_scenarios_small_size_and_one_run() -> None:
    recorder = Recorder()
    report = run_scenario(recorder.scenario, CountSettings(), quick=True)
    assert recorder.sizes == [7]
    assert recorder.calls == ["ours", "peer", "other"]
    assert report.settings == {"size": 7, "quick": True, "repeat": 1}


def test_repeat_overrides_the_scenarios_count() -> None:
    recorder = Recorder()
    run_scenario(recorder.scenario, CountSettings(), repeat=2)
    assert recorder.calls.count("ours") == 2


def test_a_slow_peer_runs_once_and_says_so(monkeypatch) -> None:
    monkeypatch.setattr(scenario_module, "_MAX_REPEATED_PEER_S", -1.0)
    recorder = Recorder()
    report = run_scenario(recorder.scenario, CountSettings())
    assert recorder.calls == ["ours", "peer", "other", "ours", "ours"]
    assert report.settings["repeat"] == 3
    assert report.peers[0]["repeat"] == 1


def test_pairs_are_never_cut_short_and_compared_one_by_one(monkeypatch) -> None:
    monkeypatch.setattr(scenario_module, "_MAX_REPEATED_PEER_S", -1.0)
    walls = iter([1.0, 2.0, 5.0, 50.0, 3.0, 12.0])  # ours, peer, ours, peer, ours, peer

    def measure() -> Figures:
        return {"wall_s": next(walls)}

    def prepare(settings: CountSettings, _: OpenQueue) -> Contest:
        peers = (Peer("peer", "1.0", measure),)
        return Contest(
            measure, peers, lambda a, b: {"speedup": b["wall_s"] / a["wall_s"]}, in_pairs=True
        )

    scenario = Scenario("pairs", "Pairs.", CountSettings, prepare, quick={"size": 1})
    report = run_scenario(scenario, CountSettings())
    assert report.peers[0]["repeat"] == 3
    assert report.ratio == {"speedup": 4.0}


def test_the_json_object_has_the_contracts_keys() -> None:
    report = run_scenario(Recorder().scenario, CountSettings()).to_json()
    assert list(report) == [
        "scenario", "commit", "environment", "settings", "ours", "peer", "ratio",
    ]  # fmt: skip
    assert report["peer"]["name"] == "peer"
    assert [other["name"] for other in report["peer"]["others"]] == ["other"]
    assert {"platform", "cpu", "num_cpus", "python", "blas", "versions"} <= set(
        report["environment"]
    )


def test_the_median_is_taken_key_by_key() -> None:
    runs: list[Figures] = [{"a": 1.0, "b": 9.0}, {"a": 3.0, "b": 7.0}, {"a": 2.0, "b": 8.0}]
    assert median_figures(runs) == {"a": 2.0, "b": 8.0}


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenarios_quick_settings_are_settings_of_it(name: str) -> None:
    scenario = SCENARIOS[name]
    assert scenario.settings(**scenario.quick) != scenario.settings()
