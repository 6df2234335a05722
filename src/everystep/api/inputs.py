"""From what callers pass (rectangles, masks, embeddings) to one prompt per row, without padding.

Everything is checked here, before any compute. With an encoder there are two sides: what it reads,
and the first ids of the decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from everystep.api.arrays import of_row, read_mask, read_positions, span_of
from everystep.api.features import Rows, read_values
from everystep.api.options import Options
from everystep.api.passed import Given, read_passed
from everystep.api.pictures import (
    NOTHING_HELD,
    Held,
    Pictures,
    read_pictures,
    shift_of,
    vision_of,
)
from everystep.bridge.core import ForeignModel
from everystep.errors import RequestError, UnsupportedError
from everystep.models import Model
from everystep.models.dense import require_within
from everystep.nn.network import Heard
from everystep.outputs import encoder_states
from everystep.types import Prompt

if TYPE_CHECKING:
    from everystep.api.model import LanguageModel


@dataclass(frozen=True, slots=True, eq=False)
class EncoderSource:
    """What stands on the encoder's side: B prompts to encode, or B states (S, E) that are done.

    `places`: (B,) where the states of each row stand in the rectangle that was passed, of `width`
    positions; empty until they are encoded where no ids are. `ids`: (B,) the rows of that
    rectangle, empty where ids are not known.
    """

    prompts: tuple[Prompt, ...] = ()
    states: tuple[Tensor, ...] = ()
    places: tuple[np.ndarray, ...] = ()
    width: int = 0
    ids: tuple[np.ndarray, ...] = ()

    def encoded(self, states: Sequence[Tensor], heard: Sequence[Heard]) -> EncoderSource:
        """The same once it is known how many states there are, (B,) states (S, E)."""
        widths = [one.layers[-1].shape[-2] for one in heard] or list(map(len, states))
        places = tuple(np.arange(len(one)) for one in states)
        return replace(self, places=places, width=max(widths))


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
        """How many rows the call has."""
        return len(self.prompts)

    @property
    def pads(self) -> tuple[int, ...]:
        """(B,) how many pad ids stand before each prompt in the rectangle of ids."""
        return (0,) * self.batch if self.embeds_width else self.margins

    @property
    def prompt_width(self) -> int:
        """Positions per row of the rectangle, whatever it is made of."""
        return self.embeds_width or self.width

    @property
    def counted_width(self) -> int:
        """What lengths count: positions, and ids beside them that are not theirs."""
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


def read_inputs(
    model: LanguageModel, given: Given, options: Options, held: Held = NOTHING_HELD
) -> Inputs:
    """The rectangle that tokens are added to, and the encoder's side of it, if there is one.

    `held`: what is cached already, where that was passed.
    """
    if model.is_encoder_decoder:
        source, batch = _read_source(model, given, options)
        return replace(_read_decoder(model, given, options, batch), source=source)
    for name in ("decoder_input_ids", "decoder_attention_mask", "encoder_outputs"):
        if given.get(name) is not None:
            what = f"{name} was given to a model without an encoder"
            raise RequestError(what, do="Pass the prompt as input_ids or inputs_embeds")
    if options.prefix is not None:
        held = Held(counts=(len(options.prefix),), shifts=(shift_of(options.prefix.prompt),))
    return _read_rectangle(model, given, options, held=held)


def placed(inputs: Inputs, new: int) -> Inputs:
    """The inputs whose position ids, where a function gives them, are known for the prompts and for
    all that may follow, `new` tokens at most. RequestError for what no position ids are."""
    if inputs.place is None:
        return inputs
    prompts = []
    for row, prompt in enumerate(inputs.prompts):
        places = torch.arange(prompt.length + new)
        found = read_positions(inputs.place(places), inputs.batch, len(places))
        prompts.append(replace(prompt, positions=of_row(found, row)))
    return replace(inputs, prompts=tuple(prompts))


def require_begun(inputs: Inputs) -> None:
    """RequestError for a prompt whose images were to be read after positions that are cached."""
    for prompt in inputs.prompts:
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


def with_negative(model: LanguageModel, given: Given, inputs: Inputs, options: Options) -> Inputs:
    """The inputs with what guidance leads away from, if it was given."""
    ids, mask = given.get("negative_prompt_ids"), given.get("negative_prompt_attention_mask")
    if ids is None:
        if mask is not None:
            what = "negative_prompt_attention_mask was given without negative_prompt_ids"
            raise RequestError(what, do="Pass both or neither")
        return inputs
    if options.effective.guidance_scale in (None, 1):
        what, got = "negative_prompt_ids has no effect", options.effective.guidance_scale
        do = "Set guidance_scale, or leave negative_prompt_ids out"
        raise RequestError(
            f"{what} without guidance_scale", wanted="guidance_scale > 1", got=got, do=do
        )
    passed = {"input_ids": ids, "attention_mask": mask}
    negative = _read_rectangle(model, passed, options, "negative_prompt_ids")
    _require_rows("negative_prompt_ids", negative.batch, inputs.batch)
    return replace(inputs, negative=negative.prompts)


def _read_rectangle(
    model: LanguageModel,
    given: Given,
    options: Options,
    name: str = "input_ids",
    held: Held = NOTHING_HELD,
) -> Inputs:
    """Prompts of every row; padding on either side is recognised by the mask and left out.

    Without a mask, pad ids count as padding if the pad id is not an end id, as in transformers.
    """
    passed = read_passed(model, given, options, name)
    ids, (rows, width) = passed.ids, passed.shape
    guessed = given.get("attention_mask") is None
    spans = [span_of(real, row, guessed=guessed) for row, real in enumerate(passed.real)]
    place = given.get("position_ids")
    fills: tuple[int | None, ...] = ()
    if ids is not None and passed.aligned:
        fills = tuple(_fill(row, *span) for row, span in zip(ids, spans, strict=True))
    prompts = tuple(passed.prompt(row, *span) for row, span in enumerate(spans))
    pictures: tuple[Pictures, ...] = ()
    if (vision := vision_of(model)) is not None:
        own = [passed.real[row, first:last] for row, (first, last) in enumerate(spans)]
        each = enumerate(zip(prompts, own, strict=True))
        seen = [held.row(row, prompt, real, spans[row][0]) for row, (prompt, real) in each]
        prompts, pictures = read_pictures(vision, given, seen)
    return Inputs(
        prompts,
        margins=tuple(width - (last - first) for first, last in spans),
        firsts=tuple(first for first, _ in spans),
        width=0 if ids is None else ids.shape[1],
        embeds_width=0 if passed.aligned else width,
        fills=fills,
        values=read_values(model.prompt_inputs, given, rows),
        pictures=pictures,
        place=place if callable(place) else None,
        per_token=frozenset(n for n, one in model.inputs.items() if one.per == "token"),
    )


def _fill(row: np.ndarray, first: int, last: int) -> int | None:
    """The outermost id of a row's padding."""
    if first > 0:
        return int(row[0])
    return int(row[-1]) if last < len(row) else None


