"""Text to ids and back: tokenizer, chat template, incremental detokenizer."""

from everystep.text.batch import BatchEncoding
from everystep.text.detokenizer import Detokenizer, Trimmer
from everystep.text.following import Follower, follow
from everystep.text.pieces import Spelling, bytes_by_id
from everystep.text.sandbox import TemplateLimits
from everystep.text.template import ChatTemplate
from everystep.text.tokenizer import Tokenizer
from everystep.text.tokenizer_settings import Settings

__all__ = [
    "BatchEncoding",
    "ChatTemplate",
    "Detokenizer",
    "Follower",
    "Settings",
    "Spelling",
    "TemplateLimits",
    "Tokenizer",
    "Trimmer",
    "bytes_by_id",
    "follow",
]
