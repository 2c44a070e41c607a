"""A model's fingerprint: what its keys and values depend on, weights by their content."""

import hashlib
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from .demo_model import cache_directory
from .weight_digest import digest_files

_FORMAT = "headwater-model-2"
_CONFIGS = ("config.json", "hf_quant_config.json")
"""What mlx-lm builds the model by."""


def weights_digest(directory: Path) -> "Future[str]":
    """Begin to digest a model's weights on threads of its own: it may take as long as the load.

    Equal weights have equal digests, wherever they lie. The result may raise OSError.
    """
    pool = ThreadPoolExecutor(1, "weights-digest")
    paths = sorted(directory.glob("model*.safetensors"))
    future = pool.submit(digest_files, paths, cache_directory() / "digests")
    pool.shutdown(wait=False)
    return future


def model_fingerprint(directory: Path, weights: str, parts: Iterable[str]) -> str:
    """Return what tells models apart whose keys and values must not be mixed.

    *weights* is their digest; *parts* is what else matters (dtypes, tokenizer). Raises OSError.
    """
    digest = hashlib.sha256()
    for part in (_FORMAT, weights, *parts):
        _add(digest, part.encode())
    for name in _CONFIGS:
        path = directory / name
        _add(digest, path.read_bytes() if path.is_file() else b"")
    return "sha256:" + digest.hexdigest()


def _add(digest: "hashlib._Hash", part: bytes) -> None:
    # With its length, so that no two lists of parts run together into the same bytes.
    digest.update(len(part).to_bytes(8, "little") + part)
