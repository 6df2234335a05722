"""What would have been: a recorded run repeated up to a choice, compared with the record to the
bit, and gone on with otherwise.

A record has what its run was asked for, so the run can be made again. What a file cannot hold
(functions, hooks, pictures) is passed again; if the repetition departs from the record, an error
says where.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from everystep.adapters import STEER
from everystep.api.open import open as open_run
from everystep.config import FIELDS
from everystep.draws import weights
from everystep.errors import RequestError, UnsupportedError, shown
from everystep.inspector.views import marked, spelled, stage_name
from everystep.records import Record, RecordedRow, RecordedRun
from everystep.runs.run import Run
from everystep.runs.steps import Step
from everystep.text import bytes_by_id

Spell = Callable[[int], str]
MOST_SPANS = 64
"""Parts of a prompt that are masked one after another, at most."""
_WITHOUT_EFFECT = (
    *("max_length", "return_dict_in_generate", "output_scores", "output_logits"),
    *("prompt_lookup_num_tokens", "assistant_early_exit", "max_matching_ngram_size"),
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
)
"""Fields that change no token: lengths that another field says, outputs, and drafts."""


@dataclass(frozen=True, slots=True)
class RepeatedRun:
    """A run that stands where a recorded one stood.

    `at`: how many ids stand after the prompt. `difference`: the largest one between a logit of the
    record and the repeated one; 0.0 where all are equal to the bit.
    """

    run: Run
    at: int
    difference: float


def repeat(
    record: Record,
    name: str,
    model: Any,
    tokenizer: Any,
    at: int | None = None,
    **again: object,
) -> RepeatedRun:
    """Repeat a recorded run until `at` ids stand after the prompt, or to its end.

    `again`: keywords of `es.open` whose values no record holds. RequestError for another model, for
    prompts that are more than ids, and where the repetition departs from the record.
    """
    run = run_of(record, name)
    require_model(record, run, model)
    ids = run.tokens.get(0, [])
    most = len(ids)
    if at is not None and not 0 <= at <= most:
        raise RequestError("the record has no such position", wanted=f"0 to {most}", got=shown(at))
    opened = open_run(model, tokenizer, prompt_of(run), **_settings(run, {}), **again)  # type: ignore[arg-type]
    if not opened.alone:
        opened.result()
        _require_equal(run, opened)
        return RepeatedRun(opened, len(opened.tokens), _difference(run, opened))
    end = most if at is None else at
    difference, coming = 0.0, 0
    for position in range(end):
        opened = _changed(run, opened, position)
        if position < len(opened.tokens):
            continue
        if position in run.given:
            opened.send([ids[position]])
            coming = position + 1
            continue
        for step in opened:
            chosen = step.branches[0].tokens if step.branches else ()
            if chosen and coming < most and chosen[0] == ids[coming]:
                difference = max(difference, apart(run.row_at(coming), step))
            coming += len(chosen)
            if len(opened.tokens) > position:  # contrastive search tells a token a step later
                break
        if opened.tokens[position : position + 1] != (ids[position],):
            raise _departed(run, position, opened)
    opened = _changed(run, opened, end)
    if len(opened.tokens) > end:  # a grammar may force several at once
        opened.rewind(len(opened.tokens) - end)
    return RepeatedRun(opened, end, difference)


def run_of(record: Record, name: str) -> RecordedRun:
    """Return the run of this name; RequestError where there is none."""
    if name not in record.runs:
        names = ", ".join(list(record.runs)[:20])
        raise RequestError(f"the record has no run {name!r}", wanted=names or "a run", got=name)
    return record.runs[name]


def require_model(record: Record, run: RecordedRun, model: Any) -> None:
    """Raise RequestError unless a run was made with this model and its adapters."""
    names = [name for name, _ in adapters_of(run) if name in model.adapters]
    pairs = [(model.digest(), record.header.get("model"))]
    if "adapted" in run.about:
        pairs.append((model.digest(names), run.about["adapted"]))
    for own, there in pairs:
        if own != there:
            raise RequestError(
                "the record was made with another model, so nothing can be repeated with this one",
                wanted=f"the model {str(there)[:16]}",
                got=own[:16],
                do="Pass the model, with the quantisation and the adapters, that it was made with",
            )


def adapters_of(run: RecordedRun) -> list[tuple[str, float]]:
    """Return the names and weights of the adapters of a run; steering is none of these."""
    said = run.about.get("adapters")
    found = said if isinstance(said, list) else []
    return [
        (str(one[0]), one[1])
        for one in found
        if isinstance(one, list)
        and len(one) == 2
        and isinstance(one[1], int | float)
        and not str(one[0]).startswith(STEER)
    ]


def steering_of(run: RecordedRun) -> dict[int, torch.Tensor]:
    """Return the vectors that steered a run, by layer; RequestError where the record does not hold
    them whole."""
    said = run.about.get("steer")
    found = {}
    for layer, one in said.items() if isinstance(said, dict) else ():
        kinds = one if isinstance(one, dict) else {}
        kind = next((name for name in ("float32", "float64") if name in kinds), "")
        try:
            raw = base64.b64decode(kinds[kind], validate=True)
            values = np.frombuffer(raw, dtype=kind)
            found[int(layer)] = torch.from_numpy(values.copy())
        except (KeyError, TypeError, ValueError) as error:
            what = f"the record does not hold the vector that steered layer {str(layer)[:20]}"
            do = "Open the run again with es.open and steer=..."
            raise RequestError(what, do=do) from error
    return found


def source_of(run: RecordedRun) -> list[int]:
    """Return the ids that an encoder read; none without one."""
    said = run.about.get("source")
    fits = isinstance(said, list) and all(type(one) is int for one in said)
    return [*said] if fits and isinstance(said, list) else []


def prompt_of(run: RecordedRun, hidden: tuple[int, int] | None = None) -> Any:
    """Return the prompt of a run; `hidden`: from which to which position it is masked."""
    about, ids = run.about, source_of(run) or list(run.prompt)
    more = about.get("beyond_ids")
    more = [str(one)[:40] for one in more] if isinstance(more, list) else []
    if about.get("left_out") or not ids or about.get("hooks") or more:
        raise RequestError(
            "the record does not hold all of its prompt, or there were hooks",
            wanted="a prompt of ids alone",
            got=f"ids and {', '.join(more[:8])}" if more else None,
            do="Open the run again with es.open",
        )
    first = about.get("first_position")
    padded = max(0, -first) if type(first) is int and "source" not in about else 0
    if not padded and hidden is None:
        return ids
    mask = torch.ones(1, len(ids), dtype=torch.int64)
    mask[0, :padded] = 0
    found = {"input_ids": torch.tensor([ids]), "attention_mask": mask}
    if hidden is not None:  # what stands beside the span keeps its place
        mask[0, hidden[0] : hidden[1]] = 0
        found["position_ids"] = (torch.arange(len(ids)) - padded).clamp(min=0)[None]
    return found


def _settings(run: RecordedRun, changes: Mapping[str, object]) -> dict[str, object]:
    """Return the keywords that a run was asked with, with other values of some."""
    found: dict[str, object] = {}
    said = run.about.get("configuration")
    for name, value in said.items() if isinstance(said, dict) else ():
        own = value[0] if isinstance(value, list) and len(value) == 2 else value
        if name in FIELDS and name not in _WITHOUT_EFFECT:
            found[name] = own
    if "max_new_tokens" not in found and isinstance(said, dict) and "max_length" in said:
        found["max_length"] = said["max_length"][0]
    follows = run.about.get("follows")
    if isinstance(follows, list) and len(follows) == 2:
        kind, text = map(str, follows)
        found[kind] = json.loads(text) if kind in ("schema", "choices") else text
    if adapters := adapters_of(run):
        found["adapters"] = dict(adapters)
    if steer := steering_of(run):
        found["steer"] = steer
    seed = run.about.get("seed")
    found["seed"] = seed if type(seed) is int else 0
    return {**found, **changes}


def _changed(run: RecordedRun, opened: Run, position: int, given: int = 0) -> Run:
    """Set what was set when so many ids stood there; `given`: how many that were chosen are given
    here."""
    for at, values in run.changes:
        if at != position:
            continue
        if isinstance(names := values.get("without"), list):
            opened = opened.without(*map(str, names))
        else:
            opened.set(**_shorter(values, given))  # type: ignore[arg-type]
    return opened


def _departed(run: RecordedRun, position: int, opened: Run) -> RequestError:
    got = opened.tokens[position] if position < len(opened.tokens) else "the end"
    return RequestError(
        f"the repetition departs from the record at token {position}",
        wanted=run.tokens[0][position],
        got=got,
        do="Pass again what a record cannot hold, such as logits_processor= or negative_prompt=",
    )


def _require_equal(run: RecordedRun, opened: Run) -> None:
    """Raise RequestError unless a search gave the recorded hypotheses."""
    found = opened.result()
    for index, one in enumerate(found if isinstance(found, list) else [found]):
        if index in run.tokens and list(one.tokens) != run.tokens[index]:
            ids = list(one.tokens)
            pairs = zip(ids, run.tokens[index], strict=False)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), len(ids))
            raise _departed(run, min(at, len(run.tokens[0]) - 1), opened)


def _difference(run: RecordedRun, opened: Run) -> float:
    """Return the largest difference of a search's first choice, which all hypotheses share."""
    return apart(run.row_at(0), opened.step_at(0)) if opened.tokens else 0.0


