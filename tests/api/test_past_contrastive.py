"""Contrastive search beside a cache: it reads hidden states, which no cache holds."""

from __future__ import annotations

import pytest
import torch

import everystep as es
from everystep.errors import RequestError
from tests.api.test_past import IDS, MODELS, MORE, _past, run


@pytest.mark.parametrize("alpha", [0.5, 1.3])
def test_contrastive_search_goes_on_from_a_cache(alpha: float) -> None:
    """It feeds the prompt again, since a cache holds no hidden states."""
    model, options = MODELS["llama"][1], {"penalty_alpha": alpha, "top_k": 4}
    whole, past = torch.cat([IDS, IDS], dim=1), _past()
    fresh = run(model, whole, **options).sequences
    for cache in (past, es.DynamicCache()):
        assert torch.equal(run(model, whole, past_key_values=cache, **options).sequences, fresh)
    assert past.get_seq_length() == 10


def test_contrastive_search_needs_the_ids_of_the_past() -> None:
    # A mask that is longer than the ids says that these come after the cache.
    asked = {"attention_mask": torch.ones(2, 13, dtype=torch.long), "past_key_values": _past()}
    with pytest.raises(RequestError, match="lacks hidden states"):
        run(MODELS["llama"][1], MORE, penalty_alpha=0.5, top_k=4, **asked)
