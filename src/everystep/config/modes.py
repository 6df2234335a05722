"""Which way of generating a configuration asks for, by the reference's names and rules."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any


class GenerationMode(StrEnum):
    """The ways of generating; `GenerationMode` of transformers 5.23.0."""

    CONTRASTIVE_SEARCH = "contrastive_search"
    GREEDY_SEARCH = "greedy_search"
    SAMPLE = "sample"
    ASSISTED_GENERATION = "assisted_generation"
    DOLA_GENERATION = "dola_generation"
    BEAM_SEARCH = "beam_search"
    BEAM_SAMPLE = "beam_sample"
    CONSTRAINED_BEAM_SEARCH = "constrained_beam_search"
    GROUP_BEAM_SEARCH = "group_beam_search"


_SINGLE = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


def generation_mode(values: Mapping[str, Any], *, assisted: bool = False) -> GenerationMode:
    """The mode that every field's values stand for; `assisted` by a second model.

    Drafts and DoLa build on greedy decoding and sampling, and are not modes of anything else.
    """
    base = _base_mode(values)
    if base not in _SINGLE:
        return base
    drafts = ("prompt_lookup_num_tokens", "assistant_early_exit")
    if assisted or values["use_mtp"] or any(values[name] is not None for name in drafts):
        return GenerationMode.ASSISTED_GENERATION
    if values["dola_layers"] is not None:
        return GenerationMode.DOLA_GENERATION
    return base


def _base_mode(values: Mapping[str, Any]) -> GenerationMode:
    if values["constraints"] is not None or values["force_words_ids"] is not None:
        return GenerationMode.CONSTRAINED_BEAM_SEARCH
    sampled = bool(values["do_sample"])
    if (values["num_beams"] or 1) == 1:
        if sampled:
            return GenerationMode.SAMPLE
        contrastive = (values["top_k"] or 0) > 1 and (values["penalty_alpha"] or 0) > 0
        return GenerationMode.CONTRASTIVE_SEARCH if contrastive else GenerationMode.GREEDY_SEARCH
    if (values["num_beam_groups"] or 1) > 1:
        return GenerationMode.GROUP_BEAM_SEARCH
    return GenerationMode.BEAM_SAMPLE if sampled else GenerationMode.BEAM_SEARCH
