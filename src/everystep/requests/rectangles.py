"""The rows of a rectangle as a call passed them: read, checked part by part, cut row by row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from everystep.bridge.core import ForeignModel
from everystep.errors import InvariantError, RequestError
from everystep.models import Model
from everystep.models.dense import require_within
from everystep.outputs import encoder_states
from everystep.requests.arrays import (
    holed,
    of_row,
    read_embeds,
    read_ids,
    read_mask,
    read_named,
    read_positions,
    read_square,
    require_known,
    span_of,
)
from everystep.requests.door import PromptValues
from everystep.requests.features import read_values
from everystep.requests.inputs import Inputs
from everystep.requests.options import Ends, Prefix
from everystep.requests.pictures import (
    NOTHING_HELD,
    Held,
    Pictures,
    read_pictures,
    shift_of,
    vision_of,
)
from everystep.requests.prefixes import source_of
from everystep.requests.subject import Subject
from everystep.types import InputSpec, Prompt
from everystep.types.sources import EncoderSource

_BESIDE_AN_ENCODER = (
    *("decoder_input_ids", "decoder_attention_mask"),
    *("encoder_outputs", "assistant_encoder_outputs"),
)


@dataclass(frozen=True, slots=True, eq=False)
class Passed:
    """The parts of B rows of L positions that a call passed, each checked by itself.

    `ids`: (B, T), of any T beside `embeds` (B, L, E); `aligned`: every position has one. `real`:
    (B, L) bool, `square`: (B, 1 or H, L, L) bool or None. `positions`: (..., B or 1, L) or None.
    `named`: what the model declares. `wholes`: (B,) what each prompt is given as a whole, () for
    nothing. `place`: what finds the positions of such a prompt.
    """

    shape: tuple[int, int]
    ids: np.ndarray | None
    aligned: bool
    embeds: Tensor | None
    real: np.ndarray
    square: Tensor | None
    positions: Tensor | None
    named: Mapping[str, tuple[InputSpec, Tensor]] = field(default_factory=dict)
    wholes: Sequence[Mapping[str, Tensor]] = ()
    place: Callable[[Prompt], Prompt] | None = None

    def prompt(self, row: int, first: int, last: int) -> Prompt:
        """Return the positions [first, last) of a row."""
        mask = None if self.square is None else self.square[row]
        places: Tensor | None = None
        if mask is None and not self.real[row, first:last].all():
            mask, places = holed(self.real[row, first:last])
        if self.positions is not None:
            places = of_row(self.positions, row)[..., first:last]
        ids = None if self.ids is None else self.ids[row].copy()
        prompt = Prompt(
            ids=ids[first:last] if ids is not None and self.aligned else ids,
            embeds=None if self.embeds is None else self.embeds[row, first:last],
            positions=places,
            inputs={
                name: values[row, first:last] if spec.per == "token" else values[row]
                for name, (spec, values) in self.named.items()
            },
            mask=mask,
            whole=self.wholes[row] if self.wholes else {},
        )
        return prompt if self.place is None else self.place(prompt)


def with_prompt(given: PromptValues, prompt: object, name: str) -> PromptValues:
    """Return the values with a call's first argument, the prompt, by `name`.

    RequestError for a mapping, and for a prompt that was given twice.
    """
    if isinstance(prompt, Mapping):
        raise RequestError(
            "the first argument is a mapping",
            wanted="ids",
            got=type(prompt).__name__,
            do="Pass its entries: generate(**batch)",
        )
    ids = name == "input_ids"
    if (given.input_ids if ids else given.named.get(name)) is not None:
        what = f"the prompt was given twice: as the first argument and as {name}"
        raise RequestError(what, do=f"Pass it once, as {name}")
    if ids:
        return replace(given, input_ids=prompt)
    return replace(given, named={**given.named, name: prompt})


def read_passed(subject: Subject, given: PromptValues, ends: Ends, name: str) -> Passed:
    """Return what these values say of the rows; errors call the ids by `name`."""
    ids, embeds, pad = _read_content(subject, given, ends, name)
    shape = ids.shape if embeds is None else embeds.shape[:2]  # type: ignore[union-attr]
    rows, length = (int(size) for size in shape)
    mask, positions = given.attention_mask, given.position_ids
    square = None
    if isinstance(mask, Tensor) and mask.dim() > 2:
        square, mask = read_square(mask, rows, length), torch.ones(rows, length)
    real = read_mask(mask, (rows, length)) if mask is not None else np.ones((rows, length), bool)
    aligned = ids is not None and ids.shape == shape
    if mask is None and aligned and pad is not None and pad not in ends.eos:
        real = np.not_equal(ids, pad)  # type: ignore[arg-type]
    places = None
    if positions is not None and not callable(positions):
        places = read_positions(positions, rows, length)
        if places.dim() == 3 and len(places) == 4 and vision_of(subject) is not None:
            places = places[1:]  # before them the places in the row, as transformers has it
    passed = Passed((rows, length), ids, aligned, embeds, real, square, places)
    return _with_named(subject, given, passed) if given.named else passed


def _with_named(subject: Subject, given: PromptValues, passed: Passed) -> Passed:
    """Return the same with what the model declares."""
    rows, length = passed.shape
    specs = {name: spec for name, spec in subject.inputs.items() if name in given.named}
    named = {
        name: (spec, read_named(spec, given.named[name], rows, length))
        for name, spec in specs.items()
        if not spec.open
    }
    opened = {name: given.named[name] for name, spec in specs.items() if spec.open}
    if not opened:
        return replace(passed, named=named)
    core = subject.core
    if not isinstance(core, ForeignModel):
        raise InvariantError("only a wrapped model reads inputs of open shapes")
    known = [np.empty(0, dtype=np.int64)] * rows
    if passed.aligned and passed.ids is not None:
        known = [ids[real] for ids, real in zip(passed.ids, passed.real, strict=True)]
    media = core.media(opened, known, length)
    named |= {name: (specs[name], one) for name, one in media.tokens.items()}
    place = core.placed if given.position_ids is None else None
    return replace(passed, named=named, wholes=media.wholes, place=place)


def _read_content(
    subject: Subject, given: PromptValues, ends: Ends, name: str
) -> tuple[np.ndarray | None, Tensor | None, int | None]:
    """Return (B, T) ids, (B, L, E) embeddings, either of them or both, and the id that is
    padding."""
    ids, embeds, pad = given.input_ids, given.inputs_embeds, ends.pad
    if ids is None and embeds is None:
        # A begin token that is the pad token too was not passed as padding.
        ids, name, pad = _start(ends.begin, given.attention_mask), "bos_token_id", None
    array = None if ids is None else read_ids(ids, name, empty=embeds is not None)
    found = None if embeds is None else read_embeds(embeds, array, subject.width)
    if array is not None:
        tokens = [one.token for one in subject.prompt_inputs if one.token is not None]
        known = array[~np.isin(array, tokens)] if tokens else array
        core, size = subject.core, subject.vocab_size
        most = core.known_ids if isinstance(core, ForeignModel) else size
        require_known(known, most if found is None else None, name)
        if found is None or array.shape[1]:
            return array, found, pad
    return None, found, pad


def _start(begin: int | None, mask: object) -> Tensor:
    """Return (B, 1) the begin token, for as many rows as a mask has, or for one."""
    if begin is None:
        raise RequestError(
            "there is nothing to start from",
            wanted="input_ids, inputs_embeds, or a bos_token_id in the generation config",
            got="none of them",
            do="Pass input_ids",
        )
    rows = mask.shape[0] if isinstance(mask, Tensor) and mask.dim() == 2 else 1
    return torch.full((rows, 1), begin)


def read_inputs(
    subject: Subject,
    given: PromptValues,
    ends: Ends,
    prefix: Prefix | None = None,
    held: Held = NOTHING_HELD,
) -> Inputs:
    """Return the rectangle that tokens are added to, and the encoder's side of it, if there is one.

    `held`: what is cached already, where that was passed.
    """
    if subject.is_encoder_decoder and prefix is not None:
        return _read_rest(subject, given, ends, prefix)
    if subject.is_encoder_decoder:
        source, batch = _read_source(subject, given, ends)
        return replace(_read_decoder(subject, given, ends, batch), source=source)
    for name in _BESIDE_AN_ENCODER:
        if getattr(given, name) is not None:
            what = f"{name} was given to a model without an encoder"
            raise RequestError(what, do="Pass the prompt as input_ids or inputs_embeds")
    if prefix is not None:
        held = Held(counts=(len(prefix),), shifts=(shift_of(prefix.prompt),))
    return _read_rectangle(subject, given, ends, held=held)


def require_guided(name: str, scale: float | None) -> None:
    """Refuse a prompt to be guided away from, by this name, where nothing guides."""
    if scale in (None, 1):
        what, do = f"{name} has no effect without guidance_scale", "Set guidance_scale, or leave"
        raise RequestError(what, wanted="guidance_scale > 1", got=scale, do=f"{do} {name} out")


def with_negative(
    subject: Subject, given: PromptValues, inputs: Inputs, ends: Ends, scale: float | None
) -> Inputs:
    """Return the inputs with what guidance of this `scale` leads away from."""
    ids, mask = given.negative_prompt_ids, given.negative_prompt_attention_mask
    if ids is None:
        what = "negative_prompt_attention_mask was given without negative_prompt_ids"
        raise RequestError(what, do="Pass both or neither")
    require_guided("negative_prompt_ids", scale)
    passed = PromptValues(input_ids=ids, attention_mask=mask)
    negative = _read_rectangle(subject, passed, ends, "negative_prompt_ids")
    _require_rows("negative_prompt_ids", negative.batch, inputs.batch)
    return replace(inputs, negative=negative.prompts)


def _read_rectangle(
    subject: Subject,
    given: PromptValues,
    ends: Ends,
    name: str = "input_ids",
    held: Held = NOTHING_HELD,
) -> Inputs:
    """Return the prompts of every row; padding on either side is recognised by the mask and left
    out.

    Without a mask, pad ids count as padding if the pad id is not an end id, as in transformers.
    """
    passed = read_passed(subject, given, ends, name)
    ids, (rows, width) = passed.ids, passed.shape
    aligned, guessed = passed.aligned, given.attention_mask is None
    spans = [span_of(real, row, guessed=guessed) for row, real in enumerate(passed.real)]
    place = given.position_ids
    fills: tuple[int | None, ...] = ()  # the outermost id of each row's padding
    if ids is not None and aligned:
        fills = tuple(
            None if last - first == width else int(row[0] if first > 0 else row[-1])
            for row, (first, last) in zip(ids, spans, strict=True)
        )
    prompts = tuple(passed.prompt(row, *span) for row, span in enumerate(spans))
    pictures: tuple[Pictures, ...] = ()
    if (vision := vision_of(subject)) is not None:
        own = [passed.real[row, first:last] for row, (first, last) in enumerate(spans)]
        each = enumerate(zip(prompts, own, strict=True))
        seen = [held.row(row, prompt, real, spans[row][0]) for row, (prompt, real) in each]
        prompts, pictures = read_pictures(vision, given.named, seen, placed=place is not None)
    return Inputs(
        prompts,
        margins=tuple(width - (last - first) for first, last in spans),
        firsts=tuple(first for first, _ in spans),
        width=0 if ids is None else ids.shape[1],
        embeds_width=0 if aligned else width,
        fills=fills,
        values=read_values(subject.prompt_inputs, given.named, rows) if given.named else (),
        pictures=pictures,
        place=place if callable(place) else None,
        per_token=frozenset(n for n, (spec, _) in passed.named.items() if spec.per == "token"),
    )


def _read_source(subject: Subject, given: PromptValues, ends: Ends) -> tuple[EncoderSource, int]:
    """Return the encoder's side, that of an assistant's encoder with it, and how many rows it
    has."""
    source, batch = _read_own_source(subject, given, ends)
    if given.assistant_encoder_outputs is None:
        return source, batch
    name = "assistant_encoder_outputs"
    passed = encoder_states(given.assistant_encoder_outputs, name)
    states, _ = _real_states(subject, passed, given.attention_mask)
    _require_rows(name, len(states), batch)
    return replace(source, assistant=states), batch


def _with_assistant(subject: Subject, outputs: object, source: EncoderSource) -> EncoderSource:
    """Return a source that has been read, with what the encoder of a draft model made of it."""
    name = "assistant_encoder_outputs"
    states = encoder_states(outputs, name)
    _require_rows(name, len(states), len(source.places))
    if subject.core.source is not None:  # whose states are all real
        return replace(source, assistant=tuple(states))
    width = max(int(places[-1]) + 1 for places in source.places)
    if states.shape[1] < width:
        do = "Pass what it made of the source that the prefix was made of, padding included"
        raise RequestError(f"{name} is of another source", wanted=width, got=states.shape[1], do=do)
    each = zip(states, source.places, strict=True)
    return replace(source, assistant=tuple(row[torch.from_numpy(own)] for row, own in each))


def _read_own_source(
    subject: Subject, given: PromptValues, ends: Ends
) -> tuple[EncoderSource, int]:
    """Return what the model's own encoder reads, and how many rows it has."""
    if given.position_ids is not None:
        what = "position_ids has no meaning for a model with an encoder, which counts positions"
        raise RequestError(what, do="Leave position_ids out")
    if given.input_ids is not None and given.inputs_embeds is not None:
        what = "inputs_embeds and input_ids both say what the encoder reads"
        raise RequestError(what, wanted="one of them", got="both", do="Leave one of them out")
    if given.encoder_outputs is not None:
        states, places = _read_states(subject, given)
        return EncoderSource(states=states, places=places), len(states)
    core = subject.core
    if core.source is not None:
        return _read_whole(core, core.source, given)
    mask = given.attention_mask
    if isinstance(mask, Tensor) and mask.dim() > 2:
        do = "Pass a (batch, length) mask"
        raise RequestError("an encoder reads no 4-D attention_mask", do=do)
    read = _read_rectangle(subject, given, ends)
    longest = max(prompt.length for prompt in read.prompts)
    require_within(longest, core.network.most_source_positions, "the encoder")
    starts = zip(read.firsts, read.prompts, strict=True)
    places = tuple(first + np.flatnonzero(_shown(prompt)) for first, prompt in starts)
    shifts = np.subtract(read.firsts, read.margins)
    ids = tuple(map(np.roll, read.table(0), shifts)) if read.width else ()
    return EncoderSource(read.prompts, (), places, read.prompt_width, ids), read.batch


