"""What a new adapter is to be: PEFT's configurations, and the adapter that begins to learn."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from everystep.adapters.adapter import TABLE
from everystep.adapters.peft_adapter import AdapterPlan, PeftAdapter
from everystep.adapters.peft_kinds import scale_patterns, setting_of
from everystep.adapters.peft_parts import BASE, PREFIX, own_biases, own_values
from everystep.adapters.targets import AdaptableParts, Target, Targets, parts_of
from everystep.config.kinds import is_integer, is_number, require
from everystep.errors import RequestError, UnsupportedError, nearest, shown
from everystep.models import Model
from everystep.models.config import Fields
from everystep.nn.modes import ordinary_mode

ALL_LINEAR = "all-linear"

Names = str | Collection[str] | None
Tokens = Sequence[int] | Mapping[str, Sequence[int]] | None
"""Ids of tokens, of the table of embeddings or by the names of modules."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """A LoRA that is to learn, by PEFT's names and with PEFT's defaults.

    `target_modules`: names of modules or ends of them, a regular expression for whole names, or
    "all-linear" for all projections of the layers; None for those that make queries and values. The
    head and the table of embeddings are modules too. `modules_to_save`: ends of names of modules
    that learn as a whole. `trainable_token_indices`: ids whose rows of the table learn, and of the
    head where that is the table; or such lists by module. `target_parameters`: ends of names of
    parameters, as "mlp.experts.gate_up_proj" for all experts of a layer. `ensure_weight_tying`:
    a table that learns as a whole stays the head of a model that has one matrix for both. `bias`:
    the model's own biases that learn beside it, "none", "all", or "lora_only" for those of the
    modules with low ranks; `lora_bias` gives it biases of its own.
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
    trainable_token_indices: Tokens = None
    target_parameters: Sequence[str] | None = None
    ensure_weight_tying: bool = False
    init_lora_weights: bool | str = True
    task_type: str | None = "CAUSAL_LM"

    def __post_init__(self) -> None:
        _require_common(self)
        require(_is_positive(self.lora_alpha), "lora_alpha", "a number above 0", self.lora_alpha)
        share, begun = self.lora_dropout, self.init_lora_weights
        fits = is_number(share) and 0 <= share < 1
        require(fits, "lora_dropout", "a number from 0 to below 1", share)
        for name in ("use_rslora", "use_dora", "lora_bias", "ensure_weight_tying"):
            _require_flag(name, getattr(self, name))
        _require_parts(self)
        fits = isinstance(begun, bool) or begun == "gaussian"
        require(fits, "init_lora_weights", "True, False or 'gaussian'", begun)
        biases = ("none", "all", "lora_only")
        require(self.bias in biases, "bias", " or ".join(map(repr, biases)), self.bias)
        if self.bias == "all" and self.modules_to_save:
            do = "Pass bias='lora_only', or name no modules to save"
            raise RequestError("bias='all' and modules_to_save both train biases", do=do)


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
    known = parts_of(model)
    chosen, parameters = _chosen(config, known), _parameters(config, known)
    kind, draw = ("LORA", _lora) if isinstance(config, LoraConfig) else ("LOHA", _loha)
    settings = {
        "peft_type": kind,
        "base_model_name_or_path": name,
        **_plain(config),
        "target_modules": _said(config.target_modules, chosen),
    }
    if any(one.part.transposed for one in chosen):
        settings["fan_in_fan_out"] = True
    _keep_tied(settings, chosen, known)
    values = Fields(settings, "the adapter's configuration")
    patterns = scale_patterns(values)
    wide = torch.promote_types(model.dtype, torch.float32)
    tensors: dict[str, Tensor] = {}
    with ordinary_mode(), torch.no_grad():
        for target in chosen:
            rank = int(setting_of(patterns["rank_pattern"], target.module, config.r))
            for what, drawn in draw(config, target, rank, model).items():  # type: ignore[arg-type]
                tensors[f"{PREFIX}{target.module}.{what}"] = drawn
        for parameter, module, shape, count in parameters:
            rank = int(setting_of(patterns["rank_pattern"], parameter, config.r))
            pair = _factors(config, *shape, rank, count)  # type: ignore[arg-type]
            tensors |= {f"{PREFIX}{module}.{what}": one for what, one in pair.items()}
        whole = own_values(values, model, known)
        _refuse_twice([one.module for one in chosen], [home for _, home, _, _ in parameters], whole)
        tensors |= whole | own_biases(values, model, known, [one.module for one in chosen])
        tensors = {name: one.to(model.device, wide) for name, one in tensors.items()}
    plan = AdapterPlan.of(values, tensors, model)
    found = PeftAdapter(plan, tensors)
    found.now()  # which finds what does not fit
    return found.requires_grad_()


