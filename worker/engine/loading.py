"""Loading a model: any directory or hub name that mlx-lm can load, with clear errors."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import structlog
from headwater.schemas import ModelCard, SchemaError, TokenizerFiles
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from mlx.utils import tree_flatten
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.models.cache import make_prompt_cache
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from ..errors import StartupError
from ..segment import CacheKind
from .demo_model import DEMO_ALIAS, demo_directory, fetch_demo
from .fingerprint import model_fingerprint, weights_digest
from .segments import classify, flatten

log = structlog.get_logger()

_UNBOUNDED_CONTEXT = 1_048_576
"""Assumed for recurrent models, whose config names no limit."""

_CONTEXT_KEYS = (
    "max_position_embeddings",
    "max_sequence_length",
    "max_seq_len",
    "n_positions",
    "seq_length",
)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model and what the worker has to know of it. Lives on the thread that loaded it."""

    model: Any
    """An mlx.nn.Module of mlx_lm.models."""
    source: str
    config: dict[str, Any]
    tokenizer_files: TokenizerFiles
    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]
    vocab_size: int
    """Width of the logits; token ids are below it."""
    context_length: int
    """Tokens that prompt and output together may have."""
    weight_dtypes: tuple[str, ...]
    """Of the weights as they are computed with, sorted."""
    cache_classes: tuple[str, ...]
    """Names of mlx-lm's caches that the layers use, sorted."""
    cache_kind: CacheKind
    """What a prefix cache may store of it."""
    fingerprint: str
    """Keys and values may be shared only where it is equal."""

    def new_caches(self) -> list[Any]:
        """Return mlx-lm's caches of one row, empty."""
        caches: list[Any] = make_prompt_cache(self.model)
        return caches

    def card(
        self, alias: str, adapters: tuple[str, ...] = (), *, enforces_tool_calls: bool = False
    ) -> ModelCard:
        """Return what producers are told of this model and its adapters."""
        return ModelCard(
            alias=alias,
            source=self.source,
            vocab_size=self.vocab_size,
            context_length=self.context_length,
            tokenizer_fingerprint=self.tokenizer_files.fingerprint,
            eos_token_ids=tuple(sorted(self.eos_token_ids)),
            enforces_tool_calls=enforces_tool_calls,
            adapters=adapters,
        )


def load_model(source: str) -> LoadedModel:
    """Load *source*: a directory, a hub name, or `demo` for the demo model.

    On a CPU quantized and 16-bit weights become float32, which its BLAS computes far faster.
    Raises StartupError that says what to do.
    """
    directory = _demo() if source == DEMO_ALIAS else _directory(source)
    _check_files(directory)
    digest = weights_digest(directory)
    model, config = _load_weights(directory)
    if mx.default_device() == mx.Device(mx.cpu):
        _to_float32(model)
    files = _tokenizer_files(directory)
    tokenizer = _tokenizer(directory, files)
    caches = list(flatten(make_prompt_cache(model)))
    dtypes = _dtypes(model)
    classes = tuple(sorted({type(cache).__name__ for cache in caches}))
    return LoadedModel(
        model=model,
        source=source,
        config=config,
        tokenizer_files=files,
        tokenizer=tokenizer,
        eos_token_ids=frozenset(_eos_token_ids(directory, config, files, tokenizer)),
        vocab_size=_logits_width(model),
        context_length=_context_length(config),
        weight_dtypes=dtypes,
        cache_classes=classes,
        cache_kind=classify(caches),
        fingerprint=model_fingerprint(
            directory, digest.result(), (*dtypes, *classes, files.fingerprint)
        ),
    )


def _demo() -> Path:
    if not demo_directory().is_dir():
        log.info("fetching_demo_model", size_mb=93, directory=str(demo_directory()))
    return fetch_demo()


def _directory(source: str) -> Path:
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.exists() or source.startswith((".", "/", "~")) or source.count("/") != 1:
        raise StartupError(
            f"no model directory {source!r}; give a directory with config.json and *.safetensors,"
            f" a hub name (owner/name), or {DEMO_ALIAS!r}"
        )
    try:
        # mlx-lm offers no public name for it.
        return Path(mlx_lm_utils._download(source))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise StartupError(
            f"can't get {source!r} from the hub ({_first_line(error)}); give a local directory,"
            " or fetch it where the hub can be reached"
        ) from error


