"""Tensors that callers get may be changed in place, and losses go back through them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from everystep.api.load import from_weights
from everystep.api.model import LanguageModel
from everystep.outputs import TokenLogprobs
from everystep.testing.models import tiny_llama
from tests.outputs.test_transition_scores import tiny_t5

IDS = torch.tensor([[5, 6, 7, 5, 6], [9, 8, 9, 8, 9]])
SHOWN = ("scores", "logits", "hidden_states", "attentions")


def with_encoder() -> LanguageModel:
    theirs = tiny_t5()
    return from_weights(theirs.config.to_dict(), theirs.state_dict(), dtype=torch.float64)


MODELS = {
    "decoder": tiny_llama,
    "decoder in panels": lambda: tiny_llama(dtype=torch.float32),
    "with encoder": with_encoder,
}


@pytest.fixture(scope="module", params=MODELS, ids=lambda name: name.replace(" ", "-"))
def model(request: pytest.FixtureRequest) -> LanguageModel:
    made: LanguageModel = MODELS[request.param]()  # type: ignore[operator]
    return made


def tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor inside, with where it stands."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, tuple | list):
        for place, one in enumerate(value):
            yield from tensors(one, f"{name}[{place}]")
    elif isinstance(value, TokenLogprobs):
        yield from tensors(list(vars(value).values()), name)


@pytest.mark.parametrize(
    "settings",
    [{}, {"num_beams": 2}, {"do_sample": True, "num_return_sequences": 2}],
    ids=["greedy", "beams", "sampling"],
)
def test_outputs_are_ordinary(model: LanguageModel, settings: dict[str, Any]) -> None:
    asked = {f"output_{name}": True for name in SHOWN}
    out = model.generate(
        IDS, max_new_tokens=3, return_dict_in_generate=True, logprobs=2, **asked, **settings
    )
    cache = [tuple(pair) for pair in out.past_key_values.to_legacy_cache()]
    held = {**out, "logprobs": out.logprobs, "past_key_values": cache}
    found = [pair for name, value in held.items() for pair in tensors(value, name)]
    assert {"sequences", "scores[0]", "past_key_values[0][0]"} <= {name for name, _ in found}
    assert [name for name, tensor in found if tensor.is_inference()] == []


def test_sequences_may_be_changed_and_learnt_from(model: LanguageModel) -> None:
    sequences = model.generate(IDS, max_new_tokens=3)
    sequences[:, 0] = 4
    table = torch.ones(model.vocab_size, 2, requires_grad=True)
    torch.nn.functional.embedding(sequences, table).sum().backward()
    assert table.grad is not None


def test_weights_may_be_trained_elsewhere(model: LanguageModel) -> None:
    for name, weight in model.state_dict().items():
        scale = torch.ones((), dtype=weight.dtype, requires_grad=True)
        (scale * weight).sum().backward()
        assert scale.grad is not None, name


def test_a_loop_of_the_callers_returns_what_may_be_changed() -> None:
    def loop(model: Any, input_ids: Tensor, **inputs: Any) -> Tensor:
        scores = model(input_ids, attention_mask=inputs["attention_mask"]).logits[:, -1]
        chosen = inputs["logits_processor"](input_ids, scores).argmax(-1)
        return torch.cat([input_ids, chosen[:, None]], dim=-1)

    sequences = tiny_llama().generate(IDS, max_new_tokens=1, custom_generate=loop)
    sequences[:, 0] = 4
    assert sequences.shape == (2, 6)
