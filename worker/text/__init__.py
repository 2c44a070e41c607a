"""Token ids to text: detokenizer, stop strings, deltas."""

from .detokenizer import Detokenizer, start_detokenizer
from .logprobs import LogprobLog
from .sequence_text import SequenceText, Stop, TextDiverged
from .stops import StopMatcher, StopOutput
from .vocabulary import Vocabulary

__all__ = [
    "Detokenizer",
    "LogprobLog",
    "SequenceText",
    "Stop",
    "StopMatcher",
    "StopOutput",
    "TextDiverged",
    "Vocabulary",
    "start_detokenizer",
]
