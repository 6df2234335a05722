"""A class that prepares its inputs itself, as code written for transformers does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import everystep as es
from tests.bridge.families import END, PAD, VOCABULARY, randomise


class Counting(transformers.LlamaForCausalLM):
    """Adds to every embedding how many tokens were chosen before."""

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> Any:
        given = super().prepare_inputs_for_generation(input_ids, **kwargs)
        given["chosen"] = kwargs.get("chosen", torch.zeros(len(input_ids), dtype=torch.float64))
        return given

    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: dict[str, Any], **kwargs: Any
    ) -> dict[str, Any]:
        kept = super()._update_model_kwargs_for_generation(outputs, model_kwargs, **kwargs)
        before = kept.get("chosen", torch.zeros(len(outputs.logits), dtype=torch.float64))
        return {**kept, "chosen": before + 1}

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        chosen: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        hidden = inputs_embeds
        if hidden is None:
            hidden = self.get_input_embeddings()(input_ids)
        if chosen is not None:
            hidden = hidden + 0.3 * chosen[:, None, None]
        return super().forward(inputs_embeds=hidden, attention_mask=attention_mask, **kwargs)


class Leaning(transformers.LlamaForCausalLM):
    """Hides every position but the last four, by a mask of its own."""

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> Any:
        given = super().prepare_inputs_for_generation(input_ids, **kwargs)
        mask = given["attention_mask"].clone()
        mask[:, :-4] = 0
        return {**given, "attention_mask": mask}


def made(kind: Any) -> Any:
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=128,
        pad_token_id=PAD,
        eos_token_id=END,
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind(config).to(torch.float64).eval()
        randomise(model)
    return model


IDS = torch.tensor([[PAD, PAD, 7, 8, 9], [5, 6, 7, 8, 11], [PAD, 12, 13, 7, 7]])
WAYS = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_k": 0},
    "chunks": {"prefill_chunk_size": 2},
}


@pytest.mark.parametrize("kind", [Counting, Leaning])
@pytest.mark.parametrize("way", WAYS)
def test_it_is_called_as_the_reference_calls_it(kind: Any, way: str) -> None:
    model = made(kind)
    mask = (IDS != PAD).long()
    given = {"attention_mask": mask, "max_new_tokens": 16, **WAYS[way]}
    torch.manual_seed(1)
    expected = model.generate(IDS, **given)
    torch.manual_seed(1)
    assert es.wrap(model).generate(IDS, **given).tolist() == expected.tolist()
    plain = made(transformers.LlamaForCausalLM)
    torch.manual_seed(1)
    assert es.wrap(plain).generate(IDS, **given).tolist() != expected.tolist()


def test_beams_carry_what_is_theirs() -> None:
    model = made(Counting)
    given = {"max_new_tokens": 16, "num_beams": 3}
    expected = model.generate(IDS[1:2], **given)
    assert es.wrap(model).generate(IDS[1:2], **given).tolist() == expected.tolist()


@pytest.mark.parametrize("option", [{"use_cache": False}, {"prompt_lookup_num_tokens": 3}])
def test_what_would_call_it_in_another_order_is_an_error(option: dict[str, Any]) -> None:
    with pytest.raises(es.EverystepError, match=r"fed again|truncate"):
        es.wrap(made(Counting)).generate(IDS[1:2], max_new_tokens=5, **option)
