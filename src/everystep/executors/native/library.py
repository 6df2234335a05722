"""The compiled library: which one fits this processor, and the structures that it reads.

Structures mirror `cpp/model.h` field by field; their sizes are compared when the library is loaded.
The library is loaded once per process. Nothing here knows what a decoder is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from everystep.errors import (
    CapacityError,
    EverystepError,
    InvariantError,
    UnsupportedError,
    message,
)
from everystep.executors.native.build import COMMAND, fitting_sets, library_path
from everystep.files.sources import SourceSettings

INTERFACE = 22


class Matrix(Structure):
    """A packed matrix; see `cpp/model.h` for this and all others."""

    _fields_ = (
        ("format", c_int32),
        ("pad", c_int32),
        ("rows", c_int64),
        ("columns", c_int64),
        ("data", c_void_p),
        ("row_scales", c_void_p),
    )


class LinearMapC(Structure):
    """Matrices with one input, outputs side by side."""

    _fields_ = (("count", c_int64), ("parts", Matrix * 3), ("bias", c_void_p))


class MlpWeights(Structure):
    """An MLP, whose gate may have no matrices."""

    _fields_ = tuple((name, LinearMapC) for name in ("gate", "up", "down"))


class ExpertWeights(Structure):
    """Experts, none where `count` is 0."""

    _fields_ = (
        *((name, c_int64) for name in ("count", "chosen", "normalised")),
        ("router", LinearMapC),
        ("each", POINTER(MlpWeights)),
    )


class RecurrenceWeights(Structure):
    """A recurrence, or none where `inward` has no matrices."""

    _fields_ = (
        *((name, LinearMapC) for name in ("inward", "select", "step")),
        *((name, c_void_p) for name in ("conv", "conv_bias", "decay", "skip")),
    )


class NormWeights(Structure):
    """A norm, or none where `weight` is null."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p))


class LayerWeights(Structure):
    """One layer."""

    _fields_ = (
        *((name, LinearMapC) for name in ("qkv", "out", "across_q", "across_kv", "across_out")),
        ("dense", MlpWeights),
        ("experts", ExpertWeights),
        ("recurrence", RecurrenceWeights),
        *((name, NormWeights) for name in ("attention", "mlp", "attention_post", "mlp_post")),
        *((name, NormWeights) for name in ("q", "k", "across", "across_post")),
        ("rope", c_int64),
        ("window", c_int64),
        ("factor", c_float),
        ("pad", c_float),
    )


class StackWeights(Structure):
    """A stack of layers, with a head if it is a decoder."""

    _fields_ = (
        *((name, c_int64) for name in ("layers", "width", "heads", "kv_heads", "head_dim")),
        *((name, c_int64) for name in ("inner", "vocabulary", "places")),
        *((name, c_int64) for name in ("kernel", "states", "rank")),
        *((name, c_int32) for name in ("norm_kind", "activation", "parallel", "whole_qk")),
        *((name, c_int32) for name in ("norms_sums", "both_ways")),
        *((name, c_float) for name in ("eps", "scale", "softcap", "embed_scale", "final_softcap")),
        ("output_scale", c_float),
        ("layer", POINTER(LayerWeights)),
        ("norm", NormWeights),
        ("embedding", Matrix),
        ("head", LinearMapC),
        ("positions", c_void_p),
        ("embed_norm", NormWeights),
        ("distances", c_void_p),
        ("reach", c_int64),
    )


class RopeRows(Structure):
    """The rotations of tokens; `held` keeps alive what it points to."""

    held: object = None
    _fields_ = (
        *((name, c_void_p) for name in ("cos", "sin", "row")),
        *((name, c_int64) for name in ("dim", "rows")),
    )


class GivenEmbeds(Structure):
    """Embeddings in place of ids."""

    _fields_ = (("offset", c_int64), ("count", c_int64), ("values", c_void_p))


class ChangeWeights(Structure):
    """A change of neighbouring panels of a linear map."""

    _fields_ = (
        *((name, c_int64) for name in ("panel", "panels", "first", "stretch")),
        ("up", Matrix),
        *((name, c_void_p) for name in ("gain", "shift")),
        *((name, c_float) for name in ("scale", "pad")),
    )


