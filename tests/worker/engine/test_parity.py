"""A runner that batches wrongly is found at load and not used."""

import mlx.core as mx
import pytest
from headwater.worker.engine.merged_runner import MergedRunner
from headwater.worker.engine.parity import choose_runner
from headwater.worker.engine.row_runner import RowRunner
from headwater.worker.engine.shared_kv.runner import SharedPrefixRunner
from headwater.worker.errors import EngineUnsound
from mlx.nn import Module
from mlx_lm.models.cache import ChunkedKVCache, RotatingKVCache
from structlog.testing import capture_logs

from tests.tiny_models import TINY_FAMILIES, VOCABULARY_SIZE, WINDOW, tiny_model

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 4096,
}


class LeakyRunner(MergedRunner):
    """Lets a row see its neighbour, a little."""

    def decode(self, rows, tokens):
        logits = super().decode(rows, tokens)
        return logits + 0.01 * mx.roll(logits, 1, axis=0)


class RaisingRunner(MergedRunner):
    def decode(self, rows, tokens):
        raise ValueError("shapes do not match")


class NotANumberRunner(MergedRunner):
    def decode(self, rows, tokens):
        return super().decode(rows, tokens) * float("nan")


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_a_family_that_batches_rightly_gets_the_fast_runner_without_a_warning(family) -> None:
    with capture_logs() as logs:
        runner = choose_runner(tiny_model(family), VOCABULARY_SIZE)

    assert type(runner) is (MergedRunner if family == "mamba2" else SharedPrefixRunner)
    assert logs == []


class ForgetfulRunner(MergedRunner):
    """Is wrong for rows longer than the small models' window only."""

    def decode(self, rows, tokens):
        logits = super().decode(rows, tokens)
        lengths = mx.array([self._batch.num_tokens(row) for row in rows])
        return mx.where(lengths[:, None] > 20, mx.roll(logits, 1, axis=1), logits)


def test_a_small_instance_shows_what_short_rows_on_the_real_weights_do_not() -> None:
    model, config = tiny_model("llama"), {**LLAMA, "hidden_size": 4096, "num_hidden_layers": 32}
    with capture_logs() as logs:
        short = choose_runner(model, VOCABULARY_SIZE, (ForgetfulRunner,))
        both = choose_runner(model, VOCABULARY_SIZE, (ForgetfulRunner,), config)

    assert type(short) is ForgetfulRunner
    assert type(both) is RowRunner
    assert logs[0]["event"] == "parity_failed"


def test_a_config_that_gives_no_small_instance_leaves_the_word_to_the_real_weights() -> None:
    with capture_logs() as logs:
        runner = choose_runner(
            tiny_model("llama"), VOCABULARY_SIZE, config={**LLAMA, "rope_scaling": {"type": "?"}}
        )

    assert type(runner) is SharedPrefixRunner
    assert [entry["event"] for entry in logs] == ["no_small_instance"]


def test_rows_on_the_real_weights_are_longer_than_a_short_window() -> None:
    model = tiny_model("gemma3_text")
    seen = []

    class WatchingRunner(MergedRunner):
        def detach(self, sequence):
            seen.append(self._batch.num_tokens(sequence) if sequence in self._batch else 0)
            super().detach(sequence)

    choose_runner(model, VOCABULARY_SIZE, (WatchingRunner,))

    assert max(seen) > 2 * WINDOW


@pytest.mark.parametrize("wrong", [LeakyRunner, RaisingRunner, NotANumberRunner])
def test_a_wrong_runner_is_passed_over_for_the_next_candidate(wrong) -> None:
    with capture_logs() as logs:
        runner = choose_runner(tiny_model("llama"), VOCABULARY_SIZE, (wrong, MergedRunner))

    assert type(runner) is MergedRunner
    assert [(entry["event"], entry["runner"]) for entry in logs] == [
        ("parity_failed", wrong.__name__)
    ]


def test_without_a_right_candidate_rows_run_one_at_a_time_and_a_warning_says_so() -> None:
    with capture_logs() as logs:
        runner = choose_runner(tiny_model("llama"), VOCABULARY_SIZE, (LeakyRunner,))

    assert type(runner) is RowRunner
    assert logs[-1]["event"] == "rows_run_one_at_a_time"
    assert logs[-1]["log_level"] == "warning"


class UnbatchableCacheModel(Module):
    """A llama whose caches mlx-lm can't merge, as llama4's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_model("llama")

    @property
    def layers(self):
        return self.inner.layers

    def make_cache(self):
        return [ChunkedKVCache(512) for _ in self.layers]

    def __call__(self, inputs, cache=None):
        return self.inner(inputs, cache=cache)


class KeepingCacheModel(UnbatchableCacheModel):
    """Keeps its first tokens for ever, which a merged cache would forget in silence."""

    def make_cache(self):
        return [RotatingKVCache(8, keep=4) for _ in self.layers]


@pytest.mark.parametrize("model_class", [UnbatchableCacheModel, KeepingCacheModel])
def test_caches_that_mlx_lm_can_not_merge_rightly_run_one_at_a_time(model_class) -> None:
    with capture_logs() as logs:
        runner = choose_runner(model_class(), VOCABULARY_SIZE)

    assert type(runner) is RowRunner
    assert any("no batch form" in reason for reason in logs[-1]["failed"])


def test_the_chosen_runner_starts_without_rows() -> None:
    assert choose_runner(tiny_model("qwen3_5"), VOCABULARY_SIZE).nbytes == 0


def test_sixteen_bit_weights_are_allowed_their_rounding() -> None:
    model = tiny_model("llama")
    model.set_dtype(mx.bfloat16)
    assert type(choose_runner(model, VOCABULARY_SIZE)) is SharedPrefixRunner


def test_a_model_that_computes_nan_for_a_row_alone_is_refused() -> None:
    model = tiny_model("llama")
    model.lm_head.weight = model.lm_head.weight * float("nan")
    with pytest.raises(EngineUnsound, match="not finite"):
        choose_runner(model, VOCABULARY_SIZE)
