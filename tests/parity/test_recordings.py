"""Strategies that transformers no longer has, against what its release 4.55.4 answered.

`recordings/` has the answers, the models and the script that recorded them. Tokens are equal, and
scores within 1e-5. Of several end tokens transformers writes the first, whichever was chosen;
here the chosen one stands. Where processors leave no token, transformers chooses id 0 without a
word; here that is an error.
"""

from __future__ import annotations

import json
import math
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from everystep.api.load import from_weights
from everystep.api.model import LanguageModel
from everystep.engine import dola
from everystep.errors import EverystepError, RequestError
from everystep.strategies import classic, constrained, contrastive, diverse
from tests.parity.models import exact_norms
from tests.parity.recordings.tiny import BEAMS, KINDS, MODELS, setting, weights

FOLDER = Path(__file__).with_name("recordings")
BY_DEFAULT = 40


@cache
def recorded(kind: str) -> list[list[Any]]:
    found: list[list[Any]] = json.loads((FOLDER / f"{kind}.json").read_text())
    return found


@cache
def model(name: str) -> LanguageModel:
    known = {key: torch.from_numpy(value) for key, value in weights(name).items()}
    return from_weights(dict(MODELS[name]), known, dtype=torch.float64)


def answer(kind: str, number: int) -> tuple[list[list[int]], list[float]]:
    """The new ids of every row and the scores, as they are recorded."""
    name, prompt, options = setting(kind, number)
    torch.manual_seed(options.pop("seed", 0))
    ends, ids = options["eos_token_id"] or [], torch.tensor([prompt])
    shown = {"return_dict_in_generate": True, "output_scores": True}
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **shown, **options}
    with exact_norms(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found = model(name).generate(**given)
    rows = found.sequences[:, len(prompt) :].tolist()
    if kind in BEAMS:
        for row, tokens in zip(rows, found.new_tokens, strict=True):
            if tokens and tokens[-1] in ends:
                row[len(tokens) - 1] = ends[0]
        return rows, found.sequences_scores.tolist()
    return rows, [float(s[0, t]) for s, t in zip(found.scores, rows[0], strict=True)]


def _at_a_loss(kind: str, number: int, before: list[int]) -> str | None:
    """What is other than expected where transformers chose id 0 after these ids, as nothing likely
    was left: an error, but in DoLa, which contrasts the likely of what is left (decision 71)."""
    try:
        found, own = answer(kind, number)
    except RequestError as error:
        return None if "no token can be drawn" in str(error) else str(error)
    goes_on = kind == "dola" and found[0][: len(before)] == before
    return None if goes_on and all(map(math.isfinite, own)) else f"{kind} {number}: {found}, {own}"


def difference(kind: str, record: list[Any]) -> str | None:
    """What is other than recorded; None for nothing, or where transformers refused."""
    number, rows, scores = record
    if isinstance(rows, str):
        return None
    wrong = [at for at, one in enumerate(scores) if math.isnan(one) or one == -math.inf]
    if kind not in BEAMS and wrong:
        return _at_a_loss(kind, number, rows[0][: wrong[0]])
    found, own = answer(kind, number)
    # Of beams that nothing could follow transformers returned what had a score of -inf.
    real = sum(one > -1e8 for one in scores) if kind in BEAMS else len(scores)
    found, own, rows, scores = found[:real], own[:real], rows[:real], scores[:real]
    if found != rows:
        return f"{kind} {number}: {found} instead of {rows}"
    pairs = zip(own, scores, strict=True)
    far = [(x, y) for x, y in pairs if abs(x - y) > 1e-5 * max(1.0, abs(y))]
    return f"{kind} {number}: scores {far}" if far else None


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_the_last_release_that_had_them(kind: str) -> None:
    records = recorded(kind)[:BY_DEFAULT]
    assert len(records) == BY_DEFAULT
    assert sum(isinstance(rows, list) for _, rows, _ in records) >= 0.9 * BY_DEFAULT
    assert [text for one in records if (text := difference(kind, one))] == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_further_answers_are_too(kind: str) -> None:
    records = recorded(kind)[BY_DEFAULT:]
    assert [text for one in records if (text := difference(kind, one))] == []


# --- the recordings bite --------------------------------------------------------------------------


def alike(banks: np.ndarray) -> np.ndarray:
    """No place says how many of the bank came before."""
    return np.zeros_like(banks)


def nearest_layer(final: torch.Tensor, early: torch.Tensor) -> torch.Tensor:
    """The last candidate, however little it differs."""
    return early[-1]


def by_likelihood(hidden: torch.Tensor, known: Any) -> torch.Tensor:
    """Directions of no length, so that nothing repeats anything."""
    return torch.zeros_like(hidden)


BROKEN: dict[str, tuple[str, Any, str, Any]] = {
    "banks without turns": ("constrained", constrained, "_places_within", alike),
    "no step of its own towards a word": (
        "constrained",
        constrained.ConstrainedBeam,
        "_advancing",
        lambda *_: iter(()),
    ),
    "an end before all words": (
        "constrained",
        constrained.ConstrainedBeam,
        "may_end",
        lambda *_: True,
    ),
    "groups that see nothing of each other": (
        "diverse",
        diverse.DiverseBeam,
        "turn",
        lambda self, batch, earlier: (self.rows(batch, len(earlier)), None),
    ),
    "a search that never looks ahead": ("diverse", classic, "horizon", lambda own, n: n),
    "contrast with the nearest layer": ("dola", dola, "_furthest", nearest_layer),
    "contrast among all tokens": ("dola", dola, "_SHARE", -math.inf),
    "repetition that costs nothing": ("contrastive", contrastive, "_directions", by_likelihood),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_strategy_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, owner, attribute, replacement = BROKEN[name]
    monkeypatch.setattr(owner, attribute, replacement)
    assert any(differs(kind, one) for one in recorded(kind)[:BY_DEFAULT])


def differs(kind: str, record: list[Any]) -> bool:
    """Whether the answer is another, or none."""
    try:
        return difference(kind, record) is not None
    except (EverystepError, pytest.fail.Exception):
        return True
