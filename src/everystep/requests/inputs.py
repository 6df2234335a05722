"""From what callers pass (rectangles, masks, embeddings) to one prompt per row, without padding.

Everything is checked here, before any compute. With an encoder there are two sides: what it reads,
and the first ids of the decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from everystep.bridge.core import ForeignModel
from everystep.errors import RequestError, UnsupportedError
from everystep.models import Model
from everystep.requests.arrays import of_row, read_positions
from everystep.requests.features import Rows
from everystep.requests.options import Assistant
from everystep.requests.pictures import Pictures
from everystep.requests.subject import Subject
from everystep.types import Prompt
from everystep.types.sources import EncoderSource


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """The prompts of a call. `margins`: (B,) padded positions of what was passed; `firsts`: (B,)
    where each prompt starts in it. `width`: ids per row of the rectangle that processors and
    outputs see, 0 without any. `embeds_width`: positions per row where embeddings stand beside no
    ids, or beside more or fewer, else 0. `fills`: (B,) the id that a row
    is padded with, if it is. `lead`: positions of a past that was passed without its ids; `seen`:
    (B,) which of those are real, in ascending order. `source`: the encoder's side, None without
    one. `negative`: (B,) what guidance leads away from, empty if it was not given. `number`: that
    of the first prompt among all of a call whose prompts come one by one."""

    prompts: tuple[Prompt, ...]
    margins: tuple[int, ...]
    firsts: tuple[int, ...]
    width: int
    embeds_width: int = 0
    fills: tuple[int | None, ...] = ()
    lead: int = 0
    seen: tuple[np.ndarray, ...] = ()
    source: EncoderSource | None = None
    negative: tuple[Prompt, ...] = ()
    values: Rows = ()
    pictures: tuple[Pictures, ...] = ()
    place: Callable[[Tensor], Any] | None = None
    per_token: frozenset[str] = frozenset()
    number: int = 0

    @property
    def batch(self) -> int:
        """The number of rows of the call."""
        return len(self.prompts)

    def shown(self, row: int) -> tuple[str, ...]:
        """Return the names of what is encoded and read inside the prompt of a row."""
        named = self.values[row] if self.values else ()
        return (*named, *(("pictures",) if self.pictures and self.pictures[row] else ()))

    @property
    def pads(self) -> tuple[int, ...]:
        """(B,) the number of pad ids before each prompt in the rectangle of ids."""
        return (0,) * self.batch if self.embeds_width else self.margins

    @property
    def prompt_width(self) -> int:
        """Positions per row of the rectangle, whatever it is made of."""
        return self.embeds_width or self.width

    @property
    def counted_width(self) -> int:
        """The length by which limits count: positions, and ids beside them that are not theirs."""
        return self.embeds_width + self.width

    @property
    def total_width(self) -> int:
        """Positions per row of the rectangle and of what was cached before it."""
        return self.lead + self.prompt_width

    def places(self, row: int) -> np.ndarray:
        """(length,) where the positions of a row's prompt stand in a rectangle of `total_width`
        that is padded on the left, as results are."""
        prompt = self.prompts[row]
        own = self.lead + self.margins[row] + np.arange(prompt.length - prompt.before)
        return np.concatenate([self.seen[row], own]) if self.seen else own

    def visible(self, row: int, fill: int) -> np.ndarray:
        """(width,) a row's ids after its padding: what was passed there, or `fill`."""
        ids = self.prompts[row].ids
        pad = self.fills[row] if self.fills else None
        table = np.full(self.width, fill if pad is None else pad, dtype=np.int64)
        if ids is not None:
            table[self.width - len(ids) :] = ids
        return table

    def table(self, fill: int) -> np.ndarray:
        """(B, width) what is `visible` of every row."""
        return np.stack([self.visible(row, fill) for row in range(self.batch)])


def placed(inputs: Inputs, place: Callable[[Tensor], Any], new: int) -> Inputs:
    """Return the inputs whose position ids, which a function gives, are known for the prompts and
    for all that may follow, `new` tokens at most. RequestError for what no position ids are."""
    prompts = []
    for row, prompt in enumerate(inputs.prompts):
        places = torch.arange(prompt.length + new)
        found = read_positions(place(places), inputs.batch, len(places))
        prompts.append(replace(prompt, positions=of_row(found, row)))
    return replace(inputs, prompts=tuple(prompts))


def require_unmasked(source: EncoderSource) -> None:
    """UnsupportedError where attentions are returned of an encoder that is shown holes."""
    if any(prompt.mask is not None for prompt in source.prompts):
        what = "attentions over a prompt with holes in its mask have no place in the rectangle"
        raise UnsupportedError(what, do="Leave output_attentions out, or remove what is masked")


