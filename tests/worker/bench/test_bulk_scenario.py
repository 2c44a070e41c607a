"""The bulk scenario on a tiny model: the real command on one side."""

from headwater.worker.bench.bulk import SCENARIO, BulkSettings
from headwater.worker.bench.scenario import run_scenario


def test_the_command_and_the_loop_give_the_same_text_of_one_file(tiny_folder: str) -> None:
    settings = BulkSettings(model=tiny_folder, rows=6, shared_tokens=64, new_tokens=4, peer_batch=2)

    found = run_scenario(SCENARIO, settings)

    assert found.ratio["same_text"] == 1.0
    assert found.ours["generated_tokens"] == found.peers[0]["generated_tokens"]
    assert found.ours["prompt_tokens"] == found.peers[0]["prompt_tokens"]
    assert found.ours["reused_share"] > 0.5
