"""What a called model gives beyond logits, and packed sequences, beside transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from everystep.api.model import LanguageModel
from everystep.errors import ModelClassError, RequestError, UnsupportedError
from everystep.models import build_model
from tests.models.tiny import (
    Tensors,
    ids,
    ours,
    reference_decoder,
    reference_pair,
    reference_t5,
)

IDS = ids(2, 9)
MASK = torch.ones(2, 9).long()
MASK[1, :3] = 0


def close(found: Any, expected: Any) -> None:
    """Equal within rounding (transformers' norms are of float32), also layer by layer."""
    if isinstance(expected, torch.Tensor):
        assert found.shape == expected.shape
        assert (found - expected).abs().max() < 1e-5 * max(1.0, float(expected.abs().max()))
        return
    for one, other in zip(found, expected, strict=True):
        close(one, other)


@pytest.fixture(scope="module", params=["llama", "mistral", "qwen2"])
def pair(request: pytest.FixtureRequest) -> tuple[Any, LanguageModel]:
    torch.manual_seed(0)
    config = {"sliding_window": 4} if request.param == "mistral" else {}
    theirs = reference_decoder(request.param, torch.float64, **config)
    theirs.set_attn_implementation("eager")
    return theirs, LanguageModel(ours(theirs))


@torch.no_grad()
@pytest.mark.parametrize("cached", [True, False])
def test_layers_and_attentions_are_the_references(
    pair: tuple[Any, LanguageModel], cached: bool
) -> None:
    wanted: dict[str, Any] = {"output_hidden_states": True, "output_attentions": True}
    expected, found = (model(IDS, use_cache=cached, **wanted) for model in pair)
    close(found.hidden_states, expected.hidden_states)
    close(found.attentions, expected.attentions)
    names = [name for name in expected if name != "past_key_values"]
    assert [name for name in found if name != "past_key_values"] == names
    plain = pair[1](IDS, use_cache=cached)
    assert plain.hidden_states is None is plain.attentions
    close(plain.logits, found.logits)


@torch.no_grad()
def test_of_a_piece_after_a_cache(pair: tuple[Any, LanguageModel]) -> None:
    wanted: dict[str, Any] = {"output_hidden_states": True, "output_attentions": True}
    both = []
    for model in pair:
        past = model(IDS[:, :5]).past_key_values
        both.append(model(IDS[:, 5:], past_key_values=past, **wanted))
    close(both[1].hidden_states, both[0].hidden_states)
    close(both[1].attentions, both[0].attentions)


def test_labels_give_the_references_loss_and_gradient(pair: tuple[Any, LanguageModel]) -> None:
    labels = IDS.clone()
    mask = MASK.flip(1)  # beside a row that sees nothing transformers gives nan
    labels[0, 4] = labels[1, 6:] = -100
    model = LanguageModel(ours(pair[0])).requires_grad_()
    expected = pair[0](IDS, attention_mask=mask, labels=labels)
    found = model(IDS, attention_mask=mask, labels=labels)
    close(found.loss.detach(), expected.loss.detach())
    assert found[0] is found.loss and next(iter(found)) == "loss"
    found.loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())
    with pytest.raises(RequestError, match=r"labels.*\(2, 9\).*\(2, 4\)"):
        model(IDS, labels=labels[:, :4])


@torch.no_grad()
@pytest.mark.parametrize(
    "places",
    [
        [[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7, 8]],
        [[0, 0, 1, 2, 0, 1, 0, 1, 2], [3, 4, 5, 9, 10, 0, 1, 2, 3]],
        [[0, 1, 2, 3, 4, 0, 1, 2, 3]],
    ],
)
def test_sequences_packed_in_a_row_do_not_see_each_other(
    pair: tuple[Any, LanguageModel], places: list[list[int]]
) -> None:
    positions = torch.tensor(places)
    expected = pair[0](IDS, position_ids=positions.expand(2, 9), use_cache=False).logits
    close(pair[1](IDS, position_ids=positions, use_cache=False).logits, expected)
    if len(places) == 1:
        alone = pair[1](IDS[:, 5:], use_cache=False).logits
        close(expected[:, 5:], alone)
    # With a mask or a cache a row is one sequence, whatever its positions, as in transformers.
    for given in ({"attention_mask": torch.ones(2, 9).long(), "use_cache": False}, {}):
        wanted = pair[0](IDS, position_ids=positions.expand(2, 9), **given).logits
        close(pair[1](IDS, position_ids=positions, **given).logits, wanted)


