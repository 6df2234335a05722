"""What transformers' own generation tests show of its models, family by family, of ours.

Those tests look at shapes and kinds of results. Here each of their calls is made on both sides with
the same weights, and what comes back is compared. Their names stand in generation_tests.py, with
what shows each of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import everystep as es
from everystep.api.load import from_weights
from everystep.errors import UnsupportedError
from tests.parity.generation_tests import ELSEWHERE, HERE, INTERNAL
from tests.parity.models import TINIES, fresh_reference, subject
from tests.reading import ROOT

FAMILIES = [name for name in TINIES if "-" not in name or name in ("llama-plain", "t5-plain")]
BEGIN, PHRASE = 3, [5, 9]
"""The id that decoders behind an encoder begin with, and ids that constraints force."""
PROCESSORS: Mapping[str, Any] = {
    "bad_words_ids": [[1, 0]],
    "repetition_penalty": 1.2,
    "remove_invalid_values": True,
}
WARPERS: Mapping[str, Any] = {"do_sample": True, "top_k": 10, "top_p": 0.7, "temperature": 0.7}
EVERYTHING: Mapping[str, Any] = {
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "output_attentions": True,
    "return_dict_in_generate": True,
}
BEAMS: Mapping[str, Any] = {"num_beams": 2, "length_penalty": 2.0}
MODES: Mapping[str, Mapping[str, Any]] = {
    "greedy": {},
    "sample": {**WARPERS, "num_return_sequences": 2},
    "beams": BEAMS,
    "beam samples": {**BEAMS, **WARPERS},
}
GROUPS: Mapping[str, Any] = {**BEAMS, "num_beam_groups": 2, "diversity_penalty": 2.0}


class Asked:
    """A family on both sides, and two prompts of ids without padding."""

    def __init__(self, name: str) -> None:
        self.tiny = TINIES[name]
        self.ours, self.reference = subject(name), fresh_reference(name)
        torch.manual_seed(1)
        self.ids = torch.randint(10, self.tiny.vocabulary, (2, 7))
        self.begin = {"decoder_start_token_id": BEGIN} if self.tiny.encodes else {}

    def said(self, new: int) -> int:
        """The width of results with so many new tokens."""
        return new + (1 if self.tiny.encodes else self.ids.shape[1])

    def generate(self, model: Any, **given: Any) -> Any:
        """A result of either side, with draws that begin alike."""
        torch.manual_seed(0)
        prompt = {} if {"inputs_embeds", "input_ids"} & given.keys() else {"input_ids": self.ids}
        settings = {"eos_token_id": None, "pad_token_id": 2, "max_new_tokens": 3}
        return model.generate(**{**settings, **self.begin, **prompt, **given})

    def both(self, **given: Any) -> tuple[Any, Any]:
        """The result of ours and of transformers."""
        return self.generate(self.ours, **given), self.generate(self.reference, **given)


@pytest.fixture(scope="module", params=FAMILIES)
def asked(request: pytest.FixtureRequest) -> Asked:
    return Asked(request.param)


@pytest.fixture(scope="module", params=[name for name in FAMILIES if not TINIES[name].encodes])
def decoder(request: pytest.FixtureRequest) -> Asked:
    return Asked(request.param)


def _leaves(value: Any, place: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a result with their places in it, those of a cache layer by layer."""
    if isinstance(value, Tensor):
        yield place, value
    elif (own := getattr(value, "self_attention_cache", None)) is not None:
        yield from _leaves(own, f"{place}.own")
        yield from _leaves(value.cross_attention_cache, f"{place}.cross")
    elif layers := getattr(value, "layers", None):
        for number, layer in enumerate(layers):
            yield f"{place}.{number}.keys", layer.keys
            yield f"{place}.{number}.values", layer.values
    elif hasattr(value, "items"):
        for name, one in value.items():
            yield from _leaves(one, f"{place}.{name}")
    elif isinstance(value, tuple):
        for number, one in enumerate(value):
            yield from _leaves(one, f"{place}.{number}")


def _assert_same(mine: Any, theirs: Any) -> None:
    """Two results have the same fields, of the same shapes and values."""
    found, wanted = dict(_leaves(mine)), dict(_leaves(theirs))
    assert found.keys() == wanted.keys()
    for place, one in wanted.items():
        assert found[place].shape == one.shape, place
        torch.testing.assert_close(found[place], one, rtol=1e-4, atol=1e-4, check_dtype=False)


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_results_have_the_same_fields(asked: Asked, mode: str, use_cache: bool) -> None:
    given = {**PROCESSORS, **MODES[mode], "use_cache": use_cache}
    mine, theirs = asked.both(**given, **EVERYTHING)
    assert mine.sequences.shape[-1] == asked.said(3)
    assert type(mine).__name__ == type(theirs).__name__
    _assert_same(mine, theirs)
    assert torch.equal(asked.generate(asked.ours, **given), mine.sequences)


