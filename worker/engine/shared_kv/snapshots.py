"""What the prefix cache keeps of rows with recurrent layers, taken apart and put together."""

from collections.abc import Sequence as Seq

from ..runner import Segment
from ..segments import KVSegment
from ..states import StateSegment
from .kinds import ModelLayers
from .recurrent import RowStates, as_caches


def shared_parts(prefix: Seq[Segment]) -> list[KVSegment]:
    """Return the keys and values of *prefix*, which rows share."""
    return [_keys_and_values(segment) for segment in prefix]


def states_behind(prefix: Seq[Segment]) -> RowStates:
    """Return the states at the end of *prefix*; ValueError where rows can't go on there."""
    last = prefix[-1] if prefix else None
    if not isinstance(last, StateSegment):
        return {}
    if last.states is None:
        raise ValueError("no row can go on at the end of this prefix")
    return {layer: tuple(cache.cache) for layer, cache in last.states.items()}


def state_segment(layers: ModelLayers, shared: KVSegment, states: RowStates) -> StateSegment:
    """Return a segment whose layers are named by their place among all."""
    plain = dict(zip(layers.attention, shared.layers, strict=True))
    return StateSegment(shared.num_tokens, plain, as_caches(states), shared)


def _keys_and_values(segment: Segment) -> KVSegment:
    found = segment.shared if isinstance(segment, StateSegment) else segment
    assert isinstance(found, KVSegment)
    return found
