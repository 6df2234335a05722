"""A model whose weights learn has transformers' gradients; packed weights refuse theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from everystep.api.model import LanguageModel
from everystep.errors import UnsupportedError
from everystep.models import Model, convert_model, learning_weights
from everystep.models.families import find_family
from tests.executors.models import SPECS, narrow_model, random_model
from tests.models.tiny import ids, ours, reference_decoder, reference_pair, reference_t5

REFERENCES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: reference_decoder("llama", torch.float64, attention_bias=True, mlp_bias=True),
    "qwen2": lambda: reference_decoder("qwen2", torch.float64, tie_word_embeddings=True),
    "gpt2": lambda: reference_decoder("gpt2", torch.float64),
    "falcon": lambda: reference_decoder(
        "falcon", torch.float64, new_decoder_architecture=True, num_kv_heads=2
    ),
    "olmo2": lambda: reference_decoder("olmo2", torch.float64),
    "qwen3_moe": lambda: reference_decoder("qwen3_moe", torch.float64, norm_topk_prob=True),
    "t5": lambda: reference_t5(torch.float64, feed_forward_proj="gated-gelu"),
    **{kind: partial(reference_pair, kind, torch.float64) for kind in ("bart", "mbart", "marian")},
}

# What a router chooses changes in jumps, and experts that nobody chose have no gradient.
SMOOTH = [name for name in SPECS if "experts" not in name]


def gradients(model: Model) -> dict[str, Tensor]:
    """Every gradient by the name that the weight has in a checkpoint, as it lies there."""
    family = find_family(model.config.model_type)
    parts = {part.name: part for one in family.parameters(model.spec) for part in one.parts}
    return {
        name: parts[name].stored_values(weight.grad)
        for name, weight in learning_weights(model)
        if weight.grad is not None
    }


@pytest.mark.parametrize("name", REFERENCES)
def test_gradients_are_the_references(name: str) -> None:
    reference = REFERENCES[name]()
    model = convert_model(ours(reference), learns=True)
    encodes = reference.config.is_encoder_decoder
    read, mask = ids(2, 7), torch.ones(2, 7, dtype=torch.int64)
    mask[1, :3] = 0
    places = {} if encodes else {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    written = {"decoder_input_ids": ids(2, 5)} if encodes else {}
    theirs = reference(read, attention_mask=mask, **places, **written, use_cache=False).logits
    found = model.forward(read, mask, **places, **written)
    wanted = torch.randn_like(theirs)
    if not encodes:
        wanted = wanted * mask[..., None]
    (theirs * wanted).sum().backward()
    (found * wanted).sum().backward()
    own = gradients(model)
    for weight, parameter in reference.named_parameters():
        if parameter.grad is not None and weight in own:
            # transformers takes root mean squares in float32, gradients included.
            scale = parameter.grad.abs().max()
            assert (own[weight] - parameter.grad).abs().max() <= 1e-6 * scale + 1e-12, weight
    assert len(own) >= 9


def moved(model: Model, directions: list[Tensor], step: float) -> Iterator[None]:
    """The weights of the model lie a step further for a while."""
    with torch.no_grad():
        for (_, weight), direction in zip(learning_weights(model), directions, strict=True):
            weight.add_(direction, alpha=step)
    yield
    with torch.no_grad():
        for (_, weight), direction in zip(learning_weights(model), directions, strict=True):
            weight.add_(direction, alpha=-step)


@pytest.mark.parametrize("name", SMOOTH)
def test_every_decoder_is_differentiable(name: str) -> None:
    model = random_model(SPECS[name], learns=True)
    read = torch.arange(12).view(2, 6)
    directions = [torch.randn_like(weight) for _, weight in learning_weights(model)]
    wanted = torch.randn(2, 6, 40, dtype=torch.float64)

    def loss() -> Tensor:
        return (model.forward(read) * wanted).sum()

    loss().backward()
    pairs = zip(learning_weights(model), directions, strict=True)
    along = sum(float((weight.grad * direction).sum()) for (_, weight), direction in pairs)
    values = []
    for step in (1e-4, -1e-4):
        for _ in moved(model, directions, step):
            values.append(float(loss().detach()))
    assert along == pytest.approx((values[0] - values[1]) / 2e-4, rel=2e-2)


@pytest.mark.parametrize("name", SMOOTH)
def test_every_decoder_has_the_same_gradients_in_float32(name: str) -> None:
    wide = random_model(SPECS[name], learns=True)
    narrow = random_model(SPECS[name], dtype=torch.float32, learns=True)
    wanted = torch.randn(2, 6, 40)
    for model in (wide, narrow):
        (model.forward(torch.arange(12).view(2, 6)) * wanted).sum().backward()
    for (_, one), (_, other) in zip(learning_weights(narrow), learning_weights(wide), strict=True):
        assert (one.grad - other.grad).abs().max() <= 1e-3 * other.grad.abs().max()


def test_a_model_learns_through_the_face() -> None:
    model = LanguageModel(narrow_model("llama", None, panels=True))
    read = torch.arange(12).view(2, 6)
    before = model(read).logits
    assert model.requires_grad_() is model
    with torch.enable_grad():
        logits = model(read).logits
        logits.square().sum().backward()
    assert torch.allclose(logits, before, atol=1e-4)
    assert model.runs_on.startswith("torch")
    named = dict(model.named_parameters())
    assert named["model.embed_tokens.weight"].grad.abs().sum() > 0
    assert all(weight.grad is not None for weight in model.parameters())
    tokens = model.generate(read, max_new_tokens=4, do_sample=False)
    torch.optim.SGD(model.parameters(), lr=10.0).step()
    assert not torch.equal(model.generate(read, max_new_tokens=4, do_sample=False), tokens)
    model.requires_grad_(False)
    assert not model(read).logits.requires_grad
    embeds = named["model.embed_tokens.weight"][read].detach().requires_grad_()
    model(inputs_embeds=embeds).logits.sum().backward()
    assert embeds.grad is not None


def test_learning_weights_are_the_models_own_after_a_change() -> None:
    model = LanguageModel(narrow_model("llama", None)).requires_grad_()
    kept = list(model.parameters())
    model.requires_grad_(False).requires_grad_(True)
    assert all(a is b for a, b in zip(model.parameters(), kept, strict=True))
    assert all(not weight.requires_grad for weight in model.state_dict().values())


@pytest.mark.parametrize("panels", [False, True])
def test_packed_weights_refuse_gradients(panels: bool) -> None:
    model = LanguageModel(narrow_model("llama", None, panels=panels))
    read = torch.randn(1, 4, 32, requires_grad=True)
    with pytest.raises(UnsupportedError, match="no gradient passes"):
        model(inputs_embeds=read)
    with torch.no_grad():
        model(inputs_embeds=read)
    with pytest.raises(UnsupportedError, match="packed"):
        model.parameters()


def test_a_norm_that_learns_before_packed_weights_is_refused() -> None:
    model = narrow_model("llama", None, panels=True)
    norm = model.network.layers[0].attention_norm.weight
    norm.requires_grad_()
    try:
        with pytest.raises(UnsupportedError, match="no gradient passes"):
            model.forward(torch.arange(5)[None])
    finally:
        norm.requires_grad_(False)


def test_codes_cannot_learn_and_their_values_can() -> None:
    model = LanguageModel(narrow_model("llama", "int8"))
    with pytest.raises(UnsupportedError, match="cannot learn"):
        model.requires_grad_()
    model.to(dtype=torch.float32).requires_grad_()
    model(torch.arange(5)[None]).logits.sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())
