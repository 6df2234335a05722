"""The families of models that can be built, by the `model_type` of their configuration.

A file holds its `FAMILIES` and is imported when a model of one is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any

from everystep.errors import UnsupportedError, nearest
from everystep.models.encoders import EncoderPlan
from everystep.models.loader import WeightLoader
from everystep.models.parameters import Parameter
from everystep.nn.network import Network

# Every `model_type` that can be built, and the file with its family.
MODULES: Mapping[str, str] = {
    "bart": "encoder_decoders.bart",
    "doclayllm": "layout.family",
    "falcon": "decoders.falcon",
    "gemma2": "decoders.gemma",
    "gemma3_text": "decoders.gemma",
    "gpt2": "decoders.gpt2",
    "gpt_bigcode": "decoders.gpt2",
    "gpt_neox": "decoders.gpt_neox",
    "llama": "decoders.llama",
    "mamba": "mamba",
    "marian": "encoder_decoders.marian",
    "mbart": "encoder_decoders.mbart",
    "mistral": "decoders.mistral",
    "mixtral": "decoders.mixtures",
    "mt5": "encoder_decoders.t5",
    "olmo2": "decoders.olmo2",
    "opt": "decoders.opt",
    "phi": "decoders.phi",
    "phi3": "decoders.phi3",
    "qwen2": "decoders.qwen",
    "qwen3": "decoders.qwen",
    "qwen3_moe": "decoders.mixtures",
    "smollm3": "decoders.smollm3",
    "stablelm": "decoders.stablelm",
    "starcoder2": "decoders.starcoder2",
    "t5": "encoder_decoders.t5",
    "whisper": "encoder_decoders.whisper",
}


def no_encoders(config: Mapping[str, Any]) -> tuple[EncoderPlan, ...]:
    """What most families plan."""
    return ()


@dataclass(frozen=True)
class Family:
    """How a configuration becomes a spec, a spec parameters, and loaded parameters a network.

    `defaults`: what the configuration may leave out. `leftovers`: patterns of names in checkpoints
    that hold nothing that is needed. `aliases`: the family's own names of values in a configuration
    -> the usual ones, which count; it may use either. `synonyms`: further names of tensors -> those
    that parameters have. `plan_encoders`: the encoders of prompt inputs that a configuration,
    complete with its defaults, describes beside the network.
    """

    defaults: Mapping[str, Any]
    read_spec: Callable[[Mapping[str, Any]], Any]
    parameters: Callable[[Any], Iterable[Parameter]]
    assemble: Callable[[Any, WeightLoader], Network]
    leftovers: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    synonyms: Mapping[str, str] = field(default_factory=dict)
    plan_encoders: Callable[[Mapping[str, Any]], tuple[EncoderPlan, ...]] = no_encoders

    def all_parameters(self, config: Mapping[str, Any], spec: Any) -> dict[str, Parameter]:
        """Those of the network and of the encoders, by their keys."""
        plans = self.plan_encoders(config)
        beside = (one for plan in plans for one in plan.parameters)
        return {one.key: one for one in (*self.parameters(spec), *beside)}

    def leaves_over(self, spec: Any, name: str) -> bool:
        """Whether checkpoints may hold this for nothing, as they may a copy of a tied head."""
        leftovers = (*self.leftovers, "lm_head.weight") if spec.tied else self.leftovers
        return any(fnmatchcase(name, pattern) for pattern in leftovers)


def find_family(model_type: object) -> Family:
    """The family of a `model_type`; UnsupportedError when there is none."""
    if not isinstance(model_type, str) or model_type not in MODULES:
        close = nearest(str(model_type), MODULES)
        raise UnsupportedError(
            "this kind of model has no implementation here",
            wanted=f"model_type of {', '.join(MODULES)}",
            got=repr(model_type),
            do=f"The nearest is {close!r}" if close else None,
        )
    module = import_module(f"everystep.models.{MODULES[model_type]}")
    family: Family = module.FAMILIES[model_type]
    return family
