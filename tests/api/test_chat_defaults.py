"""What messages mean where neither the caller nor the model says: the same in every call."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import everystep as es
from everystep.config import FIELDS, GenerationConfig, chat_defaults, merge_configs
from everystep.config.chat_defaults import ChatDefaults, chat_defaults_of
from everystep.errors import RequestError, UnknownArgumentError, UnsupportedError
from everystep.files.sources import DEFAULT_MODEL
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer

USER = {"role": "user", "content": "Hi"}
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_p": 0.9}
SYSTEM = {"role": "system", "content": "Be brief."}
OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "eos_token_id": None}
MODEL, TOKENIZER = tiny_llama(vocab_size=320, dtype=torch.float32), tiny_tokenizer(320)


def instructed() -> es.LanguageModel:
    """Return the model with a default system message."""
    model = tiny_llama(vocab_size=320, dtype=torch.float32)
    model.chat_defaults = ChatDefaults("Be brief.")
    return model


def assumed(call: dict[str, Any], own: GenerationConfig, passed: object = None) -> dict[str, Any]:
    """Return what a chat assumes beside these settings."""
    found = merge_configs(call, passed, own, ChatDefaults())
    return {name: found[name] for name in found if found.source(name) == "chat"}


@pytest.mark.parametrize(
    ("call", "own", "expected"),
    [
        ({}, {}, {"max_new_tokens": 512, **SAMPLED}),
        ({"max_new_tokens": 3}, {}, SAMPLED),
        ({"max_length": 30}, {}, SAMPLED),
        ({"do_sample": None}, {}, {"max_new_tokens": 512, **SAMPLED}),
        ({}, {"max_length": 4096}, {"max_new_tokens": 512, **SAMPLED}),
        ({}, {"max_new_tokens": 9}, SAMPLED),
        ({}, {"repetition_penalty": 1.1}, {"max_new_tokens": 512, **SAMPLED}),
        ({}, {"temperature": 0.6}, {"max_new_tokens": 512}),
        ({}, {"do_sample": False}, {"max_new_tokens": 512}),
        ({"do_sample": False}, {}, {"max_new_tokens": 512}),
        ({"num_beams": 2}, {}, {"max_new_tokens": 512}),
        ({"penalty_alpha": 0.6, "top_k": 4}, {"min_p": 0.1}, {"max_new_tokens": 512}),
    ],
)
def test_what_is_left_open_is_assumed_and_shown_as_what_it_is(
    call: dict[str, Any], own: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert assumed(call, GenerationConfig(**own)) == expected


def test_a_configuration_that_is_passed_says_it_too() -> None:
    passed = GenerationConfig(top_k=3, max_new_tokens=9)
    assert assumed({}, GenerationConfig(), passed) == {}
    assert "max_new_tokens=512 (chat)" in repr(merge_configs({}, chat=ChatDefaults()))
    assert merge_configs({}, chat=ChatDefaults(), chosen=True).do_sample is False


@pytest.mark.parametrize("sampling", [{"temprature": 1.0}, {"temperature": "hot"}, {"seed": 3}])
def test_defaults_that_cannot_be_are_refused(sampling: dict[str, Any]) -> None:
    with pytest.raises((UnknownArgumentError, RequestError)):
        ChatDefaults(None, sampling)
    with pytest.raises(RequestError, match="a text or None"):
        ChatDefaults(5)  # type: ignore[arg-type]


def test_a_conversation_begins_with_the_system_message_unless_it_has_one() -> None:
    defaults = ChatDefaults("Be brief.")
    begun = [{"role": "system", "content": "Be brief."}, USER]
    assert defaults.begun([USER]) == begun
    assert defaults.begun(begun) == begun
    assert ChatDefaults().begun([USER]) == [USER]
    guided = [{"role": "developer", "content": "Be kind."}, USER]
    assert defaults.begun(guided) == guided


def test_the_default_model_has_its_own() -> None:
    assert chat_defaults_of(DEFAULT_MODEL.upper()) == chat_defaults.KNOWN[DEFAULT_MODEL]
    for other in ("org/name", "a.gguf", 5, None):
        assert chat_defaults_of(other) == ChatDefaults()


def test_every_option_that_decides_exists() -> None:
    assert set(chat_defaults._CHOOSES) <= set(FIELDS)


def test_every_call_gives_a_conversation_the_same_answer() -> None:
    model, seeded = instructed(), {"seed": 3, **OPTIONS}
    whole = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, **seeded}
    plain = replace(ChatDefaults(), system=None, sampling={})
    wanted = es.chat(model, TOKENIZER, "Hi", **seeded)
    for prompt in ([USER], (USER,), USER, {"messages": [USER]}, [SYSTEM, USER]):
        assert es.generate(model, TOKENIZER, prompt, **seeded) == wanted
        with es.stream(model, TOKENIZER, prompt, **seeded) as stream:
            assert "".join(event.text for event in stream) == wanted
        assert es.open(model, TOKENIZER, prompt, **seeded).result().text == wanted
    with es.chat(model, TOKENIZER, "Hi", stream=True, **seeded) as stream:
        assert "".join(event.text for event in stream) == wanted
    model.chat_defaults = plain
    assert es.generate(model, TOKENIZER, [SYSTEM, USER], **whole) == wanted
    assert es.generate(model, TOKENIZER, [USER], **whole) != wanted


def test_an_asynchronous_engine_gives_it_too() -> None:
    model, seeded = instructed(), {"seed": 3, **OPTIONS}

    async def answers() -> list[str]:
        async with es.AsyncEngine(model, TOKENIZER) as engine:
            streamed = [event.text async for event in engine.stream([USER], **seeded)]
            return ["".join(streamed), await engine.generate([USER], **seeded)]

    assert asyncio.run(answers()) == [es.chat(model, TOKENIZER, "Hi", **seeded)] * 2


def test_in_a_batch_each_conversation_gets_them_and_a_text_does_not() -> None:
    model, seeds = instructed(), [3, 4, 5]
    prompts: list[Any] = [[USER], "Hi", [SYSTEM, USER]]
    found = es.generate(model, TOKENIZER, prompts, seed=seeds, **OPTIONS)
    alone = [es.chat(model, TOKENIZER, "Hi", seed=seed, **OPTIONS) for seed in seeds]
    assert found == [alone[0], es.generate(model, TOKENIZER, "Hi", **OPTIONS), alone[2]]
    each = [{"do_sample": False}, {}, {"max_new_tokens": 3}]
    found = es.generate(model, TOKENIZER, prompts, options=each, seed=seeds, **OPTIONS)
    assert found[0] == es.chat(model, TOKENIZER, "Hi", do_sample=False, **OPTIONS) != alone[0]
    assert alone[2].startswith(found[2]) and len(found[2]) < len(alone[2])


def test_several_answers_are_drawn_however_the_conversations_come() -> None:
    options = {**OPTIONS, "num_return_sequences": 2, "seed": 1}
    (listed,) = es.generate(MODEL, TOKENIZER, [[USER]], **options)
    (one_by_one,) = es.generate(MODEL, TOKENIZER, iter([[USER]]), **options)
    assert len({*listed}) == 2 and listed == one_by_one
    with pytest.raises(RequestError, match="greedy decoding finds one sequence"):
        es.generate(MODEL, TOKENIZER, ["Hi"], **options)


def test_what_stands_before_a_text_or_in_a_prefix_begins_alike() -> None:
    model = instructed()
    after = [es.score(model, TOKENIZER, " yes", after=one) for one in ([USER], [SYSTEM, USER])]
    assert after[0].perplexity == after[1].perplexity
    assert after[0].perplexity != es.score(MODEL, TOKENIZER, " yes", after=[USER]).perplexity
    prefix = es.prefill(model, TOKENIZER, [USER])
    assert prefix.ids == es.prefill(model, TOKENIZER, [SYSTEM, USER]).ids
    going = es.generate(model, TOKENIZER, [USER], prefix=prefix, seed=3, **OPTIONS)
    assert going == es.generate(model, TOKENIZER, [USER], seed=3, **OPTIONS)


def test_a_saved_run_samples_on_whatever_the_defaults_are_now(tmp_path: Path) -> None:
    model = instructed()
    run = es.open(model, TOKENIZER, [USER], seed=3, **OPTIONS)
    next(run)
    run.save(tmp_path / "run.es")
    other = tiny_llama(vocab_size=320, dtype=torch.float32)
    other.chat_defaults = ChatDefaults(None, {})
    assert es.resume(tmp_path / "run.es", other, TOKENIZER).result().text == run.result().text
    changed = es.open(model, TOKENIZER, [USER], seed=3, **OPTIONS)
    changed.set(do_sample=False)
    greedy = es.chat(model, TOKENIZER, "Hi", do_sample=False, **OPTIONS)
    assert changed.result().text == greedy


def asked_of(part: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]}]


def test_a_picture_by_its_address_is_not_fetched() -> None:
    part = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    with pytest.raises(RequestError, match="pictures are not fetched"):
        es.generate(MODEL, TOKENIZER, asked_of(part))
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    with pytest.raises(RequestError, match="need a tokenizer that takes them"):
        es.generate(MODEL, TOKENIZER, asked_of(part))


@pytest.mark.parametrize(
    ("part", "what"),
    [
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "no sounds.*Whisp"),
        ({"type": "audio", "audio": [0.0]}, "no sounds"),
        ({"type": "video_url", "video_url": {"url": "data:"}}, "no videos at addresses.*frames"),
        ({"type": "file", "file": {"file_id": "a"}}, "no files"),
    ],
)
def test_parts_that_no_template_prints_are_refused(part: dict[str, object], what: str) -> None:
    with pytest.raises(UnsupportedError, match=f"messages hold {what}"):
        es.chat(MODEL, TOKENIZER, asked_of(part))


def test_a_chat_goes_no_further_than_the_context() -> None:
    options = {"eos_token_id": None, "do_sample": False, "return_dict_in_generate": True}
    context = MODEL.context
    assert context is not None
    found = es.generate(MODEL, TOKENIZER, [{"role": "user", "content": "a" * 60}], **options)
    assert found.prompt_tokens + len(found.tokens) == min(context, found.prompt_tokens + 512)


def test_a_chat_is_sampled_and_a_text_is_not() -> None:
    greedy = es.generate(MODEL, TOKENIZER, [USER], do_sample=False, **OPTIONS)
    answers = {es.chat(MODEL, TOKENIZER, "Hi", seed=seed, **OPTIONS) for seed in range(6)}
    assert len(answers) > 2
    wanted = es.generate(MODEL, TOKENIZER, [USER], seed=3, **SAMPLED, **OPTIONS)
    assert es.chat(MODEL, TOKENIZER, "Hi", seed=3, **OPTIONS) == wanted
    assert es.chat(MODEL, TOKENIZER, "Hi", do_sample=False, **OPTIONS) == greedy
    rendered = TOKENIZER.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    ids = TOKENIZER.encode(rendered, add_special_tokens=False)
    assert es.generate(MODEL, TOKENIZER, ids, **OPTIONS) == greedy


@pytest.mark.model
def test_the_default_model_knows_the_capital_of_france() -> None:
    model, tokenizer = es.load(dtype=torch.float32)
    question = "What is the capital of France?"
    said = [{"role": "user", "content": question}]
    answer = es.chat(model, tokenizer, question, max_new_tokens=12)
    assert "Paris" in answer
    assert es.generate(model, tokenizer, said, max_new_tokens=12) == answer
    with es.stream(model, tokenizer, said, max_new_tokens=12) as stream:
        assert "".join(event.text for event in stream) == answer


def test_an_answer_that_is_not_begun_is_of_conversations_alone() -> None:
    given = {**OPTIONS, "add_generation_prompt": False}
    for prompts in ("Hi", ["Hi", [USER]]):
        with pytest.warns(UserWarning, match="add_generation_prompt has no effect on a prompt"):
            es.generate(MODEL, TOKENIZER, prompts, **given)
    es.generate(MODEL, TOKENIZER, [[USER], {"messages": [USER]}], **given)  # and no warning
    es.generate(MODEL, TOKENIZER, (one for one in [[USER]]), **given)