@pytest.mark.parametrize("kept", [1, 2])
def test_beams_in_groups_have_every_field(asked: Asked, kept: int) -> None:
    found = asked.generate(
        asked.ours, **GROUPS, **PROCESSORS, **EVERYTHING, num_return_sequences=kept
    )
    assert found.sequences.shape == (2 * kept, asked.said(3))
    _assert_shaped(asked, found, rows=4)


@pytest.mark.parametrize("kept", [1, 2])
def test_a_forced_phrase_is_in_every_sequence(asked: Asked, kept: int) -> None:
    given = {"num_beams": 4 * kept, "num_return_sequences": kept, "length_penalty": 2.0}
    for forced in ({"constraints": [es.PhrasalConstraint(PHRASE)]}, {"force_words_ids": [PHRASE]}):
        found = asked.generate(asked.ours, **given, **forced, **PROCESSORS, **EVERYTHING)
        _assert_shaped(asked, found, rows=8 * kept)
        for said in found.sequences[:, -3:].tolist():
            assert PHRASE in (said[:2], said[1:])


def test_contrastive_search_has_every_field(asked: Asked) -> None:
    given = {"penalty_alpha": 0.6, "top_k": 5, **PROCESSORS}
    found = asked.generate(asked.ours, **given, **EVERYTHING)
    _assert_shaped(asked, found, rows=2)
    assert torch.equal(asked.generate(asked.ours, **given, low_memory=False), found.sequences)


def test_contrast_of_layers_has_every_field(asked: Asked) -> None:
    found = asked.generate(asked.ours, dola_layers="low", **WARPERS, **PROCESSORS, **EVERYTHING)
    _assert_shaped(asked, found, rows=2)


def _assert_shaped(asked: Asked, found: Any, rows: int) -> None:
    """A result has what transformers gives for rows of greedy search: the same fields, each of the
    same length and shapes."""
    greedy = asked.generate(asked.reference, **EVERYTHING)
    assert found.sequences.shape[1] == greedy.sequences.shape[1]
    for name in ("scores", "logits"):
        assert [tuple(one.shape) for one in found[name]] == [(rows, asked.tiny.vocabulary)] * 3
    for name in ("hidden_states", "attentions", "decoder_hidden_states", "decoder_attentions"):
        wanted = getattr(greedy, name, None)
        if wanted is None:
            continue
        for step, layers in zip(found[name], wanted, strict=True):
            shapes = [(rows, *one.shape[1:]) for one in layers]
            assert [tuple(one.shape) for one in step] == shapes, name


def _another(asked: Asked) -> Any:
    """A model of the same sizes that says other things."""
    torch.manual_seed(2)
    weights = {
        name: one + torch.randn_like(one) if one.is_floating_point() else one
        for name, one in asked.reference.state_dict().items()
    }
    return from_weights(dict(asked.tiny.config), weights, dtype=torch.float64)


def _assert_drafted(asked: Asked, **drafted: Any) -> None:
    """Drafts change no token and no field of a result, and samples are of its shape."""
    given = {**EVERYTHING, "input_ids": asked.ids[:1], "max_new_tokens": 4}
    plain = asked.generate(asked.ours, **given)
    _assert_same(asked.generate(asked.ours, **given, **drafted), plain)
    _assert_same(plain, asked.generate(asked.reference, **given))
    sampled = asked.generate(asked.ours, **given, **drafted, do_sample=True)
    assert sampled.sequences.shape == plain.sequences.shape


def test_drafts_from_the_prompt_change_nothing(asked: Asked) -> None:
    _assert_drafted(asked, prompt_lookup_num_tokens=2)


@pytest.mark.parametrize("of", ["itself", "another", "its first layer"])
def test_drafts_of_a_model_change_nothing(decoder: Asked, of: str) -> None:
    if of == "its first layer":
        _assert_drafted(decoder, assistant_early_exit=1)
        return
    model = decoder.ours if of == "itself" else _another(decoder)
    settings = {"num_assistant_tokens": 2, "num_assistant_tokens_schedule": "constant"}
    _assert_drafted(decoder, assistant_model=model, **settings)


