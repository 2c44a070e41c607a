"""What crosses Redis, and nothing else: jobs, events, names. Loads without Redis or MLX."""

from . import keys, limits
from .base import WireModel
from .errors import HeadwaterError, SchemaError
from .events import (
    END_TYPES,
    FENCE_TYPES,
    Cancelled,
    Channel,
    ChoiceEnd,
    Delta,
    DeltaPart,
    End,
    EntryId,
    Event,
    Expired,
    Failed,
    Fence,
    Finished,
    FinishReason,
    Released,
    Restarted,
    Resumed,
    Started,
    StreamEntry,
    TextSpan,
    Timings,
    Usage,
    decode_entry,
    encode_fields,
)
from .job import SCHEMA_VERSION, GenerationJob, Priority, SamplingParams, StreamMode
from .model_card import ModelCard
from .serializer import OrjsonSerializer
from .tokenizer_files import TokenizerFiles
from .worker_status import WorkerStatus

__all__ = [
    "END_TYPES",
    "FENCE_TYPES",
    "SCHEMA_VERSION",
    "Cancelled",
    "Channel",
    "ChoiceEnd",
    "Delta",
    "DeltaPart",
    "End",
    "EntryId",
    "Event",
    "Expired",
    "Failed",
    "Fence",
    "FinishReason",
    "Finished",
    "GenerationJob",
    "HeadwaterError",
    "ModelCard",
    "OrjsonSerializer",
    "Priority",
    "Released",
    "Restarted",
    "Resumed",
    "SamplingParams",
    "SchemaError",
    "Started",
    "StreamEntry",
    "StreamMode",
    "TextSpan",
    "Timings",
    "TokenizerFiles",
    "Usage",
    "WireModel",
    "WorkerStatus",
    "decode_entry",
    "encode_fields",
    "keys",
    "limits",
]
