"""Configurations inside the configuration: two watermarks and how to compile.

Each is built from keywords or from the dict that a file holds, checks its values at once, and goes
back to a plain dict. What they cause is done elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

from everystep.config.kinds import is_integer, is_list, is_number
from everystep.errors import RequestError, UnknownArgumentError, message, nearest


def _require(holds: bool, name: str, wanted: str, got: object) -> None:
    if not holds:
        do = f"Give {name.rpartition('.')[2]} such a value, or leave it out"
        raise RequestError(message(f"{name} is not valid", wanted=wanted, got=repr(got), do=do))


@dataclass
class WatermarkingConfig:
    """A green-list watermark (Kirchenbauer et al. 2023): its share, strength and seeding."""

    greenlist_ratio: float = 0.25
    bias: float = 2.0
    hashing_key: int = 15485863
    seeding_scheme: str = "lefthash"
    context_width: int = 1

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Returns if every value is possible; RequestError otherwise."""
        ratio, width, scheme = self.greenlist_ratio, self.context_width, self.seeding_scheme
        name = "watermarking_config."
        in_range = is_number(ratio) and 0 <= ratio <= 1
        _require(in_range, name + "greenlist_ratio", "a number from 0 to 1", ratio)
        _require(is_number(self.bias), name + "bias", "a number", self.bias)
        _require(is_integer(self.hashing_key), name + "hashing_key", "integer", self.hashing_key)
        known = scheme in ("lefthash", "selfhash")
        _require(known, name + "seeding_scheme", "'lefthash' or 'selfhash'", scheme)
        wide = is_integer(width) and width >= 1
        _require(wide, name + "context_width", "an integer of at least 1", width)

    def to_dict(self) -> dict[str, Any]:
        """The values by name."""
        return asdict(self)

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any]) -> WatermarkingConfig:
        """A configuration with the given values."""
        return _build(cls, config_dict, "watermarking_config")


@dataclass
class SynthIDTextWatermarkingConfig:
    """A SynthID watermark (Dathathri et al. 2024): n-gram length, one key per depth, tables."""

    ngram_len: int
    keys: list[int]
    context_history_size: int = 1024
    sampling_table_seed: int = 0
    sampling_table_size: int = 2**16
    skip_first_ngram_calls: bool = False
    debug_mode: bool = False

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Returns if every value is possible; RequestError otherwise."""
        name = "watermarking_config."
        long = is_integer(self.ngram_len) and self.ngram_len >= 1
        _require(long, name + "ngram_len", "an integer of at least 1", self.ngram_len)
        keyed = is_list(self.keys, is_integer, least=1)
        _require(keyed, name + "keys", "a non-empty list of integers", self.keys)
        size = self.sampling_table_size
        fits = is_integer(size) and 1 <= size <= 2**24
        _require(fits, name + "sampling_table_size", "an integer from 1 to 2**24", size)
        kept = is_integer(self.context_history_size) and self.context_history_size >= 1
        _require(
            kept,
            name + "context_history_size",
            "an integer of at least 1",
            self.context_history_size,
        )

    def to_dict(self) -> dict[str, Any]:
        """The values by name."""
        return asdict(self)

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any]) -> SynthIDTextWatermarkingConfig:
        """A configuration with the given values."""
        return _build(cls, config_dict, "watermarking_config")


@dataclass
class CompileConfig:
    """How forwards are compiled, in the terms of `torch.compile`."""

    fullgraph: bool = False
    dynamic: bool | None = None
    backend: str | Callable[..., Any] = "inductor"
    mode: str = "reduce-overhead"
    options: dict[str, Any] | None = field(default=None)

    def to_dict(self) -> dict[str, Any]:
        """The values by name."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any]) -> CompileConfig:
        """A configuration with the given values."""
        return _build(cls, config_dict, "compile_config")


T = TypeVar("T")
Watermark = WatermarkingConfig | SynthIDTextWatermarkingConfig


def watermark(value: Watermark | Mapping[str, Any]) -> Watermark:
    """A watermark configuration as it is, or the one whose values a dict holds."""
    if not isinstance(value, Mapping):
        return value
    if "ngram_len" in value or "keys" in value:
        return SynthIDTextWatermarkingConfig.from_dict(value)
    return WatermarkingConfig.from_dict(value)


def compilation(value: CompileConfig | Mapping[str, Any]) -> CompileConfig:
    """A compile configuration as it is, or the one whose values a dict holds."""
    return CompileConfig.from_dict(value) if isinstance(value, Mapping) else value


def _build(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    known = {one.name for one in fields(cls)}  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            guess = nearest(str(name), known)
            do = f"The nearest is {guess}" if guess else "It knows " + ", ".join(sorted(known))
            raise UnknownArgumentError(message(f"{where} has no value {name!r}", do=do))
    try:
        return cls(**values)
    except TypeError:
        needed = "ngram_len and keys"
        text = message(
            f"{where} is incomplete", wanted=needed, got=", ".join(values), do="Add them"
        )
        raise RequestError(text) from None
