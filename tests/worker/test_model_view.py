"""What is said of the runner that serves a model."""

import pytest
from headwater.worker.engine.merged_runner import MergedRunner
from headwater.worker.engine.parity import RunnerFactory, choose_runner
from headwater.worker.engine.row_runner import RowRunner
from headwater.worker.engine.shared_kv import SharedPrefixRunner
from headwater.worker.model_view import describe_runner

from tests.tiny_models import VOCABULARY_SIZE, tiny_model


@pytest.mark.parametrize(
    ("factory", "rows", "prefix"),
    [
        (SharedPrefixRunner, "shared prefixes: rows run together", "held once for all"),
        (MergedRunner, "merged rows: rows run together", "each row has a copy"),
        (RowRunner, "rows alone: one forward a row", "each row has a copy"),
    ],
)
def test_one_line_says_how_rows_run_and_what_sharing_saves(
    factory: RunnerFactory, rows: str, prefix: str
) -> None:
    """Each kind of runner has words of its own."""
    line = describe_runner(factory(tiny_model("llama")))

    assert line.startswith(rows)
    assert line.endswith(prefix)
    assert "\n" not in line


def test_a_family_whose_layers_hold_no_keys_is_said_to_copy() -> None:
    """What a worker would choose, whatever mlx-lm's caches are called."""
    runner = choose_runner(tiny_model("mamba2"), VOCABULARY_SIZE)

    assert describe_runner(runner).startswith("merged rows")