# --- which modules --------------------------------------------------------------------------------


def _chosen(config: AdapterConfig, known: AdaptableParts) -> list[Target]:
    """Return the maps that a configuration names, in the network's order."""
    wanted, excluded = config.target_modules, _matcher("exclude_modules", config.exclude_modules)
    targets = known.projections
    if wanted is None:
        found = [one for one in targets.values() if _makes_queries_or_values(one, targets)]
    elif wanted == ALL_LINEAR:
        found = list(targets.values())
    else:
        named = _matcher("target_modules", wanted)
        targets = {one.module: one for one in (known.table, *targets.values(), known.head)}
        _refuse_strangers(wanted, targets)
        found = [one for one in targets.values() if named(one.module)]
    in_layers = _layers(config)
    found = [one for one in found if in_layers(one.module) and not excluded(one.module)]
    if not found and not _names_parts(config):
        raise RequestError(
            "the adapter's configuration names no projection of this model",
            wanted=", ".join(sorted({_end(one) for one in targets})),
            got=f"target_modules={shown(wanted)}",
            do='Name some of these, or pass target_modules="all-linear"',
        )
    _refuse_loha_of_rows(config, found, known)
    return found


def _names_parts(config: AdapterConfig) -> bool:
    """Return whether a configuration names anything beside target_modules."""
    if isinstance(config, LoraConfig) and (
        config.target_parameters or config.trainable_token_indices
    ):
        return True
    return bool(config.modules_to_save)


def _refuse_loha_of_rows(
    config: AdapterConfig, chosen: Sequence[Target], known: AdaptableParts
) -> None:
    if isinstance(config, LoHaConfig) and known.table in chosen:
        raise UnsupportedError(
            "a LoHa of embeddings is not supported",
            wanted="projections of layers, or the head",
            got=known.table.module,
            do="Take an es.LoraConfig, or name it in modules_to_save",
        )


_Parameter = tuple[str, str, tuple[int, int], int]
"""A parameter, the module that its tensors are saved under, (rows, in), and how many matrices."""


def _parameters(config: AdapterConfig, known: AdaptableParts) -> list[_Parameter]:
    """Return what target_parameters names, in the network's order; UnsupportedError for a name that
    finds nothing, as PEFT would pass over it in silence."""
    wanted = (isinstance(config, LoraConfig) and config.target_parameters) or ()
    plain = [one for one in known.maps.values() if one is not known.table]
    found: list[_Parameter] = []
    for target in plain:
        parameter = f"{target.module}.weight"
        if any(_is_named(parameter, name) for name in wanted):
            if target.part.transposed:
                what = "target_parameters names what lies transposed"
                raise UnsupportedError(what, got=parameter, do="Name it in target_modules")
            found.append((parameter, target.module, target.shape, 1))
    named = [one for one in known.stacks if any(_is_named(one, name) for name in wanted)]
    for one in named:
        home, stack = one.rpartition(".")[0], known.stacks[one]
        later = [other for other in named if other.rpartition(".")[0] == home]
        # PEFT wraps one after another, so the last of a module is the outermost.
        depth = len(later) - 1 - later.index(one)
        found.append((one, home + BASE * depth, stack.shape, len(stack.keys)))
    names = [one for one, *_ in found]
    if strangers := [w for w in wanted if not any(_is_named(one, w) for one in names)]:
        every = {*known.stacks, *(f"{one.module}.weight" for one in plain)}
        close = nearest(strangers[0], {".".join(one.split(".")[-2:]) for one in every})
        raise UnsupportedError(
            "target_parameters names what is no parameter that can be adapted",
            wanted="stacks of experts, or weights of projections and routers",
            got=shown(strangers[0]),
            do=f"The nearest is {close!r}" if close else "Leave it out",
        )
    return sorted(found, key=lambda one: _layer_of(one[0]))


def _refuse_twice(
    modules: Sequence[str], homes: Sequence[str], whole: Mapping[str, Tensor]
) -> None:
    """Refuse a module that is asked for in two ways, which PEFT refuses too."""
    bodies = [name.removeprefix(PREFIX) for name in whole]
    each = {one.rpartition(".")[0] for one in bodies}
    rows = {one.removesuffix(".token_adapter") for one in each if one.endswith(".token_adapter")}
    held = {*bodies, *each}
    inside = ({*modules, *homes} & (held | rows)) | ({*modules} & {*homes}) | (rows & held)
    if inside:
        raise RequestError(
            "a module is asked for in two ways",
            wanted="each in one of target_modules, target_parameters, modules_to_save and "
            "trainable_token_indices",
            got=", ".join(sorted(inside)),
            do="Leave it out of the others",
        )


