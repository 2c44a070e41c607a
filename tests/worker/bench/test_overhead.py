"""The overhead scenario on a tiny model, with the real server."""

import orjson
import pytest
from headwater.producer.cli.app import main
from headwater.worker.bench.overhead import SCENARIO, OverheadSettings
from headwater.worker.bench.scenario import BenchError, run_scenario


def test_the_same_jobs_run_through_redis_and_without_it(tiny_folder, capsys):
    arguments = ["bench", "overhead", "--json", "--repeat", "2", "--model", tiny_folder]
    with pytest.raises(SystemExit) as leaving:
        main([*arguments, "--jobs", "6", "--new-tokens", "5", "--batch", "4"])
    assert leaving.value.code == 0
    report = orjson.loads(capsys.readouterr().out)
    ours, peer = report["ours"], report["peer"]
    assert ours["generated_tokens"] == peer["generated_tokens"] == 6 * 5
    assert ours["prompt_tokens"] == peer["prompt_tokens"]
    assert report["ratio"]["throughput"] > 0


def test_without_a_server_it_says_how_to_run_it(tiny_folder):
    with pytest.raises(BenchError, match="headwater bench"):
        run_scenario(SCENARIO, OverheadSettings(model=tiny_folder, jobs=1), repeat=1)
