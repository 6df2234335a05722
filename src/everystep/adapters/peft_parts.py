"""What PEFT's adapters hold beside changes of projections.

Modules that were trained as a whole, rows of the table of embeddings, and low ranks of the stacks
in which transformers holds experts. All are read as differences from the model's own values, so
that they add like a LoRA: a weight is a share of the difference.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import cast, final

import torch
from torch import Tensor

from everystep.adapters.changes import (
    AdapterChange,
    Delta,
    NormChange,
    Replacement,
    Shift,
    TokenRows,
)
from everystep.adapters.peft_kinds import scale_patterns, setting_of
from everystep.adapters.targets import (
    AdaptableParts,
    ExpertStack,
    NormTarget,
    Target,
    part_at,
)
from everystep.errors import FormatError, UnsupportedError, nearest, shown
from everystep.models import Model
from everystep.models.config import Fields
from everystep.models.decoder import Decoder
from everystep.nn.linear import dense

PREFIX = "base_model.model."
TOKENS = "trainable_tokens_delta"
BASE = ".base_layer"
_LOW_RANK = re.compile(r"(.+?)\.lora_(A|embedding_A)(\.weight)?")
_OF_EXPERTS = re.compile(rf"(.+?)((?:\{BASE})*)\.lora_([AB])\.weight")

Change = AdapterChange | NormChange
Held = Mapping[str, Tensor]
"""Tensors of an adapter in the model's place and type, by their names in its file."""


class AdapterPart(ABC):
    """Tensors of an adapter that no kind of adapter explains, and the changes that they make.

    `names`: of the tensors, by what they are. `learns`: whether they are trained.
    """

    names: Mapping[str, str]
    learns: bool

    @abstractmethod
    def changes(self, model: Model, held: Held) -> Iterator[tuple[str, Change]]:
        """Yield the changes with their keys, differentiable in the tensors; FormatError for shapes
        that do not fit."""


def _require_shape(name: str, found: Tensor, wanted: tuple[int, ...]) -> Tensor:
    if tuple(found.shape) != wanted:
        what = f"the adapter's tensor {name!r} does not fit the model"
        raise FormatError(what, wanted=wanted, got=tuple(found.shape))
    return found


def _shift_of(target: Target, model: Model, name: str, held: Held) -> Tensor | None:
    """Return how far a bias that was trained lies from the model's own; None where it has none."""
    bias, base = _require_shape(name, held[name], target.shape[:1]), target.bias(model)
    return None if base is None else target.part.loaded(bias) - base.to(bias)


@final
@dataclass(frozen=True, eq=False)
class Twin(AdapterPart):
    """A tensor that PEFT saves twice because two modules share it; `of`: the one that counts."""

    names: Mapping[str, str]
    of: str
    learns: bool = False

    def changes(self, model: Model, held: Held) -> Iterator[tuple[str, Change]]:
        return iter(())


# --- whole modules --------------------------------------------------------------------------------


@final
@dataclass(frozen=True, eq=False)
class WholeMap(AdapterPart):
    """A projection, a head, a router or the table of embeddings, as a whole."""

    target: Target
    names: Mapping[str, str]
    learns: bool = True

    def changes(self, model: Model, held: Held) -> Iterator[tuple[str, Change]]:
        own = self.target
        wanted = tuple(reversed(own.shape)) if own.part.transposed else own.shape
        weight = _require_shape(self.names["weight"], held[self.names["weight"]], wanted)
        weight = own.part.loaded(weight.T if own.part.transposed else weight)
        difference = weight - own.matrix(model).to(weight)
        shift = None
        if (name := self.names.get("bias")) is not None:
            shift = _shift_of(own, model, name, held)
            if shift is None:
                raise FormatError(f"the adapter holds {name!r}, and the model has no bias there")
        if self.learns or bool(difference.any()) or shift is not None:
            yield own.key, Replacement(difference, own.part.start, shift)


@final
@dataclass(frozen=True, eq=False)
class WholeNorm(AdapterPart):
    """A norm as a whole."""

    target: NormTarget
    names: Mapping[str, str]
    learns: bool = True

    def changes(self, model: Model, held: Held) -> Iterator[tuple[str, Change]]:
        norm, width = self.target.norm(model), (self.target.width,)
        for what, name in self.names.items():
            _require_shape(name, held[name], width)
            if getattr(norm, what) is None:
                raise FormatError(f"the adapter holds {name!r}, and the model has no {what} there")
        weight = held[self.names["weight"]]
        bias = None
        if norm.bias is not None:
            bias = held[self.names["bias"]] - norm.bias.to(weight)
        yield self.target.key, NormChange(weight - norm.weight.to(weight), bias)


