"""An adapter as the PEFT library saves it: adapter_config.json and adapter_model.safetensors.

Which projections it changes follows from the names of its tensors, and what it does to them from
its kind. Every key of the configuration is one that the kind computes by, or one that changes
nothing once an adapter is trained; with any other the adapter is refused, so that one that is read
is the one that was trained.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from os import PathLike
from typing import cast

from torch import Tensor

from everystep.adapters.adapter import Adapter
from everystep.adapters.changes import AdapterChange
from everystep.adapters.peft_kinds import KINDS, AdaptedModule, AdapterKind, scale_patterns
from everystep.errors import FormatError, MissingFileError, UnsupportedError, nearest, shown
from everystep.files.opening import as_path
from everystep.files.safetensors import Weights, open_weights
from everystep.files.strict_json import read_json
from everystep.models import Model
from everystep.models.config import Fields
from everystep.models.decoder import Decoder
from everystep.models.families import find_family
from everystep.models.parameters import Parameter, ParameterPart
from everystep.nn.linear import LinearMap, dense

CONFIG = "adapter_config.json"
STEM = "adapter_model"

_PREFIX = "base_model.model."
_SHARED = re.compile(r"base_model\.(vera_[AB])(?:\.default)?")
_TENSOR = re.compile(r"base_model\.model\.(.+?)\.((?:lora|hada|lokr|oft|ia3|vera)_.+)")
_ADAPTABLE = re.compile(r"layers\.\d+\.(qkv|out|up|down)\.weight")
_MERGE = "Merge the adapter into the model's weights with PEFT and load those"
_IDLE = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "peft_type", "peft_version", "revision"),
        *("task_type", "inference_mode", "runtime_config", "ephemeral_gpu_offload"),
        # Which modules were adapted: the names of the tensors say so.
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("feedforward_modules", "megatron_core", "ensure_weight_tying"),
        # While it learns, and before.
        *("lora_dropout", "vera_dropout", "rank_dropout", "rank_dropout_scale", "module_dropout"),
        *("init_weights", "init_ia3_weights", "d_initial", "projection_prng_key"),
        *("eva_config", "save_projection"),
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


def read_adapter(folder: str | PathLike[str], model: Model) -> Adapter:
    """Return the adapter in a folder, for this model, on its device and in its type.

    Raise MissingFileError, FormatError (a broken file; tensors that do not fit each other, the
    configuration or the model) and UnsupportedError (a kind that is not known, a key or a tensor
    that would make it compute something else, a target that is not a projection of a decoder's
    layer).
    """
    folder = as_path(folder)
    values = read_json(folder / CONFIG)
    if values is None:
        raise MissingFileError(f"{folder} is not the folder of an adapter", wanted=CONFIG)
    config = Fields(values, str(folder / CONFIG))
    kind = _kind(config)
    targets = _targets(model)
    transposed = any(part.transposed for _, part in targets.values())
    _require_known(config, kind, transposed=transposed)
    weights = open_weights(folder, STEM)
    shared, modules = _sorted(weights, kind)
    common = {name: _loaded(weights, there, model) for name, there in shared.items()}
    # AdaLoRA writes which of its values a module has kept: the shapes of the tensors say so.
    patterns = scale_patterns(config) if "alpha_pattern" in kind.keys else {}
    changes: dict[str, list[AdapterChange]] = {}
    for name, held in sorted(modules.items()):
        target, part = _find(targets, name)
        if part.transposed and not kind.turned:
            what = f"a {kind.name} of a projection that lies transposed is not supported"
            raise UnsupportedError(what, got=name, do=_MERGE)
        tensors = {key: _loaded(weights, there, model) for key, there in held.items()}
        key, shape = target.key.removesuffix(".weight"), (part.stop - part.start, target.shape[1])
        matrix = partial(_rows, model, key, part)
        module = AdaptedModule(name, shape, part, tensors | common, patterns, matrix)
        changes.setdefault(key, []).append(kind.make(config, module))
    return Adapter({key: tuple(found) for key, found in changes.items()})


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
    config.choice("bias", {"none": None}, "none")
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


def _sorted(
    weights: Weights, kind: AdapterKind
) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Return the names of the tensors that all modules share, and of those of each module, by what
    they are."""
    shared: dict[str, str] = {}
    found: dict[str, dict[str, str]] = {}
    for name in weights.names():
        if (common := _SHARED.fullmatch(name)) is not None and common[1] in kind.shared:
            shared[common[1]] = name
            continue
        matched = _TENSOR.fullmatch(name)
        what = "" if matched is None else re.sub(r"\.default(?=\.|$)|\.weight$", "", matched[2])
        if matched is None or what not in kind.tensors:
            wanted = ", ".join(f"{_PREFIX}MODULE.{one}" for one in sorted(kind.tensors))
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
    if not found:
        raise FormatError("the adapter holds no tensors")
    if missing := kind.shared - {*shared}:
        raise FormatError(
            f"the adapter lacks what all modules of a {kind.name} share",
            wanted=", ".join(sorted(missing)),
            got="none",
            do="Save it with save_projection=True",
        )
    return shared, found


def _loaded(weights: Weights, name: str, model: Model) -> Tensor:
    return weights.load(name, model.dtype).to(model.device)


def _targets(model: Model) -> dict[str, tuple[Parameter, ParameterPart]]:
    """Return every projection that can be adapted, by the name of its module in a checkpoint."""
    if not isinstance(model.network, Decoder):
        got = model.config.model_type
        raise UnsupportedError("only decoders take adapters", got=got)
    return {
        part.name.removesuffix(".weight"): (one, part)
        for one in find_family(model.config.model_type).parameters(model.spec)
        if _ADAPTABLE.fullmatch(one.key)
        for part in one.parts
    }


def _find(
    targets: Mapping[str, tuple[Parameter, ParameterPart]], module: str
) -> tuple[Parameter, ParameterPart]:
    if module not in targets:
        close = nearest(module, targets)
        raise UnsupportedError(
            "the adapter changes something other than a projection of a layer of this model",
            wanted="attention and MLP projections",
            got=shown(module),
            do=f"The nearest is {close!r}" if close else None,
        )
    return targets[module]


def _rows(model: Model, key: str, part: ParameterPart) -> Tensor:
    """Return (rows, in) the values of a projection's own rows, in the network's order."""
    _, layer, role = key.split(".")
    layers = cast(Decoder, model.network).layers
    base: LinearMap = getattr(layers[int(layer)], role)
    return dense(base.matrix())[part.start : part.stop]
