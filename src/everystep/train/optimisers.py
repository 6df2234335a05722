"""Optimizers of torch, with the groups that transformers makes."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from everystep.train.arguments import TrainingArguments

_KEPT_LONG = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)|(?:^|\.)ln_")
"""Names of weights that do not decay: biases and norms."""


def optimiser_of(named: Mapping[str, Tensor], args: TrainingArguments) -> torch.optim.Optimizer:
    """Return the optimizer that the arguments name, over the trained tensors."""
    kept = [one for name, one in named.items() if _KEPT_LONG.search(name.lower())]
    decayed = [one for name, one in named.items() if not _KEPT_LONG.search(name.lower())]
    groups = [
        {"params": decayed, "weight_decay": args.weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]
    groups = [one for one in groups if one["params"]]
    if args.optim == "sgd":
        return torch.optim.SGD(groups, lr=args.learning_rate)
    return torch.optim.AdamW(
        groups,
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        fused=args.optim == "adamw_torch_fused",
    )
