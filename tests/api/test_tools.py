"""Tools and thoughts in calls about messages: forced calls, parts of answers, bounded thoughts."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jsonschema
import pytest
import torch

import everystep as es
from everystep.dialogue import CallBegin, Parser, dialect_of, read_tools
from everystep.errors import RequestError, UnsupportedError
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import CHATML, tiny_tokenizer
from everystep.text import Tokenizer
from tests.dialogue.templates import FORMS

MODEL = tiny_llama(seed=2, vocab_size=320, hidden_size=16, max_position_embeddings=2048)
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 4},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "unit"],
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
ASKED = [{"role": "user", "content": "Is it warm?"}]
BY_DIALECT = {form.dialect: form for form in reversed(FORMS)}
PLAIN: dict[str, Any] = {"max_new_tokens": 150, "eos_token_id": 2, "do_sample": False}
FORCED: dict[str, Any] = {**PLAIN, "tools": TOOLS, "tool_choice": "weather"}
ONE: dict[str, Any] = {**FORCED, "parallel_tool_calls": False, "thinking_budget": 4}


def tokenizer_of(dialect: str) -> Tokenizer:
    tokenizer = tiny_tokenizer(320)
    tokenizer.chat_template = BY_DIALECT[dialect].source
    return tokenizer


HERMES = tokenizer_of("hermes")


def check(calls: Any) -> None:
    """The calls are of the tool, and their arguments follow its schema."""
    assert calls
    for one in calls:
        assert one.name == "weather" and one.complete
        jsonschema.validate(json.loads(one.arguments), WEATHER)


def bounded(dialect: str) -> dict[str, Any]:
    """A forced call, before which a model that thinks soon stops to."""
    thinks = BY_DIALECT[dialect].thoughts is not None
    return ONE if thinks else {**ONE, "thinking_budget": None}


WAYS: list[dict[str, Any]] = [
    {},
    *({"do_sample": True, "temperature": 1.5, "seed": seed} for seed in range(3)),
    {"num_beams": 3},
    {"prompt_lookup_num_tokens": 3},
]


@pytest.mark.parametrize("dialect", ["hermes", "mistral-v11", "qwen3-coder", "lfm2", "gemma-4"])
def test_a_forced_call_follows_its_schema_however_tokens_are_chosen(dialect: str) -> None:
    tokenizer = tokenizer_of(dialect)
    for way in WAYS:
        answer = es.chat(MODEL, tokenizer, ASKED, **{**bounded(dialect), **way})
        assert answer == "" and len(answer.tool_calls) == 1
        check(answer.tool_calls)


@pytest.mark.slow
@pytest.mark.parametrize("dialect", sorted(BY_DIALECT))
def test_a_forced_call_follows_its_schema_in_any_form(dialect: str) -> None:
    tokenizer = tokenizer_of(dialect)
    for way in [*WAYS, *({"do_sample": True, "seed": seed} for seed in range(20))]:
        given = {**bounded(dialect), "max_new_tokens": 600, **way}
        check(es.chat(MODEL, tokenizer, ASKED, **given).tool_calls)


def test_several_calls_or_one() -> None:
    for seed in range(8):
        given = {**FORCED, "do_sample": True, "seed": seed, "max_new_tokens": 250}
        given["enable_thinking"] = False
        calls = es.chat(MODEL, HERMES, ASKED, **given).tool_calls
        check([one for one in calls if one.complete] or calls[:1])
        if len(calls) > 1:
            break
    else:
        pytest.fail("no seed makes several calls")
    assert len({one.id for one in calls}) == len(calls)


def test_a_required_call_may_be_of_any_tool() -> None:
    given = {**ONE, "tool_choice": "required", "do_sample": True, "temperature": 3.0}
    named = {es.chat(MODEL, HERMES, ASKED, **given, seed=n).tool_calls[0].name for n in range(12)}
    assert named == {"weather", "now"}


def test_an_answer_is_a_text_and_has_parts() -> None:
    plain = es.chat(MODEL, HERMES, ASKED, **PLAIN)
    assert (plain.tool_calls, plain.reasoning_content) == ((), None)
    assert plain.message.as_dict() == {"role": "assistant", "content": plain}
    made = es.chat(MODEL, HERMES, ASKED, **ONE)
    (call,) = made.tool_calls
    said = made.message.as_dict()
    assert said["tool_calls"] == [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": "weather", "arguments": call.arguments},
        }
    ]
    after = [*ASKED, said, {"role": "tool", "tool_call_id": call.id, "content": "12"}]
    given = {**PLAIN, "max_new_tokens": 3}
    assert isinstance(es.chat(MODEL, HERMES, after, tools=TOOLS, **given), es.ChatAnswer)
    ids = HERMES.apply_chat_template(
        [
            *ASKED,
            {
                **said,
                "tool_calls": [
                    {"function": {"name": "weather", "arguments": json.loads(call.arguments)}}
                ],
            },
            after[2],
        ],
        tools=TOOLS,
        add_generation_prompt=True,
        return_dict=False,
    )
    whole = {"return_dict_in_generate": True, **given}
    assert es.generate(MODEL, HERMES, after, tools=TOOLS, **whole).prompt_tokens == len(ids)


def test_every_call_about_messages_gives_the_same() -> None:
    given = {**ONE, "seed": 5, "do_sample": True}
    wanted = es.chat(MODEL, HERMES, ASKED, **given).message
    whole = es.generate(MODEL, HERMES, ASKED, return_dict_in_generate=True, **given)
    assert whole.message == wanted and "<tool_call>" in whole.text
    assert es.generate(MODEL, HERMES, ASKED, **given) == whole.text
    run = es.open(MODEL, HERMES, ASKED, **given)
    assert run.result().message == wanted
    with es.stream(MODEL, HERMES, ASKED, **given) as events:
        assert "".join(event.text for event in events) == whole.text

    async def asked() -> Any:
        async with es.AsyncEngine(MODEL, HERMES) as engine:
            return await engine.generate(ASKED, return_dict_in_generate=True, **given)

    assert asyncio.run(asked()).message == wanted


def test_a_stream_can_be_parsed_while_it_comes() -> None:
    parser = Parser(dialect_of(HERMES.chat_template), read_tools(TOOLS), key="a")
    begun = []
    with es.chat(MODEL, HERMES, ASKED, stream=True, **ONE) as events:
        for event in events:
            found = parser.feed(event.text)
            begun += [one for one in found if isinstance(one, CallBegin)]
    parser.close()
    assert [one.name for one in begun] == ["weather"]


def test_marks_that_are_special_tokens_stay_in_the_text() -> None:
    tokenizer = tiny_tokenizer(320)
    backend = tokenizer.backend
    special = [one for one in backend.get_added_tokens_decoder().values() if one.special]
    mark = next(one.content for one in special if "reserved" in one.content)
    source = BY_DIALECT["mistral-v11"].source.replace("[CALL_ID]{{ c.id }}", "")
    tokenizer.chat_template = source
    backend.add_special_tokens(["[TOOL_CALLS]", "[ARGS]"])
    wide = tiny_llama(seed=2, vocab_size=322, hidden_size=16, max_position_embeddings=2048)
    found = es.generate(wide, tokenizer, ASKED, return_dict_in_generate=True, **ONE)
    assert found.text.startswith("[TOOL_CALLS]weather[ARGS]{") and mark not in found.text
    check(found.message.tool_calls)
    with es.stream(wide, tokenizer, ASKED, **ONE) as events:
        assert "".join(event.text for event in events) == found.text
    assert "[TOOL_CALLS]" not in tokenizer.decode(found.tokens, skip_special_tokens=True)


def test_ids_follow_from_seed_answer_and_place() -> None:
    def ids(messages: Any, **how: Any) -> list[str]:
        return [one.id for one in es.chat(MODEL, HERMES, messages, **{**ONE, **how}).tool_calls]

    longer = [*ASKED, {"role": "assistant", "content": "Yes."}, *ASKED]
    assert ids(ASKED, seed=1) == ids(ASKED, seed=1)
    assert ids(ASKED, seed=1) != ids(ASKED, seed=2)
    assert ids(ASKED, seed=1) != ids(longer, seed=1)


# --- thoughts -------------------------------------------------------------------------------------

OPEN = BY_DIALECT["hermes"].thoughts


def thinking() -> dict[str, Any]:
    return {**PLAIN, "enable_thinking": True, "max_new_tokens": 40, "eos_token_id": None}


@pytest.mark.parametrize("way", WAYS)
def test_thoughts_end_after_their_budget(way: dict[str, Any]) -> None:
    for budget in (0, 1, 7):
        given = {**thinking(), **way, "thinking_budget": budget, "return_dict_in_generate": True}
        found = es.generate(MODEL, HERMES, ASKED, **given)
        thought, closing, said = found.text.partition("</think>")
        assert closing and said
        closed = HERMES.encode("\n</think>\n\n")
        place = next(n for n in range(40) if list(found.tokens[n : n + len(closed)]) == closed)
        assert budget <= place <= budget + 3  # a character that was begun is completed
        assert found.message.reasoning_content == thought.strip()
    free = es.chat(MODEL, HERMES, ASKED, **{**thinking(), **way})
    assert free == "" and free.reasoning_content


def test_a_thought_that_has_ended_is_not_ended_again() -> None:
    closed = HERMES.encode("x</think>y")

    def end_soon(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        new = ids.shape[1] - start
        if new < len(closed):
            scores[:] = -torch.inf
            scores[:, closed[new]] = 0
        return scores

    start = len(
        HERMES.apply_chat_template(
            ASKED, add_generation_prompt=True, enable_thinking=True, return_dict=False
        )
    )
    given = {**thinking(), "logits_processor": [end_soon]}
    free = es.generate(MODEL, HERMES, ASKED, **given)
    bound = es.generate(MODEL, HERMES, ASKED, thinking_budget=len(closed), **given)
    assert bound == free and free.startswith("x</think>y")


def test_a_budget_and_a_forced_call_go_together() -> None:
    given = {**ONE, "enable_thinking": True, "thinking_budget": 5}
    for way in WAYS:
        found = es.chat(MODEL, HERMES, ASKED, **{**given, **way})
        check(found.tool_calls)
        assert len(HERMES.encode(found.reasoning_content or "")) <= 8


def test_a_saved_run_goes_on_within_its_budget(tmp_path: Any) -> None:
    given = {**thinking(), "thinking_budget": 9, "tools": TOOLS, "seed": 3, "do_sample": True}
    wanted = es.open(MODEL, HERMES, ASKED, **given).result()
    for steps in (3, 12):
        run = es.open(MODEL, HERMES, ASKED, **given)
        for _ in range(steps):
            next(run)
        run.save(tmp_path / "run")
        again = es.resume(tmp_path / "run", MODEL, HERMES).result()
        assert (again.tokens, again.message) == (wanted.tokens, wanted.message)


# --- what is refused ------------------------------------------------------------------------------


def without_thoughts() -> Tokenizer:
    tokenizer = tiny_tokenizer(320)
    tokenizer.chat_template = FORMS[1].source.replace("enable_thinking", "x")
    return tokenizer


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"tools": []}, "empty"),
        ({"tools": "now"}, "no list"),
        ({"tools": TOOLS, "tool_choice": "weahter"}, "Perhaps you meant 'weather'"),
        ({"tool_choice": "auto"}, "about tools"),
        ({"parallel_tool_calls": True}, "about tools"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "no bool"),
        ({"enable_thinking": 1}, "no bool"),
        ({"thinking_budget": -1}, "impossible"),
        ({"thinking_budget": True}, "impossible"),
        ({"tools": TOOLS, "tool_choice": "required", "regex": "a"}, "cannot follow regex"),
        ({"enable_thinking": True, "thinking_budget": 3, "regex": "a"}, "cannot follow regex"),
    ],
)
def test_wrong_values_are_refused_before_any_compute(given: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        es.chat(MODEL, HERMES, ASKED, **{**PLAIN, **given})


def test_what_a_model_does_not_know_is_refused() -> None:
    plain = without_thoughts()
    with pytest.raises(UnsupportedError, match="thinking_budget has no effect"):
        es.chat(MODEL, plain, ASKED, thinking_budget=3)
    with pytest.raises(UnsupportedError, match="enable_thinking has no effect"):
        es.chat(MODEL, plain, ASKED, enable_thinking=False)
    unknown = tiny_tokenizer(320)
    assert unknown.chat_template == CHATML
    with pytest.raises(UnsupportedError, match="known form"):
        es.chat(MODEL, unknown, ASKED, tools=TOOLS)
    for prompt in ("Is it warm?", [1, 2, 3]):
        with pytest.raises(RequestError, match="belong to a conversation"):
            es.generate(MODEL, HERMES, prompt, tools=TOOLS, **PLAIN)
    with pytest.raises(RequestError, match=r"es\.chat"):
        MODEL.generate(torch.tensor([[1]]), tools=TOOLS)
    with pytest.raises(RequestError, match="logprobs"):
        es.chat(MODEL, HERMES, ASKED, logprobs=1, **ONE)
    cut = {"role": "assistant", "tool_calls": [{"function": {"name": "now", "arguments": "{"}}]}
    with pytest.raises(RequestError, match="call that is none"):
        es.chat(MODEL, HERMES, [*ASKED, cut, *ASKED], tools=TOOLS, **PLAIN)


def test_tools_that_may_not_be_called_are_not_shown() -> None:
    given = {**PLAIN, "max_new_tokens": 5, "return_dict_in_generate": True}
    hidden = es.generate(MODEL, HERMES, ASKED, tools=TOOLS, tool_choice="none", **given)
    plain = es.generate(MODEL, HERMES, ASKED, **given)
    assert (hidden.prompt_tokens, hidden.text) == (plain.prompt_tokens, plain.text)
    shown = es.generate(MODEL, HERMES, ASKED, tools=TOOLS, **given)
    assert shown.prompt_tokens > plain.prompt_tokens


@pytest.mark.model
def test_the_default_model_is_told_of_tools_in_its_system_message() -> None:
    model, tokenizer = es.load(dtype=torch.float32)
    given = {**FORCED, "eos_token_id": tokenizer.eos_token_id}
    for way in ({}, {"do_sample": True, "seed": 1, "max_new_tokens": 60}):
        answer = es.chat(model, tokenizer, "How warm is Rome?", **{**given, **way})
        check(answer.tool_calls)
    after = [*ASKED, answer.message.as_dict(), {"role": "tool", "content": "12 C"}]
    assert es.chat(model, tokenizer, after, tools=TOOLS, max_new_tokens=4)
