"""The kinds of adapters that PEFT saves, each by its tensors, its settings and what they make.

Formulas are those of PEFT's forward (0.21), which decides where its merge differs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from everystep.adapters.changes import (
    AdapterChange,
    Delta,
    Dense,
    InputScaling,
    Kronecker,
    Magnitude,
    OutputScaling,
    Rotation,
)
from everystep.errors import FormatError, shown
from everystep.models.config import Fields
from everystep.models.parameters import ParameterPart

_PATTERN = re.compile(r"[\w.\\|^$*+\[\]-]{1,200}")
_MOST_REPEATS = 3  # within a pattern: what a search takes grows with its length to this power
_MOST_TERMS = 100
_MOST_SCALE = 1e30

Patterns = tuple[tuple[re.Pattern[str], float], ...]
"""Searches for names of modules, and the number of those that are found."""


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedModule:
    """A projection that an adapter changes, and the adapter's tensors for it.

    `shape`: (rows, in). `part`: how its rows lie in the network. `patterns`: settings that some
    modules have for themselves, by key. `matrix`: gives (rows, in) of the model below.
    """

    name: str
    shape: tuple[int, int]
    part: ParameterPart
    tensors: Mapping[str, Tensor]
    patterns: Mapping[str, Patterns]
    matrix: Callable[[], Tensor]

    def require(self, **wanted: tuple[int, ...]) -> None:
        """Raise FormatError for a tensor of another shape."""
        for name, shape in wanted.items():
            if tuple(self.tensors[name].shape) != shape:
                raise FormatError(
                    f"the adapter's tensors for {self.name!r} do not fit the model and the rank",
                    wanted=f"{name} {shape}",
                    got=tuple(self.tensors[name].shape),
                )

    def setting(self, key: str, default: float) -> float:
        """Return what the first pattern says that finds this module, or the default."""
        return setting_of(self.patterns[key], self.name, default)


@dataclass(frozen=True, slots=True, eq=False)
class AdapterKind:
    """A kind of adapter.

    `keys`: the settings that it computes by. `tensors`: what a module may have, and `needed`: the
    sets of which it has one. `shared`: what all modules have in common. `places`: those
    of a module's that are whole numbers and do not learn. `turned`: whether its
    tensors mean the same where checkpoints hold weights transposed. `biases`: which biases of the
    model it may have trained. `make`: makes the change of a module.
    """

    name: str
    make: Callable[[Fields, AdaptedModule], AdapterChange]
    keys: frozenset[str]
    tensors: frozenset[str]
    needed: tuple[frozenset[str], ...]
    shared: frozenset[str] = frozenset()
    places: frozenset[str] = frozenset()
    turned: bool = False
    biases: frozenset[str] = frozenset({"none"})


def scale_patterns(config: Fields) -> dict[str, Patterns]:
    """Return ranks and scales that some modules have for themselves, by patterns of their names.

    Raise FormatError for a pattern that could take long to search for, and for what is no number.
    """
    found = {}
    for key in ("rank_pattern", "alpha_pattern"):
        given = config.values.get(key) or {}
        if not isinstance(given, dict):
            raise config.wrong(key, "an object of names and numbers", given)
        found[key] = tuple(_pattern(config, key, name, value) for name, value in given.items())
    return found


def setting_of(patterns: Patterns, module: str, default: float) -> float:
    """Return the number of the first pattern that finds a module, or the default."""
    return next((value for pattern, value in patterns if pattern.match(module)), default)


def _pattern(config: Fields, key: str, name: str, value: object) -> tuple[re.Pattern[str], float]:
    """Return the search for a name, as PEFT's `get_pattern_key` has it, and its number."""
    plain = _PATTERN.fullmatch(name) and len(re.findall(r"[*+]", name)) <= _MOST_REPEATS
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if plain and 0 < number < _MOST_SCALE:
        with suppress(re.error):
            return re.compile(rf"(.*\.)?({name})$"), float(number)
    raise config.wrong(
        key,
        f"names of modules, with at most {_MOST_REPEATS} repeats, and numbers above 0",
        {name: value},
    )


# --- low rank -------------------------------------------------------------------------------------