class ChangesOfMap(Structure):
    """The changes of one linear map, in the order in which they are made."""

    _fields_ = (("count", c_int64), ("each", POINTER(ChangeWeights)))


class TurnWeights(Structure):
    """A turn of what some rows of a map read."""

    _fields_ = (
        *((name, c_int64) for name in ("stretch", "blocks", "size")),
        *((name, c_void_p) for name in ("factors", "blocks_of_turns")),
    )


class TurnsOfRead(Structure):
    """The turns of what maps read."""

    _fields_ = (("count", c_int64), ("each", POINTER(TurnWeights)))


class TurnedPanels(Structure):
    """Panels of a map with rows that read what a turn makes."""

    _fields_ = (
        *((name, c_int64) for name in ("panel", "panels", "stretch")),
        ("lanes", c_void_p),
    )


class TurnedMap(Structure):
    """The turned panels of one map."""

    _fields_ = (("count", c_int64), ("each", POINTER(TurnedPanels)))


class FoldWeights(Structure):
    """Two small matrices that multiply what is read from both sides."""

    _fields_ = (
        *((name, c_int64) for name in ("stretch", "first", "size")),
        *((name, c_int64) for name in ("rows", "columns", "inner_rows", "inner_columns")),
        *((name, c_void_p) for name in ("left", "right", "places")),
    )


class FoldsOfRead(Structure):
    """The folds of what maps read."""

    _fields_ = (("count", c_int64), ("each", POINTER(FoldWeights)))


class ChangesOfLayer(Structure):
    """The changes of a layer."""

    _fields_ = (
        ("down", Matrix * 4),
        ("maps", ChangesOfMap * 5),
        ("turns", TurnsOfRead * 4),
        ("turned", TurnedMap * 5),
        ("folds", FoldsOfRead * 4),
    )


class AdapterMatrices(Structure):
    """An adapter."""

    _fields_ = (
        *((name, c_int64) for name in ("layers", "most", "most_down", "most_turns")),
        ("layer", POINTER(ChangesOfLayer)),
    )


class StepWork(Structure):
    """One step."""

    _fields_ = (
        *((name, c_int64) for name in ("tokens", "feeds", "ropes", "embeds")),
        *((name, c_void_p) for name in ("ids", "rows", "starts", "counts", "wanted", "pages")),
        ("stride", c_int64),
        ("rope", POINTER(RopeRows)),
        ("embed", POINTER(GivenEmbeds)),
        *((name, c_void_p) for name in ("positions", "best")),
        ("most", c_int64),
        *((name, c_void_p) for name in ("logits", "totals")),
        *((name, c_void_p) for name in ("best_values", "best_tokens", "best_totals")),
        *((name, c_void_p) for name in ("best_logits", "best_hidden", "hidden")),
        ("early", c_int64),
        *((name, c_void_p) for name in ("early_layers", "early_hidden")),
        ("early_rows", c_int64),
        *((name, c_void_p) for name in ("early_places", "early_logits", "attentions")),
        *((name, c_void_p) for name in ("across_rows", "across_counts", "across_pages")),
        ("across_stride", c_int64),
        ("across_attentions", c_void_p),
        *((name, c_void_p) for name in ("states_before", "states_kept", "states_after")),
        ("states_next", c_void_p),
        ("copies", c_int64),
        *((name, c_void_p) for name in ("copy_from", "copy_to")),
        *((name, c_int64) for name in ("deep", "deep_layers")),
        ("added", POINTER(GivenEmbeds)),
        ("adapters", c_int64),
        ("adapter", POINTER(AdapterMatrices)),
        *((name, c_void_p) for name in ("use_begins", "use_adapters", "use_weights")),
        ("ahead", c_int64),
    )


_MIRRORED = (
    Matrix,
    LinearMapC,
    MlpWeights,
    ExpertWeights,
    RecurrenceWeights,
    LayerWeights,
    StackWeights,
    RopeRows,
    GivenEmbeds,
    ChangeWeights,
    ChangesOfLayer,
    TurnWeights,
    TurnedPanels,
    FoldWeights,
    AdapterMatrices,
    StepWork,
)


