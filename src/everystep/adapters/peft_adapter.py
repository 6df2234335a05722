"""An adapter as PEFT has it: settings, tensors by PEFT's names, and the changes that they make.

Which projections it changes follows from the names of its tensors, and what it does to them from
its kind. Every key of the settings is one that the kind computes by, or one that changes nothing
once an adapter is trained; with any other the adapter is refused, so that one that is read is the
one that was trained.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn

from everystep.adapters.adapter import HEAD, TABLE, Adapter
from everystep.adapters.changes import AdapterChange, NormChange
from everystep.adapters.peft_kinds import KINDS, AdaptedModule, AdapterKind, scale_patterns
from everystep.adapters.peft_parts import PREFIX, AdapterPart, ExpertsPart, Twin, sorted_parts
from everystep.adapters.targets import AdaptableParts, Target, parts_of, require_targets
from everystep.errors import FormatError, RequestError, UnsupportedError, shown
from everystep.models import Model, refuse_copies
from everystep.models.config import Fields
from everystep.nn.modes import ordinary_mode

_SHARED = re.compile(r"base_model\.(vera_[AB])")
_TENSOR = re.compile(r"base_model\.model\.(.+?)\.((?:lora|hada|lokr|oft|ia3|vera|shira)_.+)")
_MERGE = "Merge the adapter into the model's weights with PEFT and load those"
_DROPS = ("lora_dropout", "vera_dropout")
"""The shares of what is read that a kind leaves out while it learns."""
_OTHER_DROPS = ("rank_dropout", "module_dropout")
_BESIDE_GRADIENTS = (*_OTHER_DROPS, "coft", "target_r")
"""Keys by which PEFT changes an adapter by other means than gradients while it learns."""
_IDLE = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "peft_type", "peft_version", "revision"),
        *("task_type", "inference_mode", "runtime_config", "ephemeral_gpu_offload"),
        # Which modules were adapted: the names of the tensors say so.
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("feedforward_modules", "megatron_core", "ensure_weight_tying"),
        # While it learns, and before.
        *(*_DROPS, *_OTHER_DROPS, "rank_dropout_scale"),
        *("init_weights", "init_ia3_weights", "d_initial", "projection_prng_key"),
        *("eva_config", "save_projection"),
        # Of SHiRA, which values of a weight were chosen: their places are saved.
        *("mask_type", "random_seed"),
        # Of AdaLoRA, which gives ranks to modules while it learns.
        *("init_r", "target_r", "tinit", "tfinal", "deltaT", "beta1", "beta2", "total_step"),
        "orth_reg_weight",
        # Of variants, without effect unless another key asks for them.
        *("qalora_group_size", "use_effective_conv2d", "decompose_both", "decompose_factor"),
    }
)
"""The keys that change nothing of what a trained adapter computes."""
_KEEPS = (True, False, None, "gaussian", "eva", "orthogonal")
"""The values of `init_lora_weights` that leave the model below as it is."""


@dataclass(frozen=True, eq=False)
class AdapterPlan:
    """The changes that an adapter makes of a model, without the values of its tensors.

    `modules`: each projection with the names of its tensors, by what they are. `shared`: the names
    of those that all of them have in common. `parts`: what it holds beside.
    """

    model: Model
    config: Fields
    kind: AdapterKind
    modules: tuple[tuple[Target, Mapping[str, str]], ...]
    shared: Mapping[str, str]
    parts: tuple[AdapterPart, ...] = ()

    @classmethod
    def of(cls, config: Fields, names: Iterable[str], model: Model) -> AdapterPlan:
        """Return the plan of an adapter with tensors of these names.

        Raise FormatError for tensors that do not fit each other, and UnsupportedError for a kind
        that is not known, a key or a tensor that would make it compute something else, and a
        target that cannot be adapted.
        """
        kind, known = _kind(config), parts_of(model)
        transposed = any(one.part.transposed for one in known.projections.values())
        _require_known(config, kind, transposed=transposed)
        left, parts = sorted_parts(names, config, model, known)
        shared, modules = _sorted(left, kind, alone=not parts)
        targets = require_targets(known.maps, modules, model)
        found = tuple(zip(targets, modules.values(), strict=True))
        for target, held in found:
            if target.part.transposed and not kind.turned:
                what = f"a {kind.name} of a projection that lies transposed is not supported"
                raise UnsupportedError(what, got=target.module, do=_MERGE)
            _require_place(target, held, kind, config, known)
        return cls(model, config, kind, found, shared, parts)

    def made(self, tensors: Mapping[str, Tensor]) -> Adapter:
        """Return the adapter that tensors of these names make, in the model's place and type.

        It is differentiable in them. Raise FormatError for shapes that do not fit.
        """
        # AdaLoRA writes which of its values a module has kept: the shapes of the tensors say so.
        patterns = scale_patterns(self.config) if "alpha_pattern" in self.kind.keys else {}
        common = {what: self._placed(tensors[name]) for what, name in self.shared.items()}
        changes: dict[str, list[AdapterChange]] = {}
        for target, held in self.modules:
            own = {what: self._placed(tensors[name]) for what, name in held.items()}
            matrix = partial(target.matrix, self.model)
            module = AdaptedModule(
                target.module, target.shape, target.part, own | common, patterns, matrix
            )
            changes.setdefault(target.key, []).append(self.kind.make(self.config, module))
        norms: dict[str, NormChange] = {}
        for part in self.parts:
            placed = {name: self._placed(tensors[name]) for name in part.names.values()}
            for key, change in part.changes(self.model, placed):
                if isinstance(change, NormChange):
                    norms[key] = change
                else:
                    changes.setdefault(key, []).append(change)
        return Adapter({key: tuple(found) for key, found in changes.items()}, norms)

    @property
    def beside_gradients(self) -> tuple[str, ...]:
        """The keys by which PEFT changes it by other means than gradients while it learns."""
        keys: tuple[str, ...] = _BESIDE_GRADIENTS
        tied = self.model.spec.tied
        if tied and {TABLE, HEAD} <= {target.key for target, _ in self.modules}:
            keys = (*keys, "ensure_weight_tying")  # two tensors in one memory, both of which learn
        if any(isinstance(part, ExpertsPart) for part in self.parts):
            keys = (*keys, "lora_dropout")
        return keys

    @property
    def fixed(self) -> set[str]:
        """The names of the tensors that do not learn by themselves."""
        own = (name for part in self.parts if not part.learns for name in part.names.values())
        return {*self.shared.values(), *own, *self.places}

    @property
    def places(self) -> set[str]:
        """The names of the tensors that are whole numbers."""
        return {
            name
            for _, held in self.modules
            for what, name in held.items()
            if what in self.kind.places
        }

    @property
    def twins(self) -> dict[str, str]:
        """The names of tensors that stand for another, and of that."""
        twins = (part for part in self.parts if isinstance(part, Twin))
        return {name: part.of for part in twins for name in part.names.values()}

    def _placed(self, tensor: Tensor) -> Tensor:
        counts = not tensor.is_floating_point()
        return tensor.to(self.model.device, tensor.dtype if counts else self.model.dtype)


class PeftAdapter:
    """An adapter of a model, by PEFT's names; its tensors may learn.

    `training`: whether it leaves out a share of what it reads, as its settings say.
    """

    __reduce_ex__ = refuse_copies
    __slots__ = ("_kept", "_plan", "_tensors", "training")

    def __init__(self, plan: AdapterPlan, tensors: Mapping[str, Tensor]) -> None:
        self._plan = plan
        self._tensors = dict(tensors)
        self._join_twins()
        # What was computed last, with copies of the values that learn.
        self._kept: tuple[Adapter, Mapping[str, Tensor]] | None = None
        self.training = False

    @property
    def settings(self) -> Mapping[str, object]:
        """The values of its adapter_config.json."""
        return MappingProxyType(dict(self._plan.config.values))

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The values of its adapter_model.safetensors, those that learn and those that do not."""
        return MappingProxyType(self._tensors)

    @property
    def modules(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Its tensors by the module that they change and by what they are, as "lora_A"."""
        return {
            target.module: {what: self._tensors[name] for what, name in held.items()}
            for target, held in self._plan.modules
        }

    @property
    def has_parts(self) -> bool:
        """True if it changes embeddings or experts, or holds whole modules or rows of tokens."""
        by_rows = any(target.key == TABLE for target, _ in self._plan.modules)
        return by_rows or bool(self._plan.parts)

    @property
    def learns(self) -> bool:
        """True if any of its tensors require gradients."""
        return any(one.requires_grad for one in self._tensors.values())

    @property
    def dropout(self) -> float:
        """The share of what it reads that it leaves out now; 0 unless it is training."""
        values = self._plan.config.values
        return float(next((values[key] for key in _DROPS if values.get(key)), 0)) * self.training

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that can learn by PEFT's names, float32 or, of a float64 model,
        float64.

        They are leaves: a change of one changes what the adapter computes in later calls.
        """
        fixed = self._plan.fixed
        return ((name, one) for name, one in self._tensors.items() if name not in fixed)

    def parameters(self) -> Iterator[Tensor]:
        """Yield the same without names, as optimizers take them."""
        return (one for _, one in self.named_parameters())

    def requires_grad_(self, requires_grad: bool = True) -> PeftAdapter:
        """Return the adapter itself, whose tensors require gradients from now on, or no longer do.

        UnsupportedError for one that PEFT changes by other means than gradients while it learns.
        """
        values = self._plan.config.values
        beside = (key for key in self._plan.beside_gradients if values.get(key))
        if requires_grad and (key := next(beside, None)):
            raise UnsupportedError(
                f"{key} is not supported while an adapter learns",
                wanted="an adapter that gradients alone change",
                got=f"a {self._plan.kind.name} with {key}={shown(values[key])}",
                do="Train it with PEFT, and load what came of it",
            )
        wide = torch.promote_types(self._plan.model.dtype, torch.float32)
        with ordinary_mode():
            for name, one in list(self.named_parameters()):
                if requires_grad and (one.dtype != wide or one.is_inference()):
                    one = one.detach().to(wide, copy=True)
                if requires_grad and not isinstance(one, nn.Parameter):
                    one = self._tensors[name] = nn.Parameter(one.detach())  # as DDP takes them
                one.requires_grad_(requires_grad)
        self._join_twins()
        self._kept = None
        return self

    def _join_twins(self) -> None:
        for name, other in self._plan.twins.items():
            self._tensors[name] = self._tensors[other]

    def train(self, mode: bool = True) -> PeftAdapter:
        """Return the adapter itself, in training mode or out of it; RequestError unless it
        learns."""
        if mode and not self.learns:
            do = "Call requires_grad_() first, or load it with is_trainable=True"
            raise RequestError("an adapter whose tensors are fixed cannot train", do=do)
        self.training = bool(mode)
        return self

    def eval(self) -> PeftAdapter:
        """Return the adapter itself, out of training mode."""
        return self.train(False)

    def now(self) -> Adapter:
        """Return what it computes at this moment, without gradients; what it learns later does not
        change that.

        It is the same object for as long as no value has changed.
        """
        kept = None if self._follows_weights else self._kept
        if kept is None or not self._has_values(kept[1]):
            learning = {name: one for name, one in self._tensors.items() if one.requires_grad}
            with torch.no_grad():
                seen = {name: one.detach().clone() for name, one in learning.items()}
                kept = self._kept = self._plan.made(self._tensors | seen), seen
        return kept[0]

    def _has_values(self, seen: Mapping[str, Tensor]) -> bool:
        """Tell whether the tensors that learn are as they were seen.

        Their values are compared, since an optimizer may write them past the versions of torch.
        """
        learning = {name: one for name, one in self._tensors.items() if one.requires_grad}
        return learning.keys() == seen.keys() and all(
            torch.equal(one.detach(), seen[name]) for name, one in learning.items()
        )

    def live(self) -> Adapter:
        """Return what it computes, differentiable in its tensors where they learn."""
        anew = self.learns or self._follows_weights
        return self._plan.made(self._tensors) if anew else self.now()

    @property
    def _follows_weights(self) -> bool:
        """True if what it computes changes with weights of the model, which learn."""
        reads = bool(self._plan.parts or self._plan.config.values.get("use_dora"))
        return reads and self._plan.model.learns

    def follow(self, model: Model) -> None:
        """Belong to a model that was moved or converted; tensors that learn stay the same leaves,
        on its device."""
        for one in self._tensors.values():
            if one.requires_grad:
                one.data = one.data.to(model.device)
        self._plan, self._kept = replace(self._plan, model=model), None


# --- the configuration ----------------------------------------------------------------------------


def _kind(config: Fields) -> AdapterKind:
    name = config.values.get("peft_type", "LORA")
    if not isinstance(name, str) or name not in KINDS:
        raise UnsupportedError(
            f"{config.where}: peft_type is not supported",
            wanted=", ".join(KINDS),
            got=shown(name),
            do=f"{_MERGE}, or wrap the PEFT model itself with everystep.wrap",
        )
    return KINDS[name]


def _require_known(config: Fields, kind: AdapterKind, *, transposed: bool) -> None:
    """Refuse keys that would make the adapter compute something else, unless they are false, empty
    or null.

    `transposed`: weights lie so in checkpoints, which `fan_in_fan_out` says of them.
    """
    config.choice("bias", dict.fromkeys(kind.biases), "none")
    known = _IDLE | kind.keys | {"bias", "init_lora_weights"}
    for key, value in config.values.items():
        right = transposed and key == "fan_in_fan_out"
        if key not in known and value and not right:
            raise UnsupportedError(
                f"{config.where}: {key} is not supported",
                wanted=f"a plain {kind.name}, without it",
                got=shown(value)[:200],
                do=_MERGE,
            )
    begun = config.values.get("init_lora_weights")
    if not isinstance(begun, str | bool | None) or begun not in _KEEPS:
        raise UnsupportedError(
            f"{config.where}: this init_lora_weights changes the model below the adapter",
            wanted="an adapter for the weights of the model as they are",
            got=shown(begun),
            do="Save it with PEFT's save_pretrained(folder, path_initial_model_for_weight_"
            "conversion=...), which makes a plain LoRA of it",
        )


# --- the tensors ----------------------------------------------------------------------------------


def _require_place(
    target: Target,
    held: Mapping[str, str],
    kind: AdapterKind,
    config: Fields,
    known: AdaptableParts,
) -> None:
    """Refuse tensors that mean nothing where they are: tables are read by rows, maps are not."""
    by_rows, is_table = "lora_embedding_A" in held, target.key == TABLE
    if by_rows != is_table:
        wanted = "lora_embedding_A and lora_embedding_B" if is_table else "lora_A and lora_B"
        what = f"the adapter's tensors for {target.module!r} do not fit what it is"
        raise FormatError(what, wanted=wanted, got=", ".join(held))
    keys = ("use_dora", "lora_bias") if is_table else ()
    if key := next((one for one in keys if config.values.get(one)), None):
        what = f"a {kind.name} of embeddings with {key} is not supported"
        raise UnsupportedError(what, wanted=f"{key}=False", got=target.module, do=_MERGE)
    if target.module in known.routers and kind is not KINDS["LORA"]:
        what = f"a {kind.name} of a router is not supported"
        raise UnsupportedError(what, wanted="a LoRA", got=target.module, do=_MERGE)


def _sorted(
    names: Iterable[str], kind: AdapterKind, *, alone: bool
) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Return the names of the tensors that all modules share, and of those of each module, by what
    they are.

    `alone`: whether the adapter holds nothing beside them.
    """
    shared: dict[str, str] = {}
    found: dict[str, dict[str, str]] = {}
    for name in names:
        if (common := _SHARED.fullmatch(name)) is not None and common[1] in kind.shared:
            shared[common[1]] = name
            continue
        matched = _TENSOR.fullmatch(name)
        what = "" if matched is None else matched[2].removesuffix(".weight")
        if matched is None or what not in kind.tensors:
            wanted = ", ".join(f"{PREFIX}MODULE.{one}" for one in sorted(kind.tensors))
            raise UnsupportedError(
                f"the adapter holds a tensor that is not part of a {kind.name} of linear layers",
                wanted=wanted,
                got=shown(name),
                do=_MERGE,
            )
        found.setdefault(matched[1], {})[what] = name
    for module, held in found.items():
        if not any(needed <= {*held} for needed in kind.needed):
            wanted = ", or ".join(" and ".join(sorted(needed)) for needed in kind.needed)
            raise FormatError(f"the adapter has half of {module!r}", wanted=wanted, got=[*held])
    if not found and alone:
        raise FormatError("the adapter holds no tensors")
    if found and (missing := kind.shared - {*shared}):
        raise FormatError(
            f"the adapter lacks what all modules of a {kind.name} share",
            wanted=", ".join(sorted(missing)),
            got="none",
            do="Save it with save_projection=True",
        )
    return shared, dict(sorted(found.items()))
