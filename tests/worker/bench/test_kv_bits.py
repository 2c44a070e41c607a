"""The scenario of quantized keys and values, small."""

from pathlib import Path

import pytest
from headwater.worker.bench.kv_bits import SCENARIO, KvBitsSettings
from headwater.worker.bench.scenario import run_scenario
from headwater.worker.engine.random_model import _ARGUMENTS, write_random_model


@pytest.mark.parametrize(("bits", "share"), [(8, 10 / 32), (4, 6 / 32)])
def test_the_report_tells_what_is_saved_and_what_is_lost(
    tmp_path: Path, bits: int, share: float
) -> None:
    model = write_random_model(tmp_path, config={**_ARGUMENTS, "head_dim": 32})
    settings = KvBitsSettings(model=str(model), bits=bits, texts=2, tokens=64, rows=2, new_tokens=3)
    report = run_scenario(SCENARIO, settings, repeat=1)

    # The caches grow by 256 tokens.
    assert report.ours["kv_bytes_per_token"] == share * report.peers[0]["kv_bytes_per_token"]
    assert report.ratio["kv_bytes"] == share
    assert 0 < report.ours["mean_logprob_difference"] < 1
    assert 0.5 < report.ours["greedy_tokens_equal"] <= 1
    assert report.peers[0]["greedy_tokens_equal"] == 1
    assert report.ours["generated_tokens_per_s"] > 0