def _lora(config: Fields, module: AdaptedModule) -> AdapterChange:
    rank = int(module.setting("rank_pattern", config.integer("r", 8)))
    root = math.sqrt(rank) if config.flag("use_rslora", False) else rank
    scale = module.setting("alpha_pattern", config.number("lora_alpha", 8)) / root
    rows, width = module.shape
    if "lora_embedding_A" in module.tensors:
        module.require(lora_embedding_A=(rank, rows), lora_embedding_B=(width, rank))
        # A has a column for each id, B makes an embedding of it: the table's rows are ids.
        return Delta(
            module.tensors["lora_embedding_B"].T, module.tensors["lora_embedding_A"].T, scale
        )
    a, b, start = module.tensors["lora_A"], module.tensors["lora_B"], module.part.start
    module.require(lora_A=(rank, width), lora_B=(rows, rank))
    shift = _only_if(config, "lora_bias", module, "lora_B.bias")
    lengths = _only_if(config, "use_dora", module, "lora_magnitude_vector")
    shift = None if shift is None else module.part.loaded(shift)
    delta = Delta(a, module.part.loaded(b), scale, start, shift)
    if lengths is None:
        return delta
    own = module.matrix()
    wide = torch.promote_types(own.dtype, torch.float32)
    # As in PEFT, what the delta does to the lengths counts as constant while it learns.
    found = torch.linalg.norm(own.to(wide) + delta.product(wide), dim=1).detach()
    gains = module.part.loaded(lengths).to(wide) / found
    return Magnitude(delta, gains.to(a.dtype), start)


def _only_if(config: Fields, key: str, module: AdaptedModule, name: str) -> Tensor | None:
    """Return the tensor that a setting asks for; FormatError if there is one without the other."""
    asked, held = config.flag(key, False), module.tensors.get(name)
    if asked != (held is not None):
        raise FormatError(
            f"{config.where}: {key} and the tensors for {module.name!r} do not agree",
            wanted=f"{name} where {key} is true, and only there",
            got=f"{key}={asked} and {'none' if held is None else 'one'}",
        )
    if held is not None:
        module.require(**{name: module.shape[:1]})
    return held


def _adalora(config: Fields, module: AdaptedModule) -> AdapterChange:
    a, values = module.tensors["lora_A"], module.tensors["lora_E"]
    rank = len(a)
    module.require(lora_A=(rank, module.shape[1]), lora_B=(module.shape[0], rank), lora_E=(rank, 1))
    alpha, begun = config.number("lora_alpha", 8), config.integer("init_r", 12)
    if rank > begun or (rank < begun and not config.values.get("rank_pattern")):
        raise FormatError(
            f"{config.where}: the ranks of {module.name!r} and init_r do not agree",
            wanted=f"{begun} rows of lora_A, or fewer and a rank_pattern",
            got=rank,
        )
    b = module.part.loaded(module.tensors["lora_B"])
    # The share of a rank stays as it began, however many of them the budget has left.
    return Delta(a * values, b, (alpha or rank) / (begun + 1e-5), module.part.start)


def _vera(config: Fields, module: AdaptedModule) -> AdapterChange:
    a, b = module.tensors["vera_A"], module.tensors["vera_B"]
    d, by_row = module.tensors["vera_lambda_d"], module.tensors["vera_lambda_b"]
    rank, (rows, width) = config.integer("r", 256), module.shape
    module.require(vera_lambda_d=(rank,), vera_lambda_b=(rows,))
    if a.dim() != 2 or b.dim() != 2 or len(a) != rank or a.shape[1] < width or len(b) < rows:
        wanted = f"vera_A of at least ({rank}, {width}) and vera_B of at least ({rows}, {rank})"
        got = f"{tuple(a.shape)} and {tuple(b.shape)}"
        raise FormatError("the adapter's projections do not fit the model", wanted=wanted, got=got)
    scaled = by_row[:, None] * b[:rows, :rank]
    return Delta(d[:, None] * a[:, :width], module.part.loaded(scaled), 1.0, module.part.start)


# --- products of small matrices -------------------------------------------------------------------


def _loha(config: Fields, module: AdaptedModule) -> AdapterChange:
    rank, (rows, width) = len(module.tensors["hada_w1_b"]), module.shape
    sides = {f"hada_w{one}_a": (rows, rank) for one in (1, 2)}
    module.require(**sides, **{f"hada_w{one}_b": (rank, width) for one in (1, 2)})
    one, two = (
        module.tensors[f"hada_w{index}_a"] @ module.tensors[f"hada_w{index}_b"] for index in (1, 2)
    )
    scale = module.setting("alpha_pattern", config.number("alpha", 8)) / rank
    return Dense(module.part.loaded(one * two * scale), module.part.start)