def test_padding_and_told_places_change_nothing(decoder: Asked) -> None:
    padding = torch.full((2, 32), 2)
    wide, mask = torch.cat((padding, decoder.ids), 1), torch.ones(2, 39, dtype=torch.long)
    mask[:, :32] = 0
    places = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    plain = decoder.ours(decoder.ids).logits[:, -1]
    padded = decoder.ours(wide, attention_mask=mask, position_ids=places, use_cache=False)
    torch.testing.assert_close(padded.logits[:, -1], plain, rtol=1e-4, atol=1e-4)
    wanted = decoder.generate(decoder.ours)
    for given in ({}, {"position_ids": places}):
        found = decoder.generate(decoder.ours, input_ids=wide, attention_mask=mask, **given)
        assert torch.equal(found[:, 32:], wanted)
    told = decoder.generate(decoder.ours, position_ids=torch.arange(7).expand(2, 7))
    assert torch.equal(told, wanted)


def test_a_call_of_the_model_has_a_cache_in_the_same_form(asked: Asked) -> None:
    begun = {"decoder_input_ids": asked.ids[:, :4]} if asked.tiny.encodes else {}
    given = {"input_ids": asked.ids, **begun, "use_cache": True}
    with torch.no_grad():
        _assert_same(asked.ours(**given), asked.reference(**given))


@pytest.mark.parametrize("beams", [1, 2])
def test_embeddings_stand_for_their_ids(asked: Asked, beams: int) -> None:
    given = {"num_beams": beams, "min_new_tokens": 3, **EVERYTHING}
    wanted = asked.generate(asked.ours, **given)
    embedded = asked.ours.get_input_embeddings()(asked.ids)
    if not asked.tiny.encodes:
        both = asked.generate(asked.ours, input_ids=asked.ids, inputs_embeds=embedded, **given)
        _assert_same(both, wanted)
    alone = asked.generate(asked.ours, inputs_embeds=embedded, **given)
    new = slice(None) if asked.tiny.encodes else slice(7, None)
    assert torch.equal(alone.sequences, wanted.sequences[:, new])
    _assert_same((alone.scores, alone.past_key_values), (wanted.scores, wanted.past_key_values))
    noise = torch.rand(embedded.shape, dtype=embedded.dtype)
    other = asked.generate(asked.ours, inputs_embeds=noise, **given)
    assert not any(map(torch.allclose, other.scores, wanted.scores))


@pytest.mark.parametrize("embedded", [False, True])
def test_a_static_cache_changes_nothing_and_has_the_same_room(
    decoder: Asked, embedded: bool
) -> None:
    given: dict[str, Any] = {**EVERYTHING, "output_attentions": False, "max_new_tokens": 20}
    if embedded:
        given["inputs_embeds"] = decoder.ours.get_input_embeddings()(decoder.ids)
    plain = decoder.generate(decoder.ours, **given)
    mine, theirs = decoder.both(**given, cache_implementation="static")
    assert torch.equal(mine.sequences, plain.sequences)
    _assert_same((mine.scores, mine.logits), (plain.scores, plain.logits))
    shapes = [
        [tuple(layer.keys.shape) for layer in one.past_key_values.layers] for one in (mine, theirs)
    ]
    assert shapes[0] == shapes[1]


def test_generating_goes_on_behind_a_cache(asked: Asked) -> None:
    given: dict[str, Any] = {**EVERYTHING, "use_cache": True}
    whole = asked.generate(asked.ours, **given, max_new_tokens=4)
    part = asked.generate(asked.ours, **given, max_new_tokens=3)
    given["past_key_values"] = part.past_key_values
    if asked.tiny.encodes:
        given["decoder_input_ids"] = part.sequences
    else:
        given["input_ids"] = part.sequences
        given["attention_mask"] = torch.ones_like(part.sequences)
    rest = asked.generate(asked.ours, **given, max_new_tokens=1)
    assert torch.equal(rest.sequences, whole.sequences)
    _assert_same(rest.past_key_values, whole.past_key_values)


def test_generating_goes_on_behind_embeddings(decoder: Asked) -> None:
    embedded = decoder.ours.get_input_embeddings()(decoder.ids)
    given = {**EVERYTHING, "use_cache": True}
    whole = decoder.generate(decoder.ours, **given, inputs_embeds=embedded, max_new_tokens=4)
    part = decoder.generate(decoder.ours, **given, inputs_embeds=embedded, max_new_tokens=3)
    further = torch.cat((embedded, decoder.ours.get_input_embeddings()(part.sequences)), dim=1)
    given |= {"past_key_values": part.past_key_values, "inputs_embeds": further}
    rest = decoder.generate(decoder.ours, **given, max_new_tokens=1)
    assert torch.equal(torch.cat((part.sequences, rest.sequences), 1), whole.sequences)
    _assert_same(rest.past_key_values, whole.past_key_values)


