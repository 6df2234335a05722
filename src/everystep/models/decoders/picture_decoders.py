"""What families of decoders that read pictures have in common, beside their tower."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from everystep.errors import FormatError
from everystep.models.config import Fields
from everystep.models.decoder import assemble_decoder
from everystep.models.decoders.decoder_families import heads_of, rope_of
from everystep.models.families import Family
from everystep.models.loader import WeightLoader
from everystep.models.parameters import NAMES, CheckpointLayout, Parameter, decoder_parameters
from everystep.models.spec import DecoderSpec
from everystep.models.vision.tower import VisionTower, assemble_tower, vision_parameters
from everystep.nn.rotary import Rope, section_axes

_TEXT_NAMES = {
    **{role: name.replace("model.", "model.language_model.") for role, name in NAMES.items()},
    "head": "lm_head",
}
TOWER_NAMES: Mapping[str, str] = {
    "patch": "model.visual.patch_embed.proj",
    "table": "model.visual.pos_embed",
    "blocks": "model.visual.blocks",
    "attention_norm": "norm1",
    "mlp_norm": "norm2",
    "qkv": "attn.qkv",
    "out": "attn.proj",
    "merger": "model.visual.merger",
}
_TOKENS: Mapping[str, Any] = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}
TOWER, TEXT = "vision", "text_config"
_OLDER = (("visual.", "model.visual."), ("model.", "model.language_model."))


def vision_family(
    read_spec: Callable[[Mapping[str, Any]], DecoderSpec],
    names: Mapping[str, str],
    *,
    stacked: bool = False,
) -> Family:
    """Make a family whose tower's weights have these names; `stacked` as in `CheckpointLayout`."""
    return Family(
        {"tie_word_embeddings": False, **_TOKENS},
        read_spec,
        partial(_parameters, names, stacked),
        assemble_decoder,
        leftovers=("*rotary_*emb.inv_freq",),
        tower=_tower,
        prefixes=_OLDER,
        without={TOWER: text_alone},
    )


def text_family(
    read_spec: Callable[[Mapping[str, Any]], DecoderSpec],
    defaults: Mapping[str, Any],
    *,
    stacked: bool = False,
) -> Family:
    """Make the family of a text part alone, read from checkpoints that may hold a tower too."""
    return Family(
        {**defaults, "tie_word_embeddings": False},
        read_spec,
        partial(decoder_parameters, layout=CheckpointLayout(NAMES, stacked=stacked)),
        assemble_decoder,
        leftovers=("*rotary_*emb.inv_freq", "visual.*", "model.visual.*"),
        prefixes=(("model.language_model.", "model."), ("model.visual.", "model.visual.")),
        whole=("model.", "model.language_model."),
    )


