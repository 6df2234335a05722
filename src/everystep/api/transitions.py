"""How likely each generated token was, from the scores that `generate()` returned.

It reads an output's tensors and nothing of the model: scores hold every row of a step, beam indices
say which row a token came from, and the end of `sequences` holds the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from everystep.errors import RequestError, message


def compute_transition_scores(
    sequences: Tensor,
    scores: Sequence[Tensor] | None,
    beam_indices: Tensor | None = None,
    normalize_logits: bool = False,
) -> Tensor:
    """The score that each generated token had when it was chosen, (B, T), 0 after its end.

    `sequences`: (B, length) ids. `scores`: per step (R, V). `beam_indices`: (B, steps), the row of
    `scores` behind each token, -1 after the end; without it row r belongs to sequence r.
    `normalize_logits`: log-probabilities instead of the scores themselves. Source: the reference's
    `GenerationMixin.compute_transition_scores`.
    """
    if not scores:
        raise RequestError(
            message(
                "there are no scores to read",
                wanted="the scores of each step",
                got=repr(scores),
                do="Generate with output_scores=True and return_dict_in_generate=True",
            )
        )
    rows = _rows(sequences, scores, beam_indices)
    used = rows >= 0
    length = int(used.sum(dim=-1).max())
    rows, used = rows[:, :length], used[:, :length]
    tokens = sequences[:, sequences.shape[1] - length :]
    stacked = torch.stack(tuple(scores[:length]))  # (T, R, V)
    over = stacked.amax(dim=-1).isneginf()  # (T, R): where a row had already ended
    if normalize_logits:
        stacked = torch.log_softmax(stacked, dim=-1)
    place = torch.arange(length, device=rows.device), rows.clamp(min=0)
    return stacked[(*place, tokens)].masked_fill(~used | over[place], 0.0)


def _rows(sequences: Tensor, scores: Sequence[Tensor], beam_indices: Tensor | None) -> Tensor:
    """(B, steps) the row of scores behind every token."""
    held = scores[0].shape[0]
    if beam_indices is None:
        own = torch.arange(held, device=sequences.device)
        beam_indices = own[:, None].expand(-1, len(scores))
    if len(beam_indices) != len(sequences):
        raise RequestError(
            message(
                "sequences do not fit the rows they were chosen from",
                wanted=f"{len(beam_indices)} sequences",
                got=len(sequences),
                do="Pass the beam_indices of the same output",
            )
        )
    return beam_indices.long()
