"""A batch KV that stores shared prefixes once and scores each for all its rows in one product."""

from .runner import SharedPrefixRunner

__all__ = ["SharedPrefixRunner"]
