"""A module's own preparation of its inputs, called for each row by itself, as transformers does.

A class outside of the library may bring its own `prepare_inputs_for_generation`, and its own
`_update_model_kwargs_for_generation`, which carries values from one forward to the next. Those are
written for one batch from its start to its end. Here the batch is a row, and what is carried
belongs to the row: a fork gets a copy, and what cannot be taken back is never cut.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from everystep.bridge.foreign import Foreign
from everystep.errors import UnsupportedError

_LIBRARIES = ("transformers", "peft")
_PREPARE, _UPDATE = "prepare_inputs_for_generation", "_update_model_kwargs_for_generation"
_COLUMNS = ("attention_mask", "decoder_attention_mask", "position_ids", "decoder_position_ids")


def has_own(module: nn.Module, name: str) -> bool:
    """Return whether the class of a module brings a method of this name, not its library's."""
    method = getattr(type(module), name, None)
    return method is not None and method.__module__.partition(".")[0] not in _LIBRARIES


def prepares(module: nn.Module) -> bool:
    """Return whether a module prepares its inputs in a way of its own."""
    return has_own(module, _PREPARE) or has_own(module, _UPDATE)


def carries(module: nn.Module) -> bool:
    """Return whether it carries values from one forward to the next in a way of its own."""
    return has_own(module, _UPDATE)


class Carried:
    """The values that one row carries: its ids so far and the keywords of its forwards.

    `chosen`: from how many of the forwards a token was chosen. `shown`: the names of what its
    prompt was given as a whole. `told_again`: a forward took that a second time.
    """

    def __init__(self) -> None:
        self.ids = torch.empty(1, 0, dtype=torch.int64)
        self.kept: dict[str, Any] = {}
        self.chosen = 0
        self.shown: frozenset[str] = frozenset()
        self.told_again = False

    def copied(self) -> Carried:
        """Return the same for a fork, which shares nothing with it."""
        made = Carried()
        made.ids, made.chosen = self.ids, self.chosen
        made.shown, made.told_again = self.shown, self.told_again
        made.kept = copy.deepcopy(self.kept)
        return made

    def forget_shown(self) -> None:
        """Tell the module nothing more of what the prompt was given as a whole."""
        self.kept = {name: value for name, value in self.kept.items() if name not in self.shown}
        self.shown = frozenset()

    def prepared(
        self, foreign: Foreign, given: Mapping[str, Any], cache: Any, before: int
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what the module says that it is to be called with after `before` positions.

        The second value is the keywords that it was told. `given`: what the engine feeds, as the
        module takes it.
        """
        fed = dict(given)
        name = "decoder_input_ids" if foreign.encodes else "input_ids"
        new = fed.pop(name, None)
        if new is None:
            new = torch.zeros(fed["inputs_embeds"].shape[:2], dtype=torch.int64)
        count = new.shape[1]
        self.ids = torch.cat([self.ids, new.to(self.ids)], dim=1)
        told = {**self.kept, **fed, foreign.cache_name: cache, "use_cache": True}
        for one in _COLUMNS:
            old = self.kept.get(one)
            if isinstance(old, Tensor) and old.shape[-1] == before + count:
                told[one] = old
        asked = {**told, "is_first_iteration": before == 0}
        asked["next_sequence_length"] = count if before else None
        prepare = getattr(foreign.base, _PREPARE)
        return prepare(self.ids.to(foreign.device), **_taken(prepare, asked)), told

    def update(self, foreign: Foreign, output: Any, told: dict[str, Any], *, chooses: bool) -> None:
        """Keep what the module carries on after a forward from which a token is chosen.

        Where that is still to come, keep what it was told.
        """
        step = getattr(foreign.base, _UPDATE)
        dropped = [foreign.cache_name, "use_cache", "inputs_embeds", "logits_to_keep"]
        if chooses:
            self.chosen += 1
            kept = step(output, told, **_taken(step, {"is_encoder_decoder": foreign.encodes}))
        else:
            kept, dropped = told, [*dropped, *_COLUMNS]
        self.kept = {name: value for name, value in kept.items() if name not in dropped}


def require_new(row: Carried, freed: Sequence[Carried]) -> None:
    """Raise UnsupportedError if the row is a freed one that is now fed again in one piece."""
    for one in freed:
        count = one.ids.shape[1]
        # A prompt may begin with another one, but hardly with what was then chosen for that.
        again = one.chosen > 1 or row.ids.shape[1] == count + 1
        if again and count < row.ids.shape[1] and torch.equal(row.ids[:, :count], one.ids):
            raise UnsupportedError(
                "the model's own _update_model_kwargs_for_generation cannot be called again for "
                "tokens that were already chosen",
                wanted="rows that stay in their cache",
                got=f"{row.ids.shape[1]} positions that are fed again",
                do="Leave use_cache=False out, or override prepare_inputs_for_generation alone",
            )


def _taken(function: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords that a function takes."""
    parameters = inspect.signature(function).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return dict(given)
    return {name: value for name, value in given.items() if name in parameters}
