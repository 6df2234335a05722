"""The families of models that can be built, by the `model_type` of their configuration.

A file holds its `FAMILIES` and is imported when a model of one is built.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any

from everystep.errors import RequestError, UnsupportedError, shown
from everystep.models.encoders import EncoderPlan
from everystep.models.loader import WeightLoader
from everystep.models.parameters import Parameter, ParameterPart
from everystep.models.vision.tower import VisionTower
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
    "qwen2_5_vl": "decoders.qwen2_vl",
    "qwen2_5_vl_text": "decoders.qwen2_vl",
    "qwen2_vl": "decoders.qwen2_vl",
    "qwen2_vl_text": "decoders.qwen2_vl",
    "qwen3": "decoders.qwen",
    "qwen3_moe": "decoders.mixtures",
    "qwen3_vl": "decoders.qwen3_vl",
    "qwen3_vl_moe": "decoders.qwen3_vl",
    "qwen3_vl_moe_text": "decoders.qwen3_vl",
    "qwen3_vl_text": "decoders.qwen3_vl",
    "smollm3": "decoders.smollm3",
    "stablelm": "decoders.stablelm",
    "starcoder2": "decoders.starcoder2",
    "t5": "encoder_decoders.t5",
    "whisper": "encoder_decoders.whisper",
}


def no_encoders(config: Mapping[str, Any]) -> tuple[EncoderPlan, ...]:
    """Plan nothing, as most families do."""
    return ()


@dataclass(frozen=True)
class Family:
    """The way from a configuration to a spec, its parameters, and a network of loaded ones.

    `defaults`: what the configuration may leave out. `leftovers`: patterns of names in checkpoints
    that hold nothing that is needed. `aliases`: the family's own names of values in a configuration
    -> the usual ones, which count; it may use either. `plan_encoders`: the encoders of prompt
    inputs that a configuration, complete with its defaults, describes beside the network. `tower`:
    what reads pictures, where the family has that. `prefixes`: with what names begin in other
    checkpoints, and with what they begin here. `whole`: with what names begin here, and in the
    module that other libraries have for the part and the rest together, where they have none for
    the part alone. `without`: the parts that can be left out, by name: each makes of a
    configuration that of a model without the part.
    """

    defaults: Mapping[str, Any]
    read_spec: Callable[[Mapping[str, Any]], Any]
    parameters: Callable[[Any], Iterable[Parameter]]
    assemble: Callable[[Any, WeightLoader], Network]
    leftovers: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    plan_encoders: Callable[[Mapping[str, Any]], tuple[EncoderPlan, ...]] = no_encoders
    tower: Callable[[Any, WeightLoader], VisionTower | None] | None = None
    prefixes: tuple[tuple[str, str], ...] = ()
    whole: tuple[str, str] | None = None
    without: Mapping[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]] = field(
        default_factory=dict
    )

    def in_whole(self, name: str) -> str:
        """Return the name of a module or weight as other libraries have it."""
        if self.whole is None or name.startswith(self.whole[1]):
            return name
        here, there = self.whole
        return there + name.removeprefix(here) if name.startswith(here) else name

    def all_parameters(self, config: Mapping[str, Any], spec: Any) -> dict[str, Parameter]:
        """Return the parameters of the network and of the encoders, by their keys."""
        plans = self.plan_encoders(config)
        beside = (one for plan in plans for one in plan.parameters)
        return {one.key: one for one in (*self.parameters(spec), *beside)}

    def leaves_over(self, spec: Any, name: str) -> bool:
        """Return whether checkpoints may hold this for nothing, as a copy of a tied head."""
        if any(fnmatchcase(name, pattern) for pattern in self.leftovers):
            return True
        return spec.tied and name == self.head(spec).name

    def head(self, spec: Any) -> ParameterPart:
        """Return what the head is in a checkpoint that holds one."""
        parameters = self.parameters(replace(spec, tied=False))
        (head,) = next(one.parts for one in parameters if one.key == "head.weight")
        return head


def config_without(config: Mapping[str, Any], parts: Iterable[str]) -> Mapping[str, Any]:
    """Return the configuration of the model without some of its parts, each of which it may have
    or lack; raise RequestError for a part that its family cannot do without."""
    for part in parts:
        kind = config.get("model_type")
        known = find_family(kind).without
        if part not in known:
            raise RequestError(
                f"a model of type {kind} has no such part that can be left out",
                wanted=" or ".join(map(repr, known)) or "no part at all",
                got=f"without={part!r}",
                do="Leave it out of without",
            )
        config = known[part](config)
    return config


_ELSEWHERE = (
    "If transformers knows it, load it there and pass the model to everystep.wrap, which needs"
    " the extra everystep[transformers]"
)


def find_family(model_type: object) -> Family:
    """Return the family of a `model_type`; raise UnsupportedError when there is none."""
    if not isinstance(model_type, str) or model_type not in MODULES:
        meant = intended_family(str(model_type))
        raise UnsupportedError(
            "this kind of model has no implementation here",
            wanted=f"model_type of {', '.join(MODULES)}",
            got=shown(model_type),
            do=f"Perhaps you meant {meant!r}" if meant else _ELSEWHERE,
        )
    module = import_module(f"everystep.models.{MODULES[model_type]}")
    family: Family = module.FAMILIES[model_type]
    return family


def intended_family(name: str) -> str | None:
    """Return the family whose name this is, misspelt; None where it may be another's as well.

    Names of families differ by a letter or a digit: bert and bart, olmo2 and molmo2, phi and phi3.
    So case and separators may differ, and one letter inside a word be missing, added or out of
    turn.
    """
    return next((one for one in MODULES if _is_misspelt(name, one)), None)


def _is_misspelt(name: str, known: str) -> bool:
    given, words = _words(name), _words(known)
    if "".join(given) == "".join(words):
        return True
    wrong = [(one, word) for one, word in zip(given, words, strict=False) if one != word]
    return len(given) == len(words) and len(wrong) == 1 and _has_slip(*wrong[0])


def _words(name: str) -> list[str]:
    """Return its words and its numbers."""
    return re.findall(r"[a-z]+|\d+", name.lower())


def _has_slip(given: str, word: str) -> bool:
    if len(word) < 4 or (given[0], given[-1]) != (word[0], word[-1]):
        return False
    short, long = sorted((given, word), key=len)
    if len(short) < len(long):
        return any(long[:i] + long[i + 1 :] == short for i in range(len(long)))
    return any(
        given[:i] + given[i + 1] + given[i] + given[i + 2 :] == word for i in range(len(given) - 1)
    )
