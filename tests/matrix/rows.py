"""The strategies of the matrix, one line each, and the cells that are no plain yes.

A strategy that is added to the library is a line of ROWS; its cells are then all tested. Where a
feature cannot go with it, the cell is listed in REFUSED with words of the error; where the two
have no meaning together, in APART with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch


@dataclass(frozen=True, eq=False)
class Row:
    """`options`: how it is asked for on a tiny model. `draws`: what more makes it draw at random;
    None if that makes it another strategy. `beside`: what a prompt without ids needs more.
    `assisted`: a second model of the subject drafts."""

    name: str
    options: Mapping[str, Any]
    draws: Mapping[str, Any] | None = None
    beside: Mapping[str, Any] = field(default_factory=dict)
    assisted: bool = False

    @property
    def most(self) -> int:
        """How many sequences it can give without drawing more."""
        return int(self.options.get("num_beams", self.options.get("best_of", 1)))

    @property
    def drawn(self) -> Row:
        """The same where it draws."""
        return replace(self, options={**self.options, **(self.draws or {})})


_DRAFTED: Mapping[str, Any] = {
    "do_sample": False,
    "num_assistant_tokens": 2,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.0,
}
ROWS: tuple[Row, ...] = (
    Row("greedy", {"strategy": "greedy"}),
    Row("sample", {"strategy": "sample", "temperature": 1.3}, draws={}),
    Row("best_of", {"strategy": "best_of", "best_of": 3, "temperature": 1.5}, draws={}),
    Row("beam", {"strategy": "beam", "num_beams": 3}),
    Row("beam_sample", {"strategy": "beam_sample", "num_beams": 3}, draws={}),
    Row(
        "diverse_beam",
        {"strategy": "diverse_beam", "num_beam_groups": 2, "diversity_penalty": 0.7},
    ),
    Row(
        "constrained_beam",
        {"strategy": "constrained_beam", "num_beams": 3, "force_words_ids": [[9]]},
    ),
    Row("dola", {"strategy": "dola", "do_sample": False}, draws={"do_sample": True}),
    Row("contrastive", {"strategy": "contrastive", "top_k": 3}),
    Row(
        "guided",
        {"strategy": "guided", "do_sample": False},
        draws={"do_sample": True},
        beside={"negative_prompt_ids": torch.tensor([[70, 80]])},
    ),
    Row(
        "lookup",
        {
            "strategy": "lookup",
            "prompt_lookup_num_tokens": 3,
            "num_assistant_tokens_schedule": "constant",
            "do_sample": False,
        },
        draws={"do_sample": True},
    ),
    Row("assisted", {"strategy": "assisted", **_DRAFTED}, draws={"do_sample": True}, assisted=True),
    Row(
        "early_exit",
        {"strategy": "early_exit", "assistant_early_exit": 1, **_DRAFTED},
        draws={"do_sample": True},
    ),
)

_SAME = "nothing is drawn at random, so a seed says nothing"
APART: Mapping[tuple[str, str], str] = {
    ("greedy", "per-row seeds"): _SAME,
    ("beam", "per-row seeds"): _SAME,
    ("diverse_beam", "per-row seeds"): _SAME,
    ("constrained_beam", "per-row seeds"): _SAME,
    ("contrastive", "per-row seeds"): _SAME,
    ("lookup", "speculation"): "it is speculation",
    ("assisted", "speculation"): "it is speculation",
    ("early_exit", "speculation"): "it is speculation",
}
"""(strategy, feature) -> why the two have no meaning together."""


@dataclass(frozen=True)
class Refusal:
    """Words of the error, and the reason that the page gives."""

    words: str
    why: str


_DRAFTS = Refusal(
    "prompt_lookup_num_tokens(=3)?( cannot be combined| has no effect)|does not go with",
    "drafts are for sequences that choose by themselves; these are chosen together",
)
_NO_EARLY_EXIT = Refusal(
    "can be left early.*Leave assistant_early_exit out",
    "only the layers of a decoder can be left early",
)
_ONE_BEST = Refusal(
    "num_return_sequences", "of one prompt there is one continuation, so several are refused"
)
REFUSED: Mapping[tuple[str, str], Refusal] = {
    ("beam", "speculation"): _DRAFTS,
    ("beam_sample", "speculation"): _DRAFTS,
    ("diverse_beam", "speculation"): _DRAFTS,
    ("best_of", "speculation"): _DRAFTS,
    ("constrained_beam", "speculation"): _DRAFTS,
    ("contrastive", "speculation"): _DRAFTS,
    ("early_exit", "recurrent model"): _NO_EARLY_EXIT,
    ("greedy", "num_return_sequences"): _ONE_BEST,
    ("contrastive", "num_return_sequences"): _ONE_BEST,
}
"""(strategy, feature) -> how the two are refused before anything is computed."""