def test_a_quantised_cache_is_of_its_class_and_its_settings_are_checked(asked: Asked) -> None:
    settings = {"nbits": 4, "q_group_size": 8, "residual_length": 128}
    given = {"cache_implementation": "quantized", "return_dict_in_generate": True}
    if asked.tiny.config.get("sliding_window"):
        with pytest.raises(UnsupportedError, match="sliding windows"):
            asked.generate(asked.ours, **given)
        return
    found = asked.generate(asked.ours, **given, cache_config=settings, max_new_tokens=5)
    assert found.sequences.shape == (2, asked.said(5))
    own = getattr(found.past_key_values, "self_attention_cache", found.past_key_values)
    assert isinstance(own, es.QuantizedCache)
    with pytest.raises(ValueError, match="nbits"):
        asked.generate(asked.ours, **given, cache_config={**settings, "nbits": 60})
    with pytest.raises(ValueError, match="past_key_values"):
        asked.generate(asked.ours, **given, past_key_values=es.DynamicCache())


def test_logits_are_kept_for_the_last_place(asked: Asked) -> None:
    wanted = asked.generate(asked.ours)
    for kept in (0, 1):
        assert torch.equal(asked.generate(asked.ours, logits_to_keep=kept), wanted)


def test_nothing_need_be_said_where_a_begin_token_is_known(asked: Asked) -> None:
    given = {"bos_token_id": 4, "max_new_tokens": 3, "eos_token_id": None, **PROCESSORS}
    mine, theirs = (one.generate(**given, **asked.begin) for one in (asked.ours, asked.reference))
    assert mine.tolist() == theirs.tolist()


# --- Single cases ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama() -> Asked:
    return Asked("llama-plain")


@pytest.fixture(scope="module", params=["llama-plain", "gpt2", "bart", "t5-plain"])
def several(request: pytest.FixtureRequest) -> Asked:
    return Asked(request.param)


def test_scores_of_grouped_beams_are_the_sum_of_their_tokens(several: Asked) -> None:
    given = {**GROUPS, "num_return_sequences": 2, "length_penalty": 0.0, "max_new_tokens": 9}
    found = several.generate(several.ours, **given, **EVERYTHING)
    each = several.ours.compute_transition_scores(found.sequences, found.scores, found.beam_indices)
    torch.testing.assert_close(each.sum(-1), found.sequences_scores, check_dtype=False)


@pytest.mark.parametrize("limits", [{"max_length": 20}, {"max_length": 20, "min_length": 10}])
def test_limits_behind_embeddings_count_them(llama: Asked, limits: dict[str, int]) -> None:
    given = {**limits, "eos_token_id": [*range(0, 40, 2)], "max_new_tokens": None}
    embedded = llama.ours.get_input_embeddings()(llama.ids)
    whole, theirs = llama.both(**given)
    assert torch.equal(whole, theirs)
    found = llama.generate(llama.ours, inputs_embeds=embedded, **given)
    assert torch.equal(found, whole[:, 7:])


def test_without_a_prompt_there_must_be_a_begin_token(llama: Asked) -> None:
    embedded = llama.ours.get_input_embeddings()(llama.ids)
    llama.generate(llama.ours, inputs_embeds=embedded, bos_token_id=None)
    with pytest.raises(ValueError, match="bos_token_id"):
        llama.ours.generate(max_length=20, bos_token_id=None)


def test_a_begin_token_is_the_calls_or_the_models(llama: Asked) -> None:
    model = from_weights(
        dict(llama.tiny.config),
        llama.reference.state_dict(),
        dtype=torch.float64,
        generation_config=es.GenerationConfig(bos_token_id=7, max_new_tokens=2),
    )
    assert model.generate()[0, 0] == 7
    assert model.generate(generation_config=es.GenerationConfig(bos_token_id=9))[0, 0] == 9
    silent = es.GenerationConfig(bos_token_id=None)
    assert model.generate(generation_config=silent)[0, 0] == 7
    model.generation_config.bos_token_id = 8
    assert model.generate(generation_config=silent)[0, 0] == 8
    assert silent.bos_token_id is None


def test_raw_logits_are_those_of_a_forward(llama: Asked) -> None:
    wanted = llama.ours(llama.ids).logits[:, -1]
    plain = llama.generate(llama.ours, **EVERYTHING)
    drawn = llama.generate(llama.ours, do_sample=True, temperature=0.5, **EVERYTHING)
    for found in (plain, drawn):
        torch.testing.assert_close(found.logits[0], wanted, check_dtype=False)
    assert torch.equal(plain.logits[-1], plain.scores[-1])
    assert not torch.equal(drawn.logits[-1], drawn.scores[-1])


