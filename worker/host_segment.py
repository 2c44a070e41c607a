"""HostSegment: a cached segment in host memory, on its way between engine and disk."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy.typing as npt


class HostSegment(NamedTuple):
    """What was computed for a token range, outside the device. Belongs to no thread."""

    num_tokens: int
    arrays: Mapping[str, npt.NDArray[Any]]
    """By names that the engine gives; 16-bit floats that NumPy has no type for are uint16."""
    details: Mapping[str, Any]
    """What else the engine needs to rebuild the segment, as JSON values."""

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())