def _lokr(config: Fields, module: AdaptedModule) -> AdapterChange:
    rank = module.setting("rank_pattern", config.integer("r", 8))
    scale = module.setting("alpha_pattern", config.number("alpha", 8)) / rank
    left, right = _factor(module, "lokr_w1"), _factor(module, "lokr_w2")
    rows, width = len(left) * len(right), left.shape[1] * right.shape[1]
    if (rows, width) != module.shape:
        what = f"the adapter's tensors for {module.name!r} do not fit the model"
        raise FormatError(what, wanted=f"a product {module.shape}", got=(rows, width))
    if module.part.interleaved is not None:
        product = torch.kron(left, right) * scale
        return Dense(module.part.loaded(product), module.part.start)
    return Kronecker(left * scale, right, module.part.start)


def _shira(config: Fields, module: AdaptedModule) -> AdapterChange:
    values, places = module.tensors["shira_weight"], module.tensors["shira_indices"]
    rows, width = module.shape
    count = config.integer("r", 32) * (rows + width)
    module.require(shira_weight=(count,), shira_indices=(2, count))
    row, column = places.long()
    if bool((places < 0).any()) or bool((row >= rows).any()) or bool((column >= width).any()):
        raise FormatError(
            f"the adapter's shira_indices for {module.name!r} are outside of the projection",
            wanted=f"rows below {rows} and columns below {width}",
            got=f"up to {places.amax(1).tolist()} from {places.amin(1).tolist()} on",
        )
    matrix = values.new_zeros(rows, width).index_put((row, column), values, accumulate=True)
    return Dense(module.part.loaded(matrix), module.part.start)


def _factor(module: AdaptedModule, name: str) -> Tensor:
    """Return a factor (n, m), which may be a product of two."""
    held = module.tensors
    names = (name,) if name in held else (f"{name}_a", f"{name}_b")
    pair = [held[one] for one in names]
    fits = all(one.dim() == 2 for one in pair)
    if not fits or (len(pair) == 2 and pair[0].shape[1] != len(pair[1])):
        what = f"the adapter's tensors for {module.name!r} do not fit each other"
        raise FormatError(what, wanted=f"{name} as a matrix", got=[tuple(x.shape) for x in pair])
    return pair[0] if len(pair) == 1 else pair[0] @ pair[1]


# --- rotations and scales -------------------------------------------------------------------------


