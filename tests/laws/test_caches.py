"""Law 4 with cache objects: continued from one equals uncached equals the whole in one call."""

from __future__ import annotations

from collections.abc import Collection
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import everystep as es
from everystep.api.model import LanguageModel
from tests.api.test_past import MODELS

FAMILIES = ("llama", "qwen2", "windows")
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_k": 20, "seed": 5},
    "several": {"do_sample": True, "num_return_sequences": 2, "seed": 6},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "output_scores": True},
    "beam sampling": {"num_beams": 2, "do_sample": True, "seed": 7, "output_scores": True},
    "drafts": {"prompt_lookup_num_tokens": 3},
    "penalty": {"repetition_penalty": 1.4, "no_repeat_ngram_size": 3},
}
# The others read ids, which are not passed where the prompt is only what is new.
WITHOUT_IDS = ("greedy", "sampled", "several", "beams", "beam sampling")
QUIET = {"pad_token_id": 0, "eos_token_id": 96, "return_dict_in_generate": True}


class Talk:
    """Two turns of random lengths: what is read first, and what comes after the first answer."""

    def __init__(self, seed: int, ways: Collection[str] = tuple(WAYS)) -> None:
        chance = Random(seed)
        self.model: LanguageModel = MODELS[chance.choice(FAMILIES)][1]
        self.options = WAYS[chance.choice(sorted(ways))]
        self.chunk = chance.choice([None, 1, 2, 5])
        rows, width = chance.randint(1, 3), chance.randint(1, 20)
        self.static = chance.random() < 0.3 and "prompt_lookup_num_tokens" not in self.options
        draw = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(1, 96, (rows, width), generator=draw)
        self.mask = torch.ones_like(self.ids)
        for row in range(1, rows):
            self.mask[row, : chance.randint(0, width - 1)] = 0
        self.more = torch.randint(1, 96, (rows, chance.randint(1, 12)), generator=draw)
        self.first, self.second = chance.randint(1, 6), chance.randint(1, 6)

    def say(self, ids: Tensor, mask: Tensor, **options: Any) -> Any:
        return self.model.generate(ids, attention_mask=mask, **{**QUIET, **options})

    def begin(self) -> tuple[Tensor, Tensor, Any]:
        """The whole of the second prompt, its mask, and a cache that holds the first turn."""
        past = es.StaticCache(self.model.config, 60) if self.static else es.DynamicCache()
        new = {"max_new_tokens": self.first, "min_new_tokens": self.first}
        out = self.say(self.ids, self.mask, past_key_values=past, **new)
        whole = torch.cat([out.sequences, self.more], dim=1)
        told = torch.ones(len(whole), whole.shape[1] - self.mask.shape[1], dtype=torch.long)
        return whole, torch.cat([self.mask, told], dim=1), out.past_key_values

    def go_on(self, ids: Tensor, mask: Tensor, **options: Any) -> tuple[list[list[int]], Any]:
        """The new tokens of the second turn."""
        options = {"max_new_tokens": self.second, **self.options, **options}
        out = self.say(ids, mask, **options)
        return out.sequences[:, ids.shape[1] :].tolist(), out


@pytest.mark.parametrize("seed", range(60))
def test_continued_equals_uncached_equals_whole(seed: int) -> None:
    talk = Talk(seed)
    whole, mask, past = talk.begin()
    expected, full = talk.go_on(whole, mask)
    if "prompt_lookup_num_tokens" not in talk.options:
        assert talk.go_on(whole, mask, use_cache=False)[0] == expected
    held = past.get_seq_length()
    found, out = talk.go_on(whole, mask, past_key_values=past, prefill_chunk_size=talk.chunk)
    assert found == expected
    assert out.past_key_values is past and past.get_seq_length() > held
    if "num_beams" in talk.options:
        assert out.sequences_scores.shape == full.sequences_scores.shape
        gap = (out.sequences_scores - full.sequences_scores).abs().max()
        assert gap < 1e-6


@pytest.mark.parametrize("seed", range(60))
def test_only_what_is_new_equals_the_whole(seed: int) -> None:
    talk = Talk(seed, WITHOUT_IDS)
    whole, mask, past = talk.begin()
    expected, _ = talk.go_on(whole, mask)
    new = whole[:, past.get_seq_length() :]
    found, _ = talk.go_on(new, mask, past_key_values=past, prefill_chunk_size=talk.chunk)
    assert found == expected