@final
@dataclass(frozen=True, eq=False)
class WholeExperts(AdapterPart):
    """The stack of all matrices of a layer's experts, as a whole."""

    stack: ExpertStack
    names: Mapping[str, str]
    learns: bool = True

    def changes(self, model: Model, held: Held) -> Iterator[tuple[str, Change]]:
        name, network = self.names["weight"], cast(Decoder, model.network)
        stacked = _require_shape(name, held[name], (len(self.stack.keys), *self.stack.shape))
        for key, one in zip(self.stack.keys, stacked, strict=True):
            yield key, Replacement(one - dense(part_at(network, key).matrix()).to(one))


# --- biases ---------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, eq=False)
class OwnBias(AdapterPart):
    """The bias of a map of the model, which was trained beside the adapter."""

    target: Target
    names: Mapping[str, str]
    learns: bool = True

    def changes(self, model: Model, held: Held) -> Iterator[tuple[str, Change]]:
        (name,), own = self.names.values(), self.target
        shift = _shift_of(own, model, name, held)
        if shift is not None:
            yield own.key, Shift(shift, own.shape[1], own.part.start)


@final
@dataclass(frozen=True, eq=False)
class OwnNormBias(AdapterPart):
    """The bias of a norm of the model, likewise."""

    target: NormTarget
    names: Mapping[str, str]
    learns: bool = True

    def changes(self, model: Model, held: Held) -> Iterator[tuple[str, Change]]:
        (name,), norm = self.names.values(), self.target.norm(model)
        bias = _require_shape(name, held[name], (self.target.width,))
        if norm.bias is not None:
            yield self.target.key, NormChange(torch.zeros_like(bias), bias - norm.bias.to(bias))


def biases_of(model: Model, known: AdaptableParts) -> dict[str, Tensor]:
    """Return every bias of the model as checkpoints hold it, by the name of its module."""
    maps = ((one, one.bias(model)) for one in known.maps.values())
    found = {one.module: one.part.stored(own) for one, own in maps if own is not None}
    norms = ((one.module, one.norm(model).bias) for one in known.norms.values())
    return found | {module: own for module, own in norms if own is not None}


def _asked_biases(
    config: Fields, model: Model, known: AdaptableParts, adapted: Collection[str]
) -> dict[str, Tensor]:
    """Return the biases that a configuration trains, as the model has them, by their modules;
    `adapted`: the modules that have low ranks."""
    kind = config.text("bias", "none")
    every = {} if kind == "none" else biases_of(model, known)
    return {module: own for module, own in every.items() if kind == "all" or module in adapted}


def own_biases(
    config: Fields, model: Model, known: AdaptableParts, adapted: Collection[str]
) -> dict[str, Tensor]:
    """Return the biases with which an adapter begins, by PEFT's names: the model's own."""
    return {
        f"{PREFIX}{module}{BASE if module in adapted else ''}.bias": own.detach().clone()
        for module, own in _asked_biases(config, model, known, adapted).items()
    }


def _bias_parts(
    config: Fields, held: Mapping[str, str], model: Model, known: AdaptableParts, left: list[str]
) -> Iterator[AdapterPart]:
    """Yield the biases that an adapter holds, by their modules; FormatError where some that the
    configuration names are missing. `left`: the names of its low ranks."""
    matched = (_LOW_RANK.fullmatch(known.in_whole(one.removeprefix(PREFIX))) for one in left)
    adapted = {one[1] for one in matched if one is not None}
    wanted = _asked_biases(config, model, known, adapted)
    if missing := sorted({*wanted} - {*held}):
        raise FormatError(
            f"{config.where}: bias names biases that the adapter does not hold",
            wanted=f"{PREFIX}{missing[0]}.bias",
            got=f"{len(missing)} of {len(wanted)} are missing",
            do="Save it with a newer PEFT, whose files have them",
        )
    for module, name in sorted(held.items()):
        if module in known.norms:
            yield OwnNormBias(known.norms[module], {"bias": name})
        else:
            yield OwnBias(known.maps[module], {"bias": name})