def _layer_of(parameter: str) -> int:
    """Return the number of the layer that a parameter is in, a big one for what comes after."""
    return next((int(one) for one in parameter.split(".") if one.isdigit()), 1 << 30)


def _keep_tied(settings: dict[str, Any], chosen: Sequence[Target], known: AdaptableParts) -> None:
    """Name a table that is to stay the head as PEFT does; UnsupportedError for low ranks of both,
    which PEFT trains as two tensors in one memory."""
    if not settings.get("ensure_weight_tying"):
        return
    if not known.tied:
        raise RequestError(
            "ensure_weight_tying has no effect: the head is a matrix of its own in this model",
            wanted="a model whose head is its table of embeddings",
            got="ensure_weight_tying=True",
            do="Leave it out",
        )
    if known.table in chosen or known.head in chosen:
        raise UnsupportedError(
            "ensure_weight_tying is not supported for low ranks of embeddings and head",
            wanted="modules_to_save=['embed_tokens'], or trainable_token_indices",
            got=f"target_modules={shown(settings['target_modules'])}",
            do="Leave ensure_weight_tying out, and both learn by themselves",
        )


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
                "target_modules names what is no projection, head or table of this model",
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
    if target.key == TABLE:
        return _of_rows(config, target, rank)
    found = _factors(config, *target.shape, rank)
    if config.use_dora:
        found["lora_magnitude_vector"] = _lengths(config, target, found, model)
    return found


def _factors(
    config: LoraConfig, rows: int, width: int, rank: int, count: int = 1
) -> dict[str, Tensor]:
    """Return the factors of one matrix, or those of `count` side by side."""
    # PEFT makes two layers of torch first, whose own draws come before those that count.
    down = nn.Linear(width, rank * count, bias=False, dtype=torch.float32, device="cpu")
    up = nn.Linear(rank * count, rows, bias=config.lora_bias, dtype=torch.float32, device="cpu")
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
    return found


def _of_rows(config: LoraConfig, target: Target, rank: int) -> dict[str, Tensor]:
    """Return the factors of the table; refuse what is not known of it, as PEFT does."""
    for name in ("use_dora", "lora_bias"):
        if getattr(config, name):
            do = "Leave the embeddings out of target_modules"
            what = f"{name} of embeddings is not supported"
            raise UnsupportedError(what, wanted=f"{name}=False", got=target.module, do=do)
    (ids, width), generator = target.shape, {"dtype": torch.float32, "device": "cpu"}
    a, b = torch.randn(rank, ids, **generator), torch.randn(width, rank, **generator)  # type: ignore[call-overload]
    if config.init_lora_weights is not False:
        nn.init.zeros_(a)
        nn.init.normal_(b)
    return {"lora_embedding_A": a, "lora_embedding_B": b}


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
            return {key: plain(one) for key, one in value.items()}
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
    saved = config.modules_to_save
    listed = saved is None or (_are_names(saved) and not isinstance(saved, str))
    require(listed, "modules_to_save", "a list of names, or None", saved)


def _require_parts(config: LoraConfig) -> None:
    """Refuse what PEFT refuses too: low ranks of parameters that are more than two factors."""
    given, tokens = config.target_parameters, config.trainable_token_indices
    listed = given is None or (_are_names(given) and not isinstance(given, str))
    require(listed, "target_parameters", "a list of names, or None", given)
    each = list(tokens.values()) if isinstance(tokens, Mapping) else [tokens]
    fits = tokens is None or (bool(each) and all(map(_are_tokens, each)))
    require(fits, "trainable_token_indices", "ids, or lists of ids by module, or None", tokens)
    flags = ("lora_dropout", "lora_bias", "use_dora")
    if given and (name := next((one for one in flags if getattr(config, one)), None)):
        raise UnsupportedError(
            f"{name} is not supported beside target_parameters",
            wanted=f"{name} left out",
            got=f"{name}={shown(getattr(config, name))}",
            do="Name modules in target_modules, or leave it out",
        )


def _are_tokens(value: object) -> bool:
    listed = isinstance(value, list | tuple) and bool(value)
    return listed and all(is_integer(one) and one >= 0 for one in value)  # type: ignore[attr-defined]


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
