"""The scheduler scenario, small."""

import orjson
import pytest
from headwater.producer.cli.app import main
from headwater.worker.bench.scenario import run_scenario
from headwater.worker.bench.scheduler import SCENARIO, SchedulerSettings


def test_the_report_compares_a_long_queue_with_a_short_one():
    settings = SchedulerSettings(
        known=300, baseline=30, batch=8, steps=60, prompt_tokens=64, claims=0
    )
    report = run_scenario(SCENARIO, settings, repeat=1)

    assert report.ours["step_p50_ms"] > 0
    assert report.ratio["step_time"] > 0
    assert report.peers[0]["name"] == "headwater, 30 known"


def test_prefixes_are_reused_in_the_measured_work():
    settings = SchedulerSettings(known=100, batch=8, steps=100, prompt_tokens=64, claims=0)
    report = run_scenario(SCENARIO, settings, repeat=1)

    assert report.ours["prompt_tokens_reused"] > 0


def test_jobs_are_claimed_from_a_real_queue_of_each_depth(capsys):
    arguments = ["bench", "scheduler", "--json", "--repeat", "1", "--known", "20", "--steps", "20"]
    with pytest.raises(SystemExit) as leaving:
        main([*arguments, "--claims", "5", "--depth", "25000", "--baseline-depth", "3"])

    assert leaving.value.code == 0
    found = orjson.loads(capsys.readouterr().out)
    assert found["ours"]["queue_depth"] == 25_000
    assert found["peer"]["queue_depth"] == 3
    assert found["ratio"]["claim_time"] > 0