def apart(row: RecordedRow | None, step: Step) -> float:
    """Return the largest difference between recorded logits of a choice and repeated ones."""
    if row is None or step.logits is None:
        return 0.0
    own = step.logits[0].float().cpu().numpy()
    there = np.array([-np.inf if one is None else one for one in row.logits], dtype=np.float32)
    known = [id for id in row.ids if 0 <= id < len(own)]
    if len(known) < len(row.ids):
        return math.inf
    here = own[np.array(known, dtype=np.int64)]
    both = np.isfinite(here) & np.isfinite(there)
    if not np.array_equal(np.isfinite(here), np.isfinite(there)):
        return math.inf
    return float(np.abs(here[both] - there[both]).max(initial=0.0))


def speller(record: Record, tokenizer: Any) -> Spell:
    """Return what spells ids with their marks, also those that no record has, as a record would."""
    found = None if tokenizer is None else bytes_by_id(tokenizer)

    def spell(id: int) -> str:
        if id in record.texts or found is None:
            return spelled(record, id)
        return marked(found(id).decode(errors="backslashreplace"))

    return spell


# --- what would have been needed ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StageMargin:
    """A token at one stage: its scores before and after, and by how much it missed what the stage
    kept; None where it was kept."""

    name: str
    before: float
    after: float
    missed: float | None


