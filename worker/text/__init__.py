"""Token ids to text: detokenizer, stop strings, deltas."""

from .channels import ChannelSplitter
from .detokenizer import Detokenizer, start_detokenizer
from .logprobs import LogprobLog
from .prompt_logprobs import PromptLog
from .reply_shape import ReplyShape, reply_shape
from .sequence_text import SequenceText, Stop
from .stops import StopMatcher, StopOutput
from .text_log import TextDiverged
from .vocabulary import Vocabulary

__all__ = [
    "ChannelSplitter",
    "Detokenizer",
    "LogprobLog",
    "PromptLog",
    "ReplyShape",
    "SequenceText",
    "Stop",
    "StopMatcher",
    "StopOutput",
    "TextDiverged",
    "Vocabulary",
    "reply_shape",
    "start_detokenizer",
]
