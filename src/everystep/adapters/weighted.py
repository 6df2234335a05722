"""One LoRA made of several with weights, in the ways that PEFT has.

A combination is either of what adapters add, whole matrices of which a low rank is kept ("svd" and
names that end so), or of their two factors, each for itself. "cat" puts factors side by side, which
is the weighted sum exactly. Sources: Yadav et al. 2023 (TIES), Yu et al. 2023 (DARE), and PEFT.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from everystep.adapters.peft_adapter import AdapterPlan, PeftAdapter
from everystep.adapters.peft_kinds import scale_patterns, setting_of
from everystep.adapters.peft_parts import PREFIX
from everystep.adapters.targets import parts_of
from everystep.config.kinds import is_integer, is_number, require
from everystep.errors import RequestError, UnsupportedError, shown
from everystep.models import Model
from everystep.models.config import Fields

_OF_FACTORS = ("linear", "ties", "dare_linear", "dare_ties", "magnitude_prune")
_OF_PRODUCTS = ("svd", *(f"{one}_svd" for one in _OF_FACTORS[1:]))
COMBINATIONS = ("cat", *_OF_FACTORS, *_OF_PRODUCTS)

Parts = tuple[Tensor, Tensor, float]
"""A (rank, in), B (rows, rank) and the scale of their product."""


@dataclass(frozen=True, slots=True)
class Combination:
    """A way in which adapters become one, by PEFT's names.

    `density`: the share of values that is kept. `svd_rank`: of the result, None for the largest of
    those combined. `svd_clamp`: the quantile at which what is kept of a matrix is cut off.
    """

    combination_type: str = "svd"
    svd_rank: int | None = None
    svd_clamp: float | None = None
    svd_full_matrices: bool = True
    svd_driver: str | None = None
    density: float | None = None
    majority_sign_method: str = "total"

    def __post_init__(self) -> None:
        kind = self.combination_type
        require(kind in COMBINATIONS, "combination_type", ", ".join(COMBINATIONS), kind)
        rank, clamp, density = self.svd_rank, self.svd_clamp, self.density
        fits = rank is None or (is_integer(rank) and rank > 0)
        require(fits, "svd_rank", "a whole number of at least 1", rank)
        fits = clamp is None or (is_number(clamp) and 0 <= clamp <= 1)
        require(fits, "svd_clamp", "a number from 0 to 1", clamp)
        flag = self.svd_full_matrices
        require(isinstance(flag, bool), "svd_full_matrices", "True or False", flag)
        driver = self.svd_driver
        require(driver is None or isinstance(driver, str), "svd_driver", "a name, or None", driver)
        sign = self.majority_sign_method
        require(sign in ("total", "frequency"), "majority_sign_method", "total or frequency", sign)
        if self.prunes:
            fits = is_number(density) and 0 < density <= 1  # type: ignore[operator]
            require(fits, "density", "a number above 0, up to 1", density)
        self._refuse_idle()

    @property
    def of_products(self) -> bool:
        """True if whole matrices are combined, and a low rank of them is kept."""
        return self.combination_type in _OF_PRODUCTS

    @property
    def prunes(self) -> bool:
        """True if only a share of the values is kept."""
        return self.combination_type not in ("cat", "linear", "svd")

    def _refuse_idle(self) -> None:
        """Refuse a choice that has no effect on a combination of this type."""
        kind = self.combination_type
        idle = {
            "density": self.density is not None and not self.prunes,
            "majority_sign_method": self.majority_sign_method != "total" and "ties" not in kind,
            "svd_rank": self.svd_rank is not None and not self.of_products,
            "svd_clamp": self.svd_clamp is not None and not self.of_products,
            "svd_driver": self.svd_driver is not None and not self.of_products,
        }
        if name := next((name for name, is_idle in idle.items() if is_idle), None):
            what = f"{name} has no effect on a combination of this type"
            got = f"combination_type={kind!r}"
            raise RequestError(what, got=got, do=f"Leave {name} out, or choose another type")

    def combined(self, tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """Return what becomes of tensors of one shape."""
        kept = [self._pruned(one) for one in tensors] if self.prunes else [*tensors]
        stacked = torch.stack(kept)
        factors = torch.tensor(weights, dtype=stacked.dtype, device=stacked.device)
        weighted = stacked * factors.view(-1, *(1,) * (stacked.dim() - 1))
        if "ties" not in self.combination_type:
            return weighted.sum(0)
        counted = stacked if self.majority_sign_method == "total" else stacked.sign()
        agrees = stacked.sign() == torch.where(counted.sum(0) >= 0, 1, -1)
        return (weighted * agrees).sum(0) / agrees.sum(0).clamp(min=1)

    def _pruned(self, tensor: Tensor) -> Tensor:
        share = float(self.density or 1)
        if share >= 1:
            return tensor
        if "dare" in self.combination_type:
            return tensor * torch.bernoulli(torch.full_like(tensor, share)) / share
        largest = tensor.abs().flatten().topk(int(share * tensor.numel())).indices
        mask = torch.zeros(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        return tensor * mask.index_fill(0, largest, 1).view(tensor.shape)


def weighted_adapter(
    adapters: Mapping[str, PeftAdapter],
    weights: Sequence[float],
    combination: Combination,
    model: Model,
) -> PeftAdapter:
    """Return one LoRA of several, whose scale is 1.

    Draws of DARE are by torch's generator. Raise UnsupportedError for adapters that are more than
    two factors, RequestError for weights that are not one for each, and for ranks that differ where
    factors are combined.
    """
    numbers = isinstance(weights, list | tuple) and all(is_number(one) for one in weights)
    fits = numbers and len(weights) == len(adapters) > 0
    require(fits, "weights", f"{len(adapters)} numbers, one for each adapter", weights)
    given = [_parts_of(name, one) for name, one in adapters.items()]
    ranks = [max(len(a) for a, _, _ in each.values()) for each in given]
    rank = _rank(combination, ranks)
    make: Callable[..., tuple[Tensor, Tensor]] = _side_by_side
    if combination.combination_type != "cat":
        make = partial(_of_products if combination.of_products else _of_factors, combination, rank)
    tensors = {}
    with torch.no_grad():
        for module in parts_of(model).maps:
            found = [
                (each[module], float(weight))
                for each, weight in zip(given, weights, strict=True)
                if module in each
            ]
            if found:
                a, b = make([parts for parts, _ in found], [weight for _, weight in found])
                name = f"{PREFIX}{module}"
                tensors[f"{name}.lora_A.weight"] = pad(a, (0, 0, 0, rank - len(a)))
                tensors[f"{name}.lora_B.weight"] = pad(b, (0, rank - b.shape[1]))
    first = next(iter(adapters.values())).settings
    settings = {
        **first,
        "r": rank,
        "lora_alpha": rank,
        "use_rslora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "layers_to_transform": None,
        "target_modules": [*dict.fromkeys(one.split(".lora_")[0] for one in _targets_of(tensors))],
        "exclude_modules": None,
        "target_parameters": None,
    }
    plan = AdapterPlan.of(Fields(settings, "the adapter's configuration"), tensors, model)
    made = PeftAdapter(plan, tensors)
    made.now()
    return made


def _targets_of(tensors: Mapping[str, Tensor]) -> list[str]:
    return [name.removeprefix(PREFIX) for name in tensors]


def _parts_of(name: str, adapter: PeftAdapter) -> dict[str, Parts]:
    """Return the factors of an adapter and their scale, by module."""
    config, own = Fields(adapter.settings), adapter.settings
    plain = own.get("peft_type", "LORA") == "LORA" and not adapter.has_parts
    if not plain or own.get("use_dora") or own.get("lora_bias"):
        raise UnsupportedError(
            "only plain LoRAs become one adapter",
            wanted="adapters of two factors, without use_dora, lora_bias, embeddings, experts, "
            "whole modules and rows of tokens",
            got=f"{shown(name)}, a {own.get('peft_type', 'LORA')}",
            do="Mix them in a call: adapters={'a': 0.7, 'b': 0.3}",
        )
    patterns = scale_patterns(config)["alpha_pattern"]
    found = {}
    for module, held in adapter.modules.items():
        a, b = (held[side].detach() for side in ("lora_A", "lora_B"))
        root = math.sqrt(len(a)) if config.flag("use_rslora", False) else len(a)
        alpha = setting_of(patterns, module, config.number("lora_alpha", 8))
        found[module] = (a, b, alpha / root)
    return found


def _rank(combination: Combination, ranks: Sequence[int]) -> int:
    if combination.combination_type == "cat":
        return sum(ranks)
    if combination.of_products:
        return combination.svd_rank or max(ranks)
    if len({*ranks}) > 1:
        raise RequestError(
            "factors of different ranks cannot be combined",
            wanted="adapters of one rank",
            got=ranks,
            do='Pass combination_type="cat", or one that ends in "svd"',
        )
    return ranks[0]


def _side_by_side(parts: Sequence[Parts], weights: Sequence[float]) -> tuple[Tensor, Tensor]:
    scaled = [a * (weight * scale) for (a, _, scale), weight in zip(parts, weights, strict=True)]
    return torch.cat(scaled), torch.cat([b for _, b, _ in parts], dim=1)


def _of_factors(
    combination: Combination, rank: int, parts: Sequence[Parts], weights: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Combine the factors, each for itself: a weight is shared by both, its sign is A's."""
    whole = [weight * scale for (_, _, scale), weight in zip(parts, weights, strict=True)]
    roots = [math.sqrt(abs(one)) for one in whole]
    signed = [math.copysign(root, one) for root, one in zip(roots, whole, strict=True)]
    a = combination.combined([_rows(one, rank) for one, _, _ in parts], signed)
    return a, combination.combined([_rows(one.T, rank).T for _, one, _ in parts], roots)


def _rows(matrix: Tensor, rank: int) -> Tensor:
    return pad(matrix, (0, 0, 0, rank - len(matrix)))


def _of_products(
    combination: Combination, rank: int, parts: Sequence[Parts], weights: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Combine what is added, and keep its largest singular values."""
    wide = torch.promote_types(parts[0][0].dtype, torch.float32)
    added = combination.combined(
        [b.to(wide) @ a.to(wide) * scale for a, b, scale in parts], weights
    )
    how: dict[str, Any] = {"full_matrices": combination.svd_full_matrices}
    u, values, v = torch.linalg.svd(added, driver=combination.svd_driver, **how)
    kept = min(rank, len(values))
    b, a = u[:, :kept] * values[:kept], v[:kept]
    if combination.svd_clamp is not None:
        most = torch.quantile(torch.cat([b.flatten(), a.flatten()]), combination.svd_clamp)
        a, b = a.clamp(-most, most), b.clamp(-most, most)
    return a.to(parts[0][0].dtype), b.to(parts[0][0].dtype)