@dataclass(frozen=True, slots=True)
class Needed:
    """The distance of a token from being chosen.

    `rank`, `share`: by the scores that were chosen from. `ruled_out`: the stage that ruled it out,
    None where it was possible. `more`: what its score would have needed in addition, everything
    else as it was; 0.0 for the chosen one. `number`: what was drawn, None for a choice by score.
    """

    token: int
    chosen: int
    logit: float
    rank: int
    share: float
    stages: tuple[StageMargin, ...]
    ruled_out: str | None
    more: float
    number: float | None


def needed(run: Run, position: int, token: int) -> Needed:
    """Return what a token would have needed to be chosen at a position of a run."""
    step = run.step_at(position)
    if step.logits is None or step.scores is None:
        raise RequestError("nothing was chosen there", got=position, do="Take another position")
    logits = step.logits[0].float().cpu().numpy()
    scores = step.scores[0].float().cpu().numpy()
    if not 0 <= token < len(logits):
        wanted = f"0 to {len(logits) - 1}"
        raise RequestError("there is no such token", wanted=wanted, got=shown(token))
    stages, ruled_out = [], None
    for change in step.changes:
        before = change.before[0].float().cpu().numpy()
        after = change.after[0].float().cpu().numpy()
        missed = None
        if after[token] == -np.inf and before[token] > -np.inf:
            ruled_out, kept = change.name, before[after > -np.inf]
            missed = float(kept.min() - before[token]) if len(kept) else math.inf
        stages.append(StageMargin(change.name, float(before[token]), float(after[token]), missed))
    chosen = step.branches[0].tokens[0] if step.branches else int(scores.argmax())
    if position < len(run.tokens):
        chosen = run.tokens[position]
    drawn = step.drawn
    share = weights(scores[None].copy())[0].astype(np.float64)
    share /= share.sum()
    rank = int(np.count_nonzero(scores > scores[token]))
    given = float(logits[token]), rank, float(share[token]), tuple(stages), ruled_out
    # A token that a stage ruled out would have needed what it had before, and then some.
    own = scores[token] if ruled_out is None else _before(stages, ruled_out)
    more = 0.0 if chosen == token else _more(scores, share, token, float(own), drawn)
    return Needed(token, chosen, *given, more, drawn)