def _read_whole(
    core: Model | ForeignModel, name: str, given: PromptValues
) -> tuple[EncoderSource, int]:
    """Return the encoder's side where it reads the input of this name, and neither ids nor
    embeddings; how many states it makes of that is known when they are encoded."""
    contents = {"input_ids": given.input_ids, "inputs_embeds": given.inputs_embeds}
    others = [one for one, value in contents.items() if value is not None]
    if name not in given.named or others:
        raise RequestError(
            f"the model's encoder reads {name}",
            wanted=f"{name}, as its processor returns it",
            got=", ".join(others) or f"no {name}",
            do=f"Pass {name}, and what the answer begins with as decoder_input_ids",
        )
    passed = {one.name: given.named[one.name] for one in core.inputs if one.name in given.named}
    if given.attention_mask is not None:
        passed["attention_mask"] = given.attention_mask
    wholes = core.sources(passed)
    return EncoderSource(tuple(Prompt(whole=one) for one in wholes)), len(wholes)


def _shown(prompt: Prompt) -> np.ndarray:
    """Return (length,) bool: the positions that its mask shows."""
    if prompt.mask is None:
        return np.ones(prompt.length, dtype=bool)
    shown: np.ndarray = prompt.mask[-1].numpy()
    return shown


def _read_states(
    subject: Subject, given: PromptValues
) -> tuple[tuple[Tensor, ...], tuple[np.ndarray, ...]]:
    """Return (B,) encoder states (S, E) of the caller's, those of padding left out, and their
    places."""
    states = encoder_states(given.encoder_outputs)
    prompts = {"input_ids": given.input_ids, "inputs_embeds": given.inputs_embeds, **given.named}
    names = ("input_ids", "inputs_embeds", *subject.inputs)
    if both := [name for name in names if prompts.get(name) is not None]:
        raise RequestError(
            "encoder_outputs and a prompt for the encoder were both given",
            wanted="one of them",
            got=f"encoder_outputs and {', '.join(both)}",
            do=f"Leave {' and '.join(both)} out",
        )
    return _real_states(subject, states, given.attention_mask)


