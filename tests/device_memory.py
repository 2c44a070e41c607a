"""The device's memory, read when nothing that earlier work left is still to be freed."""

import gc

import mlx.core as mx


def settled_active_memory() -> int:
    """Return the bytes of live arrays, after cycles are collected and the device is idle.

    Without it what another test left in a cycle is freed at some later moment, and a difference
    of two readings counts that as its own.
    """
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    return mx.get_active_memory()