_FUNCTIONS = {
    "es_open": (c_int32, POINTER(StackWeights), c_int32, POINTER(c_void_p)),
    "es_close": (None, c_void_p),
    "es_reserve": (c_int32, c_void_p, c_int64, c_int64),
    "es_keep_states": (c_int32, c_void_p, c_void_p, c_int64, c_void_p, c_int32),
    "es_export": (None, c_void_p, c_void_p, c_int64, c_int32, c_void_p),
    "es_import": (None, c_void_p, c_void_p, c_int64, c_void_p),
    "es_export_states": (None, c_void_p, c_int32, c_void_p),
    "es_import_states": (None, c_void_p, c_int32, c_void_p),
    "es_rest": (None, c_void_p),
    "es_guesses": (None, c_void_p, POINTER(c_int64)),
    "es_experts_read": (c_int64, c_void_p),
    "es_read_rows": (None, POINTER(Matrix), c_int64, c_int64, c_void_p),
    "es_sum_up": (None, c_void_p, c_int64, c_void_p),
    "es_read_out": (c_int32, c_void_p, c_void_p, c_int64, c_void_p),
    "es_run": (c_int32, c_void_p, POINTER(StepWork), c_int32),
}
"""The type of each function's result in the library, and those of its arguments."""


@dataclass(frozen=True)
class Status:
    """`instructions`: the set in use, or None; `reason`: why there is no library, or None."""

    instructions: str | None
    reason: str | None = None


@cache
def status() -> Status:
    """Return which library this process uses, or why none."""
    wanted = SourceSettings.from_environment().variables.get("EVERYSTEP_INSTRUCTIONS")
    if wanted == "none":
        return Status(None, "EVERYSTEP_INSTRUCTIONS is none")
    fitting = fitting_sets()
    chosen = [name for name in fitting if wanted in (None, name) and library_path(name).exists()]
    if chosen:
        return Status(chosen[0])
    if wanted is not None and wanted not in fitting:
        return Status(None, f"EVERYSTEP_INSTRUCTIONS is {wanted}, this processor has {fitting}")
    run = COMMAND if wanted is None else f"{COMMAND} {wanted}"
    return Status(None, f"it was not compiled: install a C++ compiler and run {run}")


@cache
def load() -> ctypes.CDLL:
    """Load the library; raise UnsupportedError where there is none."""
    found = status()
    if found.instructions is None:
        raise UnsupportedError("there is no native executor here", got=found.reason)
    return open_library(library_path(found.instructions))


def open_library(path: Path) -> ctypes.CDLL:
    """Open the library in a file, with the types of its functions.

    Raise UnsupportedError if it belongs to another version.
    """
    library = ctypes.CDLL(str(path))
    sizes = (c_int64 * len(_MIRRORED))()
    library.es_sizes(sizes)
    if library.es_interface() != INTERFACE or list(sizes) != [*map(ctypes.sizeof, _MIRRORED)]:
        raise UnsupportedError(
            "the native library belongs to another version",
            got=str(path),
            do=f"Run {COMMAND}",
        )
    for name, (result, *given) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, given
    return library


_LESS = "Run fewer or shorter sequences at once"
_THREADS = message(
    "the system gives this process no more threads",
    do="Raise its limits of memory and processes, or call torch.set_num_threads(1) before",
)
_FAILURES: Mapping[int, tuple[type[EverystepError], str]] = {
    1: (CapacityError, message("memory ran out in the native executor", do=_LESS)),
    2: (InvariantError, message("an id beyond the vocabulary was fed")),
    3: (InvariantError, message("matrices that are joined are not whole panels")),
    4: (CapacityError, _THREADS),
    5: (
        InvariantError,
        message("the native executor was given a page or a position that does not exist"),
    ),
}


def check(failure: int) -> None:
    """Raise the error for what a function of the library returned, unless that is 0."""
    if failure:
        kind, text = _FAILURES[failure]
        raise kind(text)
