"""What a new adapter is to be: PEFT's configurations, and the adapter that begins to learn."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from everystep.adapters.peft_adapter import AdapterPlan, PeftAdapter
from everystep.adapters.peft_kinds import scale_patterns, setting_of
from everystep.adapters.peft_parts import PREFIX
from everystep.adapters.targets import Target, Targets, targets_of
from everystep.config.kinds import is_integer, is_number, require
from everystep.errors import RequestError, UnsupportedError, nearest, shown
from everystep.models import Model
from everystep.models.config import Fields
from everystep.nn.modes import ordinary_mode

ALL_LINEAR = "all-linear"

Names = str | Collection[str] | None


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """A LoRA that is to learn, by PEFT's names and with PEFT's defaults.

    `target_modules`: names of modules or ends of them, a regular expression for whole names, or
    "all-linear" for all projections of the layers; None for those that make queries and values.
    `init_lora_weights`: True for PEFT's own way, which adds nothing at first, "gaussian" likewise
    from a normal distribution, False for random values.
    """

    r: int = 8
    lora_alpha: float = 8
    lora_dropout: float = 0.0
    target_modules: Names = None
    exclude_modules: Names = None
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    bias: str = "none"
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    layers_to_transform: int | Sequence[int] | None = None
    layers_pattern: Names = None
    modules_to_save: Sequence[str] | None = None
    init_lora_weights: bool | str = True
    task_type: str | None = "CAUSAL_LM"

    def __post_init__(self) -> None:
        _require_common(self)
        require(_is_positive(self.lora_alpha), "lora_alpha", "a number above 0", self.lora_alpha)
        share, begun = self.lora_dropout, self.init_lora_weights
        fits = is_number(share) and 0 <= share < 1
        require(fits, "lora_dropout", "a number from 0 to below 1", share)
        for name in ("use_rslora", "use_dora", "lora_bias"):
            _require_flag(name, getattr(self, name))
        fits = isinstance(begun, bool) or begun == "gaussian"
        require(fits, "init_lora_weights", "True, False or 'gaussian'", begun)
        if self.bias != "none":
            raise UnsupportedError(
                "biases of the model below an adapter do not learn",
                wanted="bias='none'",
                got=f"bias={shown(self.bias)}",
                do="Leave bias out, or pass lora_bias=True for biases of the adapter's own",
            )


@dataclass(frozen=True, kw_only=True)
class LoHaConfig:
    """A LoHa that is to learn, by PEFT's names and with PEFT's defaults.

    `target_modules`: as of a `LoraConfig`. `init_weights`: whether it adds nothing at first.
    """

    r: int = 8
    alpha: float = 8
    target_modules: Names = None
    exclude_modules: Names = None
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    layers_to_transform: int | Sequence[int] | None = None
    layers_pattern: Names = None
    modules_to_save: Sequence[str] | None = None
    init_weights: bool = True
    task_type: str | None = "CAUSAL_LM"

    def __post_init__(self) -> None:
        _require_common(self)
        require(_is_positive(self.alpha), "alpha", "a number above 0", self.alpha)
        _require_flag("init_weights", self.init_weights)


AdapterConfig = LoraConfig | LoHaConfig


def new_adapter(config: AdapterConfig, model: Model, name: str = "") -> PeftAdapter:
    """Return an adapter for a model that begins to learn; `name`: of the model.

    Its values are drawn by torch's generator, module after module, as PEFT draws them. Raise
    RequestError for a configuration that finds no module or cannot be, and UnsupportedError for a
    model that takes no adapters.
    """
    targets = targets_of(model)
    chosen = _chosen(config, targets)
    kind, draw = ("LORA", _lora) if isinstance(config, LoraConfig) else ("LOHA", _loha)
    settings = {
        "peft_type": kind,
        "base_model_name_or_path": name,
        **_plain(config),
        "target_modules": _said(config.target_modules, chosen),
    }
    if any(one.part.transposed for one in chosen):
        settings["fan_in_fan_out"] = True
    values = Fields(settings, "the adapter's configuration")
    patterns = scale_patterns(values)
    wide = torch.promote_types(model.dtype, torch.float32)
    tensors: dict[str, Tensor] = {}
    with ordinary_mode(), torch.no_grad():
        for target in chosen:
            rank = int(setting_of(patterns["rank_pattern"], target.module, config.r))
            for what, drawn in draw(config, target, rank, model).items():  # type: ignore[arg-type]
                tensors[f"{PREFIX}{target.module}.{what}"] = drawn.to(model.device, wide)
    plan = AdapterPlan.of(values, tensors, model)
    found = PeftAdapter(plan, tensors)
    found.now()  # which finds what does not fit
    return found.requires_grad_()


# --- which modules --------------------------------------------------------------------------------


def _chosen(config: AdapterConfig, targets: Targets) -> list[Target]:
    """Return the projections that a configuration names, in the network's order."""
    wanted, excluded = config.target_modules, _matcher("exclude_modules", config.exclude_modules)
    if wanted is None:
        found = [one for one in targets.values() if _makes_queries_or_values(one, targets)]
    elif wanted == ALL_LINEAR:
        found = list(targets.values())
    else:
        _refuse_strangers(wanted, targets)
        named = _matcher("target_modules", wanted)
        found = [one for one in targets.values() if named(one.module)]
    in_layers = _layers(config)
    found = [one for one in found if in_layers(one.module) and not excluded(one.module)]
    if not found:
        raise RequestError(
            "the adapter's configuration names no projection of this model",
            wanted=", ".join(sorted({_end(one) for one in targets})),
            got=f"target_modules={shown(wanted)}",
            do='Name some of these, or pass target_modules="all-linear"',
        )
    return found