@torch.no_grad()
def test_an_encoders_states_and_a_mask_of_the_decoder() -> None:
    theirs = reference_t5(torch.float64)
    model = LanguageModel(ours(theirs))
    start, mask = ids(2, 5), torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    states = theirs.get_encoder()(IDS, attention_mask=MASK)
    given = {"attention_mask": MASK, "decoder_input_ids": start, "decoder_attention_mask": mask}
    labels = ids(2, 5)
    labels[1, :2] = -100
    expected = theirs(IDS, **given, labels=labels, use_cache=False)
    for prompt in (
        {"input_ids": IDS},
        {"encoder_outputs": states},
        {"encoder_outputs": (states[0],)},
    ):
        found = model(**prompt, **given, labels=labels)
        close(found.logits[mask.bool()], expected.logits[mask.bool()])
        close(found.loss, expected.loss)
    with pytest.raises(RequestError, match="encoder_outputs and a prompt"):
        model(IDS, encoder_outputs=states, **given)
    with pytest.raises(RequestError, match="no encoder states"):
        model(encoder_outputs=7, **given)
    decoder = LanguageModel(ours(reference_decoder("llama", torch.float64)))
    for extra in ({"decoder_attention_mask": MASK}, {"encoder_outputs": states}):
        with pytest.raises(RequestError, match=r"models with an encoder|a prompt"):
            decoder(IDS, **extra)


@torch.no_grad()
@pytest.mark.parametrize("family", ["t5", "bart"])
def test_a_decoder_reads_embeddings_in_the_place_of_ids(family: str) -> None:
    theirs = reference_pair(family, torch.float64)
    model, written = LanguageModel(ours(theirs)), ids(2, 5)
    embeds = theirs.get_decoder().embed_tokens(written)
    given = {"input_ids": IDS, "attention_mask": MASK, "use_cache": False}
    found = model(**given, decoder_inputs_embeds=embeds).logits
    close(found, theirs(**given, decoder_inputs_embeds=embeds).logits)
    close(found, model(**given, decoder_input_ids=written).logits)
    begun = model(IDS, MASK, decoder_inputs_embeds=embeds[:, :3])
    cache = begun.past_key_values
    rest = model(attention_mask=MASK, decoder_inputs_embeds=embeds[:, 3:], past_key_values=cache)
    close(torch.cat([begun.logits, rest.logits], dim=1), found)
    decoder = LanguageModel(ours(reference_decoder("llama", torch.float64)))
    for wrong, said in (
        (lambda: model(IDS, decoder_inputs_embeds=embeds, decoder_input_ids=written), "one of the"),
        (lambda: model(IDS, decoder_inputs_embeds=embeds[..., :5]), "another width"),
        (lambda: model(IDS, decoder_inputs_embeds=written), "a .batch, length, hidden. tensor"),
        (lambda: decoder(IDS, decoder_inputs_embeds=embeds.new_zeros(2, 9, 48)), "neither"),
    ):
        with pytest.raises(RequestError, match=said):
            wrong()


@pytest.mark.parametrize("name", ["decoder_inputs_embeds", "cache_position"])
def test_generate_says_why_it_reads_neither_where_the_reference_fails(name: str) -> None:
    theirs = reference_pair("bart", torch.float64)
    value = {"decoder_inputs_embeds": torch.zeros(2, 1, 32).double(), "cache_position": IDS[0]}
    given: dict[str, Any] = {name: value[name], "max_new_tokens": 2}
    with pytest.raises(ValueError, match=r"both|not used|exactly one"):
        theirs.generate(IDS, **given)
    with pytest.raises(UnsupportedError, match=rf"{name} is not read: .*Leave|{name} .*Pass"):
        LanguageModel(ours(theirs)).generate(IDS, decoder_start_token_id=3, **given)


@torch.no_grad()
def test_a_cache_position_says_what_holds_anyway(pair: tuple[Any, LanguageModel]) -> None:
    theirs, model = pair
    past, other = (one(IDS[:, :5]).past_key_values for one in (model, theirs))
    given = {"input_ids": IDS[:, 5:], "cache_position": torch.arange(5, 9)}
    for places in (torch.arange(4), torch.tensor([5, 6, 7, 9]), torch.arange(5, 8)):
        with pytest.raises(RequestError, match=r"cache_position .* wanted 5 to 8"):
            model(IDS[:, 5:], past_key_values=past, cache_position=places)
    found = model(**given, past_key_values=past).logits
    close(found, theirs(**given, past_key_values=other).logits)
    assert past.get_seq_length() == 9


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_without_a_head_is_no_model_that_generates(tied: bool) -> None:
    theirs = reference_decoder("llama", torch.float64, tie_word_embeddings=tied)
    config = theirs.config.to_dict()
    body = Tensors(theirs.model.state_dict())
    headless = {n: t for n, t in theirs.state_dict().items() if n != "lm_head.weight"}
    for source in (body, Tensors(headless)):
        if tied:
            assert build_model(config, source).vocab_size == 97
            continue
        with pytest.raises(ModelClassError, match=r"no language head.*ForCausalLM"):
            build_model(config, source)
