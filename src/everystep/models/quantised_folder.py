"""The layout of a folder with quantised weights: how it is read, checked and written.

A quantised weight `x` is stored as `x.codes`, `x.scales` and, with minimums, `x.mins`, byte for
byte as they lie in memory; config.json says so under `quantization_config`. All of it is checked
before a value is read. docs/quantised-folders.md describes the layout for others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from everystep.errors import FormatError, RequestError, UnsupportedError, shown
from everystep.files.safetensors import Weights
from everystep.models.load import InPanels, build_model, stored_weights
from everystep.models.model import Model
from everystep.nn.quantized import BLOCK, QuantizedWeight
from everystep.nn.rounding import Rounding

CONFIG_KEY = "quantization_config"
METHOD, VERSION = "everystep", 1
_FORMATS: tuple[Rounding, ...] = ("int8", "int4")
_SUFFIXES = ("codes", "scales", "mins")
_ANNOUNCED = (CONFIG_KEY, "compression_config", "quantization")
"""Keys under which programs say that they quantised: the usual one, an older one, that of MLX."""

_METHODS: Mapping[str, str] = {
    "aqlm": "AQLM",
    "auto-round": "AutoRound",
    "awq": "AWQ",
    "bitnet": "BitNet",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "eetq": "EETQ",
    "fbgemm_fp8": "FBGEMM as FP8",
    "fouroversix": "Four Over Six",
    "fp8": "scales of FP8",
    "fp_quant": "FP-Quant",
    "gemma": "Gemma's own tools",
    "gguf": "GGUF inside a folder",
    "gptq": "GPTQ",
    "higgs": "HIGGS",
    "hqq": "HQQ",
    "metal": "Metal kernels",
    "mlx": "MLX",
    "modelopt": "ModelOpt",
    "mxfp4": "MXFP4",
    "mxfp8": "MXFP8",
    "nvfp4": "NVFP4",
    "quanto": "Quanto",
    "quark": "Quark",
    "sinq": "SINQ",
    "spqr": "SpQR",
    "torchao": "torchao",
    "vptq": "VPTQ",
}
"""What `quant_method` is called."""

_UNDONE: Mapping[object, str] = {
    "bitsandbytes": "from_pretrained(folder).dequantize()",
    "compressed-tensors": "from_pretrained(folder, quantization_config="
    "CompressedTensorsConfig(run_compressed=False))",
    "fp8": "from_pretrained(folder, quantization_config=FineGrainedFP8Config(dequantize=True))",
    "mxfp4": "from_pretrained(folder, quantization_config=Mxfp4Config(dequantize=True))",
}
"""How transformers makes floats again, which `save_pretrained` writes."""


def folder_format(config: Mapping[str, Any]) -> Rounding | None:
    """Return the format that a config.json announces, None where weights are floats.

    Raise UnsupportedError for a method or version of others, FormatError for a wrong field.
    """
    key = next((one for one in _ANNOUNCED if config.get(one) is not None), None)
    if key is None:
        return None
    given = config[key]
    if not isinstance(given, Mapping):
        raise FormatError(f"config.json: {key} should be an object", got=given)
    method, version = given.get("quant_method"), given.get("version")
    if (key, method, version) != (CONFIG_KEY, METHOD, VERSION):
        raise _no_reader(given)
    for format in _FORMATS:
        if given.get("format") == format:
            return format
    raise FormatError(
        f"config.json: format in {CONFIG_KEY}",
        wanted=" or ".join(_FORMATS),
        got=shown(given.get("format")),
    )


def _no_reader(given: Mapping[str, Any]) -> UnsupportedError:
    """Return the error for weights that another program has quantised, with a way out."""
    method, version = given.get("quant_method"), given.get("version")
    if method is None and given.keys() >= {"bits", "group_size"}:
        method = "mlx"
    if method is None and given.keys() & {"load_in_4bit", "load_in_8bit"}:
        method = "bitsandbytes"
    name = _METHODS.get(str(method), "another program") if method != METHOD else METHOD
    undone = f", or undo it in transformers: {_UNDONE[method]}" if method in _UNDONE else ""
    return UnsupportedError(
        f"weights that were quantised by {name} have no reader here",
        wanted=f"weights of floats, or quant_method {METHOD!r}, version {VERSION}",
        got=f"quant_method {shown(method)}, version {shown(version)}",
        do="Load the model that they were made from, with quantize='int8' or 'int4' where memory is"
        f" short, or a GGUF file of it{undone}",
    )


def build_quantised_model(
    config: Mapping[str, Any],
    weights: Weights,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    quantize: str | None = "auto",
    in_panels: InPanels | None = None,
) -> Model:
    """Build the model in a folder whose config.json announces a format.

    Codes are kept for "auto" without a `dtype` and for the folder's own format; otherwise weights
    are dequantised. `in_panels` as in `build_model`. Raise RequestError for the other format and as
    `build_model` does.
    """
    format = folder_format(config)
    source = _Joined(weights, format or "int8")
    if quantize not in ("auto", None, format):
        raise RequestError(
            "weights that were rounded before are not rounded again",
            wanted=f"'auto', {format!r} or None for quantize",
            got=shown(quantize),
            do="Quantise the model that they were made from",
        )
    keeps = quantize == format or (quantize == "auto" and dtype is None)
    plain = {key: value for key, value in config.items() if key != CONFIG_KEY}
    wanted = dtype if keeps else dtype or torch.float32
    kept = source.quantised if keeps else None
    return build_model(plain, source, dtype=wanted, device=device, kept=kept, in_panels=in_panels)


def quantised_contents(
    model: Model, format: Rounding
) -> tuple[dict[str, object], dict[str, Tensor]]:
    """Return the config.json and the tensors of a folder for this model, which is in `format`."""
    tensors: dict[str, Tensor] = {}
    for name, weight in stored_weights(model):
        if isinstance(weight, Tensor):
            tensors[name] = weight.contiguous()
            continue
        parts = zip(_SUFFIXES, (weight.codes, weight.scales, weight.mins), strict=True)
        tensors |= {f"{name}.{suffix}": part for suffix, part in parts if part is not None}
    about = {"quant_method": METHOD, "version": VERSION, "format": format}
    return {**model.config.to_dict(), "dtype": "float32", CONFIG_KEY: about}, tensors


@dataclass(frozen=True)
class _Joined:
    """A folder's tensors as a source, codes under the names of their weights; checked as made."""

    weights: Weights
    format: Rounding

    def __post_init__(self) -> None:
        for name in self.weights.names():
            base, _, suffix = name.rpartition(".")
            if suffix in _SUFFIXES:
                _check_whole(self.weights, base)
        for name in self._quantised_names():
            _check_parts(self.weights, name, self.format)
        if not self._quantised_names():
            raise FormatError(f"the folder is said to be {self.format}, but has no codes")

    def names(self) -> Iterable[str]:
        plain = [name for name in self.weights.names() if name.rpartition(".")[2] not in _SUFFIXES]
        return [*plain, *self._quantised_names()]

    def shape(self, name: str) -> tuple[int, ...]:
        codes = f"{name}.codes"
        if codes not in self.weights:
            return self.weights.shape(name)
        rows, width = self.weights.shape(codes)
        return rows, width if self.format == "int8" else 2 * width

    def load(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        weight = self.quantised(name)
        return self.weights.load(name, dtype) if weight is None else weight.dequantize().to(dtype)

    def quantised(self, name: str) -> QuantizedWeight | None:
        """Return the weight of this name, None where it is stored as floats."""
        if f"{name}.codes" not in self.weights:
            return None
        there = [one for suffix in _SUFFIXES if (one := f"{name}.{suffix}") in self.weights]
        return QuantizedWeight(self.format, *map(self.weights.load, there))

    def _quantised_names(self) -> list[str]:
        names = self.weights.names()
        return [name.removesuffix(".codes") for name in names if name.endswith(".codes")]


def _check_whole(weights: Weights, base: str) -> None:
    for suffix in ("codes", "scales"):
        if f"{base}.{suffix}" not in weights:
            raise FormatError(f"the quantised weight {base!r} has no {suffix}")
    if base in weights:
        raise FormatError(f"the weight {base!r} is there twice, as codes and as floats")


def _check_parts(weights: Weights, base: str, format: Rounding) -> None:
    shape = weights.shape(f"{base}.codes")
    if len(shape) != 2 or (format == "int4" and shape[1] % (BLOCK // 2)):
        wanted = "rows of whole blocks"
        raise FormatError(f"{base}.codes is misshaped", wanted=wanted, got=shape)
    rows, width = shape
    halves = (torch.float16, (rows, width // (BLOCK // 2)))
    if format == "int8":
        parts = {"codes": (torch.int8, shape), "scales": (torch.float32, (rows,))}
    else:
        parts = {"codes": (torch.uint8, shape), "scales": halves, "mins": halves}
    for suffix in _SUFFIXES:
        name = f"{base}.{suffix}"
        if name not in weights:
            continue
        found = (weights.dtype(name), weights.shape(name))
        if found != parts.get(suffix):
            raise FormatError(
                f"{name} does not fit the format {format}",
                wanted=parts.get(suffix, "no minimums"),
                got=found,
            )
