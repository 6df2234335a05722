"""Rows of a cache that a caller chose, repeated or put into another order."""

from __future__ import annotations

import pytest
import torch

from everystep.errors import RequestError
from tests.api.test_past import MODELS, MORE, PADDED, PADDED_IDS, run


def test_padding_is_known_of_rows_that_were_chosen() -> None:
    model = MODELS["llama"][1]
    first = run(model, PADDED_IDS, attention_mask=PADDED, eos_token_id=None)
    whole = torch.cat([first.sequences, MORE], dim=1)
    past = first.past_key_values
    past.batch_select_indices((1, 0))
    mask = torch.cat([PADDED, torch.ones(2, 8, dtype=torch.long)], dim=1)
    with pytest.raises(RequestError, match="none in row 0"):
        run(model, whole, attention_mask=mask, past_key_values=past)
    past.reorder_cache(torch.tensor([1, 0]))
    found = run(model, whole, attention_mask=mask, past_key_values=past)
    assert torch.equal(found.sequences, run(model, whole, attention_mask=mask).sequences)
