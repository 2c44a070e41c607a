"""Prefixes on disk, below the prefix cache: they survive restarts and are shared by workers.

    <directory>/<model>/<key>-<start>-<end>.json              sidecar: what it is, and checksums
    <directory>/<model>/<key>-<start>-<end>.<hash>.safetensors

A key is a hash of model fingerprint, namespace and tokens [0, end), so nothing of a prompt can be
read from names or sidecars, and no namespace finds another's. An entry holds tokens
[start, end); those before are another entry's. No MLX here: arrays are NumPy's.
"""

from .folder import DiskFolder, Entry
from .inventory import clear_directory, take_inventory
from .prefix_keys import PrefixKeys
from .tier import DiskTier, Loaded

__all__ = [
    "DiskFolder",
    "DiskTier",
    "Entry",
    "Loaded",
    "PrefixKeys",
    "clear_directory",
    "take_inventory",
]