def _read_source(model: LanguageModel, given: Given, options: Options) -> tuple[EncoderSource, int]:
    """The encoder's side and how many rows it has."""
    if given.get("position_ids") is not None:
        what = "position_ids has no meaning for a model with an encoder, which counts positions"
        raise RequestError(what, do="Leave position_ids out")
    if given.get("input_ids") is not None and given.get("inputs_embeds") is not None:
        what = "inputs_embeds and input_ids both say what the encoder reads"
        raise RequestError(what, wanted="one of them", got="both", do="Leave one of them out")
    if given.get("encoder_outputs") is not None:
        states, places = _read_states(model, given)
        return EncoderSource(states=states, places=places), len(states)
    core = model.core
    if core.source is not None:
        return _read_whole(core, core.source, given)
    mask = given.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() > 2:
        do = "Pass a (batch, length) mask"
        raise RequestError("an encoder reads no 4-D attention_mask", do=do)
    read = _read_rectangle(model, given, options)
    longest = max(prompt.length for prompt in read.prompts)
    require_within(longest, core.network.most_source_positions, "the encoder")
    if options.returns("output_attentions") and any(p.mask is not None for p in read.prompts):
        what = "attentions over a prompt with holes in its mask have no place in the rectangle"
        raise UnsupportedError(what, do="Leave output_attentions out, or remove what is masked")
    starts = zip(read.firsts, read.prompts, strict=True)
    places = tuple(first + np.flatnonzero(_shown(prompt)) for first, prompt in starts)
    shifts = np.subtract(read.firsts, read.margins)
    ids = tuple(map(np.roll, read.table(0), shifts)) if read.width else ()
    return EncoderSource(read.prompts, (), places, read.prompt_width, ids), read.batch