def _real_states(
    subject: Subject, states: Tensor, real: object
) -> tuple[tuple[Tensor, ...], tuple[np.ndarray, ...]]:
    """Return (B,) those of encoder states (B, S, E) that stand for real positions, and their
    places."""
    core = subject.core
    if real is not None and core.source is not None:
        real = core.real_states(torch.as_tensor(real), states.shape[1])
    mask = read_mask(real, tuple(states.shape[:2]))
    places = tuple(np.flatnonzero(row) for row in mask)
    found = tuple(row[torch.from_numpy(own)] for row, own in zip(states, places, strict=True))
    return found, places


def _read_decoder(subject: Subject, given: PromptValues, ends: Ends, batch: int) -> Inputs:
    """Return what the decoder starts from: the start token, or the caller's ids after it."""
    ids, mask, name = given.decoder_input_ids, given.decoder_attention_mask, "decoder_input_ids"
    unpadded = replace(ends, pad=None)
    if ids is None:
        starts = PromptValues(input_ids=_starts(ends.starts, batch))
        return _read_rectangle(subject, starts, unpadded, name)
    passed = PromptValues(input_ids=ids, attention_mask=mask)
    read = _read_rectangle(subject, passed, unpadded, name)
    _require_rows("decoder_input_ids", read.batch, batch)
    return _begun(read, ends.starts) if ends.starts else read


