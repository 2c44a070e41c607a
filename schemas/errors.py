"""The root of every error that we raise on purpose, and the errors of the wire format.

* HeadwaterError              its message is one line that says what is wrong and what to do
  x SchemaError (ValueError)  bytes or values that are not what they claim to be

The producer's tree (producer/errors.py) and the worker's hang under the same root, so the
command line can tell a message for its user from a bug.
"""


def install_hint(extra: str) -> str:
    """Return how to get what *extra* of the package brings, from an index or in a checkout."""
    return f"pip install 'headwater[{extra}]', or in a checkout pip install '.[{extra}]'"


class HeadwaterError(Exception):
    """Root of our errors. The message is one line for the person who can act on it."""


class SchemaError(HeadwaterError, ValueError):
    """A value that does not fit the wire format; the message names field, value and range."""
