"""A LoRA as the PEFT library saves it: adapter_config.json and adapter_model.safetensors.

Which projections it changes follows from the names of its tensors. What would make it compute
something else is refused, so an adapter that is read is the adapter that was trained.
"""

from __future__ import annotations

import math
import re
from os import PathLike

from torch import Tensor

from everystep.adapters.lora import Delta, LoRA
from everystep.errors import FormatError, MissingFileError, UnsupportedError, nearest, shown
from everystep.files.opening import as_path
from everystep.files.safetensors import Weights, open_weights
from everystep.files.strict_json import read_json
from everystep.models import Model
from everystep.models.config import Fields
from everystep.models.decoder import Decoder
from everystep.models.families import find_family
from everystep.models.parameters import Parameter, ParameterPart

CONFIG = "adapter_config.json"
STEM = "adapter_model"

_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_ADAPTABLE = re.compile(r"layers\.\d+\.(qkv|out|up|down)\.weight")
# What makes an adapter another one, unless it is absent, null, false or empty.
_REFUSED = (
    "fan_in_fan_out",
    "use_dora",
    "lora_bias",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "alora_invocation_tokens",
    "alpha_pattern",
    "modules_to_save",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
)


def read_lora(folder: str | PathLike[str], model: Model) -> LoRA:
    """Return the adapter in a folder, for this model, on its device and in its type.

    Raise MissingFileError, FormatError (a broken file; tensors that do not fit each other, the
    configuration or the model) and UnsupportedError (another kind of adapter, a variant of LoRA, a
    target that is not a projection of a decoder's layer).
    """
    folder = as_path(folder)
    values = read_json(folder / CONFIG)
    if values is None:
        raise MissingFileError(f"{folder} is not the folder of an adapter", wanted=CONFIG)
    config = Fields(values, str(folder / CONFIG))
    targets = _targets(model)
    _refuse_variants(config, transposed=any(part.transposed for _, part in targets.values()))
    weights = open_weights(folder, STEM)
    deltas: dict[str, list[Delta]] = {}
    for module, pair in sorted(_pairs(weights).items()):
        target, part = _find(targets, module)
        a, b = (weights.load(pair[half], model.dtype).to(model.device) for half in "AB")
        _check_shapes(config, module, (part.stop - part.start, target.shape[1]), a, b)
        key = target.key.removesuffix(".weight")
        delta = Delta(a, part.loaded(b), _scale(config, len(a)), part.start)
        deltas.setdefault(key, []).append(delta)
    return LoRA({key: tuple(found) for key, found in deltas.items()})


def _refuse_variants(config: Fields, *, transposed: bool) -> None:
    """Refuse variants of LoRA that compute something else.

    `transposed`: weights lie so in checkpoints, which `fan_in_fan_out` says of them.
    """
    config.choice("peft_type", {"LORA": None}, "LORA")
    config.choice("bias", {"none": None}, "none")
    for key in _REFUSED:
        value = config.values.get(key)
        if value and not (transposed and key == "fan_in_fan_out"):
            raise UnsupportedError(
                f"{config.where}: {key} is not supported",
                wanted="a plain LoRA, without it",
                got=shown(value)[:200],
                do="Merge the adapter into the model's weights with PEFT and load those",
            )


def _scale(config: Fields, rank: int) -> float:
    root = math.sqrt(rank) if config.flag("use_rslora", False) else rank
    return config.number("lora_alpha", 8) / root


def _pairs(weights: Weights) -> dict[str, dict[str, str]]:
    """Return, by module, the names of its tensors "A" and "B"."""
    found: dict[str, dict[str, str]] = {}
    for name in weights.names():
        matched = _TENSOR.fullmatch(name)
        if matched is None:
            raise UnsupportedError(
                "the adapter holds a tensor that is not part of a LoRA of linear layers",
                wanted="base_model.model.MODULE.lora_A.weight and lora_B",
                got=shown(name),
            )
        found.setdefault(matched[1], {})[matched[2]] = name
    for module, pair in found.items():
        if len(pair) < 2:
            what, wanted = f"the adapter has half of {module!r}", "lora_A and lora_B"
            raise FormatError(what, wanted=wanted, got=pair)
    if not found:
        raise FormatError("the adapter holds no tensors")
    return found


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
    targets: dict[str, tuple[Parameter, ParameterPart]], module: str
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


def _check_shapes(
    config: Fields, module: str, shape: tuple[int, int], a: Tensor, b: Tensor
) -> None:
    rank = len(a) if config.values.get("rank_pattern") else config.integer("r", 8)
    wanted = (rank, shape[1]), (shape[0], rank)
    if (tuple(a.shape), tuple(b.shape)) != wanted:
        raise FormatError(
            f"the adapter's tensors for {module!r} do not fit the model and the rank",
            wanted=f"A {wanted[0]} and B {wanted[1]}",
            got=f"{tuple(a.shape)} and {tuple(b.shape)}",
        )
