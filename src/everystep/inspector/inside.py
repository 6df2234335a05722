"""The inside of the model at a recorded choice: a lens per layer, and what each head looked at.

No record holds hidden states or attentions. They follow from the ids that were read, from the
adapters and the steering, so the choice is fed once more, and its logits are compared with the
recorded ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from everystep.adapters import AdapterUse, adapted
from everystep.api.open import open as open_run
from everystep.errors import RequestError, UnsupportedError, shown
from everystep.inspector.counterfactuals import (
    Spell,
    adapters_of,
    apart,
    prompt_of,
    require_model,
    run_of,
    source_of,
    steering_of,
)
from everystep.inspector.paths import rows_along
from everystep.models import Model
from everystep.models.decoder import Decoder
from everystep.nn.network import Network
from everystep.records import Record, RecordedRun
from everystep.runs.steps import Step
from everystep.shown import table

MOST_BEST = 3
"""Tokens of a layer, and positions of a head, that are shown."""
NO_ID = -1
"""A place that is read and has no id."""
_READ_BY_ALL = ("cache_implementation", "cache_config")
"""Fields that change hidden states: how rows keep what they hold."""


@dataclass(frozen=True, slots=True)
class LensLayer:
    """The tokens that the head reads from the states after a layer, or from the embeddings at 0.

    `rank`, `share`: of the chosen token. `entropy`: in nats. `best`: the first tokens, with their
    shares.
    """

    layer: int
    rank: int
    share: float
    entropy: float
    best: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Lens:
    """The head applied to each layer's state at one choice, through the final norm.

    `difference`: the largest one between a recorded logit and the repeated one, None where there is
    nothing to compare. `spelled`: the texts of its tokens.
    """

    at: int
    token: int
    layers: tuple[LensLayer, ...]
    difference: float | None
    spelled: Mapping[int, str]

    @property
    def first(self) -> int | None:
        """The layer from which on the chosen token is the first one; None where it never is."""
        behind = [one.layer for one in self.layers if one.rank]
        found = behind[-1] + 1 if behind else 0
        return found if found < len(self.layers) else None

    def _repr_html_(self) -> str:
        """Return a table with a row for each layer."""
        rows = [
            (one.layer, one.rank, f"{one.share:.2%}", one.entropy, _said(one.best, self.spelled))
            for one in self.layers
        ]
        head = ("layer", "rank", "share", "entropy", "best")
        return table(head, rows, f"token {self.at}: {self.spelled[self.token]}")


@dataclass(frozen=True, slots=True)
class HeadLook:
    """The places that one head looked at most, with their weights; those of all places add up to
    1."""

    layer: int
    head: int
    best: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Looks:
    """The places that each head looked at for one choice.

    `across`: whether these are places of what an encoder read, or positions of what was read before
    the choice. `read`: (S,) the ids there, -1 for none. `weights`: (L, H, S).
    """

    at: int
    token: int
    across: bool
    read: tuple[int, ...]
    weights: Tensor
    difference: float | None
    spelled: Mapping[int, str]

    @property
    def mean(self) -> Tensor:
        """The mean (S,) over all layers and heads."""
        return self.weights.mean(dim=(0, 1))

    def heads(self, most: int = MOST_BEST) -> list[HeadLook]:
        """Return for each head the positions that it looked at most."""
        return [
            HeadLook(layer, head, _most(own, most))
            for layer, each in enumerate(self.weights)
            for head, own in enumerate(each)
        ]

    def _repr_html_(self) -> str:
        """Return a table with a row for each head."""
        rows = [(one.layer, one.head, self.places(one.best)) for one in self.heads()]
        return table(("layer", "head", "looked at"), rows, f"token {self.at}")

    def places(self, best: Sequence[tuple[int, float]]) -> str:
        """Return positions with their texts and weights."""
        return ", ".join(
            f"{place} {self.spelled[self.read[place]]} {weight:.1%}" for place, weight in best
        )


def lens(
    record: Record,
    name: str,
    model: Any,
    tokenizer: Any,
    at: int,
    spell: Spell,
    *,
    index: int = 0,
    prompt: Any = None,
    best: int = MOST_BEST,
) -> Lens:
    """Return what the head makes of each layer's state where a recorded token was chosen.

    `index`: which sequence of the run. `prompt`: what was read, as for `es.open`, where the record
    does not hold all of it: pictures, or what an encoder reads. UnsupportedError for a model of
    another library.
    """
    head = _head_of(record, name, model)
    asked = Choice(record, name, at, index, prompt)
    step, token, difference = asked.fed_again(model, tokenizer, "hidden_states")
    states = step.hidden_states
    if states is None:
        raise _unseen("hidden states", model)
    layers = []
    for number, hidden in enumerate(states):
        last = hidden[-1:].to(model.device, head.dtype)  # (1, E)
        if number + 1 < len(states):  # the last entry has gone through the norm
            last = head.finish(last)
        with torch.no_grad():
            logits = head.logits(last)[0].double().cpu()
        layers.append(_seen_through(number, logits, token, best))
    ids = {token, *(id for one in layers for id, _ in one.best)}
    return Lens(at, token, tuple(layers), difference, {id: spell(id) for id in ids})


def _seen_through(number: int, logits: Tensor, token: int, best: int) -> LensLayer:
    """Return what (V,) logits say of a token and of the best."""
    known = logits.log_softmax(dim=-1)
    share = known.exp()
    entropy = -float(torch.where(share > 0, share * known, 0.0).sum())
    rank = int((logits > logits[token]).sum())
    values, ids = share.topk(min(best, len(share)))
    listed = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return LensLayer(number, rank, float(share[token]), entropy, listed)


def looks(
    record: Record,
    name: str,
    model: Any,
    tokenizer: Any,
    at: int,
    spell: Spell,
    *,
    index: int = 0,
    prompt: Any = None,
) -> Looks:
    """Return what each head looked at where a recorded token was chosen.

    Of a model with an encoder it is the places of its source that the decoder looked at; these have
    no ids where the source is not ids. `index`, `prompt`: as for `lens`. UnsupportedError where
    the model has no attention that an executor reports.
    """
    asked = Choice(record, name, at, index, prompt)
    step, token, difference = asked.fed_again(model, tokenizer, "attentions")
    across = step.cross_attentions
    found = step.attentions if across is None else across
    if not found:
        raise _unseen("attentions", model)
    run = record.runs[name]
    size = max(one.shape[-1] for one in found)
    read = [*run.prompt, *run.tokens[index][:at]] if across is None else source_of(run)
    read = [*[NO_ID] * (size - len(read)), *read][-size:]
    weights = torch.zeros(len(found), found[0].shape[0], size, dtype=torch.float64)
    for layer, one in enumerate(found):  # a layer with a window sees the last positions
        weights[layer, :, size - one.shape[-1] :] = one[:, -1].double().cpu()
    texts = {id: spell(id) for id in {token, *read} - {NO_ID}}
    texts[NO_ID] = ""
    return Looks(at, token, across is not None, tuple(read), weights, difference, texts)


@dataclass(frozen=True, slots=True)
class Choice:
    """A choice of a record: the run, the token, the sequence; `prompt`: None for the recorded."""

    record: Record
    name: str
    at: int
    index: int
    prompt: Any = None

    def fed_again(self, model: Any, tokenizer: Any, what: str) -> tuple[Step, int, float | None]:
        """Feed what was read before it once more, with hidden states or attentions.

        Return the step, the chosen token, and the largest difference from a recorded logit.
        """
        run, at = run_of(self.record, self.name), self.at
        require_model(self.record, run, model)
        if self.index not in run.tokens:
            known = ", ".join(map(str, sorted(run.tokens))) or "none yet"
            got = shown(self.index)
            raise RequestError("the run has no such sequence", wanted=known, got=got)
        ids = run.tokens[self.index]
        if not 0 <= at < len(ids):
            wanted = f"0 to {len(ids) - 1}"
            raise RequestError("no token of the record stands there", wanted=wanted, got=shown(at))
        asked = {**_inner(run), "do_sample": False, "num_beams": 1, "max_new_tokens": at + 1}
        prompt = prompt_of(run) if self.prompt is None else self.prompt
        shows = {f"output_{what}": True}
        opened = open_run(model, tokenizer, prompt, **asked, **shows, seed=0)  # type: ignore[arg-type]
        try:
            if at:
                opened.send(ids[:at])
            step = next(opened)
        finally:
            opened.cancel()
        row = rows_along(run, self.index)[at]
        compared = row is not None and step.logits is not None
        return step, ids[at], apart(row, step) if compared else None


def _inner(run: RecordedRun) -> dict[str, object]:
    """Return the keywords of a run that change hidden states."""
    found: dict[str, object] = {}
    said = run.about.get("configuration")
    for name, value in said.items() if isinstance(said, dict) else ():
        if name in _READ_BY_ALL:
            found[name] = value[0] if isinstance(value, list) and len(value) == 2 else value
    if mix := adapters_of(run):
        found["adapters"] = dict(mix)
    if steer := steering_of(run):
        found["steer"] = steer
    return found


def _head_of(record: Record, name: str, model: Any) -> Network:
    """Return what turns states of one position into logits, with the adapters of the run."""
    core, mix = model.core, dict(adapters_of(run_of(record, name)))
    if not isinstance(core, Model):
        raise UnsupportedError(
            "a lens needs the final norm and the head, which a wrapped model does not name",
            got=type(core).__name__,
            do="Load the folder of the model with everystep.load, or ask for attention",
        )
    network = core.network
    if not mix or not isinstance(network, Decoder):
        return network
    known = model.resolved(mix)
    uses = tuple(AdapterUse(one, weight, known[one]) for one, weight in mix.items())
    only = torch.zeros(1, dtype=torch.int64)
    return adapted(network, [(uses, only)]).at(only)


def _unseen(what: str, model: Any) -> UnsupportedError:
    kind = getattr(model.config, "model_type", "this kind")
    got, do = f"a model of {kind}", "Take a model whose layers have them; --why needs none"
    return UnsupportedError(f"the executor reports no {what} of this model", got=got, do=do)


def _most(weights: Tensor, most: int) -> tuple[tuple[int, float], ...]:
    """Return the places of the highest of (S,) weights, with these."""
    values, places = weights.topk(min(most, len(weights)))
    return tuple(zip(places.tolist(), values.tolist(), strict=True))


def _said(best: Sequence[tuple[int, float]], texts: Mapping[int, str]) -> str:
    return ", ".join(f"{texts[id]} {share:.1%}" for id, share in best)


def _repeated(difference: float | None) -> str:
    if difference is None:
        return "it was given, so there is no recorded choice to compare with"
    if difference == 0.0:
        return "the choice was repeated, to the bit"
    return f"the choice was repeated, logits within {difference:.2g}"


def lens_lines(one: Lens) -> list[str]:
    """Return a lens in lines."""
    name = one.spelled[one.token]
    found = [
        f"the head after each layer, at token {one.at} ({name}); {_repeated(one.difference)}",
        f"{'layer':>5} {'rank':>7} {'share':>8} {'entropy':>8}  best",
    ]
    for layer in one.layers:
        shown_best = _said(layer.best, one.spelled)
        numbers = f"{layer.layer:>5} {layer.rank:>7} {layer.share:>8.2%} {layer.entropy:>8.3f}"
        found.append(f"{numbers}  {shown_best}")
    if one.first is None:
        return [*found, f"{name} is not the first after the last layer: others had a higher logit"]
    return [*found, f"{name} is the first from layer {one.first} on"]


def looks_lines(one: Looks, most: int = 10) -> list[str]:
    """Return what was looked at, in lines: over all heads, then head by head."""
    name = one.spelled[one.token]
    where = "in what the encoder read" if one.across else "in what was read"
    found = [
        f"where the choice of token {one.at} ({name}) looked {where}; {_repeated(one.difference)}",
        f"all heads: {one.places(_most(one.mean, most))}",
    ]
    for head in one.heads():
        found.append(f"layer {head.layer} head {head.head}: {one.places(head.best)}")
    return found
