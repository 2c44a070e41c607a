"""Every limit of the wire format, in one place."""

MAX_JOB_ID_CHARS = 128
MAX_NAME_CHARS = 64
"""Model aliases and namespaces."""

MAX_PROMPT_TOKENS = 4_194_304
MAX_NEW_TOKENS = 1_048_576
MAX_TOKEN_ID = 2**31 - 1
MAX_SEED = 2**63 - 1
MAX_CHOICES = 128

MAX_CONTINUATIONS = 1024
"""Of a scoring job: each is a sequence of its own."""

MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_CHARS = 8192
"""All stop strings of a job together: what it costs the worker to look for them."""
MAX_STOP_TOKEN_IDS = 1024

MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0
"""Either way: more than any model's preference for one token."""
MAX_BAD_TOKEN_IDS = 1024
MAX_TOP_LOGPROBS = 20
MAX_REPETITION_PENALTY = 10.0
MAX_PENALTY = 2.0
"""Of presence and frequency penalties, either way."""

MAX_JSON_SCHEMA_BYTES = 65_536
"""A response format's schema as JSON: what it costs to compile."""
MAX_REGEX_CHARS = 8192
MAX_FORMAT_CHOICES = 1024
MAX_FORMAT_CHOICE_CHARS = 32_768
"""All choices of a format together."""

MAX_METADATA_BYTES = 4096
"""Metadata's size as JSON."""
MAX_TOOL_NAME_CHARS = 256
MAX_TOOLS_BYTES = 256 * 1024
"""The size of the tools' definitions as JSON."""

MAX_PAYLOAD_BYTES = 32 * 1024 * 1024
"""A job's payload after decompression; a larger one is refused before it is inflated."""

MAX_JSON_CONTAINERS = 400_000
"""Brackets and braces that open in a payload: each takes a worker fifty times its byte to read.
No job that keeps to the other limits has half as many."""

MAX_COMPRESSED_PAYLOAD_BYTES = 16 * 1024 * 1024
"""A job's payload as it lies in Redis."""

MAX_TOKENIZER_BYTES = 256 * 1024 * 1024
"""A tokenizer's files after decompression."""
