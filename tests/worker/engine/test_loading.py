"""Loading tiny models of our own making, with every file that real ones may have."""

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import mlx.core as mx
import pytest
from headwater.worker.engine import loading
from headwater.worker.engine.loading import LoadedModel, load_model
from headwater.worker.errors import StartupError
from headwater.worker.segment import CacheKind
from mlx_lm.models import llama
from mlx_lm.utils import quantize_model, save_model
from structlog.testing import capture_logs
from tokenizers import Tokenizer, models

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "vocab_size": 64,
    "max_position_embeddings": 100,
    "tie_word_embeddings": True,
}
TOKENS = ["<unk>", "<end>", "<turn>", "<stop>", "a", "b"]


def _model(seed: int = 0) -> llama.Model:
    mx.random.seed(seed)
    return llama.Model(llama.ModelArgs.from_dict(CONFIG))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A complete llama model, float32."""
    save_model(tmp_path, _model())
    Tokenizer(models.WordLevel({t: i for i, t in enumerate(TOKENS)}, "<unk>")).save(
        str(tmp_path / "tokenizer.json")
    )
    _write(tmp_path / "config.json", CONFIG)
    return tmp_path


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def _with_config(directory: Path, **changes: Any) -> LoadedModel:
    _write(directory / "config.json", CONFIG | changes)
    return load_model(str(directory))


def test_a_plain_model_is_described_by_what_it_computes(directory: Path) -> None:
    loaded = load_model(str(directory))

    assert (loaded.vocab_size, loaded.context_length) == (64, 100)
    assert loaded.weight_dtypes == ("float32",)
    assert loaded.cache_classes == ("KVCache",)
    assert loaded.cache_kind is CacheKind.SEGMENTS
    card = loaded.card("tiny")
    assert (card.alias, card.vocab_size, card.context_length) == ("tiny", 64, 100)
    assert card.tokenizer_fingerprint == loaded.tokenizer_files.fingerprint


def test_ends_come_from_every_place_that_declares_them(directory: Path) -> None:
    _write(directory / "generation_config.json", {"eos_token_id": [2, 7]})
    _write(directory / "tokenizer_config.json", {"eos_token": {"content": "<stop>"}})
    _write(directory / "special_tokens_map.json", {"eos_token": "<unk>"})

    assert _with_config(directory, eos_token_id=1).eos_token_ids == {0, 1, 2, 3, 7}


def test_a_model_without_any_end_has_none(directory: Path) -> None:
    assert _with_config(directory, eos_token_id=None).eos_token_ids == frozenset()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 100),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}}, 400),
        ({"rope_scaling": {"type": "linear", "factor": 8.0}}, 100),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 100}}, 200),
        ({"max_position_embeddings": 800, "rope_scaling": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 100}}, 800),
    ],
)  # fmt: skip
def test_the_context_counts_rope_scaling_in(
    directory: Path, changes: dict[str, Any], expected: int
) -> None:
    assert _with_config(directory, **changes).context_length == expected


def test_16_bit_weights_are_float32_on_a_cpu(directory: Path) -> None:
    model = _model()
    model.set_dtype(mx.bfloat16)
    save_model(directory, model)

    assert load_model(str(directory)).weight_dtypes == ("float32",)


def test_quantized_weights_are_float32_on_a_cpu_and_compute_the_same(directory: Path) -> None:
    model, config = quantize_model(_model(), dict(CONFIG), 32, 8)
    save_model(directory, model)
    _write(directory / "config.json", config)
    expected = model(mx.array([[4, 5]]))

    loaded = load_model(str(directory))

    assert loaded.weight_dtypes == ("float32",)
    assert mx.allclose(loaded.model(mx.array([[4, 5]])), expected, atol=1e-4)


def test_the_fingerprint_is_the_same_at_every_load_and_at_every_place(
    directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    copy = tmp_path_factory.mktemp("copies") / "another-name"
    shutil.copytree(directory, copy)

    fingerprints = {load_model(str(place)).fingerprint for place in (directory, directory, copy)}
    assert len(fingerprints) == 1


@pytest.mark.parametrize("change", ["weights", "config", "tokenizer"])
def test_the_fingerprint_changes_with(directory: Path, change: str) -> None:
    before = load_model(str(directory)).fingerprint
    if change == "weights":
        save_model(directory, _model(seed=1))
    elif change == "config":
        _write(directory / "config.json", CONFIG | {"rms_norm_eps": 1e-6})
    else:
        Tokenizer(models.WordLevel({"<unk>": 0}, "<unk>")).save(str(directory / "tokenizer.json"))

    assert load_model(str(directory)).fingerprint != before


def test_a_tokenizer_without_its_fast_form_is_converted(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()
    _write(directory / "vocab.json", {"a": 0, "b": 1, "ab": 2, "<end>": 3})
    (directory / "merges.txt").write_text("#version: 0.2\na b\n")
    _write(
        directory / "tokenizer_config.json",
        {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<end>", "unk_token": "<end>", "bos_token": "<end>"},
    )  # fmt: skip

    loaded = load_model(str(directory))

    assert loaded.tokenizer.encode("aba").ids == [2, 0]
    assert loaded.eos_token_ids == {3}


def test_a_model_without_a_tokenizer_is_refused(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()

    with pytest.raises(StartupError, match="no usable tokenizer"):
        load_model(str(directory))


def test_a_damaged_tokenizer_is_refused(directory: Path) -> None:
    (directory / "tokenizer.json").write_text('{"version": "1.0"}')

    with pytest.raises(StartupError, match="no usable tokenizer"):
        load_model(str(directory))


def test_a_config_without_an_architecture_names_what_it_lacks(directory: Path) -> None:
    _write(directory / "config.json", {"vocab_size": 64})

    with pytest.raises(StartupError, match=r"config\.json lacks 'model_type'"):
        load_model(str(directory))


def test_a_torn_config_is_refused(directory: Path) -> None:
    (directory / "config.json").write_text('{"model_type": ')

    with pytest.raises(StartupError, match="can't load"):
        load_model(str(directory))


def test_weights_cut_short_are_refused(directory: Path) -> None:
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])

    with pytest.raises(StartupError, match="can't load"):
        load_model(str(directory))


def test_who_waits_for_the_demo_model_is_told_so(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWATER_MODEL_CACHE", str(directory / "cache"))
    monkeypatch.setattr(loading, "fetch_demo", lambda: directory)

    with capture_logs() as logs:
        load_model("demo")
        loading.demo_directory().mkdir(parents=True)
        load_model("demo")

    assert [line["event"] for line in logs].count("fetching_demo_model") == 1


def test_a_hub_name_while_offline_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))

    with pytest.raises(StartupError, match=r"from the hub .*; give a local directory"):
        load_model("nobody/nothing")


def test_a_models_own_code_is_never_run(directory: Path) -> None:
    (directory / "evil.py").write_text("raise SystemExit('it ran')")

    with pytest.raises(StartupError, match="custom module"):
        _with_config(directory, model_file="evil.py")