def _before(stages: Sequence[StageMargin], name: str) -> float:
    return next(one.before for one in stages if one.name == name)


def _more(
    scores: np.ndarray, share: np.ndarray, token: int, own: float, number: float | None
) -> float:
    """Return what a score of `own` lacks to be the highest, or to be where the number fell."""
    others = np.delete(scores, token)
    if number is None:
        return max(float(others.max()) - own, 0.0)
    # With a weight y of its own, and the others adding up to 1, the token has the part from
    # below / (1 + y) to (below + y) / (1 + y). It has to hold the number.
    rest = 1.0 - float(share[token])
    if rest <= 0.0:
        return 0.0
    below = float(share[:token].sum()) / rest
    least = max(below / number - 1.0, (number - below) / (1.0 - number), 1e-300)
    top = float(others.max())
    total = top + math.log(float(np.exp((others - top).astype(np.float64)).sum()))
    return math.log(least) + total - own


def needed_lines(one: Needed, spell: Spell) -> list[str]:
    """Return what a token would have needed, in lines."""
    name, chosen = spell(one.token), spell(one.chosen)
    if one.token == one.chosen:
        return [f"{name} was chosen: rank {one.rank}, share {one.share:.2%}"]
    found = [f"{name} in place of {chosen}: logit {one.logit:.4g}, rank {one.rank} in the end"]
    for stage in one.stages:
        line = f"  {stage_name(stage.name)}: {stage.before:.4g} -> {stage.after:.4g}"
        if stage.missed is not None:
            line += f", ruled out; it missed what was kept by {stage.missed:.4g}"
        found.append(line)
    where = "to be the highest" if one.number is None else f"to be where {one.number:.4f} fell"
    left = "" if one.ruled_out is None else f", and to pass {stage_name(one.ruled_out)}"
    how = "more" if one.more >= 0 else "less"
    found.append(f"  it would have needed {abs(one.more):.4g} {how} {where}{left}")
    return found