def test_a_default_length_is_told_of_and_a_set_one_is_not(llama: Asked) -> None:
    with pytest.warns(UserWarning, match="max_new_tokens"):
        llama.ours.generate(llama.ids, eos_token_id=None, pad_token_id=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llama.ours.generate(llama.ids, eos_token_id=None, pad_token_id=2, max_length=20)


def test_drafts_keep_lengths_without_a_word(llama: Asked) -> None:
    given = {"input_ids": llama.ids[:1], "assistant_model": _another(llama)}
    given |= {"eos_token_id": [*range(0, 40, 2)], "max_new_tokens": None}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = llama.generate(llama.ours, **given, min_new_tokens=10, max_length=20)
        assert found.shape[1] in (18, 19, 20)
        found = llama.generate(llama.ours, **given | {"max_new_tokens": 20}, min_new_tokens=10)
        assert 17 < found.shape[1] <= 27
        assert llama.generate(llama.ours, **given | {"max_new_tokens": 7}).shape[1] <= 14


@pytest.mark.parametrize("words", [[torch.tensor([[3, 4]])], [], [[-1]], [[[-1]]]])
def test_words_that_are_no_lists_of_ids_are_refused(llama: Asked, words: object) -> None:
    with pytest.raises(ValueError, match="force_words_ids"):
        llama.generate(llama.ours, force_words_ids=words, num_beams=10)


@pytest.mark.parametrize("name", ["bart", "t5-plain"])
def test_decoders_begin_with_an_id_for_each_row(name: str) -> None:
    asked = Asked(name)
    wanted = asked.generate(asked.ours)
    for start in ([BEGIN, BEGIN], BEGIN):
        mine, theirs = asked.both(decoder_start_token_id=start)
        assert torch.equal(mine, wanted) and torch.equal(theirs, wanted)
    said = es.GenerationConfig(
        decoder_start_token_id=BEGIN, max_new_tokens=3, eos_token_id=None, pad_token_id=2
    )
    assert torch.equal(asked.ours.generate(asked.ids, generation_config=said), wanted)
    with pytest.raises(ValueError, match="decoder_start_token_id"):
        asked.ours.generate(asked.ids, max_new_tokens=3)


def test_a_row_of_contrastive_search_is_the_row_alone(several: Asked) -> None:
    given: dict[str, Any] = {**EVERYTHING, "output_attentions": False, "max_new_tokens": 12}
    given |= {"penalty_alpha": 0.6, "top_k": 4}
    alone = several.generate(several.ours, **given, input_ids=several.ids[1:, 3:])
    ids, mask = several.ids.clone(), torch.ones_like(several.ids)
    ids[1, :3], mask[1, :3] = 2, 0
    both = several.generate(several.ours, **given, input_ids=ids, attention_mask=mask)
    assert torch.equal(both.sequences[1, -12:], alone.sequences[0, -12:])
    if not several.tiny.placed:  # whose encoder counts what stands before a prompt
        torch.testing.assert_close(both.scores[0][1], alone.scores[0][0])


def test_any_of_several_end_tokens_ends(llama: Asked) -> None:
    plain = llama.generate(llama.ours, **WARPERS, max_new_tokens=20)
    first, second = (int(plain[0, 7 + place]) for place in (9, 4))
    for ends in (second, [second], [first, second]):
        mine, theirs = llama.both(**WARPERS, max_new_tokens=20, eos_token_id=ends)
        assert torch.equal(mine, theirs)
        assert mine[0, 11] == second and (mine[0, 12:] == 2).all()


@pytest.mark.parametrize("limit", [22, 18])
def test_a_criterion_or_the_limit_ends_whichever_is_first(llama: Asked, limit: int) -> None:
    class AtTwenty(es.StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
            return torch.full((len(input_ids),), input_ids.shape[1] >= 20)

    given = {"max_length": limit, "max_new_tokens": None}
    found = llama.generate(llama.ours, stopping_criteria=[AtTwenty()], **given)
    assert found.shape == (2, min(limit, 20))


# --- The list -------------------------------------------------------------------------------------


def test_the_list_names_tests_that_exist() -> None:
    here = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert {*HERE.values()} == here - {"the_list_names_tests_that_exist"}
    for node in ELSEWHERE.values():
        path, _, name = node.partition("::")
        text = (ROOT / path).read_text(encoding="utf-8")
        assert f"def {name}(" in text or not name, node
    assert not HERE.keys() & ELSEWHERE.keys() and not INTERNAL.keys() & {*HERE, *ELSEWHERE}