def _check_files(directory: Path) -> None:
    if not (directory / "config.json").is_file():
        raise StartupError(f"{directory} has no config.json: is it a model directory?")
    if not any(directory.glob("model*.safetensors")):
        raise StartupError(
            f"{directory} has no weights (model*.safetensors); convert the model with"
            " `mlx_lm.convert`, or fetch it again"
        )


def _load_weights(directory: Path) -> tuple[Any, dict[str, Any]]:
    try:
        loaded: tuple[Any, dict[str, Any]] = mlx_lm_utils.load_model(directory)
    except KeyError as error:
        raise StartupError(f"can't load {directory}: its config.json lacks {error}") from error
    except (ValueError, TypeError, AttributeError, RuntimeError, OSError) as error:
        # Whatever a config of the wrong shape makes mlx-lm raise.
        raise StartupError(f"can't load {directory}: {_first_line(error)}") from error
    return loaded


def _to_float32(model: Any) -> None:
    dtypes = _dtypes(model)
    if dtypes == ("float32",):
        return
    log.info("weights_as_float32", reason="a CPU computes it fastest", were=dtypes)
    mlx_lm_utils.dequantize_model(model)
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())


def _dtypes(model: Any) -> tuple[str, ...]:
    # With a list as destination it is a list of (name, array).
    parameters: list[tuple[str, mx.array]] = []
    tree_flatten(model.parameters(), destination=parameters)
    return tuple(sorted({str(value.dtype).removeprefix("mlx.core.") for _, value in parameters}))


def _tokenizer_files(directory: Path) -> TokenizerFiles:
    try:
        if (directory / "tokenizer.json").is_file():
            return TokenizerFiles.read(directory)
        return _converted_tokenizer(directory)
    except (SchemaError, ValueError, OSError, ImportError) as error:
        raise StartupError(f"{directory} has no usable tokenizer: {_first_line(error)}") from error


def _tokenizer(directory: Path, files: TokenizerFiles) -> Tokenizer:
    try:
        return Tokenizer.from_str(json.dumps(files.tokenizer))
    except Exception as error:  # tokenizers raises nothing narrower
        raise StartupError(f"{directory} has no usable tokenizer: {_first_line(error)}") from error


def _converted_tokenizer(directory: Path) -> TokenizerFiles:
    """Return the fast form of a tokenizer that has no tokenizer.json (SentencePiece, tiktoken)."""
    slow = AutoTokenizer.from_pretrained(directory)
    config_path = directory / "tokenizer_config.json"
    template = slow.chat_template
    return TokenizerFiles(
        tokenizer=json.loads(slow.backend_tokenizer.to_str()),
        config=_read_json(config_path),
        chat_template=template if isinstance(template, str) else None,
    )


def _eos_token_ids(
    directory: Path, config: dict[str, Any], files: TokenizerFiles, tokenizer: Tokenizer
) -> Iterable[int]:
    """Yield the ends that config, generation config and tokenizer declare."""
    places = (
        config,
        config.get("text_config") or {},
        _read_json(directory / "config.json"),
        _read_json(directory / "generation_config.json"),
    )
    for place in places:
        declared = place.get("eos_token_id")
        yield from [declared] if isinstance(declared, int) else declared or []
    for place in (files.config, _read_json(directory / "special_tokens_map.json")):
        token = place.get("eos_token")
        text = token.get("content") if isinstance(token, dict) else token
        token_id = tokenizer.token_to_id(text) if isinstance(text, str) else None
        if token_id is not None:
            yield token_id


def _logits_width(model: Any) -> int:
    # Configs differ in where they say it, and some pad the embedding beyond the vocabulary.
    return int(model(mx.array([[0]])).shape[-1])


def _context_length(config: dict[str, Any]) -> int:
    for place in (config, config.get("text_config") or {}):
        declared = next((place[key] for key in _CONTEXT_KEYS if place.get(key)), None)
        if declared is not None:
            return max(int(declared), _stretched_context(place))
    return _UNBOUNDED_CONTEXT


def _stretched_context(config: dict[str, Any]) -> int:
    """Return what rope scaling makes of the original context, 0 where it is not in use."""
    # Newer configs call it rope_parameters. A factor without the original length is left alone:
    # some models (gemma3) count it in already.
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    original = scaling.get("original_max_position_embeddings")
    return int(original * (scaling.get("factor") or 1)) if original else 0


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise StartupError(f"can't read {path}: {_first_line(error)}") from error
    return value if isinstance(value, dict) else {}


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
