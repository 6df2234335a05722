"""Learning from pairs of answers, of which one is better: direct preference optimisation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

from everystep.api.model import LanguageModel
from everystep.config.kinds import is_number, require
from everystep.errors import RequestError


@final
@dataclass(frozen=True, eq=False)
class PreferenceLoss:
    """The loss of pairs, for `compute_loss` of a Trainer: DPO (Rafailov et al. 2023).

    A batch has the chosen answer of a pair, then the rejected one, as `read_rows` makes them of
    examples with `prompt`, `chosen` and `rejected`. `beta`: how far the model may go from the
    reference. `label_smoothing`: how often a pair is the wrong way round. `reference`: the model
    that it is compared with, None for the trained one without its adapter.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    reference: LanguageModel | None = None

    def __post_init__(self) -> None:
        real = is_number(self.beta) and self.beta > 0
        require(real, "beta", "a number above 0", self.beta)
        real = is_number(self.label_smoothing) and 0 <= self.label_smoothing < 0.5
        name = "label_smoothing"
        require(real, name, "a number of at least 0 and below 0.5", self.label_smoothing)

    def items_of(self, batch: Mapping[str, Any]) -> int:
        """Return how many pairs a batch has, by which the sum of a step is divided."""
        rows = len(batch["labels"])
        if rows % 2:
            do = "Give examples with prompt, chosen and rejected"
            raise RequestError("a batch is no pairs of answers", got=f"{rows} rows", do=do)
        return rows // 2

    def __call__(self, model: LanguageModel, batch: dict[str, Any], items: int) -> Tensor:
        """Return the sum over the pairs of a batch, divided by `items`."""
        plain = {name: one for name, one in batch.items() if name != "adapter_names"}
        if self.reference is None and len(plain) == len(batch):
            raise RequestError(
                "the loss of pairs has no reference: all weights of the model are trained",
                wanted="a LoRA, or a copy of the model as it was",
                do="Pass peft_config to the Trainer, or PreferenceLoss(reference=model.frozen())",
            )
        own = _of_answers(model, batch)
        with torch.no_grad():
            other = _of_answers(self.reference or model, plain)
        # (pairs, 2): the chosen one first
        gains = self.beta * (own - other).view(-1, 2)
        margin = gains[:, 0] - gains[:, 1]
        share = self.label_smoothing
        losses = -(1 - share) * F.logsigmoid(margin) - share * F.logsigmoid(-margin)
        return losses.sum() / items


def _of_answers(model: LanguageModel, batch: Mapping[str, Any]) -> Tensor:
    """Return (rows,) the log-probability of each row's labels."""
    found = model(**batch, output_logits=False, output_logprobs=True).logprobs
    whole: Tensor = found.sum(dim=1)
    return whole
