"""Models with an encoder beside one another: drafts, early layers, amateurs; and what their
decoders do as others do, contrast of layers and quantised caches."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation import GenerationMixin

import everystep as es
from everystep.errors import EverystepError
from everystep.models import first_layers
from everystep.testing.models import tiny_llama
from tests.models.tiny import ENCODER_DECODERS, ids, ours, reference_pair, sounds

NEW = 20
OPTIONS: dict[str, Any] = {
    "max_new_tokens": NEW,
    "decoder_start_token_id": 3,
    "eos_token_id": None,
    "return_dict_in_generate": True,
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "processors": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    "sampled": {"do_sample": True, "temperature": 0.7, "seed": 4},
    "several": {"do_sample": True, "temperature": 0.8, "num_return_sequences": 3, "seed": 8},
}
EVEN = {
    kind: {"num_decoder_layers": 2} if "t5" in kind else {"decoder_layers": 2}
    for kind in ENCODER_DECODERS
}


def nearby(reference: Any, amount: float = 0.08) -> Any:
    """A model whose every weight is a little off, so that it is right now and then."""
    near, generator = copy.deepcopy(reference), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in near.parameters():
            noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            weight += amount * weight.abs().mean() * noise
    return near


@cache
def references(kind: str, dtype: torch.dtype = torch.float64) -> tuple[Any, Any]:
    """transformers' model and a smaller one near it."""
    torch.manual_seed(1)
    reference = reference_pair(kind, dtype, **EVEN[kind])
    return reference, nearby(reference)


@cache
def pair(kind: str, dtype: torch.dtype = torch.float64) -> tuple[es.LanguageModel, Any]:
    """The same two in this library."""
    model, near = (es.LanguageModel(ours(one)) for one in references(kind, dtype))
    return model, near


