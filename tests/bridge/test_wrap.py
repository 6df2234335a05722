"""What a wrapped model is to its caller: the module is left as it was, and the api takes it."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import everystep as es
from everystep.draws import SeededDraws
from everystep.engine import Continuous, Engine
from everystep.errors import RequestError
from everystep.stops.ends import MaxLength
from everystep.strategies import Greedy
from everystep.testing.models import tiny_llama
from everystep.types import Prompt, Request
from tests.bridge.families import END, FAMILIES, model_of
from tests.judges.drive import Drive
from tests.models.tiny import reference_decoder

IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])


def state(model: Any) -> Any:
    """Everything about a module that a call could change."""
    return [
        (
            name,
            module.training,
            dict(vars(module)),
            dict(module._buffers),
            module._forward_hooks.copy(),
        )
        for name, module in model.named_modules()
    ]


def same(before: Any, after: Any) -> bool:
    def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
        return one.keys() == other.keys() and all(one[key] is other[key] for key in one)

    pairs = zip(before, after, strict=True)
    return all(
        (a[0], a[1], a[4]) == (b[0], b[1], b[4]) and equal(a[2], b[2]) and equal(a[3], b[3])
        for a, b in pairs
    )


@pytest.mark.parametrize("name", ["llama", "mamba", "bart"])
def test_the_module_is_left_as_it_was(name: str) -> None:
    model = copy.deepcopy(model_of(name)).train()
    seen: list[Any] = []
    model.register_forward_hook(lambda *_: seen.append(1))
    model.get_input_embeddings().eval()
    before = state(model)
    es.generate(model, input_ids=IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=4)
    assert same(before, state(model)) and seen
    assert all(weight.requires_grad and weight.grad is None for weight in model.parameters())
    given = {"labels": IDS} | ({} if name != "bart" else {"decoder_input_ids": IDS})
    model(input_ids=IDS, **given).loss.backward()


@pytest.mark.filterwarnings("ignore:.*beyond what the model was made for")
def test_tables_that_grow_with_a_call_are_put_back() -> None:
    """One of several tensors of a module is another one then."""
    config = copy.deepcopy(model_of("llama").config)
    config.max_position_embeddings = 6
    config.rope_parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}
    model = transformers.LlamaForCausalLM(config).double().eval()
    before = state(model)
    asked = {"max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}
    first = es.wrap(model).generate(IDS, **asked)
    assert same(before, state(model))
    model.generate(IDS, **asked)
    assert not same(before, state(model)), "the model itself leaves longer tables"
    assert torch.equal(es.wrap(model).generate(IDS, **asked), first)


def test_modules_that_came_later_are_at_rest_too() -> None:
    """For an engine that goes on, with each prompt anew."""
    model = copy.deepcopy(model_of("llama")).train()
    engine = Engine(es.wrap(model).executor(), Continuous(64, max_rows=8))

    def tokens() -> list[int]:
        stops = (MaxLength(12),)
        asked = Request("r", Prompt(IDS[0].numpy()), Greedy(), SeededDraws(0), stops=stops)
        going = Drive(engine)
        going.submit(replace(asked, max_length=12))
        found: list[int] = going.finish().groups["r"].done[0].tokens.tolist()
        return found

    first = tokens()
    layer = model.model.layers[0]
    layer.mlp = nn.Sequential(layer.mlp, nn.Dropout(0.9))
    assert tokens() == first
    assert layer.mlp.training and layer.mlp[1].training


def test_a_forward_that_chooses_nothing_gives_the_logits_of_one_position() -> None:
    model, asked = model_of("llama"), {"max_new_tokens": 3, "eos_token_id": None}
    wrapped, kept = es.wrap(model), list[int]()
    handle = model.register_forward_pre_hook(
        lambda _, args, given: kept.append(given["logits_to_keep"]), with_kwargs=True
    )
    try:
        wrapped.generate(torch.arange(5, 15)[None], prefill_chunk_size=4, **asked)
        assert kept == [1] * 5  # three for the prompt
    finally:
        handle.remove()


def test_an_error_and_an_interrupt_leave_it_as_it_was() -> None:
    model = copy.deepcopy(model_of("llama")).train()
    before = state(model)
    for kind in (KeyboardInterrupt, ValueError):

        def stop(input_ids: Any, scores: Any, kind: Any = kind) -> Any:
            raise kind("stop")

        with pytest.raises(kind):
            es.wrap(model).generate(IDS, max_new_tokens=4, logits_processor=[stop])
    assert same(before, state(model))


def test_one_error_ends_one_prompt() -> None:
    class Picky:
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            if 9 in input_ids[0, :1].tolist():
                raise ValueError("not nine")
            return scores

    wrapped = es.wrap(model_of("llama"))
    prompts = [[5, 6], [9, 7], [8, 7, 6]]
    found = es.generate(
        wrapped, None, prompts, logits_processor=[Picky()], max_new_tokens=5, on_error="return"
    )
    plain = es.generate(wrapped, None, prompts, max_new_tokens=5)
    assert [found[0], found[2]] == [plain[0], plain[2]]
    assert found[1].finish_reason.kind == "error"


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_a_stream_gives_the_tokens_of_the_call(name: str) -> None:
    model = model_of(name)
    events = list(es.stream(model, None, [[5, 6, 7], [8, 9]], max_new_tokens=6))
    tokens = {"0": [], "1": []}
    for event in events:
        if event.token >= 0:
            tokens[event.request_id].append(event.token)
    assert list(tokens.values()) == es.generate(model, None, [[5, 6, 7], [8, 9]], max_new_tokens=6)


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"qwen3_moe"}))
def test_outputs_are_those_of_the_model(name: str) -> None:
    model = model_of(name)
    given = {
        "attention_mask": torch.ones_like(IDS),
        "max_new_tokens": 5,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    }
    if name != "mamba":
        given["output_hidden_states"] = True
    expected, found = model.generate(IDS, **given), es.wrap(model).generate(IDS, **given)
    assert found.sequences.tolist() == expected.sequences.tolist()
    for one, other in zip(expected.scores, found.scores, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-6)
    before = "decoder_" if model.config.is_encoder_decoder else ""
    for one, other in zip(
        getattr(expected, before + "hidden_states", None) or (),
        getattr(found, before + "hidden_states", None) or (),
        strict=True,
    ):
        torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "mistral", "t5", "bart"])
def test_a_cache_is_continued_from(name: str) -> None:
    wrapped = es.wrap(model_of(name))
    given: dict[str, Any] = {"attention_mask": torch.ones_like(IDS), "suppress_tokens": [END]}
    whole = wrapped.generate(IDS, **given, max_new_tokens=12)
    first = wrapped.generate(IDS, **given, max_new_tokens=5, return_dict_in_generate=True)
    ids = {"input_ids": first.sequences}
    if wrapped.is_encoder_decoder:
        ids = {"input_ids": IDS, "decoder_input_ids": first.sequences}
    else:
        given["attention_mask"] = torch.ones_like(first.sequences)
    again = wrapped.generate(
        **ids, **given, past_key_values=first.past_key_values, max_new_tokens=7
    )
    assert again.tolist() == whole.tolist()


def test_contrastive_search_reads_hidden_states() -> None:
    wrapped = es.wrap(model_of("llama"))
    given = {"max_new_tokens": 8, "penalty_alpha": 0.6, "top_k": 4, "suppress_tokens": [END]}
    batch = wrapped.generate(IDS, attention_mask=torch.ones_like(IDS), **given)
    alone = [wrapped.generate(row[None], **given)[0].tolist() for row in IDS]
    assert batch.tolist() == alone


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_without_a_cache_the_tokens_are_the_same(name: str) -> None:
    wrapped = es.wrap(model_of(name))
    given = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 6}
    cached = wrapped.generate(IDS, **given)
    assert wrapped.generate(IDS, **given, use_cache=False).tolist() == cached.tolist()


def test_its_defaults_are_those_of_the_module_at_the_time() -> None:
    model = copy.deepcopy(model_of("gpt2"))
    wrapped = es.wrap(model)
    model.generation_config.max_new_tokens = 3
    assert wrapped.generate(IDS).shape == (2, 7)
    assert wrapped.generation_config.max_new_tokens == 3


@pytest.mark.parametrize(
    ("thing", "says"),
    [
        (object(), "this is no model"),
        (nn.Linear(2, 2), "not a model that can generate"),
        (transformers.LlamaModel, "this is no model"),
    ],
)
def test_what_cannot_generate_is_refused(thing: Any, says: str) -> None:
    with pytest.raises(es.EverystepError, match=says):
        es.generate(thing, None, [[1, 2]])


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(es.EverystepError, match="no language head"):
        es.wrap(model_of("llama").model)


def test_what_the_model_cannot_do_is_said() -> None:
    wrapped = es.wrap(model_of("bloom"))
    with pytest.raises(es.EverystepError, match="positions"):
        wrapped.generate(IDS, position_ids=torch.arange(4)[None], max_new_tokens=2)
    with pytest.raises(es.EverystepError, match="quantised"):
        wrapped.generate(IDS, cache_implementation="quantized", max_new_tokens=2)


FACTS = [name for name, one in vars(es.LanguageModel).items() if isinstance(one, property)]


@pytest.mark.parametrize("fact", FACTS)
def test_every_fact_of_a_model_is_one_of_a_wrapped_model(fact: str) -> None:
    """Each can be read of both kinds, so that no code has to ask which of the two it has."""
    wrapped, own = es.wrap(model_of("llama")), tiny_llama()
    for model in (wrapped, own):
        getattr(model, fact)
    if fact == "executor_name":
        assert (wrapped.executor_name, own.executor_name) == ("bridge", "auto")


# --- weights that change under way ----------------------------------------------------------------


def moved(module: Any) -> None:
    with torch.no_grad():
        for one in module.parameters():
            one.add_(torch.randn_like(one), alpha=0.3)


def test_kept_rows_of_weights_of_before_are_not_read() -> None:
    module = reference_decoder("llama", torch.float32)
    model, prompt = es.wrap(module), list(range(4, 44))

    async def told() -> list[Any]:
        found = []
        async with es.AsyncEngine(model) as engine:
            for change in (False, False, True):
                if change:
                    moved(module)
                answer = await engine.generate(prompt, max_new_tokens=6)
                found.append((answer, es.generate(model, None, prompt, max_new_tokens=6)))
        return found

    first, second, third = asyncio.run(told())
    assert all(answer == alone for answer, alone in (first, second, third))
    assert first[1] == second[1] != third[1]


def test_a_prefix_of_weights_of_before_is_refused() -> None:
    module = reference_decoder("llama", torch.float32)
    model = es.wrap(module)
    prefix = es.prefill(model, None, [4, 5, 6, 7])
    assert es.generate(model, None, [8], prefix=prefix, max_new_tokens=3)
    moved(module)
    with pytest.raises(RequestError, match="weights of before"):
        es.generate(model, None, [8], prefix=prefix, max_new_tokens=3)
