"""Configurations inside the configuration: two watermarks and how to compile.

Each is built from keywords or from the dict that a file holds, checks its values at once, and goes
back to a plain dict. What they cause is done elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Self

from everystep.config.kinds import FRACTION, NUMBER, SIZE, Kind, integer, is_integer, list_of
from everystep.errors import RequestError, UnknownArgumentError, nearest


@dataclass
class _Nested:
    """`where`: what errors call it. `kinds`: what those values may be that are checked."""

    where: ClassVar[str] = "watermarking_config"
    kinds: ClassVar[Mapping[str, Kind]] = {}

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raise RequestError unless every value is possible."""
        for name, kind in self.kinds.items():
            do = f"Give {name} such a value, or leave it out"
            kind.checked(getattr(self, name), f"{self.where}.{name}", do)

    def to_dict(self) -> dict[str, Any]:
        """Return the values by name."""
        return asdict(self)

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any]) -> Self:
        """Return a configuration with the given values."""
        known = {one.name for one in fields(cls)}
        for name in config_dict:
            if name not in known:
                guess = nearest(str(name), known)
                do = f"The nearest is {guess}" if guess else "It knows " + ", ".join(sorted(known))
                raise UnknownArgumentError(f"{cls.where} has no value {name!r}", do=do)
        try:
            return cls(**config_dict)
        except TypeError:
            what, got = f"{cls.where} is incomplete", ", ".join(config_dict)
            raise RequestError(what, wanted="ngram_len and keys", got=got, do="Add them") from None


@dataclass
class WatermarkingConfig(_Nested):
    """A green-list watermark (Kirchenbauer et al. 2023): its share, strength and seeding."""

    greenlist_ratio: float = 0.25
    bias: float = 2.0
    hashing_key: int = 15485863
    seeding_scheme: str = "lefthash"
    context_width: int = 1

    kinds: ClassVar[Mapping[str, Kind]] = {
        "greenlist_ratio": FRACTION,
        "bias": NUMBER,
        "hashing_key": integer(),
        "seeding_scheme": Kind(
            "'lefthash' or 'selfhash'", lambda value: value in ("lefthash", "selfhash")
        ),
        "context_width": SIZE,
    }


@dataclass
class SynthIDTextWatermarkingConfig(_Nested):
    """A SynthID watermark (Dathathri et al. 2024): n-gram length, one key per depth, tables."""

    ngram_len: int
    keys: list[int]
    context_history_size: int = 1024
    sampling_table_seed: int = 0
    sampling_table_size: int = 2**16
    skip_first_ngram_calls: bool = False
    debug_mode: bool = False

    kinds: ClassVar[Mapping[str, Kind]] = {
        "ngram_len": SIZE,
        "keys": list_of("a non-empty list of integers", is_integer, least=1),
        "sampling_table_size": Kind(
            "an integer from 1 to 2**24", lambda value: is_integer(value) and 1 <= value <= 2**24
        ),
        "context_history_size": SIZE,
    }


@dataclass
class CompileConfig(_Nested):
    """Settings for compiling forwards, in the terms of `torch.compile`."""

    fullgraph: bool = False
    dynamic: bool | None = None
    backend: str | Callable[..., Any] = "inductor"
    mode: str = "reduce-overhead"
    options: dict[str, Any] | None = None

    where: ClassVar[str] = "compile_config"

    def to_dict(self) -> dict[str, Any]:
        """Return the values by name; a backend is the same object."""
        return {**vars(self)}


Watermark = WatermarkingConfig | SynthIDTextWatermarkingConfig


def is_nested(value: object, *ours: type) -> bool:
    """Return whether it is one of `ours`, a dict of one, or of transformers' class of that name."""
    names = {one.__name__ for one in ours}
    foreign = type(value).__name__ in names and callable(getattr(value, "to_dict", None))
    return foreign or isinstance(value, (*ours, Mapping))


def _values(value: Any) -> Mapping[str, Any]:
    """Return the values of a dict, or of an object of transformers without its private ones."""
    if isinstance(value, Mapping):
        return value
    return {name: one for name, one in value.to_dict().items() if not name.startswith("_")}


def watermark(value: Any) -> Watermark:
    """Return a watermark configuration as it is, or made of a dict or transformers' object."""
    if isinstance(value, Watermark):
        return value
    value = _values(value)
    if "ngram_len" in value or "keys" in value:
        return SynthIDTextWatermarkingConfig.from_dict(value)
    return WatermarkingConfig.from_dict(value)


def compilation(value: Any) -> CompileConfig:
    """Return a compile configuration as it is, or as for a watermark."""
    return value if isinstance(value, CompileConfig) else CompileConfig.from_dict(_values(value))