# --- rows of tokens -------------------------------------------------------------------------------


@final
@dataclass(frozen=True, eq=False)
class TokenPart(AdapterPart):
    """Rows of the table, or of the head, for some `tokens`; of both where they are one matrix.

    `targets`: what has these rows, of which the first gives the model's own.
    """

    targets: tuple[Target, ...]
    tokens: tuple[int, ...]
    names: Mapping[str, str]
    learns: bool = True

    def changes(self, model: Model, held: Held) -> Iterator[tuple[str, Change]]:
        first, name = self.targets[0], self.names[TOKENS]
        rows = _require_shape(name, held[name], (len(self.tokens), first.shape[1]))
        tokens = torch.tensor(self.tokens, device=rows.device)
        base = first.matrix(model)[tokens.to(model.device)].to(rows)
        found = TokenRows(rows - base, tokens, first.shape[0])
        for target in self.targets:
            yield target.key, found


def tokens_of(config: Fields, key: str, value: object, vocab_size: int) -> tuple[int, ...]:
    """Return the ids of tokens that a configuration names; FormatError for what are no ids of the
    vocabulary, and for one that is named twice."""
    given = value if isinstance(value, list) else []
    right = all(type(one) is int and 0 <= one < vocab_size for one in given)
    if not given or not right or len({*given}) < len(given):
        raise config.wrong(key, f"ids from 0 to {vocab_size - 1}, each once", value)
    return tuple(given)


# --- experts --------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, eq=False)
class ExpertsPart(AdapterPart):
    """A LoRA of every expert of a layer; `parameter`: the name of their stack."""

    parameter: str
    stack: ExpertStack
    config: Fields
    names: Mapping[str, str]
    learns: bool = True

    def changes(self, model: Model, held: Held) -> Iterator[tuple[str, Change]]:
        patterns, count = scale_patterns(self.config), len(self.stack.keys)
        rank = int(
            setting_of(patterns["rank_pattern"], self.parameter, self.config.integer("r", 8))
        )
        rows, width = self.stack.shape
        a, b = (held[self.names[side]] for side in ("lora_A", "lora_B"))
        _require_shape(self.names["lora_A"], a, (rank * count, width))
        _require_shape(self.names["lora_B"], b, (rows, rank * count))
        root = math.sqrt(rank) if self.config.flag("use_rslora", False) else rank
        alpha = self.config.number("lora_alpha", 8)
        scale = setting_of(patterns["alpha_pattern"], self.parameter, alpha) / root
        # A has the ranks of an expert together, B has the experts of a rank together.
        down, up = a.view(count, rank, width), b.view(rows, rank, count).permute(2, 0, 1)
        for key, one, other in zip(self.stack.keys, down, up, strict=True):
            yield key, Delta(one, other, scale)


# --- from names -----------------------------------------------------------------------------------


def sorted_parts(
    names: Iterable[str], config: Fields, model: Model, known: AdaptableParts
) -> tuple[list[str], tuple[AdapterPart, ...]]:
    """Return the names that are left to the adapter's kind, and what the others are.

    Raise FormatError where tensors are missing that the configuration names, and UnsupportedError
    for names of modules that cannot be adapted.
    """
    left: list[str] = []
    whole: dict[str, dict[str, str]] = {}
    base: dict[str, dict[str, str]] = {}
    tokens: dict[str, str] = {}
    biases: dict[str, str] = {}
    experts: dict[str, dict[int, dict[str, str]]] = {}
    homes = {name.rpartition(".")[0] for name in known.stacks}
    modules = {*known.maps, *known.norms}
    saved = saved_modules(config, known)
    frame = {known.table.module, known.head.module}
    biased = modules if config.text("bias", "none") != "none" else set()
    for name in names:
        body = known.in_whole(name.removeprefix(PREFIX).replace(".modules_to_save.", "."))
        module, _, what = body.rpartition(".")
        own = module.removesuffix(BASE)
        matched = _OF_EXPERTS.fullmatch(body)
        if what == TOKENS:
            tokens[module.removesuffix(".token_adapter")] = name
        elif matched is not None and matched[1] in homes:
            depth = len(matched[2]) // len(BASE)
            experts.setdefault(matched[1], {}).setdefault(depth, {})[f"lora_{matched[3]}"] = name
        elif what == "bias" and own in biased and own not in saved:
            biases[own] = name
        elif module.removesuffix(BASE) in frame and module.endswith(BASE):
            base.setdefault(module.removesuffix(BASE), {})[what] = name
        elif body in known.stacks and body in saved:
            whole[body] = {"weight": name}
        elif what in ("weight", "bias") and module in modules and module in (saved | frame):
            whole.setdefault(module, {})[what] = name
        else:
            left.append(name)
    _require_saved(config, saved, whole)
    parts = [
        *_whole_parts(config, whole, known),
        *(WholeMap(known.maps[one], held, learns=False) for one, held in base.items()),
        *_token_parts(config, tokens, known),
        *_experts_parts(config, experts, known),
        *_bias_parts(config, biases, model, known, left),
    ]
    return left, tuple(parts)