# --- what if --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The difference that is asked about: processors that are left out, a span of the prompt that
    is masked, other values of keywords."""

    without: tuple[str, ...] = ()
    masked: tuple[int, int] | None = None
    changes: tuple[tuple[str, object], ...] = ()

    @classmethod
    def read(cls, texts: Sequence[str]) -> WhatIf:
        """Read NAME=VALUE: without=TopK, mask=2:5, adapter=NAME, seed=7, temperature=0.5."""
        without: list[str] = []
        masked: tuple[int, int] | None = None
        changes: dict[str, object] = {}
        for text in texts:
            name, equals, value = text.partition("=")
            if not equals or not name:
                wanted = "NAME=VALUE, such as seed=7, without=TopK or mask=2:5"
                what = "what is to be otherwise is spelled wrong"
                raise RequestError(what, wanted=wanted, got=text)
            if name == "without":
                without.append(value)
            elif name == "mask":
                masked = _span(value)
            elif name == "adapter":
                changes["adapters"] = {value: 1.0} if value else None
            else:
                changes[name] = _value(value)
        return cls(tuple(without), masked, tuple(changes.items()))

    @property
    def opens_anew(self) -> bool:
        """True where what changes holds for the prompt too, so that the ids are fed again."""
        return self.masked is not None or any(name == "adapters" for name, _ in self.changes)

    def __str__(self) -> str:
        found = [f"without {stage_name(one)}" for one in self.without]
        if self.masked is not None:
            found.append(f"prompt {self.masked[0]} to {self.masked[1] - 1} masked")
        found += [f"{name}={value}" for name, value in self.changes]
        return ", ".join(found) or "nothing otherwise"


def _span(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    try:
        found = int(first), int(last or int(first) + 1)
    except ValueError:
        found = (0, 0)
    if not 0 <= found[0] < found[1]:
        raise RequestError("this is no span of a prompt", wanted="FIRST:END, as 2:5", got=text)
    return found


def _value(text: str) -> object:
    """Return a value of JSON, else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a run that went otherwise.

    `recorded`, `found`: the ids after the prompt, as recorded and otherwise. `at`: where it began.
    `difference`: as of the repetition. `same`: how many ids are the same. `sureness`: the shares of
    the recorded token at the choice, before and otherwise.
    """

    asked: WhatIf
    at: int
    recorded: tuple[int, ...]
    found: tuple[int, ...]
    same: int
    difference: float
    sureness: tuple[float, float] | None


def what_if(
    record: Record,
    name: str,
    model: Any,
    tokenizer: Any,
    at: int,
    asked: WhatIf,
    **again: object,
) -> Outcome:
    """Return what comes of a recorded run that goes on otherwise after `at` ids, to its end.

    A search begins anew, as its hypotheses cannot be changed on the way.
    """
    run = run_of(record, name)
    before = tuple(run.tokens.get(0, ()))
    repeated = repeat(record, name, model, tokenizer, at, **again)
    own = repeated.run
    if not own.alone:
        at = 0
    if own.alone and not asked.opens_anew:
        other = own.without(*_full_names(own, asked.without)) if asked.without else own.fork()
        if asked.changes:
            other.set(**dict(asked.changes))  # type: ignore[arg-type]
    else:
        if asked.without:
            what = "a processor is left out of a run with one sequence, from where it stands"
            raise RequestError(what, do="Ask for the mask, the adapter or the search alone")
        other = _anew(run, model, tokenizer, at, asked, again)
    sureness = _sureness(own, other, at, before)
    other.result()
    found = other.tokens
    pairs = zip(before, found, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(before), len(found)))
    for one in (other, own):
        one.cancel()
    return Outcome(asked, at, before, found, same, repeated.difference, sureness)


def _anew(
    run: RecordedRun,
    model: Any,
    tokenizer: Any,
    at: int,
    asked: WhatIf,
    again: Mapping[str, object],
) -> Run:
    """Return a run with another prompt or adapter, which stands where the recorded one stood."""
    length = len(source_of(run) or run.prompt)
    if asked.masked is not None and asked.masked[1] > length:
        wanted = f"positions 0 to {length - 1}"
        raise RequestError("the prompt has no such span", wanted=wanted, got=asked.masked)
    settings = _settings(run, dict(asked.changes))
    chosen = at - sum(one < at for one in run.given)
    other = open_run(
        model,
        tokenizer,
        prompt_of(run, asked.masked),
        **_shorter(settings, chosen),  # type: ignore[arg-type]
        **again,  # type: ignore[arg-type]
    )
    if not at or not other.alone:
        return other
    other.send(run.tokens[0][:at])
    for place in sorted({place for place, _ in run.changes if place <= at}):
        other = _changed(run, other, place, chosen)
    own = {name: value for name, value in asked.changes if name != "adapters"}
    if run.changes and own:
        other.set(**own)  # type: ignore[arg-type]
    return other


def _shorter(values: Mapping[str, object], chosen: int) -> dict[str, object]:
    """Return values whose limits count what is chosen, where so many of it are given."""
    found = dict(values)
    for name in ("max_new_tokens", "max_length"):
        if type(limit := found.get(name)) is int:
            found[name] = limit - chosen
    if chosen and found.get("max_new_tokens") == 0:
        what = "the length was reached there, so nothing follows"
        raise RequestError(what, do="Ask about an earlier token")
    return found


def _full_names(run: Run, names: Sequence[str]) -> list[str]:
    """Return the names of processors that may be given short, as tables show them."""
    known = {stage_name(one.name): one.name for one in run.step_at(len(run.tokens)).changes}
    return [known.get(name, name) for name in names]


def _sureness(
    own: Run, other: Run, at: int, recorded: tuple[int, ...]
) -> tuple[float, float] | None:
    """Return the shares of the recorded token at the choice, before and otherwise."""
    if at >= len(recorded) or not (own.alone and other.alone) or other.done:
        return None
    shares = []
    for run in (own, other):
        scores = run.step_at(at).scores
        if scores is None:
            return None
        shares.append(float(torch.softmax(scores[0].double(), dim=-1)[recorded[at]]))
    return shares[0], shares[1]


def outcome_lines(one: Outcome, spell: Spell) -> list[str]:
    """Return what came of it, in lines."""

    def text(ids: Sequence[int]) -> str:
        return "".join(map(spell, ids))

    bits = "to the bit" if one.difference == 0.0 else f"logits within {one.difference:.2g}"
    found = [f"{one.asked}, from token {one.at} on (the record was repeated, {bits})"]
    if one.sureness is not None:
        before, after = one.sureness
        found.append(f"  {text([one.recorded[one.at]])}: share {before:.2%}, otherwise {after:.2%}")
    if one.recorded == one.found:
        return [*found, f"  the same {one.same} tokens"]
    found.append(f"  the first other token is {one.same}")
    start = max(0, one.same - 8)
    found.append(f"  recorded:  {text(one.recorded[start : one.same + 24])}")
    found.append(f"  otherwise: {text(one.found[start : one.same + 24])}")
    return found


# --- occlusion ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Occlusion:
    """A part of the prompt that was masked, and how much less likely the recorded answer became:
    the fall of the sum of its log-probabilities in nats."""

    first: int
    end: int
    loss: float


def occlusion(
    record: Record, name: str, model: Any, *, end: int | None = None, spans: int = MOST_SPANS
) -> list[Occlusion]:
    """Return for parts of the prompt how much the recorded answer depends on each.

    Each part is masked in a forward of its own over prompt and answer. `end`: how many tokens of
    the answer count, all without it. `spans`: how many parts at most; a short prompt has one for
    each id.
    """
    run = run_of(record, name)
    require_model(record, run, model)
    prompt_of(run)
    if "source" in run.about:
        what = "parts of what an encoder reads are masked one at a time"
        raise UnsupportedError(what, do="Ask --what-if mask=FIRST:END for each")
    if steering_of(run):
        what = "parts of the prompt of a run that is steered are masked one at a time"
        raise UnsupportedError(what, do="Ask --what-if mask=FIRST:END for each")
    answer = run.tokens.get(0, [])[:end]
    if not answer:
        raise RequestError("the record has no answer to explain", do="Take a run with tokens")
    most = min(max(1, spans), MOST_SPANS)
    width = math.ceil(len(run.prompt) / most)
    ids = torch.tensor([[*run.prompt, *answer]])
    answered = partial(_answered, model, dict(adapters_of(run)), ids, len(run.prompt))
    whole = answered(None)
    found = []
    for first in range(0, len(run.prompt), width):
        span = first, min(first + width, len(run.prompt))
        found.append(Occlusion(*span, whole - answered(span)))
    return found


def _answered(
    model: Any,
    mix: Mapping[str, float],
    ids: torch.Tensor,
    start: int,
    span: tuple[int, int] | None,
) -> float:
    """Return the sum of log-probabilities of all ids from `start` on, with a span masked; `mix`:
    the adapters of the run."""
    given = {"adapters": [dict(mix)]} if mix else {}
    mask = torch.ones_like(ids)
    if span is not None:
        mask[0, span[0] : span[1]] = 0
    positions = torch.arange(ids.shape[1])[None]
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, position_ids=positions, **given).logits
    shares = torch.log_softmax(logits[0, start - 1 : -1].double(), dim=-1)
    return float(shares.gather(1, ids[0, start:, None]).sum())
