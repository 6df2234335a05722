"""Hamming diversity: a group of beams avoids what the groups before it chose in the same step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from everystep.config.kinds import POSITIVE, integer
from everystep.processors.base import LogitsProcessor
from everystep.processors.stacking import admit, require


@dataclass(frozen=True)
class HammingDiversityLogitsProcessor(LogitsProcessor):
    """A token loses `diversity_penalty` for each beam of an earlier group that chose it now.

    Source: Vijayakumar et al. 2016; the class of that name in transformers 4.55.
    """

    diversity_penalty: float
    num_beams: int
    num_beam_groups: int

    def __post_init__(self) -> None:
        admit(self, "diversity_penalty", POSITIVE)
        admit(self, "num_beams", integer(2))
        admit(self, "num_beam_groups", integer(2))
        fits = self.num_beam_groups <= self.num_beams
        require(
            fits, "num_beam_groups", f"at most num_beams={self.num_beams}", self.num_beam_groups
        )

    def __call__(
        self,
        input_ids: Tensor,
        scores: Tensor,
        current_tokens: Tensor | None = None,
        beam_group_idx: int = 0,
    ) -> Tensor:
        """(R, V) scores of one group's beams -> (R, V).

        `current_tokens`: (batch * num_beams,) what each beam has chosen in this step so far.
        """
        size = self.num_beams // self.num_beam_groups
        start = beam_group_idx * size
        if start == 0:
            return scores
        require(current_tokens is not None, "current_tokens", "a token per beam", None)
        earlier = current_tokens.view(-1, self.num_beams)[:, :start]  # type: ignore[union-attr]
        width = min(start + size, self.num_beams) - start
        counts = torch.zeros(len(earlier), scores.shape[-1], dtype=torch.int64)
        counts.scatter_add_(1, earlier.cpu(), torch.ones_like(earlier, device="cpu"))
        lost = self.diversity_penalty * counts.to(scores.device)
        return scores - lost.repeat_interleave(width, dim=0)
