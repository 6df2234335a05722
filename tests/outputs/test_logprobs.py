"""Log-probabilities are those of the model's own logits, however the tokens came about."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import everystep as es
from everystep.api.load import from_weights
from everystep.api.model import LanguageModel
from everystep.engine import Continuous, Engine
from everystep.engine.logprobs import choice_logprobs, prompt_logprobs
from everystep.errors import RequestError
from everystep.outputs import TokenLogprobs
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer
from everystep.types import Event
from tests.api.test_generate import PROMPTS, padded
from tests.outputs.test_transition_scores import tiny_t5

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalised": {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2},
    "sampling": {"do_sample": True, "temperature": 0.6, "num_return_sequences": 2, "seed": 5},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "sampled beams": {"num_beams": 3, "do_sample": True, "seed": 2},
    "lookup": {"prompt_lookup_num_tokens": 4},
    "contrastive": {"penalty_alpha": 0.5, "top_k": 3},
    "guidance": {"guidance_scale": 1.5},
    "lingering": {"output_scores": True},
}


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return tiny_llama()


def told(model: LanguageModel, ids: list[int], first: int, k: int) -> tuple[Any, Any, Any]:
    """What the model says of ids[first:] by one plain forward."""
    logits = model(torch.tensor([ids])).logits[0, first - 1 : -1].float()
    logs = torch.log_softmax(logits, dim=-1)
    best = logs.topk(k)
    return logs.gather(1, torch.tensor(ids[first:])[:, None])[:, 0], best.indices, best.values


def check(model: LanguageModel, found: TokenLogprobs, ids: list[int], first: int, k: int) -> None:
    chosen, top_tokens, top = told(model, ids, first, k)
    assert found.tokens.tolist() == ids[first:]
    torch.testing.assert_close(found.logprobs, chosen, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.top_logprobs, top, atol=1e-5, rtol=0)
    assert torch.equal(found.top_tokens, top_tokens)


@pytest.mark.parametrize("way", WAYS)
def test_they_are_those_of_a_plain_forward(model: LanguageModel, way: str) -> None:
    out = model.generate(
        **padded(PROMPTS, "left"),
        max_new_tokens=9,
        logprobs=3,
        prompt_logprobs=2,
        return_dict_in_generate=True,
        **WAYS[way],
    )
    returns = len(out.sequences) // len(PROMPTS)
    for row, (known, new) in enumerate(zip(out.logprobs, out.new_tokens, strict=True)):
        prompt = PROMPTS[row // returns]
        check(model, known, prompt + new, len(prompt), 3)
    for prompt, known in zip(PROMPTS, out.prompt_logprobs, strict=True):
        check(model, known, prompt, 1, 2)


@pytest.mark.parametrize(
    "options", [{"prefill_chunk_size": 2}, {"use_cache": False}, {"output_hidden_states": True}]
)
def test_feeding_otherwise_changes_nothing(model: LanguageModel, options: dict[str, Any]) -> None:
    for beams in (1, 2):
        out = model.generate(
            torch.tensor([PROMPTS[0]]),
            num_beams=beams,
            max_new_tokens=5,
            logprobs=1,
            prompt_logprobs=1,
            return_dict_in_generate=True,
            **options,
        )
        check(model, out.logprobs[0], PROMPTS[0] + out.new_tokens[0], len(PROMPTS[0]), 1)
        check(model, out.prompt_logprobs[0], PROMPTS[0], 1, 1)


def test_they_survive_chunks_and_preemption(model: LanguageModel) -> None:
    session = es.stream(model, None, PROMPTS, logprobs=2, prompt_logprobs=1, max_new_tokens=8)
    requests = [group.request for group in session.groups]
    session.close()
    engine = Engine(model.executor(), Continuous(token_budget=3, max_rows=3, max_positions=14))
    groups = [engine.submit(request) for request in requests]
    while engine.pending:
        engine.step()
    assert engine.counts.preemptions_in_decode > 0
    assert engine.counts.chunks > 0
    for prompt, group in zip(PROMPTS, groups, strict=True):
        (done,) = group.request.strategy.finish(group)
        ids = prompt + done.tokens.tolist()
        check(model, choice_logprobs(done.memo, len(done.tokens)), ids, len(prompt), 2)
        check(model, prompt_logprobs(group), prompt, 1, 1)


def test_zero_keeps_the_tokens_themselves_alone(model: LanguageModel) -> None:
    out = model.generate(
        torch.tensor([PROMPTS[0]]), max_new_tokens=4, logprobs=0, return_dict_in_generate=True
    )
    assert out.logprobs[0].top_tokens.shape == (len(out.new_tokens[0]), 0)
    assert out.prompt_logprobs is None
    check(model, out.logprobs[0], PROMPTS[0] + out.new_tokens[0], len(PROMPTS[0]), 0)


def test_an_encoder_and_decoder_have_them_too() -> None:
    theirs = tiny_t5()
    settings = {**theirs.config.to_dict(), "is_encoder_decoder": True}
    model = from_weights(settings, theirs.state_dict(), dtype=torch.float64)
    out = model.generate(
        torch.tensor([[7, 8, 9]]),
        max_new_tokens=4,
        min_new_tokens=4,
        logprobs=2,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logs = torch.log_softmax(torch.cat(out.logits), dim=-1)
    torch.testing.assert_close(out.logprobs[0].top_logprobs, logs.topk(2).values)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"logprobs": 2}, "return_dict_in_generate=True"),
        ({"logprobs": 99, "return_dict_in_generate": True}, "from 0 to 48; got 99"),
        ({"prompt_logprobs": -1, "return_dict_in_generate": True}, "got -1"),
        ({"logprobs": True, "return_dict_in_generate": True}, "got True"),
    ],
)
def test_impossible_numbers_are_refused(
    model: LanguageModel, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(RequestError, match=says):
        model.generate(torch.tensor([PROMPTS[0]]), **options)


def test_a_prompt_without_ids_has_none(model: LanguageModel) -> None:
    embeds = model.get_input_embeddings()(torch.tensor([PROMPTS[0]]))
    with pytest.raises(RequestError, match=r"inputs_embeds only.*prompt_logprobs=5"):
        model.generate(inputs_embeds=embeds, prompt_logprobs=0, return_dict_in_generate=True)


def test_of_a_prompt_of_embeddings_the_best_tokens_are_told(model: LanguageModel) -> None:
    """What each position expects next; of the tokens that stood there nothing is known."""
    given: dict[str, Any] = {"prompt_logprobs": 3, "max_new_tokens": 2}
    given["return_dict_in_generate"] = True
    ids = torch.tensor([PROMPTS[0]])
    embeds = model.get_input_embeddings()(ids)
    (known,) = model.generate(ids, **given).prompt_logprobs
    (found,) = model.generate(inputs_embeds=embeds, **given).prompt_logprobs
    one = es.generate(model, None, {"inputs_embeds": embeds[0]}, **given)
    for blind in (found, one.prompt_logprobs):
        assert torch.equal(blind.top_tokens, known.top_tokens)
        torch.testing.assert_close(blind.top_logprobs, known.top_logprobs)
        assert blind.tokens.eq(-1).all() and blind.logprobs.isnan().all()
        assert len(blind) == len(PROMPTS[0]) - 1


# --- texts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"penalty_alpha": 0.4, "top_k": 2}])
def test_events_and_results_of_a_stream_hold_them(options: dict[str, Any]) -> None:
    model, tokenizer = tiny_llama(vocab_size=320), tiny_tokenizer(vocab_size=320)
    stream = es.stream(model, tokenizer, "some text", max_new_tokens=6, logprobs=2, **options)
    events: list[Event] = [event for event in stream if event.token >= 0]
    ((done,),) = stream.results()
    assert done.logprobs is not None
    assert [event.token for event in events] == list(done.tokens)
    assert [event.logprob for event in events] == pytest.approx(done.logprobs.logprobs.tolist())
    first = events[0].top_logprobs or ()
    assert [id for id, _ in first] == done.logprobs.top_tokens[0].tolist()


def test_es_generate_returns_them_with_the_details() -> None:
    model, tokenizer = tiny_llama(vocab_size=320), tiny_tokenizer(vocab_size=320)
    options = {"max_new_tokens": 5, "logprobs": 1, "prompt_logprobs": 1}
    with pytest.raises(RequestError, match="return_dict_in_generate"):
        es.generate(model, tokenizer, "abc", **options)
    one = es.generate(model, tokenizer, "abc", return_dict_in_generate=True, **options)
    ids = tokenizer.encode("abc")
    check(model, one.logprobs, ids + list(one.tokens), len(ids), 1)
    check(model, one.prompt_logprobs, ids, 1, 1)