def _read_whole(core: Model | ForeignModel, name: str, given: Given) -> tuple[EncoderSource, int]:
    """The encoder's side where it reads the input of this name, and neither ids nor embeddings; how
    many states it makes of that is known when they are encoded."""
    others = [one for one in ("input_ids", "inputs_embeds") if given.get(one) is not None]
    if given.get(name) is None or others:
        raise RequestError(
            f"the model's encoder reads {name}",
            wanted=f"{name}, as its processor returns it",
            got=", ".join(others) or f"no {name}",
            do=f"Pass {name}, and what the answer begins with as decoder_input_ids",
        )
    names = (*(one.name for one in core.inputs), "attention_mask")
    wholes = core.sources({one: given[one] for one in names if given.get(one) is not None})
    return EncoderSource(tuple(Prompt(whole=one) for one in wholes)), len(wholes)


def _shown(prompt: Prompt) -> np.ndarray:
    """(length,) bool: the positions that its mask shows."""
    if prompt.mask is None:
        return np.ones(prompt.length, dtype=bool)
    shown: np.ndarray = prompt.mask[-1].numpy()
    return shown


def _read_states(
    model: LanguageModel, given: Given
) -> tuple[tuple[Tensor, ...], tuple[np.ndarray, ...]]:
    """(B,) encoder states (S, E) of the caller's, those of padding left out, and their places."""
    states = encoder_states(given["encoder_outputs"])
    names = ("input_ids", "inputs_embeds", *model.inputs)
    if both := [name for name in names if given.get(name) is not None]:
        raise RequestError(
            "encoder_outputs and a prompt for the encoder were both given",
            wanted="one of them",
            got=f"encoder_outputs and {', '.join(both)}",
            do=f"Leave {' and '.join(both)} out",
        )
    real, core = given.get("attention_mask"), model.core
    if real is not None and core.source is not None:
        real = core.real_states(torch.as_tensor(real), states.shape[1])
    mask = read_mask(real, tuple(states.shape[:2]))
    places = tuple(np.flatnonzero(row) for row in mask)
    found = tuple(row[torch.from_numpy(own)] for row, own in zip(states, places, strict=True))
    return found, places


def _read_decoder(model: LanguageModel, given: Given, options: Options, batch: int) -> Inputs:
    """What the decoder starts from: the start token, or the caller's ids after it."""
    ids, mask = given.get("decoder_input_ids"), given.get("decoder_attention_mask")
    passed = {"input_ids": ids, "attention_mask": mask}
    if ids is None:
        passed = {"input_ids": _starts(options, batch)}
    read = _read_rectangle(model, passed, replace(options, pad=None), "decoder_input_ids")
    if ids is None:
        return read
    _require_rows("decoder_input_ids", read.batch, batch)
    return _begun(read, options)


def _starts(options: Options, batch: int) -> Tensor:
    """(B, 1) the first id of each row of the decoder."""
    starts = options.starts
    if not starts:
        raise RequestError(
            "the decoder has nothing to start from",
            wanted="decoder_start_token_id, bos_token_id or decoder_input_ids",
            got="none of them",
            do="Set decoder_start_token_id",
        )
    if len(starts) not in (1, batch):
        do = "Pass one id, or one per row of the prompt"
        what = "decoder_start_token_id does not fit the rows"
        raise RequestError(what, wanted=f"one id, or {batch}", got=len(starts), do=do)
    return torch.tensor(starts * (batch if len(starts) == 1 else 1))[:, None]


def _begun(read: Inputs, options: Options) -> Inputs:
    """The rows after their start ids, unless a row has its own already."""
    if not options.starts:
        return read
    starts = _starts(options, read.batch).numpy()
    known = [np.empty(0, np.int64) if p.ids is None else p.ids for p in read.prompts]
    if any(ids[0] == start[0] for ids, start in zip(known, starts, strict=True)):
        return read
    pairs = zip(starts, known, strict=True)
    prompts = tuple(Prompt(ids=np.concatenate(pair)) for pair in pairs)
    return replace(read, prompts=prompts, width=read.width + 1)


def _require_rows(name: str, found: int, batch: int) -> None:
    if found != batch:
        do = f"Pass one row of {name} per row of the prompt"
        raise RequestError(f"{name} and the prompt differ in rows", wanted=batch, got=found, do=do)