@cache
def source(kind: str, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """What the encoder reads in three rows, the first of which is shorter where rows can be."""
    torch.manual_seed(2)
    if kind == "whisper":
        return {"input_features": sounds(3, dtype)}
    mask = torch.ones(3, 11, dtype=torch.int64)
    mask[0, 6:] = 0
    return {"input_ids": ids(3, 11).clamp(min=4), "attention_mask": mask}


def run(model: Any, given: dict[str, Any], **more: Any) -> Any:
    """What `generate` gives, with its lists of what happened."""
    return model.generate(**given, **{**OPTIONS, **more})


# --- a model that drafts --------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ENCODER_DECODERS)
def test_drafts_change_nothing(kind: str, way: str) -> None:
    model, near = pair(kind)
    asked = {**WAYS[way], "output_scores": True}
    plain = run(model, source(kind), **asked)
    drafted = run(
        model, source(kind), **asked, assistant_model=near, num_assistant_tokens_schedule="constant"
    )
    assert drafted.sequences.tolist() == plain.sequences.tolist()
    assert drafted.speculation["accepted"] > 0
    for one, two in zip(drafted.scores, plain.scores, strict=True):
        assert torch.allclose(one, two, atol=1e-9)


def test_the_assistant_hears_its_own_row() -> None:
    """A draft model of the same weights guesses every token, in each of three unlike rows."""
    for kind in ("t5", "whisper"):
        model, _ = pair(kind)
        twin = es.LanguageModel(ours(references(kind)[0]))
        out = run(model, source(kind), assistant_model=twin, num_assistant_tokens=4)
        assert out.speculation["drafted"] == out.speculation["accepted"] > 0


def test_a_batch_drafts_what_its_rows_draft_alone() -> None:
    model, near = pair("bart")
    given = source("bart")
    fixed = {"assistant_model": near, "num_assistant_tokens_schedule": "constant"}
    together = run(model, given, **fixed)
    counts = [0, 0]
    for row in range(3):
        alone = {name: values[row : row + 1] for name, values in given.items()}
        own = run(model, alone, **fixed)
        assert own.sequences[0].tolist() == together.sequences[row].tolist()
        for place, name in enumerate(("drafted", "accepted")):
            counts[place] += own.speculation[name]
    assert counts == [together.speculation[name] for name in ("drafted", "accepted")]


@pytest.mark.parametrize("kind", ["t5", "whisper"])
def test_transformers_writes_the_same_with_an_assistant(kind: str) -> None:
    reference, helper = references(kind)
    model, near = pair(kind)
    given = {name: values[1:2] for name, values in source(kind).items()}
    options = {"max_new_tokens": NEW, "decoder_start_token_id": 3, "do_sample": False}
    options |= {"eos_token_id": 2, "pad_token_id": 0}
    reference.generation_config.num_assistant_tokens = 4
    helper.generation_config.num_assistant_tokens = 4
    # Whisper's own generate begins with ids of languages, which this one has not.
    expected = GenerationMixin.generate(reference, **given, **options, assistant_model=helper)
    found = model.generate(**given, **options, assistant_model=near)
    begun = 1 if kind == "whisper" else 0  # what a transcript begins with is not returned
    assert found.tolist() == expected[:, begun:].tolist()


def test_streams_many_prompts_and_runs_draft_too() -> None:
    model, near = pair("t5")
    given = {"input_ids": source("t5")["input_ids"][1:2]}
    options = {"max_new_tokens": NEW, "decoder_start_token_id": 3, "eos_token_id": None}
    expected = model.generate(**given, **options)[0, 1:].tolist()
    prompt = {"input_ids": given["input_ids"][0].tolist()}
    (many,) = es.generate(model, None, [prompt], **options, assistant_model=near)
    events = list(es.stream(model, None, [prompt], **options, assistant_model=near))
    opened = es.open(model, None, prompt, **options, assistant_model=near)
    assert many == expected
    assert [event.token for event in events] == expected
    assert list(opened.result().tokens) == expected


def test_native_steps_draft_too() -> None:
    model, near = pair("t5", torch.float32)
    given = source("t5", torch.float32)
    if not model.runs_on.startswith("native"):
        pytest.skip("the native executor was not compiled")
    plain = run(model, given)
    drafted = run(model, given, assistant_model=near, num_assistant_tokens_schedule="constant")
    assert drafted.sequences.tolist() == plain.sequences.tolist()
    assert drafted.speculation["accepted"] > 0


def test_wrapped_models_draft_for_each_other() -> None:
    reference, helper = references("t5")
    wrapped, given = es.wrap(reference), source("t5")
    plain = run(wrapped, given)
    for near in (helper, pair("t5")[1]):
        drafted = run(
            wrapped, given, assistant_model=near, num_assistant_tokens_schedule="constant"
        )
        assert drafted.sequences.tolist() == plain.sequences.tolist()
        assert drafted.speculation["accepted"] > 0


# --- encoder states that the caller brings --------------------------------------------------------


def test_states_of_both_encoders_can_be_brought() -> None:
    model, near = pair("t5")
    given = source("t5")
    mask = given["attention_mask"]
    own, beside = (
        one.get_encoder()(input_ids=given["input_ids"], attention_mask=mask)
        for one in references("t5")
    )
    constant = {"num_assistant_tokens_schedule": "constant", "assistant_model": near}
    read = run(model, given, **constant)
    brought = run(
        model,
        {"encoder_outputs": own, "attention_mask": mask, "assistant_encoder_outputs": beside},
        **constant,
    )
    assert brought.sequences.tolist() == read.sequences.tolist()
    assert brought.speculation["accepted"] == read.speculation["accepted"]


def states(width: int, rows: int = 3) -> tuple[Tensor]:
    return (torch.zeros(rows, 5, width, dtype=torch.float64),)


T5, NEAR = (lambda: pair("t5")[0]), (lambda: pair("t5")[1])
READ = {"input_ids": torch.full((3, 5), 7)}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "nothing to read": (
        {"encoder_outputs": states(32), "assistant_model": NEAR},
        "the encoder of assistant_model has nothing to read.*assistant_encoder_outputs beside",
    ),
    "an amateur with nothing to read": (
        {"encoder_outputs": states(32), "amateur_model": NEAR},
        "the encoder of amateur_model has nothing to read.*in place of encoder_outputs",
    ),
    "states for nobody": (
        {**READ, "assistant_encoder_outputs": states(32)},
        "assistant_encoder_outputs has no effect",
    ),
    "states of another width": (
        {**READ, "assistant_encoder_outputs": states(31), "assistant_model": NEAR},
        "assistant_encoder_outputs are not of assistant_model.*width 32.*got 31",
    ),
    "states of other rows": (
        {**READ, "assistant_encoder_outputs": states(32, 2), "assistant_model": NEAR},
        "assistant_encoder_outputs and the prompt differ in rows",
    ),
    "no states at all": (
        {**READ, "assistant_encoder_outputs": (), "assistant_model": NEAR},
        "assistant_encoder_outputs holds no encoder states",
    ),
    "one that reads sounds": (
        {**READ, "assistant_model": lambda: pair("whisper")[1]},
        "the encoder of assistant_model cannot read this prompt.*input_features",
    ),
    "embeddings of another width": (
        {
            "inputs_embeds": torch.zeros(1, 4, 32, dtype=torch.float64),
            "assistant_model": lambda: es.LanguageModel(
                ours(reference_pair("t5", torch.float64, d_model=24))
            ),
        },
        "the encoder of assistant_model cannot read this prompt.*width 24.*got 32",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_second_encoder_cannot_read_is_refused(name: str) -> None:
    given, told = WRONG[name]
    made = {key: value() if callable(value) else value for key, value in given.items()}
    with pytest.raises(EverystepError, match=f"(?s){told}"):
        run(T5(), made)


def test_a_decoder_has_nothing_for_an_encoder_to_read() -> None:
    for name in ("assistant_model", "amateur_model"):
        with pytest.raises(EverystepError, match=f"{name} has an encoder, and nothing is brought"):
            tiny_llama(vocab_size=97).generate(torch.tensor([[5, 6]]), **{name: NEAR()})


# --- its own first layers, an amateur, contrasted layers ------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ENCODER_DECODERS)
def test_first_layers_draft(kind: str, way: str) -> None:
    model, _ = pair(kind)
    plain = run(model, source(kind), **WAYS[way])
    early = run(model, source(kind), **WAYS[way], assistant_early_exit=1)
    assert early.sequences.tolist() == plain.sequences.tolist()
    assert early.speculation["drafted"] > 0


@pytest.mark.parametrize("kind", ENCODER_DECODERS)
def test_first_layers_are_a_shallower_model(kind: str) -> None:
    """They say what transformers' model says that has no further layers."""
    reference, model = references(kind)[0], pair(kind)[0]
    shallow = copy.deepcopy(reference)
    decoder = shallow.get_decoder()
    if "t5" in kind:
        decoder.block = decoder.block[:1]
    else:
        decoder.layers = decoder.layers[:1]
    given, written = source(kind), torch.tensor([[3, 8, 9, 4]] * 3)
    with torch.no_grad():
        expected = shallow(**given, decoder_input_ids=written).logits
    found = es.LanguageModel(first_layers(model.core, 1))(**given, decoder_input_ids=written)
    assert torch.allclose(found.logits, expected, atol=1e-9)


def contrasted(expert: Tensor, amateur: Tensor, alpha: float) -> Tensor:
    """log p - log q of tokens whose p is at least alpha times the highest."""
    p, q = expert.log_softmax(-1), amateur.log_softmax(-1)
    low = p < p.max(-1, keepdim=True).values + torch.log(torch.tensor(alpha))
    return (p - q).masked_fill(low, -torch.inf)


@pytest.mark.parametrize("kind", ["t5", "bart", "whisper"])
def test_an_amateur_hears_what_the_expert_hears(kind: str) -> None:
    """Every token is the best of both models' own forwards, each after its own encoder."""
    model, near = pair(kind)
    given = source(kind)
    out = run(model, given, amateur_model=near, max_new_tokens=6).sequences
    forward = [one(**given, decoder_input_ids=out[:, :-1]).logits for one in references(kind)]
    best = contrasted(*forward, 0.1).argmax(-1)
    assert out[:, 1:].tolist() == best.tolist()


@pytest.mark.parametrize("kind", ["t5", "bart", "marian", "whisper"])
@pytest.mark.parametrize("executor", ["auto", "torch"])
def test_layers_are_contrasted_as_the_formula_says(kind: str, executor: str) -> None:
    """With one candidate layer: log p of the last minus log q of the early one, of tokens whose p
    is at least a tenth of the highest."""
    reference = references(kind)[0]
    model = es.LanguageModel(ours(reference), executor=executor)
    given = source(kind)
    out = run(model, given, dola_layers=[1], max_new_tokens=6).sequences
    shown = reference(**given, decoder_input_ids=out[:, :-1], output_hidden_states=True)
    hidden = shown.decoder_hidden_states[1]
    if kind == "t5" and reference.config.tie_word_embeddings:
        hidden = hidden * reference.config.d_model**-0.5
    early = reference.get_output_embeddings()(hidden)
    bias = getattr(reference, "final_logits_bias", None)
    early = early if bias is None else early + bias
    scores = contrasted(shown.logits, early, 0.1)
    assert out[:, 1:].tolist() == scores.argmax(-1).tolist()


# --- a quantised cache ----------------------------------------------------------------------------

QUANTISED = {"nbits": 4, "residual_length": 4, "q_group_size": 8}


@pytest.mark.parametrize("kind", ["t5", "bart", "whisper"])
def test_a_quantised_cache_keeps_codes_of_what_the_decoder_read(kind: str) -> None:
    model, _ = pair(kind)
    given = source(kind)
    coded = {"cache_implementation": "quantized", "cache_config": QUANTISED}
    out = run(model, given, **coded, output_logits=True)
    own = out.past_key_values.self_attention_cache
    assert isinstance(out.past_key_values, es.EncoderDecoderCache)
    assert isinstance(own, es.QuantizedCache) and own.get_seq_length() == NEW
    plain = run(model, given, output_logits=True)
    gaps = [
        float((one - two).abs().max()) for one, two in zip(out.logits, plain.logits, strict=True)
    ]
    assert max(gaps[:4]) < 1e-9 < gaps[15]  # first nothing is coded, then what was read
    for row in range(3):
        alone = {name: values[row : row + 1] for name, values in given.items()}
        assert run(model, alone, **coded).sequences[0].tolist() == out.sequences[row].tolist()


def test_a_cache_holds_what_the_decoder_read() -> None:
    """In the place of a prefix: states of the encoder and a cache, from which calls go on."""
    model, given = pair("t5")[0], source("t5")
    states = references("t5")[0].get_encoder()(**given)
    brought = {"encoder_outputs": states, "attention_mask": given["attention_mask"]}
    first = run(model, brought, max_new_tokens=5)
    again = run(
        model,
        {
            **brought,
            "past_key_values": first.past_key_values,
            "decoder_input_ids": first.sequences,
        },
        max_new_tokens=4,
    )
    assert again.sequences.tolist() == run(model, given, max_new_tokens=9).sequences.tolist()