def own_values(config: Fields, model: Model, known: AdaptableParts) -> dict[str, Tensor]:
    """Return the tensors with which whole modules and rows of tokens begin, by PEFT's names: the
    model's own values, so that nothing is changed at first."""
    network, found = cast(Decoder, model.network), dict[str, Tensor]()
    saved = saved_modules(config, known)
    frame = {known.table.module, known.head.module}
    if known.tied and config.flag("ensure_weight_tying", False) and saved & frame:
        saved |= frame
    for module in sorted(saved):
        name = f"{PREFIX}{module}"
        if module in known.stacks:
            keys = known.stacks[module].keys
            found[name] = torch.stack([dense(part_at(network, key).matrix()) for key in keys])
        elif module in known.norms:
            norm = known.norms[module].norm(model)
            found |= {f"{name}.{what}": one for what, one in _held(norm.weight, norm.bias)}
        else:
            target = known.maps[module]
            bias = target.bias(model)
            weight = target.part.stored_values(target.matrix(model))
            stored = None if bias is None else target.part.stored(bias)
            found |= {f"{name}.{what}": one for what, one in _held(weight, stored)}
    for module, ids in asked_tokens(config, known, ()).items():
        table = known.table if module == known.table.module else known.head
        rows = table.matrix(model)[torch.tensor(ids, device=model.device)]
        found[f"{PREFIX}{module}.token_adapter.{TOKENS}"] = rows
    return {name: one.detach().clone() for name, one in found.items()}


def _held(weight: Tensor, bias: Tensor | None) -> Iterator[tuple[str, Tensor]]:
    yield "weight", weight
    if bias is not None:
        yield "bias", bias


def _listed(config: Fields, key: str) -> list[str]:
    """Return the names under a key; FormatError where it holds anything else."""
    given = config.values.get(key) or []
    if not isinstance(given, list) or not all(isinstance(one, str) and one for one in given):
        raise config.wrong(key, "a list of names", given)
    return given


def saved_modules(config: Fields, known: AdaptableParts) -> set[str]:
    """Return the modules, and stacks of experts, that were trained as a whole.

    As in PEFT a name is the end of a module's; what lies inside of the module is trained too.
    """
    found: set[str] = set()
    for wanted in _listed(config, "modules_to_save"):
        own = {one for one in (*known.modules, *known.stacks) if _is_inside(one, wanted)}
        if not own:
            close = nearest(wanted, {one.rpartition(".")[2] for one in known.modules})
            raise UnsupportedError(
                f"{config.where}: modules_to_save names what cannot be changed as a whole",
                wanted="a head, embeddings, norms, projections or experts of this model",
                got=shown(wanted),
                do=f"The nearest is {close!r}" if close else None,
            )
        found |= own
    return found


def _is_inside(module: str, wanted: str) -> bool:
    """Return whether a module, or one that it is a part of, has a name with this end."""
    words = module.split(".")
    return any(".".join(words[:count]).endswith(wanted) for count in range(1, len(words) + 1))


def _require_saved(config: Fields, saved: set[str], whole: Mapping[str, object]) -> None:
    if missing := sorted(saved - {*whole}):
        raise FormatError(
            f"{config.where}: modules_to_save names modules that the adapter does not hold",
            wanted=f"{PREFIX}{missing[0]}.weight",
            got=f"{len(missing)} of {len(saved)} are missing",
        )