def _read_rest(subject: Subject, given: PromptValues, ends: Ends, prefix: Prefix) -> Inputs:
    """Return what the decoder reads after a prefix, which may be nothing; its source is read."""
    source, name = source_of(prefix, subject, given), "decoder_input_ids"
    ids = (
        None
        if given.decoder_input_ids is None
        else read_ids(given.decoder_input_ids, name, empty=True)
    )
    rows, length = (1, 0) if ids is None else ids.shape
    if length:
        mask = given.decoder_attention_mask
        passed = PromptValues(input_ids=given.decoder_input_ids, attention_mask=mask)
        read = _read_rectangle(subject, passed, replace(ends, pad=None), name)
    else:
        read_mask(given.decoder_attention_mask, (rows, 0))
        nothing = Prompt(ids=np.empty(0, dtype=np.int64))
        none = (0,) * rows
        read = Inputs((nothing,) * rows, none, none, width=0, fills=(None,) * rows)
    source = source.repeated(rows)
    if given.assistant_encoder_outputs is not None:
        source = _with_assistant(subject, given.assistant_encoder_outputs, source)
    return replace(read, source=source)


def _starts(starts: tuple[int, ...], batch: int) -> Tensor:
    """Return (B, 1) the first id of each row of the decoder."""
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


def _begun(read: Inputs, starts: tuple[int, ...]) -> Inputs:
    """Return the rows after their start ids, unless a row has its own already."""
    first = _starts(starts, read.batch).numpy()
    known = [np.empty(0, np.int64) if p.ids is None else p.ids for p in read.prompts]
    if any(ids[0] == start[0] for ids, start in zip(known, first, strict=True)):
        return read
    pairs = zip(first, known, strict=True)
    prompts = tuple(Prompt(ids=np.concatenate(pair)) for pair in pairs)
    return replace(read, prompts=prompts, width=read.width + 1)


def _require_rows(name: str, found: int, batch: int) -> None:
    if found != batch:
        do = f"Pass one row of {name} per row of the prompt"
        raise RequestError(f"{name} and the prompt differ in rows", wanted=batch, got=found, do=do)
