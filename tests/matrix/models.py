"""Every strategy on every kind of model, where all but one answer are ruled out.

What comes out needs no other judge: each model can say nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping

import everystep as es
from tests.faces.table import TOKENIZER
from tests.faces.tight import FEATURES, SUBJECTS, TightCell
from tests.matrix.rows import Refusal, Row

TIGHT = ("one choice", "one sequence", "one allowed token", "everything ends it")
_EARLY = Refusal("Leave assistant_early_exit out", "its layers cannot be left early")
_UNSEEN = Refusal("wanted early", "its earlier layers are not shown to this library")
_STATES = Refusal("wanted truncate", "its states cannot forget a draft")
_HIDDEN = Refusal("wanted hidden", "its hidden states are not shown to this library")
ON_MODELS: Mapping[tuple[str, str], Refusal] = {
    ("early_exit", "recurrent"): _EARLY,
    **{("early_exit", name): _EARLY for name, one in SUBJECTS.items() if one.wrapped},
    ("dola", "wrapped recurrent"): _UNSEEN,
    ("dola", "wrapped encoder-decoder"): _UNSEEN,
    ("dola", "wrapped listener"): _UNSEEN,
    ("lookup", "wrapped recurrent"): _STATES,
    ("assisted", "wrapped recurrent"): _STATES,
    ("contrastive", "wrapped recurrent"): _HIDDEN,
}
"""(strategy, model) -> how the two are refused."""


def try_tight(row: Row, name: str) -> None:
    """Each feature of `TIGHT` has the one answer that it leaves, on each executor."""
    subject = SUBJECTS[name]
    for executor in subject.executors:
        for feature in TIGHT:
            cell = TightCell("", name, executor, subject.prompts[0], row, (feature,))
            (found,) = es.generate(
                cell.model,
                TOKENIZER,
                [cell.content()],
                **cell.given(),
                return_dict_in_generate=True,
            )
            each = found if isinstance(found, list) else [found]
            said = [one for one in each if one.tokens]
            # A word that must occur and may not: there is no answer at all.
            impossible = row.name == "constrained_beam" and feature == "one allowed token"
            assert bool(said) != impossible
            assert all(FEATURES[feature].claim([*one.tokens], one.text) for one in said)