def _whole_parts(
    config: Fields, whole: Mapping[str, dict[str, str]], known: AdaptableParts
) -> Iterator[AdapterPart]:
    table, head = whole.get(known.table.module), whole.get(known.head.module)
    if known.tied and table and head and config.flag("ensure_weight_tying", False):
        yield WholeMap(known.head, table)
        yield Twin(head, table["weight"])
        whole = {module: held for module, held in whole.items() if held is not head}
    for module, held in sorted(whole.items()):
        if "weight" not in held:
            raise FormatError(f"the adapter has half of {module!r}", wanted="weight", got=[*held])
        if module in known.stacks:
            yield WholeExperts(known.stacks[module], held)
        elif module in known.norms:
            yield WholeNorm(known.norms[module], held)
        else:
            yield WholeMap(known.maps[module], held)


def asked_tokens(
    config: Fields, known: AdaptableParts, held: Collection[str]
) -> dict[str, tuple[int, ...]]:
    """Return the ids of tokens by the modules whose rows they are, without a head that follows the
    table; `held`: the modules that have tensors for them.

    Raise FormatError for what are no ids, and UnsupportedError for other modules.
    """
    key = _tokens_key(config)
    value = config.values.get(key)
    if not value and not held:
        return {}
    given = value if isinstance(value, dict) else dict.fromkeys(held or [known.table.module], value)
    frame = known.table.module, known.head.module
    found: dict[str, tuple[int, ...]] = {}
    for name, ids in given.items():
        module = next((one for one in frame if one.endswith(name)), None)
        if module is None:
            what = f"{config.where}: {key} names what is neither embeddings nor a head"
            raise UnsupportedError(what, wanted=", ".join(frame), got=shown(name))
        found[module] = tokens_of(config, key, ids, known.table.shape[0])
    if known.tied and found.get(known.head.module) == found.get(known.table.module):
        found.pop(known.head.module, None)  # PEFT leaves it to the table
    return found


def _tokens_key(config: Fields) -> str:
    alone = config.values.get("peft_type") == "TRAINABLE_TOKENS"
    return "token_indices" if alone else "trainable_token_indices"


def _token_parts(
    config: Fields, held: Mapping[str, str], known: AdaptableParts
) -> Iterator[AdapterPart]:
    """Yield the rows of tokens; FormatError where tensors and the configuration do not agree."""
    asked = asked_tokens(config, known, held)
    table, head = known.table.module, known.head.module
    tied = known.tied and table in asked and head not in asked
    own = {*held} - ({head} if tied else set())
    if own != {*asked}:
        wanted = ", ".join(f"{one}...{TOKENS}" for one in sorted(asked)) or "no such tensors"
        what = f"{config.where}: {_tokens_key(config)} and the adapter's tensors do not agree"
        raise FormatError(what, wanted=wanted, got=", ".join(sorted(held)) or "none")
    for module, ids in asked.items():
        targets: tuple[Target, ...] = (known.table,) if module == table else (known.head,)
        if tied:
            targets = known.table, known.head
        yield TokenPart(targets, ids, {TOKENS: held[module]})
    if tied and (twice := held.get(head)) is not None:
        yield Twin({TOKENS: twice}, held[table])


def _experts_parts(
    config: Fields, held: Mapping[str, Mapping[int, Mapping[str, str]]], known: AdaptableParts
) -> Iterator[AdapterPart]:
    """Yield the LoRAs of experts.

    PEFT wraps the stacks of a module in the order in which it has them, so the last of them is the
    outermost, and those before it are `base_layer`s of it.
    """
    wanted = _listed(config, "target_parameters")
    homes: dict[str, list[str]] = {}
    for one in known.stacks:
        homes.setdefault(one.rpartition(".")[0], []).append(one)
    for home, own in homes.items():
        named = [one for one in own if any(one == w or one.endswith(f".{w}") for w in wanted)]
        depths = held.get(home, {})
        if sorted(depths) != list(range(len(named))):
            raise FormatError(
                f"{config.where}: target_parameters and the adapter's tensors do not agree",
                wanted=f"tensors for {', '.join(named) or 'no experts'}",
                got=f"{len(depths)} pairs under {home}",
            )
        for parameter, depth in zip(named, sorted(depths, reverse=True), strict=True):
            pair = depths[depth]
            if {*pair} != {"lora_A", "lora_B"}:
                what = f"the adapter has half of {parameter!r}"
                raise FormatError(what, wanted="lora_A and lora_B", got=[*pair])
            yield ExpertsPart(parameter, known.stacks[parameter], config, pair)
