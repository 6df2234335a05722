"""The verdict on a draw: both sides run, are compared, and small or empty differences explained.

Three things are no difference. A beam that never ended has no hypothesis, and what transformers
returns in its place is left out. A norm rounds to float32, and sums of another order may round the
other way; whether that is all is seen by running both sides with norms that do not round. Where the
scores of a step leave no choice, transformers chooses some id, and this library refuses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.parity.compare import Difference, differences
from tests.parity.defects import met, without
from tests.parity.draws import Draw
from tests.parity.models import exact_norms
from tests.parity.sides import Outcome, Side, ours, reference

# What a float32 step can do to the logits of a tiny model.
ROUNDING = 1e-5
UNFILLED = "Beams that never end"
ROUNDED = "Norms in float32"
NO_CHOICE = "Scores that leave no choice"
OF_DECODERS = ("scores", "logits", "attentions", "hidden_states")
STEPS = {*OF_DECODERS, "decoder_attentions", "cross_attentions", "decoder_hidden_states"}


@dataclass(frozen=True)
class Verdict:
    """`ran`: whether both sides gave a result. `explained`: headings of docs/parity.md."""

    draw: Draw
    ran: bool
    problems: tuple[Difference, ...]
    explained: tuple[str, ...]


def judge(draw: Draw, expected: Side = reference, found: Side = ours) -> Verdict:
    """Runs and compares; the sides can be others, to judge the judge."""
    outcomes = expected(draw), found(draw)
    problems = differences(draw, *outcomes)
    explained = [defect.heading for defect in met(draw)]
    ran = all(outcome.error is None for outcome in outcomes)
    if problems and _leaves_no_choice(draw, expected, outcomes):
        problems = []
        explained.append(NO_CHOICE)
    if problems and ran and (lost := _unfilled(draw, expected)) is not None:
        steps = min(map(_steps, outcomes))
        problems = differences(draw, *(_filled(draw, one, ~lost, steps) for one in outcomes))
        explained.append(UNFILLED)
    if problems and all(problem.gap < ROUNDING for problem in problems):
        with exact_norms():
            problems = differences(draw, expected(draw), found(draw))
        explained.append(ROUNDED)
    return Verdict(draw, ran, tuple(problems), tuple(explained))


def _unfilled(draw: Draw, expected: Side) -> Tensor | None:
    """(rows,) which results of transformers are no hypothesis that ended; None if all are, and
    all those that nobody asked for: transformers runs on to fill their places too."""
    if not draw.shape.beamed:
        return None
    beams = draw.shape.beams
    changes = {"num_return_sequences": beams, "return_dict_in_generate": True}
    asked = without(draw, **changes, output_scores=True)
    result = expected(asked).result
    lengths = (result.beam_indices >= 0).sum(dim=-1)
    sums = result.sequences_scores * lengths ** draw.settings.get("length_penalty", 1.0)
    # Not "below": where processors make nan of a score, that is no hypothesis either.
    lost: Tensor = ~(torch.minimum(sums, result.sequences_scores) > -1e8)
    wanted = draw.settings.get("num_return_sequences", 1)
    return lost.view(-1, beams)[:, :wanted].reshape(-1) if lost.any() else None


def _leaves_no_choice(draw: Draw, expected: Side, outcomes: tuple[Outcome, Outcome]) -> bool:
    """Whether only this library refused, for scores without a choice, and transformers' own
    scores show such a step; not whether it is the same one."""
    theirs, own = (outcome.error for outcome in outcomes)
    if theirs is not None or "no token can be drawn" not in str(own):
        return False
    shown = without(draw, return_dict_in_generate=True, output_scores=True)
    steps = torch.stack(expected(shown).result.scores)
    return bool((steps.isnan().any(-1) | (steps == -torch.inf).all(-1)).any())


def _steps(outcome: Outcome) -> int:
    """How many steps the outcome shows; 0 where it shows none."""
    if isinstance(outcome.result, Tensor):
        return 0
    shown = [value for name, value in outcome.result.items() if name in STEPS and value is not None]
    return max(map(len, shown), default=0)


def _filled(draw: Draw, outcome: Outcome, kept: Tensor, steps: int) -> Outcome:
    """The rows that count, without the columns and after `steps` the steps that only others need;
    a cache that went on cannot be compared."""
    result = outcome.result
    if isinstance(result, Tensor):
        return Outcome(_trimmed(result[kept], draw))
    fields: dict[str, Any] = dict(result.items())
    fields["sequences"] = _trimmed(result.sequences[kept], draw)
    fields |= {name: fields[name][:steps] for name in STEPS & fields.keys() if fields[name]}
    fields["past_key_values"] = None
    if result.beam_indices is not None:
        fields["beam_indices"] = _shortened(result.beam_indices[kept], {-1})
    if result.sequences_scores is not None:
        fields["sequences_scores"] = result.sequences_scores[kept]
    return Outcome(type(result)(**fields))


def _trimmed(sequences: Tensor, draw: Draw) -> Tensor:
    pad = draw.settings.get("pad_token_id")
    fill = pad if pad is not None else draw.shape.eos[0] if draw.shape.eos else 0
    return _shortened(sequences, {fill, -1})


def _shortened(table: Tensor, fills: set[int]) -> Tensor:
    """Without the last columns that hold nothing but fills."""
    while table.shape[1] and set(table[:, -1].tolist()) <= fills:
        table = table[:, :-1]
    return table
