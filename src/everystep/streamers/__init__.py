"""Consumers of events: text on a terminal, text in a queue, and the reference's `put` and `end`."""

from everystep.streamers.base import BaseStreamer
from everystep.streamers.beams import BeamEvent, LiveBeam, beam_event
from everystep.streamers.delivery import Delivery
from everystep.streamers.iterators import AsyncTextIteratorStreamer, TextIteratorStreamer
from everystep.streamers.text import TextStreamer
from everystep.streamers.wording import Wording

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
