"""LoRA adapters: models that share all weights but those of an adapter, and rows of each."""

import copy
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import structlog
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import load_adapters

from ..errors import StartupError
from ..sequence import Sequence
from .prefill_reader import PrefillReader
from .runner import DeviceSegment, ModelRunner, Padding, Segment, prefill_then_decode

log = structlog.get_logger()

_FILES = ("adapter_config.json", "adapters.safetensors")


class AdaptedModel(NamedTuple):
    """A model with an adapter."""

    model: Any
    fingerprint: str
    """Keys and values may be shared only where it is equal."""


def adapt(model: Any, fingerprint: str, directory: Path) -> AdaptedModel:
    """Return *model* with the adapter in *directory*; both share the weights that it leaves alone.

    *fingerprint* is the model's own. Raises StartupError that says what to do.
    """
    digest = hashlib.sha256(fingerprint.encode())
    try:
        for name in _FILES:
            digest.update(hashlib.sha256((directory / name).read_bytes()).digest())
    except OSError as error:
        raise StartupError(
            f"no adapter in {directory} ({error}); give a directory with {' and '.join(_FILES)},"
            " as `mlx_lm.lora` writes it"
        ) from error
    twin = _twin(model)
    try:
        load_adapters(twin, str(directory))
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        # Whatever a config of the wrong shape, or of another model, makes mlx-lm raise.
        raise StartupError(f"the adapter in {directory} does not fit the model: {error}") from error
    if mx.default_device() == mx.Device(mx.cpu):
        # As the model's own weights, which stay the arrays that they are.
        twin.apply(_as_float32)
    twin.eval()
    mx.eval(twin.parameters())
    log.info("adapter", directory=str(directory))
    return AdaptedModel(twin, "sha256:" + digest.hexdigest())


def _as_float32(array: mx.array) -> mx.array:
    is_other = array.dtype != mx.float32 and mx.issubdtype(array.dtype, mx.floating)
    return array.astype(mx.float32) if is_other else array


def _twin(model: Any) -> Any:
    """Copy the modules, not the arrays."""
    parameters: list[tuple[str, mx.array]] = []
    tree_flatten(model.parameters(), destination=parameters)
    return copy.deepcopy(model, {id(array): array for _, array in parameters})


class AdapterRunner:
    """A ModelRunner whose rows belong to different adapters of one model.

    A step has one forward for each adapter that its rows name.
    """

    def __init__(self, base: ModelRunner, adapted: Mapping[str, ModelRunner]) -> None:
        """*base* runs the rows without an adapter, *adapted* the others, by alias."""
        self._runners: dict[str | None, ModelRunner] = {None: base}
        self._runners.update(adapted)
        self.cache_kind = base.cache_kind
        self.shares_prefix = base.shares_prefix
        spare_tokens = base.allocation.spare_tokens * len(self._runners)
        self.allocation = base.allocation._replace(spare_tokens=spare_tokens)

    @property
    def nbytes(self) -> int:
        """Bytes held by the rows of all adapters."""
        return sum(runner.nbytes for runner in self._runners.values())

    @property
    def padding(self) -> Padding | None:
        """What is padding, in all adapters' rows."""
        paddings = [runner.padding for runner in self._runners.values()]
        known = [padding for padding in paddings if padding is not None]
        return Padding(*map(sum, zip(*known, strict=True))) if known else None

    @property
    def reads_states(self) -> bool:
        """Whether a reader of prefills is given the last layer's states."""
        return all(runner.reads_states for runner in self._runners.values())

    def attach(self, sequence: Sequence, prefix: Seq[Segment]) -> None:
        """Give *sequence* a row of its adapter."""
        self._of(sequence).attach(sequence, prefix)

    def detach(self, sequence: Sequence) -> None:
        """Drop the row; unknown sequences are ignored."""
        self._of(sequence).detach(sequence)

    def prefill(
        self,
        rows: Seq[Sequence],
        chunks: Seq[Seq[int]],
        reader: PrefillReader | None = None,
    ) -> mx.array:
        """Compute the next *chunks* of *rows*, adapter by adapter."""
        parts = []
        for runner, members in self._groups(rows):
            taken = runner.prefill(
                [rows[index] for index in members], [chunks[index] for index in members], reader
            )
            parts.append((members, taken))
        return _in_order(parts)

    def decode(self, rows: Seq[Sequence], tokens: mx.array) -> mx.array:
        """Compute one token a row, adapter by adapter."""
        parts = []
        for runner, members in self._groups(rows):
            own = tokens if len(members) == len(rows) else tokens[mx.array(members)]
            parts.append((members, runner.decode([rows[index] for index in members], own)))
        return _in_order(parts)

    def prefill_and_decode(
        self,
        rows: Seq[Sequence],
        chunks: Seq[Seq[int]],
        decoding: Seq[Sequence],
        tokens: mx.array,
    ) -> mx.array:
        """Do both in one forward where all rows belong to one adapter."""
        runners = {self._of(row) for row in (*rows, *decoding)}
        if len(runners) > 1:
            return prefill_then_decode(self, rows, chunks, decoding, tokens)
        return runners.pop().prefill_and_decode(rows, chunks, decoding, tokens)

    def state(self, rows: Seq[Sequence]) -> list[mx.array]:
        """Return the arrays that *rows* live in."""
        groups = ((runner, [rows[i] for i in members]) for runner, members in self._groups(rows))
        return [array for runner, own in groups for array in runner.state(own)]

    def extract(self, sequence: Sequence, start: int, end: int) -> DeviceSegment:
        """Copy tokens [start, end) of a row."""
        return self._of(sequence).extract(sequence, start, end)

    def rebase(self, sequence: Sequence, prefix: Seq[Segment]) -> None:
        """Note that *prefix* now holds the row's first tokens."""
        self._of(sequence).rebase(sequence, prefix)

    def _of(self, sequence: Sequence) -> ModelRunner:
        return self._runners[sequence.job.adapter]

    def _groups(self, rows: Iterable[Sequence]) -> Iterator[tuple[ModelRunner, list[int]]]:
        """Yield the runners that *rows* need, each with the indices of its rows."""
        members: dict[str | None, list[int]] = {}
        for index, row in enumerate(rows):
            members.setdefault(row.job.adapter, []).append(index)
        return ((self._runners[adapter], indices) for adapter, indices in members.items())


def _in_order(parts: list[tuple[list[int], mx.array]]) -> mx.array:
    """Join the parts' rows in the order that their indices say."""
    if len(parts) == 1:
        return parts[0][1]
    indices = [index for members, _ in parts for index in members]
    back = sorted(range(len(indices)), key=indices.__getitem__)
    return mx.concatenate([values for _, values in parts])[mx.array(back)]
