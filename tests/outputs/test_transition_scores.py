"""Transition scores equal transformers', for every kind of output it has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from everystep.api.load import from_weights
from everystep.api.model import LanguageModel
from everystep.errors import RequestError

SEED = 3


def tiny_t5() -> transformers.T5ForConditionalGeneration:
    config = transformers.T5Config(
        vocab_size=37, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4,
        decoder_start_token_id=0, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.T5ForConditionalGeneration(config).double().eval()


def tiny_llama() -> transformers.LlamaForCausalLM:
    config = transformers.LlamaConfig(
        vocab_size=37, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, eos_token_id=5, pad_token_id=0, bos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).double().eval()


@pytest.fixture(scope="module", params=["decoder", "encoder-decoder"])
def pair(request: pytest.FixtureRequest) -> tuple[LanguageModel, Any]:
    """Our model and transformers', with the same weights."""
    theirs: Any = tiny_llama() if request.param == "decoder" else tiny_t5()
    with torch.no_grad():
        for weight in theirs.parameters():
            if weight.dim() > 1:
                weight.mul_(6.0)
    settings = {**theirs.config.to_dict(), "is_encoder_decoder": request.param != "decoder"}
    return from_weights(settings, theirs.state_dict(), dtype=torch.float64), theirs


def generated(model: Any, **options: Any) -> Any:
    torch.manual_seed(SEED)
    return model.generate(
        torch.tensor([[7, 8, 9, 10], [11, 12, 13, 14]]),
        max_new_tokens=7,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": True, "temperature": 0.7, "num_return_sequences": 2},
        {"num_beams": 3, "num_return_sequences": 2},
        {"num_beams": 3, "do_sample": True, "early_stopping": True},
    ],
    ids=["greedy", "sampling", "beams", "sampled beams"],
)
def test_they_equal_the_references(
    pair: tuple[LanguageModel, Any], options: dict[str, Any], normalized: bool
) -> None:
    found: list[Tensor] = []
    for model in pair:
        out = generated(model, **options)
        indices = out.beam_indices if "num_beams" in options else None
        found.append(
            model.compute_transition_scores(out.sequences, out.scores, indices, normalized)
        )
    ours, theirs = found
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours.double(), theirs.double(), atol=1e-5, rtol=0)


def test_they_add_up_to_the_scores_of_beams(pair: tuple[LanguageModel, Any]) -> None:
    model = pair[0]
    out = generated(model, num_beams=4, num_return_sequences=4, length_penalty=1.0)
    scores = model.compute_transition_scores(out.sequences, out.scores, out.beam_indices)
    lengths = (out.beam_indices >= 0).sum(dim=1)
    torch.testing.assert_close(scores.sum(dim=1) / lengths, out.sequences_scores)


def test_without_scores_there_is_nothing_to_read(pair: tuple[LanguageModel, Any]) -> None:
    with pytest.raises(RequestError, match="output_scores=True"):
        pair[0].compute_transition_scores(torch.zeros(1, 3, dtype=torch.int64), None)


def test_sequences_must_fit_their_rows(pair: tuple[LanguageModel, Any]) -> None:
    scores = (torch.zeros(2, 5),)
    with pytest.raises(RequestError, match="beam_indices"):
        pair[0].compute_transition_scores(torch.zeros(1, 3, dtype=torch.int64), scores)
