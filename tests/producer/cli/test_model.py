import json
from pathlib import Path

import mlx.core as mx
import pytest
from headwater.producer.cli import main
from headwater.worker.engine import demo_model
from mlx_lm.models import llama
from mlx_lm.utils import save_model
from tokenizers import Tokenizer, models

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "vocab_size": 16,
    "max_position_embeddings": 100,
    "eos_token_id": 3,
}


def _model(*arguments: str) -> int:
    with pytest.raises(SystemExit) as leaving:
        main(("model", *arguments))
    return int(leaving.value.code or 0)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    model = llama.Model(llama.ModelArgs.from_dict(CONFIG))
    model.set_dtype(mx.float16)  # a CPU logs that it computes with float32
    save_model(tmp_path, model)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    Tokenizer(models.WordLevel({"a": 0}, "a")).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_show_prints_what_a_worker_makes_of_a_model(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _model("show", str(directory), "--json") == 0

    shown = json.loads(capsys.readouterr().out)
    assert (shown["vocab_size"], shown["context_length"]) == (16, 100)
    assert (shown["eos_token_ids"], shown["cache_kind"]) == ([3], "segments")


def test_show_says_the_same_to_a_reader(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _model("show", str(directory)) == 0

    shown = capsys.readouterr().out
    assert "context_length: 100\n" in shown
    assert "runner: shared prefixes: " in shown


def test_a_directory_without_weights_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    assert _model("show", str(tmp_path)) == 1

    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "no weights (model*.safetensors)" in lines[0]


def test_fetch_demo_prints_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADWATER_MODEL_CACHE", str(tmp_path))
    directory = demo_model.demo_directory()
    directory.mkdir(parents=True)

    assert _model("fetch-demo") == 0
    assert _model("fetch-demo", "--json") == 0

    plain, as_json = capsys.readouterr().out.splitlines()
    assert Path(plain) == directory
    assert json.loads(as_json) == {"path": str(directory)}
