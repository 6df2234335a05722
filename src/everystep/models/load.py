"""From a configuration and a source of weights to a model, and back to named weights.

Names and shapes are compared before the first value is read. What a source is made of is not known
here.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from everystep.errors import FormatError, RequestError, UnsupportedError, shown
from everystep.memory import require_memory
from everystep.models.config import Fields, ModelConfig
from everystep.models.families import Family, find_family
from everystep.models.loader import (
    HeldWeights,
    Kept,
    TensorSource,
    WeightLoader,
    held_weights,
    network_weights,
)
from everystep.models.model import Model
from everystep.models.names import Renamed, check_names, common_names
from everystep.models.parameters import Parameter, ParameterPart
from everystep.models.splitting import refuse_split, split_loader
from everystep.models.stacks import unstacked
from everystep.models.tying import spec_as_stored, with_table
from everystep.nn.digests import add_tensor
from everystep.nn.linear import Matrix, Rows, Weight, dense, rows_of
from everystep.nn.modes import ordinary_mode
from everystep.nn.panels import SIXTEEN_BITS, ReadRows
from everystep.nn.quantized import QuantizedWeight
from everystep.nn.rounding import Rounding
from everystep.nn.split import Split

InPanels = Callable[[Any], ReadRows | None]
"""What reads rows of the panels that hold models of a specification, None where nothing does. They
are in one of the types of panels, on the CPU."""

_TOLD_NOTHING = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype")
"""Values of a configuration that tell nothing of what the model computes."""
_DIGESTED = 1 << 24  # values

_DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


def build_model(
    config: Mapping[str, Any],
    source: TensorSource,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    quantize: Rounding | None = None,
    kept: Kept | None = None,
    in_panels: InPanels | None = None,
    split: Split | None = None,
) -> Model:
    """Build a model with the weights of `source`; without `dtype`, its configuration names the
    type.

    `quantize`: its matrices are rounded to 8 or 4 bits. `kept`: where it has a quantised weight for
    a name, that is used as it is. What is not quantised is float32 then. `in_panels`: whether the
    weights lie as the native executor reads them, which computes in float32, and what reads them.
    `split`: which part of the model is built, None for the whole.
    Raise RequestError (a type beside quantised weights), UnsupportedError (a family, a type, a
    value without implementation) and FormatError (impossible values; missing, unexpected or
    misshaped weights).
    """
    family = find_family(config.get("model_type"))
    values = complete_config(config)
    quantised = quantize is not None or kept is not None
    wanted = _beside_codes(dtype) if quantised else _dtype(config, dtype)
    spec = family.read_spec(values)
    if (read := Fields(values)).has("max_position_embeddings"):
        read.integer("max_position_embeddings")
    parameters = family.all_parameters(values, spec)
    count = 1 if split is None else split.count
    names = common_names(family, spec, parameters.values(), source.names())
    own = None if kept is None else partial(_kept_as, kept, names)
    source, kept = unstacked(Renamed(source, names), own, parameters.values())
    parameters = with_table(family, spec, parameters, set(source.names()))
    loader = WeightLoader(
        parameters,
        source,
        wanted,
        torch.device(device),
        kept,
        rounding=quantize,
        panels=_in_panels(in_panels, spec, wanted, device),
    )
    check_names(family, spec, parameters.values(), loader.source)
    _require_memory(parameters.values(), wanted, device, quantised=quantised, count=count)
    spec = spec_as_stored(family, spec, loader)
    if split is not None:
        loader = split_loader(loader, spec, split)
    return _model(family, ModelConfig(values), spec, loader)


def require_split(config: Mapping[str, Any], count: int) -> None:
    """Raise UnsupportedError unless a model of this configuration can lie in parts on so many
    processes; nothing is read for that."""
    family, values = find_family(config.get("model_type")), complete_config(config)
    spec, beside = family.read_spec(values), bool(family.plan_encoders(values))
    parameters = family.all_parameters(values, spec).values()
    refuse_split(config["model_type"], spec, parameters, count, beside=beside)


def _kept_as(kept: Kept, names: Mapping[str, str], name: str) -> QuantizedWeight | None:
    return kept(names[name])


def _require_memory(
    parameters: Iterable[Parameter],
    dtype: torch.dtype | None,
    device: Any,
    *,
    quantised: bool,
    count: int,
) -> None:
    """Raise CapacityError where the weights cannot be held: in their type, or as half bytes.

    `count`: how many processes share them out.
    """
    size = 0.5 if quantised else (dtype or torch.float16).itemsize
    needed = sum(size * math.prod(one.shape) for one in parameters) / count
    do = "Load it with quantize='int8' or 'int4', in a narrower dtype, or on another machine"
    require_memory(int(needed), "this model", do, torch.device(device))


def stored_weights(model: Model) -> Iterator[tuple[str, Rows]]:
    """Yield every weight as it is stored, under its checkpoint name.

    Parts of fused ones are views where the checkpoint has the same order. What lies in panels is
    unpacked when its turn comes. Codes of a weight that a checkpoint has transposed lie row by row,
    under that name and ".T".
    """
    for part, held in _places(model):
        rows = rows_of(held, part.start, part.stop)
        if isinstance(rows, QuantizedWeight):
            yield part.codes_name, part.stored(rows)
        else:
            yield part.name, part.stored_values(rows)


def _places(model: Model) -> Iterator[tuple[ParameterPart, Weight]]:
    """Yield what has a name in the checkpoint, and the weight that has its rows.

    What a network of the caller's own has beside is named as there. Raise UnsupportedError where
    the model is a part.
    """
    refuse_part(model)
    family = find_family(model.config.model_type)
    known = family.all_parameters(model.config, model.spec)
    parts = {key: one.parts for key, one in known.items()}
    for key, held in _weights(model):
        if key not in parts:
            for one in held if isinstance(held, tuple) else (held,):
                yield ParameterPart(key, 0, one.shape[0]), one
            continue
        if isinstance(held, tuple):
            for part, one in zip(parts[key], held, strict=True):
                yield replace(part, start=0, stop=one.shape[0]), one
            continue
        for part in parts[key]:
            yield part, held


def refuse_part(model: Model) -> None:
    """Refuse to read the weights of a model as a whole where this process has a part of them."""
    split = getattr(model.network, "split", None)
    if split is not None:
        raise UnsupportedError(
            "the weights lie in parts on several processes, and this would read the whole",
            wanted="a model that one process holds",
            got=f"{split.count} processes",
            do="Load it without parallel for that",
        )


def named_weights(model: Model) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight under its checkpoint name, quantised ones as float32 copies, and one that
    lies in parts on several processes whole, which all of them ask for at the same time."""
    stacks: dict[str, Tensor] = {}
    for part, held in _places(model):
        if hasattr(held, "full_tensor"):
            held = held.full_tensor().detach()
        values = part.stored_values(dense(rows_of(held, part.start, part.stop)))
        if (stack := part.stack) is None or not stack.written:
            yield part.name, values
            continue
        if stack.name not in stacks:
            stacks[stack.name] = values.new_empty(stack.count, values.shape[1], stack.rows)
        stacks[stack.name][stack.index, :, stack.start : stack.stop] = values.T
        if stack.index == stack.count - 1 and stack.stop == stack.rows:
            yield stack.name, stacks.pop(stack.name)