def _oft(config: Fields, module: AdaptedModule) -> AdapterChange:
    held, width = module.tensors["oft_R"], module.shape[1]
    size = config.integer("oft_block_size", 32, least=0)
    if not size:
        blocks = config.integer("r", 8)
        size = width // max(blocks, 1)
    if size < 2 or width % size:
        wanted = f"blocks that divide {width} positions"
        raise FormatError(f"{config.where}: oft_block_size is impossible", wanted=wanted, got=size)
    shares, count = config.flag("block_share", False), width // size
    module.require(oft_R=(1 if shares else count, size * (size - 1) // 2))
    if "use_cayley_neumann" not in config.values:
        raise FormatError(
            f"{config.where}: use_cayley_neumann is missing, so that the rotation is not known",
            wanted="an adapter that PEFT 0.16 or newer has written",
            got=shown(config.values.get("peft_version")),
        )
    skew = _skew(held, size)
    if config.flag("coft", False):
        skew = _within(skew, config.number("eps", 6e-5))
    if config.flag("use_cayley_neumann", True):
        turns = _neumann(skew, config.integer("num_cayley_neumann_terms", 5, most=_MOST_TERMS))
    else:
        one = torch.eye(size, dtype=skew.dtype, device=skew.device).expand_as(skew)
        turns = torch.linalg.solve(one + skew, one - skew, left=False)
    turns = turns.expand(count, size, size).to(held.dtype).contiguous()
    return Rotation(turns, module.shape[0], module.part.start)


def _skew(upper: Tensor, size: int) -> Tensor:
    """Return (blocks, size, size), skew-symmetric, from what stands above the diagonals."""
    wide = torch.promote_types(upper.dtype, torch.float32)
    found = torch.zeros(len(upper), size, size, dtype=wide, device=upper.device)
    rows, columns = torch.triu_indices(size, size, 1)
    found[:, rows, columns] = upper.to(wide)
    return found - found.transpose(1, 2)


def _within(skew: Tensor, eps: float) -> Tensor:
    """Return the blocks, each no longer than its share of `eps`."""
    most = eps / math.sqrt(len(skew))
    lengths = torch.linalg.matrix_norm(skew, keepdim=True)
    return torch.where(lengths <= most, skew, most * skew / lengths)


def _neumann(skew: Tensor, terms: int) -> Tensor:
    """Return I + 2 Q + ... + 2 Q^(n-1) + Q^n, the beginning of (I + Q)(I - Q)^-1.

    n is one less than the terms but at least 3; 2 terms are I + 2 Q, as in PEFT.
    """
    found = torch.eye(skew.shape[-1], dtype=skew.dtype, device=skew.device).repeat(len(skew), 1, 1)
    last, power = (max(terms - 1, 3) if terms > 2 else 0), skew
    if terms > 1:
        found += 2 * skew
    for exponent in range(2, last + 1):
        power = power @ skew
        found += power if exponent == last else 2 * power
    return found


def _ia3(config: Fields, module: AdaptedModule) -> AdapterChange:
    factors, (rows, width) = module.tensors["ia3_l"], module.shape
    if tuple(factors.shape) == (1, width):
        return InputScaling(factors[0], rows, module.part.start)
    module.require(ia3_l=(rows, 1))
    return OutputScaling(module.part.loaded(factors[:, 0]), module.part.start)


def _nothing(config: Fields, module: AdaptedModule) -> AdapterChange:
    """Refuse a module: rows of tokens are read without one."""
    raise FormatError("the adapter holds a tensor that means nothing", got=module.name)


_PLAIN = frozenset({"lora_A", "lora_B"})
_ROWS = frozenset({"lora_embedding_A", "lora_embedding_B"})
_SIDES = frozenset(f"hada_w{one}_{side}" for one in (1, 2) for side in "ab")
_FACTORS = tuple(
    frozenset((*left, *right))
    for left in (("lokr_w1",), ("lokr_w1_a", "lokr_w1_b"))
    for right in (("lokr_w2",), ("lokr_w2_a", "lokr_w2_b"))
)
_SPARSE = frozenset({"shira_weight", "shira_indices"})
_BIASES = frozenset({"none", "all", "lora_only"})
_SCALES = frozenset({"r", "alpha", "rank_pattern", "alpha_pattern", "modules_to_save"})

KINDS: Mapping[str, AdapterKind] = {
    "LORA": AdapterKind(
        "LoRA",
        _lora,
        frozenset(
            {
                *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"),
                *("use_dora", "lora_bias", "modules_to_save"),
                *("trainable_token_indices", "target_parameters"),
            }
        ),
        _PLAIN | _ROWS | {"lora_B.bias", "lora_magnitude_vector"},
        (_PLAIN, _ROWS),
        turned=True,
        biases=_BIASES,
    ),
    "LOHA": AdapterKind("LoHa", _loha, _SCALES, _SIDES, (_SIDES,)),
    "LOKR": AdapterKind("LoKr", _lokr, _SCALES, frozenset().union(*_FACTORS), _FACTORS),
    "SHIRA": AdapterKind(
        "SHiRA",
        _shira,
        frozenset({"r", "modules_to_save"}),
        _SPARSE,
        (_SPARSE,),
        places=frozenset({"shira_indices"}),
    ),
    "ADALORA": AdapterKind(
        "AdaLoRA",
        _adalora,
        frozenset({"r", "lora_alpha", "rank_pattern", "modules_to_save"}),
        _PLAIN | {"lora_E"},
        (_PLAIN | {"lora_E"},),
        turned=True,
        biases=_BIASES,
    ),
    "VERA": AdapterKind(
        "VeRA",
        _vera,
        frozenset({"r", "modules_to_save"}),
        frozenset({"vera_lambda_b", "vera_lambda_d"}),
        (frozenset({"vera_lambda_b", "vera_lambda_d"}),),
        frozenset({"vera_A", "vera_B"}),
        turned=True,
    ),
    "OFT": AdapterKind(
        "OFT",
        _oft,
        frozenset(
            {
                *("r", "oft_block_size", "coft", "eps", "block_share"),
                *("use_cayley_neumann", "num_cayley_neumann_terms", "modules_to_save"),
            }
        ),
        frozenset({"oft_R"}),
        (frozenset({"oft_R"}),),
    ),
    "IA3": AdapterKind(
        "IA3",
        _ia3,
        frozenset({"modules_to_save"}),
        frozenset({"ia3_l"}),
        (frozenset({"ia3_l"}),),
        turned=True,
    ),
    "TRAINABLE_TOKENS": AdapterKind(
        "set of trained tokens",
        _nothing,
        frozenset({"token_indices"}),
        frozenset(),
        (),
    ),
}
"""The kinds that are read, by their `peft_type`."""