def require_begun(prompts: Sequence[Prompt]) -> None:
    """RequestError for a prompt whose images were to be read after positions that are cached."""
    for prompt in prompts:
        if prompt.whole and prompt.past is not None:
            raise RequestError(
                "what is given for a whole prompt cannot be read after cached positions",
                wanted="no past_key_values and no prefix before it",
                got=", ".join(sorted(prompt.whole)),
                do="Pass the whole prompt without a cache",
            )


def behind(prompt: Prompt, count: int, per_token: frozenset[str]) -> Prompt:
    """The prompt, of which what is said by position says it behind `count` cached positions, which
    are seen by all that comes and not fed again."""
    positions, mask = prompt.positions, prompt.mask
    if positions is not None:
        # What comes next goes on behind the positions that are given, however many are cached.
        lead = torch.arange(count).clamp(max=int(positions.min()))
        lead = lead.expand(*positions.shape[:-1], count)
        positions = torch.cat([lead, positions], dim=-1)
    if mask is not None:
        mask = F.pad(F.pad(mask, (count, 0), value=True), (0, 0, count, 0), value=True).tril()
    inputs = {
        name: F.pad(x, (*(0, 0) * (x.dim() - 1), count, 0)) if name in per_token else x
        for name, x in prompt.inputs.items()
    }
    return replace(prompt, positions=positions, mask=mask, inputs=inputs)


# --- what the encoders of second models read ------------------------------------------------------

_DRAFTER, _AMATEUR = "assistant_model", "amateur_model"
_STATES = "assistant_encoder_outputs"


def refuse_second_encoders(
    subject: Subject,
    source: EncoderSource | None,
    assistant: Assistant | None,
    amateur: Subject | None,
) -> None:
    """Raise RequestError where the encoder of a model that drafts, or of an amateur, cannot read
    what the model's own reads."""
    given = source is not None and bool(source.assistant)
    if given and (assistant is None or not assistant.core.network.encodes):
        raise RequestError(
            f"{_STATES} has no effect",
            wanted=f"an {_DRAFTER} with an encoder beside it",
            got="none" if assistant is None else "a decoder",
            do=f"Leave {_STATES} out",
        )
    if assistant is not None and assistant.core.network.encodes:
        _require_readable(_DRAFTER, subject, assistant.core, source)
    if amateur is not None and amateur.is_encoder_decoder:
        _require_readable(_AMATEUR, subject, amateur.core, source)


def _require_readable(
    name: str, subject: Subject, core: Model | ForeignModel, source: EncoderSource | None
) -> None:
    """Raise RequestError where the encoder of the second model of this name cannot read the
    source."""
    drafts, width = name == _DRAFTER, core.network.spec.width
    if source is None:
        raise RequestError(
            f"{name} has an encoder, and nothing is brought for one to read",
            wanted="a decoder, as the model is one",
            got=f"{name} with an encoder",
            do=f"Choose a decoder as {name}",
        )
    if drafts and source.assistant:
        got = source.assistant[0].shape[-1]
        if got != width:
            what = f"{_STATES} are not of {name}"
            raise RequestError(what, wanted=f"states of width {width}", got=got)
    elif not source.prompts:
        raise RequestError(
            f"the encoder of {name} has nothing to read",
            wanted="the prompt itself" + f", or {_STATES}" * drafts,
            got="encoder_outputs, which are those of the model",
            do="Pass the prompt in place of encoder_outputs" + f", or {_STATES} beside" * drafts,
        )
    else:
        _require_content(name, subject, core, source)


def _require_content(
    name: str, subject: Subject, core: Model | ForeignModel, source: EncoderSource
) -> None:
    """Raise RequestError where the prompts are of another kind or size than the encoder reads."""
    own, most = subject.core.source, core.network.most_source_positions
    for prompt in source.prompts:
        wanted = ""
        got: object = None
        highest = -1 if prompt.ids is None else int(prompt.ids.max())
        if core.source != own:
            wanted, got = core.source or "ids or embeddings", own or "ids or embeddings"
        elif own is not None:
            core.sources({one: value[None] for one, value in prompt.whole.items()})
        elif prompt.embeds is not None and prompt.embeds.shape[-1] != core.network.spec.width:
            wanted, got = f"embeddings of width {core.network.spec.width}", prompt.embeds.shape[-1]
        elif highest >= core.vocab_size:
            wanted, got = f"ids below {core.vocab_size}", highest
        elif most is not None and prompt.length > most:
            wanted, got = f"at most {most} positions", prompt.length
        if wanted:
            what = f"the encoder of {name} cannot read this prompt"
            do = "Choose a smaller model of the same family, or leave it out"
            raise RequestError(what, wanted=wanted, got=got, do=do)
