"""Consumers of events: text on a terminal, text in a queue, and transformers' `put` and `end`."""

from everystep.streamers.delivery import Delivery
from everystep.streamers.iterators import AsyncTextIteratorStreamer, TextIteratorStreamer
from everystep.streamers.text import BaseStreamer, TextStreamer
from everystep.streamers.wording import BeamEvent, LiveBeam, Wording, beam_event

__all__ = [
    "AsyncTextIteratorStreamer",
    "BaseStreamer",
    "BeamEvent",
    "Delivery",
    "LiveBeam",
    "TextIteratorStreamer",
    "TextStreamer",
    "Wording",
    "beam_event",
]
