"""Entries on disk with made-up arrays."""

from pathlib import Path

import numpy as np
import pytest
from headwater.worker.disk_tier import DiskFolder, DiskTier, Entry, PrefixKeys
from headwater.worker.host_segment import HostSegment

FINGERPRINT = "sha256:model"
TOKENS = list(range(100, 164))


def host_segment(entry: Entry) -> HostSegment:
    """Arrays that tell which tokens they stand for."""
    tokens = np.arange(entry.start, entry.end, dtype=np.float32)
    keys = tokens.reshape(1, 1, -1, 1)
    return HostSegment(
        entry.end - entry.start,
        {"keys.0": keys, "values.0": keys + 0.5},
        {"1": [entry.end, None, {"array": "keys.0"}]},
    )


def chain(ends: list[int], namespace: str = "default", tokens: list[int] = TOKENS) -> list[Entry]:
    keys = PrefixKeys(FINGERPRINT, namespace, tokens).at(ends)
    return [Entry(keys[end], start, end) for start, end in zip([0, *ends], ends, strict=False)]


def same(one: HostSegment, other: HostSegment) -> bool:
    return (
        one.num_tokens == other.num_tokens
        and one.arrays.keys() == other.arrays.keys()
        and all(np.array_equal(one.arrays[name], other.arrays[name]) for name in one.arrays)
        and one.details == other.details
    )


@pytest.fixture
def folder(tmp_path: Path) -> DiskFolder:
    made = DiskFolder(tmp_path, FINGERPRINT)
    made.entries()
    return made


@pytest.fixture
def open_tier(tmp_path: Path):
    """Opens tiers over one directory, and closes them at the end."""
    opened: list[DiskTier] = []

    def open_one(fingerprint: str = FINGERPRINT, max_bytes: int = 10**9) -> DiskTier:
        tier = DiskTier(DiskFolder(tmp_path, fingerprint), fingerprint, max_bytes)
        opened.append(tier)
        return tier

    yield open_one
    for tier in opened:
        tier.close()
