"""The live beams of a request, as a consumer may see them: everything here may still change."""

from __future__ import annotations

from dataclasses import dataclass

from everystep.streamers.wording import Wording
from everystep.types import Group, TokenTable


@dataclass(frozen=True, slots=True)
class LiveBeam:
    """A beam at work: its ids and text after what is settled, and the sum of its scores."""

    tokens: tuple[int, ...]
    text: str | None
    score: float


@dataclass(frozen=True, slots=True)
class BeamEvent:
    """The live beams of one request after a step, best first; the next step may change them.

    `position` counts the generated tokens that are settled, and so in every beam.
    """

    request_id: str
    position: int
    beams: tuple[LiveBeam, ...]


def beam_event(group: Group, table: TokenTable, wording: Wording) -> BeamEvent:
    """What the live beams of a group hold now."""
    request = group.request
    first = request.prompt_visible + group.reported
    live = []
    for sequence in sorted(group.live, key=lambda s: -s.score):
        tokens = table.data[sequence.line, first : sequence.visible].tolist()
        text = wording.ahead(request.request_id, 0, tokens)
        live.append(LiveBeam(tuple(tokens), text, sequence.score))
    return BeamEvent(request.request_id, group.reported, tuple(live))