def named_shapes(model: Model) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and shape of what `named_weights` yields, in its order; unpack nothing."""
    if getattr(model.network, "split", None) is not None:
        known = find_family(model.config.model_type).all_parameters(model.config, model.spec)
        yield from ((part.name, shape) for one in known.values() for part, shape in one.shapes())
        return
    for part, held in _places(model):
        shape = (part.stop - part.start, *held.shape[1:])
        shape = shape[::-1] if part.transposed else shape
        if (stack := part.stack) is None or not stack.written:
            yield part.name, shape
        elif stack.index == stack.count - 1 and stack.stop == stack.rows:
            yield stack.name, (stack.count, shape[1], stack.rows)


def exported_config(model: Model, dtype: torch.dtype) -> dict[str, Any]:
    """Return the config.json of a folder that holds the model's weights in this type."""
    values = {**model.config, "dtype": str(dtype).removeprefix("torch.")}
    values.pop("torch_dtype", None)
    # A head that a checkpoint held beside the table it was said to be tied to.
    apart = {**values, "tie_word_embeddings": False}
    if not model.spec.tied and find_family(model.config.model_type).read_spec(apart) == model.spec:
        return apart
    return values


def weight_digest(model: Model) -> str:
    """Return a text that is equal for models of one configuration whose weights agree in every bit,
    however they lie in memory."""
    digest = hashlib.sha256(_told(model))
    for part, held in _places(model):
        # Panels are unpacked a few rows at a time.
        step = max(1, _DIGESTED // max(1, math.prod(held.shape[1:])))
        for first in range(part.start, part.stop, step):
            rows = rows_of(held, first, min(first + step, part.stop))
            parts = rows.tensors() if isinstance(rows, QuantizedWeight) else {"": rows}
            for name, values in parts.items():
                add_tensor(digest, f"{part.name} {name}", values)
    return digest.hexdigest()


def weight_bytes(model: Model) -> dict[str, int]:
    """Return how many bytes of weights there are of each format or type, the most first.

    Of a model in parts on several processes they are those of this process.
    """
    found: dict[str, int] = {}
    if getattr(model.network, "split", None) is None:
        sizes = (_kind_and_bytes(part, held) for part, held in _places(model))
    else:
        sizes = ((_type_name(one), one.nbytes) for one in own_tensors(model))
    for kind, size in sizes:
        found[kind] = found.get(kind, 0) + size
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def step_bytes(model: Model) -> int | None:
    """Return how many bytes of weights a step of one row reads: all but a table that is no head.

    None where that differs from step to step, as with experts, or some are for an encoder or lie in
    another process.
    """
    network = model.network
    layers = getattr(network, "layers", ())
    if getattr(network, "split", None) is not None:
        return None
    if network.encodes or any(getattr(layer, "experts", None) is not None for layer in layers):
        return None
    places = [one for one in _places(model) if network.spec.tied or one[1] is not network.table]
    return sum(_kind_and_bytes(*place)[1] for place in places)


def _kind_and_bytes(part: Any, held: Any) -> tuple[str, int]:
    # All rows of a weight take the same room, and one is quick to unpack.
    row = rows_of(held, part.start, part.start + 1)
    count = part.stop - part.start
    if isinstance(row, QuantizedWeight):
        return str(row.format), row.bytes * count
    return _type_name(row), row.nbytes * count


def _type_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def own_tensors(model: Model) -> Iterator[Tensor]:
    """Yield the float tensors that a process has of a model in parts."""
    yield from (one for _, one in _weights(model) if isinstance(one, Tensor))


def part_digest(model: Model) -> str:
    """Return a text that is equal for parts of one configuration that agree in every bit."""
    digest = hashlib.sha256(_told(model))
    for key, one in _weights(model):
        if isinstance(one, Tensor):
            add_tensor(digest, key, one)
    return digest.hexdigest()


def _told(model: Model) -> bytes:
    told = {name: value for name, value in model.config.items() if name not in _TOLD_NOTHING}
    return json.dumps(told, sort_keys=True, default=str).encode()


def convert_model(
    model: Model,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    exact_activations: bool = False,
    in_panels: InPanels | None = None,
    learns: bool | None = None,
) -> Model:
    """Return the same weights in another type or on another device; the given model stays.

    With a `dtype` quantised weights become values of that type, without one they stay. With
    `exact_activations` the new model's quantised weights meet activations as they are, which
    separates the rounding of activations from that of weights. `in_panels` as in `build_model`.
    `learns`: whether all weights are plain float tensors that require gradients, None for as they
    are; raise UnsupportedError if one of them is quantised and `dtype` is left out.
    """
    learns = model.learns if learns is None else learns
    weights = dict(stored_weights(model))
    quantised = any(isinstance(one, QuantizedWeight) for one in weights.values())
    if learns and dtype is None and quantised:
        raise UnsupportedError(
            "quantised weights are a frozen copy, which cannot learn",
            wanted="a model with float weights",
            do="Load it with quantize=None or with a dtype, or convert it with to(dtype=...)",
        )
    family = find_family(model.config.model_type)
    wanted = model.float_type if dtype is None else _supported(dtype)
    place = torch.device(model.device if device is None else device)
    held = HeldWeights(weights)
    loader = WeightLoader(
        family.all_parameters(model.config, model.spec),
        held,
        wanted,
        place,
        held.quantised if dtype is None else None,
        exact_activations=exact_activations,
        panels=None if learns else _in_panels(in_panels, model.spec, wanted, place),
        learns=learns,
    )
    return _model(family, model.config, model.spec, loader)


def learning_weights(model: Model) -> list[tuple[str, Tensor]]:
    """Return the weights of a model that learns, by their names in a checkpoint.

    These are the tensors themselves, as the network has them: a change of one changes the model.
    Raise UnsupportedError where they are packed.
    """
    if not model.learns:
        raise UnsupportedError(
            "the model's weights are packed, and nothing can change them",
            do="Call model.requires_grad_() first",
        )
    return [(part.name, one) for part, one in learning_parts(model)]


def learning_parts(model: Model) -> list[tuple[ParameterPart, Tensor]]:
    """Return the same with what is known of each: where it is, and how it lies there."""
    return [(part, one) for part, one in _places(model) if isinstance(one, Tensor)]


def _weights(model: Model) -> Iterator[tuple[str, Matrix]]:
    """Yield key and weight of everything in the network, in the encoders and in the tower."""
    yield from network_weights(model.network)
    for encoder in model.encoders:
        yield from held_weights(encoder.name, encoder)
    yield from held_weights("vision", model.tower)


def _model(family: Family, config: ModelConfig, spec: Any, loader: WeightLoader) -> Model:
    # A caller may train these weights, which tensors of inference mode do not allow.
    with ordinary_mode(), torch.no_grad():
        network = family.assemble(spec, loader)
        encoders = tuple(plan.assemble(loader) for plan in family.plan_encoders(config))
        tower = None if family.tower is None else family.tower(spec, loader)
        return Model(config, spec, network, loader.learns, encoders, tower)


def _in_panels(
    asked: InPanels | None, spec: Any, dtype: torch.dtype, device: torch.device | str
) -> ReadRows | None:
    fits = torch.device(device).type == "cpu" and dtype in (torch.float32, *SIXTEEN_BITS)
    return asked(spec) if asked is not None and fits else None


def complete_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a config.json with its family's defaults.

    Raise UnsupportedError without one.
    """
    family = find_family(config.get("model_type"))
    # A null stays only where the family has no value for it, as in transformers.
    given = {key: value for key, value in config.items() if value is not None}
    absent = {key: None for key in config if key not in given}
    given |= _by_both_names(family.aliases, given)
    found = {"is_encoder_decoder": False} | absent | dict(family.defaults) | given
    return found | {own: found[usual] for own, usual in family.aliases.items() if usual in found}


def _by_both_names(aliases: Mapping[str, str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the usual names of what has the family's own.

    Raise FormatError where they disagree.
    """
    found = {usual: given[own] for own, usual in aliases.items() if own in given}
    for own, usual in aliases.items():
        if usual in found and given.get(usual, found[usual]) != found[usual]:
            raise FormatError(
                f"config.json: {own} and {usual} are two names of one value",
                wanted="one of them, or equal values",
                got=f"{found[usual]!r} and {given[usual]!r}",
                do=f"Remove {usual}",
            )
    return found


def _dtype(config: Mapping[str, Any], given: torch.dtype | None) -> torch.dtype:
    """Return the type that was given or that the configuration names, float32 if it names none."""
    if given is not None:
        return _supported(given)
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    found = _DTYPES.get(str(name).removeprefix("torch."))
    if found is None:
        raise FormatError(
            "config.json: dtype is unknown", wanted=", ".join(_DTYPES), got=shown(name)
        )
    return found


def _beside_codes(given: torch.dtype | None) -> torch.dtype:
    """Return float32, in which everything beside quantised weights is computed."""
    if given not in (None, torch.float32):
        raise RequestError(
            "quantised weights are computed with in float32",
            wanted="no dtype, or torch.float32",
            got=given,
            do="Leave dtype out, or leave quantize out",
        )
    return torch.float32


def _supported(dtype: torch.dtype) -> torch.dtype:
    if dtype not in _DTYPES.values():
        wanted = ", ".join(_DTYPES)
        raise UnsupportedError("no model runs in this type", wanted=wanted, got=repr(dtype))
    return dtype


def usable_device(device: str | int | torch.device) -> torch.device:
    """Return the device.

    Raise RequestError for what is not one, or holds no numbers, UnsupportedError if this machine
    does not have it.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise RequestError(
            "device is no device",
            wanted="'cpu', 'cuda', 'cuda:1' or a torch.device",
            got=shown(device),
            do="Pass device='cpu', say",
        ) from error
    if found.type == "meta":
        do = "Pass device='cpu', say"
        raise RequestError("device 'meta' holds no numbers", wanted="another device", do=do)
    if found.type not in ("cpu", "cuda") and not getattr(torch, found.type).is_available():
        what = f"device {str(found)!r} is not on this machine"
        raise UnsupportedError(what, do="Pass device='cpu'")
    count = torch.cuda.device_count() if found.type == "cuda" else 0
    if found.type == "cuda" and (found.index or 0) >= count:
        raise UnsupportedError(
            f"device {str(found)!r} is not on this machine",
            wanted="a device that torch.cuda sees",
            got=f"{count} of them" if count else "no CUDA device",
            do="Pass device='cpu', or install the driver and a build of torch with CUDA",
        )
    return found
