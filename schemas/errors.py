"""Errors of the wire format.

* SchemaError (ValueError)    bytes or values that are not what they claim to be
"""


class SchemaError(ValueError):
    """A value that does not fit the wire format; the message names field, value and range."""
