"""Uniform numbers that depend on (seed, choice, index of the output token) and nothing else.

SplitMix64 (Steele, Lea and Flood, 2014), jumped to the index: any worker, batch and attempt
gets the same number without a state that would have to travel.
"""

import hashlib
from typing import Final

import numpy as np
import numpy.typing as npt
from headwater.schemas import GenerationJob

_GAMMA: Final = 0x9E3779B97F4A7C15
_FIRST: Final = 0xBF58476D1CE4E5B9
_SECOND: Final = 0x94D049BB133111EB
_MASK: Final = (1 << 64) - 1


def stream_key(job: GenerationJob, choice: int) -> int:
    """Return the 64-bit start of a choice's stream of draws.

    Submit gives every job a seed; one that comes without draws by its id, so that a later
    attempt still goes on with the same stream.
    """
    seed = job.sampling.seed
    if seed is None:
        digest = hashlib.blake2b(job.job_id.encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "big")
    return _mix(_mix(seed & _MASK) + choice * _GAMMA & _MASK)


def uniforms(
    keys: npt.NDArray[np.uint64], indices: npt.NDArray[np.uint64]
) -> npt.NDArray[np.float32]:
    """Return one float32 in [0, 1), of 24 random bits, for each key and output index."""
    mixed = keys + (indices + np.uint64(1)) * np.uint64(_GAMMA)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_FIRST)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_SECOND)
    mixed ^= mixed >> np.uint64(31)
    fraction: npt.NDArray[np.float32] = (mixed >> np.uint64(40)).astype(np.float32)
    return fraction * np.float32(2**-24)


def _mix(value: int) -> int:
    value = value + _GAMMA & _MASK
    value = (value ^ (value >> 30)) * _FIRST & _MASK
    value = (value ^ (value >> 27)) * _SECOND & _MASK
    return value ^ (value >> 31)