def _makes_queries_or_values(one: Target, targets: Targets) -> bool:
    """Return whether a module makes queries or values, perhaps beside others."""
    beside = [other for other in targets.values() if other.key == one.key]
    return one.key.endswith(".qkv") and (len(beside) < 3 or one != beside[1])


def _refuse_strangers(wanted: Names, targets: Targets) -> None:
    """Refuse a name in a list that no projection has: PEFT would pass over it in silence."""
    for name in wanted if not isinstance(wanted, str) and wanted else ():
        if not any(_is_named(one, name) for one in targets):
            close = nearest(name, {_end(one) for one in targets})
            raise UnsupportedError(
                "target_modules names what is no projection of a layer of this model",
                wanted=", ".join(sorted({_end(one) for one in targets})),
                got=shown(name),
                do=f"The nearest is {close!r}" if close else "Leave it out",
            )


def _matcher(name: str, wanted: Names) -> Callable[[str], bool]:
    """Return what tells whether a module is named, as PEFT reads names and expressions."""
    if wanted is None:
        return lambda module: False
    if not isinstance(wanted, str):
        return lambda module: any(_is_named(module, one) for one in wanted)
    expression = _expression(name, wanted)
    return lambda module: expression.fullmatch(module) is not None


def _is_named(module: str, name: str) -> bool:
    return module == name or module.endswith(f".{name}")


def _layers(config: AdapterConfig) -> Callable[[str], bool]:
    """Return what tells whether a module is in one of the layers that are asked for."""
    asked = config.layers_to_transform
    if asked is None or (not is_integer(asked) and not asked):
        if config.layers_pattern:
            do = "Pass layers_to_transform too, or leave layers_pattern out"
            raise RequestError("layers_pattern says where the numbers of layers stand", do=do)
        return lambda module: True
    if isinstance(config.target_modules, str) and config.target_modules != ALL_LINEAR:
        raise RequestError(
            "layers_to_transform stands beside a regular expression",
            wanted="a list of names, beside which layers can be chosen",
            got=f"target_modules={shown(config.target_modules)}",
            do="Write the layers into the expression",
        )
    given = config.layers_pattern or ()
    each = [given] if isinstance(given, str) else list(given)
    forms = [
        _expression("layers_pattern", rf"(?:^|.*?\.){one}\.(?P<number>\d+)\..*") for one in each
    ] or [re.compile(r".*?\.[^.]*\.(?P<number>\d+)\..*")]
    numbers = {asked} if isinstance(asked, int) else {*asked}

    def inside(module: str) -> bool:
        found = next((one for form in forms if (one := form.match(module))), None)
        return found is not None and int(found["number"]) in numbers

    return inside


