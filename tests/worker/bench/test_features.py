"""The features scenario, small."""

from headwater.worker.bench.features import SCENARIO, FeaturesSettings
from headwater.worker.bench.scenario import run_scenario


def test_the_report_compares_both_kinds_of_batches_with_greedy_ones(tiny_folder: str) -> None:
    settings = FeaturesSettings(model=tiny_folder, rows=4, prompt_tokens=8, steps=4)
    report = run_scenario(SCENARIO, settings, repeat=1)

    assert report.ours["generated_tokens"] == report.peers[0]["generated_tokens"] == 16
    assert report.ours["schema_step_p50_ms"] > 0
    assert report.peers[0]["name"] == "headwater, greedy"
    assert set(report.ratio) == {"step_time", "schema_step_time"}
