import pytest
from headwater.worker.engine.merged_runner import MergedRunner
from headwater.worker.engine.shared_kv.runner import SharedPrefixRunner

from .loop_bench import Bench


@pytest.fixture(
    params=[(True, MergedRunner), (False, MergedRunner), (True, SharedPrefixRunner)],
    ids=["merged, pipelined", "merged", "shared, pipelined"],
)
def bench(request: pytest.FixtureRequest) -> Bench:
    pipelined, runner = request.param
    return Bench(pipelined=pipelined, runner=runner)