def _expression(name: str, text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise RequestError(f"{name} is no regular expression", got=shown(text)) from error


def _said(wanted: Names, chosen: Sequence[Target]) -> str | list[str]:
    """Return how a folder names the modules, so that PEFT finds the same."""
    if wanted is None or wanted == ALL_LINEAR:
        return sorted({_end(one.module) for one in chosen})
    return wanted if isinstance(wanted, str) else list(wanted)


def _end(module: str) -> str:
    return module.rpartition(".")[2]


# --- first values ---------------------------------------------------------------------------------


def _lora(config: LoraConfig, target: Target, rank: int, model: Model) -> dict[str, Tensor]:
    rows, width = target.shape
    # PEFT makes two layers of torch first, whose own draws come before those that count.
    down = nn.Linear(width, rank, bias=False, dtype=torch.float32, device="cpu")
    up = nn.Linear(rank, rows, bias=config.lora_bias, dtype=torch.float32, device="cpu")
    if config.init_lora_weights is not False:
        if config.init_lora_weights is True:
            nn.init.kaiming_uniform_(down.weight, a=math.sqrt(5))
        else:
            nn.init.normal_(down.weight, std=1 / rank)
        nn.init.zeros_(up.weight)
        if up.bias is not None:
            nn.init.zeros_(up.bias)
    found = {"lora_A.weight": down.weight.detach(), "lora_B.weight": up.weight.detach()}
    if up.bias is not None:
        found["lora_B.bias"] = up.bias.detach()
    if config.use_dora:
        found["lora_magnitude_vector"] = _lengths(config, target, found, model)
    return found


def _lengths(
    config: LoraConfig, target: Target, drawn: Mapping[str, Tensor], model: Model
) -> Tensor:
    """Return (rows,) the lengths that the rows of a projection have at first, with what is
    added."""
    matrix = target.matrix(model)
    wide = torch.promote_types(matrix.dtype, torch.float32)
    rank = len(drawn["lora_A.weight"])
    alpha = setting_of(
        scale_patterns(Fields(_plain(config)))["alpha_pattern"], target.module, config.lora_alpha
    )
    scale = alpha / (math.sqrt(rank) if config.use_rslora else rank)
    added = drawn["lora_B.weight"].to(wide) @ drawn["lora_A.weight"].to(wide) * scale
    rows = matrix.to(wide) + target.part.loaded(added).to(matrix.device)
    return target.part.stored(torch.linalg.norm(rows, dim=1))


def _loha(config: LoHaConfig, target: Target, rank: int, model: Model) -> dict[str, Tensor]:
    rows, width = target.shape
    found = {}
    for one in (1, 2):
        for side, shape in (("a", (rows, rank)), ("b", (rank, width))):
            drawn = torch.empty(shape, dtype=torch.float32)
            if config.init_weights and (one, side) == (2, "b"):
                nn.init.zeros_(drawn)
            else:
                nn.init.kaiming_uniform_(drawn, a=math.sqrt(5))
            found[f"hada_w{one}_{side}"] = drawn
    return found


# --- what a configuration may hold ----------------------------------------------------------------


def _plain(config: AdapterConfig) -> dict[str, Any]:
    """Return the values of a configuration as JSON has them."""

    def plain(value: object) -> object:
        if isinstance(value, Mapping):
            return dict(value)
        listed = isinstance(value, Collection) and not isinstance(value, str)
        return list(value) if listed else value  # type: ignore[call-overload]

    return {one.name: plain(getattr(config, one.name)) for one in fields(config)}


def _require_common(config: AdapterConfig) -> None:
    fits = is_integer(config.r) and config.r >= 1
    require(fits, "r", "a whole number of at least 1", config.r)
    for name in ("target_modules", "exclude_modules", "layers_pattern"):
        value = getattr(config, name)
        require(_are_names(value), name, "a name, a list of names or None", value)
    layers = config.layers_to_transform
    require(_are_numbers(layers), "layers_to_transform", "whole numbers, or None", layers)
    for name in ("rank_pattern", "alpha_pattern"):
        value = getattr(config, name)
        require(isinstance(value, Mapping), name, "a mapping of names to numbers", value)
    task = config.task_type
    require(task in (None, "CAUSAL_LM"), "task_type", "'CAUSAL_LM' or None", task)
    if config.modules_to_save:
        raise UnsupportedError(
            "modules that are trained as a whole are not part of an adapter here",
            wanted="projections of the layers, in target_modules",
            got=f"modules_to_save={shown(config.modules_to_save)}",
            do="Leave modules_to_save out, or train the model's own weights after "
            "model.requires_grad_()",
        )


def _is_positive(value: object) -> bool:
    return is_number(value) and 0 < value < math.inf  # type: ignore[operator]


def _require_flag(name: str, value: object) -> None:
    require(isinstance(value, bool), name, "True or False", value)


def _are_names(value: object) -> bool:
    if value is None or isinstance(value, str):
        return True
    listed = isinstance(value, list | tuple | set | frozenset)
    return listed and all(isinstance(one, str) for one in value)  # type: ignore[attr-defined]


def _are_numbers(value: object) -> bool:
    if value is None or is_integer(value):
        return True
    return isinstance(value, list | tuple | range) and all(is_integer(one) for one in value)