def text_alone(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of the text part of a model that reads pictures.

    It says how many layers take what a tower would have added to them, as `n_deepstack_layers`.
    """
    outer = Fields(config)
    own = ("architectures", TEXT, "vision_config", *_TOKENS)
    whole = {name: value for name, value in config.items() if name not in own}
    taps = part_of(outer, "vision_config", {}).get("deepstack_visual_indexes", ())
    return {
        **whole,
        **part_of(outer, TEXT, {}),
        "tie_word_embeddings": config.get("tie_word_embeddings", False),
        "model_type": f"{config['model_type']}_text",
        "n_deepstack_layers": len(taps) if isinstance(taps, list | tuple) else 0,
    }


def _parameters(names: Mapping[str, str], stacked: bool, spec: DecoderSpec) -> Iterator[Parameter]:
    yield from decoder_parameters(spec, CheckpointLayout(_TEXT_NAMES, stacked=stacked))
    if spec.vision is not None:
        yield from vision_parameters(spec.vision, names)


def _tower(spec: DecoderSpec, loader: WeightLoader) -> VisionTower | None:
    return None if spec.vision is None else assemble_tower(spec.vision, loader)


def text_part(outer: Fields, defaults: Mapping[str, Any]) -> Fields:
    """Return the configuration of the text, which older files have among that of the whole."""
    values = outer.values if outer.values.get(TEXT) is None else None
    own = part_of(outer, TEXT, defaults) if values is None else {**defaults, **values}
    tied = outer.flag("tie_word_embeddings", False)
    return Fields({**own, "tie_word_embeddings": tied}, f"config.json, {TEXT}")


def part_of(outer: Fields, key: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return one of the configurations inside the other, with what it may leave out."""
    values = outer.values.get(key) or {}
    if not isinstance(values, Mapping):
        raise outer.wrong(key, "an object", values)
    return {**defaults, **{name: value for name, value in values.items() if value is not None}}


def mrope_values(read: Fields) -> tuple[str, Fields]:
    """Return under which key the rope is described, and its values."""
    key = "rope_parameters" if read.has("rope_parameters") else "rope_scaling"
    values = read.values.get(key) or {}
    if not isinstance(values, Mapping):
        raise read.wrong(key, "an object", values)
    return key, Fields(values, f"{read.where}, {key}")


def mrope_of(read: Fields, usual: list[int], theta: float, *, interleaved: bool) -> Rope:
    """Return the rope, each of whose pairs turns by one of three axes.

    `mrope_section`, or the `usual` ones, says how many by each.
    """
    key, turns = mrope_values(read)
    pairs, sections = heads_of(read)[2] // 2, turns.values.get("mrope_section", usual)
    counts = isinstance(sections, list | tuple) and len(sections) == 3
    counts = counts and all(type(one) is int and one >= 0 for one in sections)
    if not counts or sum(sections) != pairs:
        raise turns.wrong("mrope_section", f"3 numbers of pairs, {pairs} in all", sections)
    if interleaved and any(3 * sections[axis] > pairs + 2 - axis for axis in (1, 2)):
        wanted = "rows and columns in a third of the pairs each"
        raise turns.wrong("mrope_section", wanted, sections)
    plain = {n: v for n, v in turns.values.items() if not n.startswith("mrope_") and v != "mrope"}
    rope = rope_of(Fields({**read.values, key: plain}, read.where), theta=theta)
    return replace(rope, axes=section_axes(sections, interleaved=interleaved))


def vision_common(outer: Fields, read: Fields, width: int, size: int, out: str) -> dict[str, Any]:
    """Return the fields of a `VisionSpec` that all families have.

    `size`: of the tower's hidden states. `out`: the key of its features' size, which is to be the
    text's `width`.
    """
    heads = read.integer("num_heads")
    if size % (4 * heads):
        raise read.wrong("hidden_size", f"a multiple of 4 x {heads} heads", size)
    if read.integer(out) != width and not outer.has("vision_config"):
        raise FormatError(
            "config.json has no vision_config, and the usual tower does not fit its text",
            wanted=f"{out} = {width}",
            got=read.integer(out),
            do=f"Load the text alone with without=({TOWER!r},)",
        )
    if read.integer(out) != width:
        raise read.wrong(out, f"the text's hidden_size, {width}", read.integer(out))
    tokens = {key: outer.integer(key, least=0) for key in ("image_token_id", "video_token_id")}
    if len({*tokens.values()}) < 2:
        raise outer.wrong("video_token_id", "another id than image_token_id", tokens)
    return {
        "depth": read.count("depth"),
        "width": size,
        "heads": heads,
        "out": width,
        "image_token": tokens["image_token_id"],
        "video_token": tokens["video_token_id"],
        "channels": read.integer("in_channels"),
        "patch": read.integer("patch_size"),
        "frames": read.integer("temporal_patch_size"),
        "merge": read.integer("spatial_merge_size"),
    }


def block_numbers(read: Fields, key: str) -> tuple[int, ...]:
    """Read rising numbers of blocks of the tower."""
    values, depth = read.values[key], read.count("depth")
    listed = isinstance(values, list | tuple)
    if not listed or any(type(one) is not int or not 0 <= one < depth for one in values):
        raise read.wrong(key, f"numbers of blocks below {depth}", values)
    if list(values) != sorted(set(values)):
        raise read.wrong(key, "rising numbers", values)
    return tuple(values)
