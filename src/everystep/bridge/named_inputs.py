"""What a foreign forward takes by name beside ids: read, given to rows, and placed.

A value with one entry per position of the prompt is cut by position, as any other. A value of
another shape, such as the patches of images, belongs to the prompt as a whole: the one forward that
feeds the prompt is given it. In a batch such values often stand one after another without a row;
then a row's share follows from how many of its ids are placeholders.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everystep.bridge.foreign import Foreign
from everystep.bridge.foreign_errors import attributed
from everystep.errors import RequestError, UnsupportedError, shown
from everystep.types import InputSpec, Prompt

_OURS = frozenset(
    (
        "input_ids",
        "attention_mask",
        "position_ids",
        "inputs_embeds",
        "past_key_values",
        "cache_params",
        "cache_position",
        "labels",
        "use_cache",
        "return_dict",
        "logits_to_keep",
        "num_logits_to_keep",
        "encoder_outputs",
        "encoder_hidden_states",
        "encoder_attention_mask",
        "mm_encoder_outputs",
        "head_mask",
    )
)
"""Names of a forward that the engine fills in, and those that are no inputs of a prompt."""
_MEDIA = ("pixel", "image", "video", "audio", "vision", "feature", "grid")
_GRID = "grid_thw"
_ROPE = "get_rope_index"
_RANKS = {"input_features": 3, "pixel_values": 4, "flattened_patches": 3}
"""The number of dimensions of a batch that an encoder reads; others have 2."""


def declared(foreign: Foreign) -> tuple[InputSpec, ...]:
    """Return what a module takes beside ids or embeddings; its encoder, where one reads the prompt.

    Positions that are generated are given zeros, or what transformers repeats: the last type.
    """
    names = sorted((foreign.heard if foreign.encodes else foreign.names) - _OURS)
    return tuple(
        InputSpec(
            name,
            "token",
            (),
            torch.float64,
            open=True,
            after="last" if name == "token_type_ids" else "zeros",
        )
        for name in names
        if not name.startswith(("decoder_", "output_"))
    )


class Media:
    """The values that B rows of L positions are given by name.

    `tokens`: (B, L, ...) per position, by name. `wholes`: (B,) what each row's prompt is given as a
    whole. `ids`: (B,) those of each row without padding, empty where they are not known.
    """

    def __init__(
        self, foreign: Foreign, given: Mapping[str, Any], ids: Sequence[np.ndarray], length: int
    ) -> None:
        self._config = foreign.config
        self._ids, self._length, self._rows = ids, length, len(ids)
        self.tokens: dict[str, Tensor] = {}
        self.wholes: list[dict[str, Tensor]] = [{} for _ in ids]
        read = {name: _read(name, value) for name, value in given.items()}
        for name, value in read.items():
            each = self._listed(name, value) if isinstance(value, list) else None
            each = self._split(name, value, read) if each is None else each
            full = [one for one in each if one is not None]
            if not _is_media(name) and [len(one) for one in full] == [length] * self._rows:
                self.tokens[name] = torch.stack(full)
                continue
            for own, one in zip(self.wholes, each, strict=True):
                if one is not None and len(one):
                    own[name] = one

    def _listed(self, name: str, value: list[Tensor | None]) -> list[Tensor | None]:
        """Return (B,) what each row is given of a list; per position it may be a batch of one."""
        if len(value) != self._rows:
            do = "Pass one tensor per row of the prompt, None for rows without"
            what = f"{name} and the prompt differ in rows"
            raise RequestError(what, wanted=self._rows, got=len(value), do=do)
        batch = (1, self._length)
        media = _is_media(name)
        return [
            one[0] if one is not None and not media and tuple(one.shape[:2]) == batch else one
            for one in value
        ]

    def _split(self, name: str, value: Tensor, others: Mapping[str, Any]) -> list[Tensor | None]:
        """Return (B,) what each row has of a value."""
        rows, media = self._rows, _is_media(name)
        if not media and tuple(value.shape[:2]) == (rows, self._length):
            return list(value)
        if not media and value.dim() == 1 and len(value) == self._length:
            return [value] * rows
        if rows == 1:
            return [value]
        found = self._shares(name, value, others)
        if found is None and len(value) == rows:
            found = [value[row : row + 1] for row in range(rows)]
        if found is None:
            raise RequestError(
                f"it cannot be seen which rows of the prompt have what of {name}",
                wanted=f"a list of {rows} tensors, or a tensor of {rows} rows",
                got=tuple(value.shape),
                do="Pass a list with one tensor per row, None for rows without",
            )
        return found

    def _shares(
        self, name: str, value: Tensor, others: Mapping[str, Any]
    ) -> list[Tensor | None] | None:
        """Return (B,) the entries whose placeholders stand in each row, if they come out even."""
        kind = next((one for one in ("video", "audio") if one in name), "image")
        config = self._config
        token = getattr(config, f"{kind}_token_id", getattr(config, f"{kind}_token_index", None))
        counts = np.cumsum([int((row == token).sum()) for row in self._ids])
        if token is None or not counts[-1]:
            return None
        grid = others.get(f"{kind}_{_GRID}")
        sizes = np.ones(len(value), dtype=np.int64)
        if isinstance(grid, Tensor) and len(grid) == len(value):
            sizes = grid.prod(dim=-1).cpu().numpy()
        ends = np.concatenate([[0], np.cumsum(sizes)])
        cuts = [np.flatnonzero(ends * counts[-1] == count * ends[-1]) for count in counts]
        if not all(map(len, cuts)):
            return None
        stops = [0, *(int(cut[-1]) for cut in cuts)]
        return [value[a:b] for a, b in pairwise(stops)]


def batched(name: str, value: Tensor) -> Tensor:
    """Return what an encoder reads of one row, in a batch of one."""
    return value[None] if value.dim() == _RANKS.get(name, 2) - 1 else value


def _is_media(name: str) -> bool:
    """Return whether an input never has one entry per position."""
    return any(mark in name for mark in _MEDIA)


def _read(name: str, value: Any) -> Any:
    """Return a tensor, or a list of one per row; raise RequestError for anything else."""
    if isinstance(value, list | tuple) and any(isinstance(one, Tensor | None) for one in value):
        return [None if one is None else _read(name, one) for one in value]
    try:
        found = value if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value))
    except (ValueError, TypeError) as error:
        got = type(value).__name__
        raise RequestError(f"{name} is not a tensor", got=got) from error
    if not found.dim():
        what = f"{name} has no entries"
        raise RequestError(what, wanted="one per position, or those of a prompt", got=shown(value))
    return found


def placed(foreign: Foreign, prompt: Prompt) -> Prompt:
    """Return the prompt with the positions that its module finds for what it is given as a whole.

    The module must have a way of its own to find them; they and those that follow say all, so that
    nothing on the module counts. Raise RequestError where what is given does not fit the ids.
    """
    own = [one for one in foreign.base.modules() if callable(getattr(one, _ROPE, None))]
    if not own or not prompt.whole:
        return prompt
    find = getattr(own[0], _ROPE)
    if prompt.mask is not None or prompt.ids is None or prompt.hidden:
        raise RequestError(
            "positions cannot be found for this prompt",
            wanted="one id for each position, and no holes in the mask",
            got="holes in its mask" if prompt.mask is not None else "inputs_embeds",
            do="Pass position_ids",
        )
    device = foreign.device
    told = {name: value[None].to(device) for name, value in prompt.inputs.items()}
    told |= {name: value.to(device) for name, value in prompt.whole.items()}
    told["input_ids"] = ids = torch.tensor(prompt.ids)[None].to(device)
    told["attention_mask"] = torch.ones_like(ids)
    takes = inspect.signature(find).parameters
    missing = [n for n, one in takes.items() if n not in told and one.default is one.empty]
    missing = [n for n in missing if takes[n].kind is not inspect.Parameter.VAR_KEYWORD]
    if missing:
        what = f"positions cannot be found without {', '.join(missing)}"
        do = f"Pass {missing[0]} as the processor returned it, or position_ids"
        raise RequestError(what, wanted=", ".join(missing), got=", ".join(sorted(told)), do=do)
    with attributed(foreign.base, lambda: ", ".join(told), prompt.whole):
        found, shift = find(**{name: one for name, one in told.items() if name in takes})
    return replace(prompt, positions=_with_next(found[:, 0].cpu(), prompt.length + int(shift[0])))


def _with_next(positions: Tensor, first: int) -> Tensor:
    """Return (axes, L) positions, and that of the `first` generated token.

    The latter is left out where it is the next one.
    """
    last = int(positions.max())
    if first == last + 1:
        return positions
    if first <= last:
        what = "generated tokens would stand before the end of the prompt"
        raise UnsupportedError(what, wanted=f"{last + 1} or more", got=first)
    return torch.cat([positions, positions.new_full((len(positions), 1), first)], dim=1)
