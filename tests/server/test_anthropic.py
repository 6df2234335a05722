"""Anthropic's wire as Anthropic's own client reads it, whole and as events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

import everystep as es
from everystep.server.access import Keys, digest_of
from everystep.server.exchange import FrontSettings
from tests.server.serving import TOKENIZER, Served, dying, served, tiny
from tests.server.test_tools import TOKENIZER as WITH_TOOLS
from tests.server.test_tools import TOOL
from tests.server.test_tools import server as tools_server  # noqa: F401  # a fixture

HELLO: Any = [{"role": "user", "content": "hello"}]
SHAPE: Any = {"temperature": 1.0, "seed": 5}
"""What the client no longer types, and servers take."""
ADD: Any = {
    "name": "add",
    "description": "Adds.",
    "input_schema": TOOL["function"]["parameters"],
}


def client_of(server: Served) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[anthropic.Anthropic]:
    with client_of(server) as one:
        yield one


def streamed(client: anthropic.Anthropic, **asked: Any) -> anthropic.types.Message:
    """The message that the client's own stream adds up to."""
    with client.messages.stream(**asked) as stream:
        for _ in stream:
            pass
        return stream.get_final_message()


def test_a_message_is_that_of_the_library_and_a_stream_adds_up_to_it(
    client: anthropic.Anthropic,
) -> None:
    asked: Any = {"model": "tiny", "max_tokens": 12, "messages": HELLO, "extra_body": SHAPE}
    whole = client.messages.create(**asked)
    shape: Any = {"temperature": 1.0, "do_sample": True, "seed": 5}
    wanted = es.chat(tiny(), TOKENIZER, HELLO, max_new_tokens=12, **shape)
    (block,) = whole.content
    assert block.type == "text" and block.text == wanted
    assert (whole.role, whole.stop_reason, whole.stop_sequence) == ("assistant", "max_tokens", None)
    joined = streamed(client, **asked)
    assert [one.text for one in joined.content] == [wanted]  # type: ignore[union-attr]
    assert joined.stop_reason == whole.stop_reason
    read = [whole.usage, joined.usage]
    for usage in read:
        cached = usage.cache_read_input_tokens or 0
        assert usage.output_tokens == 12
        assert usage.input_tokens + cached == len(
            TOKENIZER.apply_chat_template(HELLO, add_generation_prompt=True, return_dict=False)
        )
    assert whole._request_id


def test_the_events_of_a_stream(server: Served) -> None:
    body = {"model": "tiny", "max_tokens": 5, "messages": HELLO, "stream": True, **SHAPE}
    answer = server.post("/v1/messages", **body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = [one.split("\n") for one in answer.text.strip().split("\n\n")]
    told = [(name.removeprefix("event: "), json.loads(data[6:])) for name, data in events]
    assert all(name == data["type"] for name, data in told)
    names = [name for name, _ in told if name != "content_block_delta"]
    assert names == [
        *("message_start", "content_block_start", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    assert told[0][1]["message"]["content"] == [] and "[DONE]" not in answer.text
    assert told[1][1]["content_block"] == {"type": "text", "text": ""}
    assert told[-2][1]["usage"]["output_tokens"] == 5


def test_what_ends_a_message(client: anthropic.Anthropic) -> None:
    asked: Any = {"model": "tiny", "messages": HELLO, "extra_body": SHAPE}
    text = client.messages.create(**asked, max_tokens=12).content[0].text  # type: ignore[union-attr]
    stop = next(one for one in text[1:] if one.isascii() and one.isalnum())
    cut = client.messages.create(**asked, max_tokens=12, stop_sequences=[stop])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].text == text[: text.index(stop)]  # type: ignore[union-attr]
    (joined,) = streamed(client, **asked, max_tokens=12, stop_sequences=[stop]).content
    assert joined.text == cut.content[0].text  # type: ignore[union-attr]
    by_itself = {"temperature": 0, "choices": ["red"]}
    ended = client.messages.create(**{**asked, "extra_body": by_itself}, max_tokens=12)
    assert (ended.content[0].text, ended.stop_reason) == ("red", "end_turn")  # type: ignore[union-attr]


def test_the_context_may_end_a_message(client: anthropic.Anthropic) -> None:
    """The client asks for thousands of tokens by habit, which models of few positions lack."""
    long: Any = [{"role": "user", "content": "q " * 2000}]
    asked: Any = {"model": "tiny", "max_tokens": 8000, "messages": long}
    never = {"logit_bias": {str(id): -100 for id in tiny_ends()}, "temperature": 0}
    room = 4096 - client.messages.count_tokens(model="tiny", messages=long).input_tokens
    assert 0 < room < 200
    answer = client.messages.create(**asked, extra_body=never)
    assert answer.stop_reason == "model_context_window_exceeded"
    assert answer.usage.output_tokens == room


def tiny_ends() -> list[int]:
    ends = tiny().generation_config.eos_token_id
    return [ends] if isinstance(ends, int) else [*(ends or ())]


def test_a_system_text_and_an_answer_that_is_begun(client: anthropic.Anthropic) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "it was"}]
    asked: Any = {"model": "tiny", "max_tokens": 8, "system": "the", "messages": begun}
    answer = client.messages.create(**asked, extra_body=SHAPE)
    messages = [{"role": "system", "content": "the"}, *begun]
    prompt = TOKENIZER.apply_chat_template(messages, continue_final_message=True, return_dict=False)
    wanted = es.generate(
        tiny(), TOKENIZER, list(prompt), max_new_tokens=8, temperature=1.0, do_sample=True, seed=5
    )
    assert [one.text for one in answer.content] == [wanted]  # type: ignore[union-attr]
    blocks = [{"type": "text", "text": "the", "cache_control": {"type": "ephemeral"}}]
    again = client.messages.create(**{**asked, "system": blocks}, extra_body=SHAPE)
    assert again.content == answer.content
    counted = client.messages.count_tokens(model="tiny", system="the", messages=begun)  # type: ignore[arg-type]
    assert counted.input_tokens == len(prompt)


@pytest.mark.parametrize("seed", range(3))
def test_a_forced_call_and_its_result(
    tools_server: Served,  # noqa: F811
    seed: int,
) -> None:
    asked: Any = {"model": "tiny", "max_tokens": 200, "messages": HELLO, "tools": [ADD]}
    asked |= {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    asked |= {"thinking": {"type": "enabled", "budget_tokens": 4}}
    asked |= {"extra_body": {"temperature": 1.0, "seed": seed}}
    with client_of(tools_server) as client:
        whole = client.messages.create(**asked)
        joined = streamed(client, **asked)
        assert [one.to_dict() for one in joined.content] == [one.to_dict() for one in whole.content]
        shape: Any = {"do_sample": True, "temperature": 1.0, "max_new_tokens": 200, "seed": seed}
        wanted = es.chat(
            tiny(),
            WITH_TOOLS,
            HELLO,
            tools=[TOOL],
            tool_choice="required",
            parallel_tool_calls=False,
            thinking_budget=4,
            enable_thinking=True,
            **shape,
        )
        kinds = [one.type for one in whole.content]
        assert kinds[-1] == "tool_use" and whole.stop_reason == joined.stop_reason == "tool_use"
        call = whole.content[-1]
        assert call.type == "tool_use" and call.name == "add"
        assert call.input == json.loads(wanted.tool_calls[0].arguments)
        thoughts = [one.thinking for one in whole.content if one.type == "thinking"]
        assert "".join(thoughts) == (wanted.reasoning_content or "")
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "3"}
        turn: Any = [
            *HELLO,
            {"role": "assistant", "content": whole.content},
            {"role": "user", "content": [result, {"type": "text", "text": "and"}]},
        ]
        named = {"type": "tool", "name": "add"}
        more = client.messages.create(**{**asked, "messages": turn, "tool_choice": named})
        assert more.stop_reason in ("tool_use", "max_tokens")
        counted = client.messages.count_tokens(model="tiny", messages=turn, tools=[ADD])
    told = [
        HELLO[0],
        {
            "role": "assistant",
            "content": "".join(one.text for one in whole.content if one.type == "text"),
            "reasoning_content": "".join(thoughts),
            "tool_calls": [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": "add", "arguments": call.input},
                }
            ],
        },
        {"role": "tool", "tool_call_id": call.id, "content": "3"},
        {"role": "user", "content": "and"},
    ]
    if not thoughts:
        del told[1]["reasoning_content"]
    ids = WITH_TOOLS.apply_chat_template(
        told, tools=[TOOL], add_generation_prompt=True, return_dict=False
    )
    assert counted.input_tokens == len(list(ids))


def test_thoughts_are_blocks_where_nothing_is_said_of_them(
    tools_server: Served,  # noqa: F811
) -> None:
    """A model that thinks by itself, which a regular expression stands for here."""
    forced = {"regex": r"<think>\n[ab]{3}\n</think>\n\n[cd]{3}", **SHAPE}
    asked: Any = {"model": "tiny", "max_tokens": 60, "messages": HELLO}
    with client_of(tools_server) as client:
        answer = client.messages.create(**asked, extra_body=forced)
        joined = streamed(client, **asked, extra_body=forced)
        with pytest.raises(anthropic.BadRequestError, match="display"):
            client.messages.create(**asked, thinking={"type": "adaptive", "display": "omitted"})
        begun: Any = [*HELLO, {"role": "assistant", "content": answer.content}]
        again = client.messages.create(**{**asked, "messages": [*begun, *HELLO]})
    thought, said = answer.content
    assert thought.type == "thinking" and set(thought.thinking) <= {"a", "b"}
    assert said.type == "text" and set(said.text) <= {"c", "d"}
    assert thought.signature
    assert [(one.type, getattr(one, one.type)) for one in joined.content] == [
        (one.type, getattr(one, one.type)) for one in answer.content
    ]
    assert again.type == "message"


def test_an_answer_that_follows_a_schema(client: anthropic.Anthropic) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    closed = {**schema, "additionalProperties": False}
    config: Any = {"format": {"type": "json_schema", "schema": closed}}
    asked: Any = {"model": "tiny", "max_tokens": 60, "messages": HELLO, "output_config": config}
    answer = client.messages.create(**asked, extra_body=SHAPE)
    assert json.loads(answer.content[0].text)["a"] in ("x", "y")  # type: ignore[union-attr]


def test_the_asynchronous_client(server: Served) -> None:
    async def main() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none") as client:

            async def ask(seed: int) -> str:
                asked: Any = {"model": "tiny", "max_tokens": 9, "messages": HELLO}
                asked["extra_body"] = {**SHAPE, "seed": seed}
                async with client.messages.stream(**asked) as stream:
                    return "".join([piece async for piece in stream.text_stream])

            return list(await asyncio.gather(*map(ask, range(8))))

    wanted = [
        server.post("/v1/messages", max_tokens=9, messages=HELLO, **{**SHAPE, "seed": seed}).json()[
            "content"
        ][0]["text"]
        for seed in range(8)
    ]
    assert asyncio.run(main()) == wanted


def test_beams_are_asked_for_as_everywhere(client: anthropic.Anthropic) -> None:
    asked: Any = {"model": "tiny", "max_tokens": 8, "messages": HELLO}
    asked["extra_body"] = {"num_beams": 3}
    wanted = es.chat(tiny(), TOKENIZER, HELLO, max_new_tokens=8, num_beams=3)
    for answer in (client.messages.create(**asked), streamed(client, **asked)):
        assert [one.text for one in answer.content] == [wanted]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temprature": 1}, "temperature"),
        ({"n": 2}, "n"),
        ({"num_return_sequences": 2}, "num_return_sequences"),
        ({"messages": [{"role": "god", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "sound"}]}]}, "content[0].type"),
        ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "messages[0].name"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"tools": [ADD]}, "tools"),
        ({"tool_choice": {"type": "some"}}, "tool_choice"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking.budget_tokens"),
        ({"output_config": {"effort": "high"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"temperature": -1}, "temperature"),
        ({"logprobs": 2}, "logprobs"),
    ],
)
def test_impossible_messages(server: Served, body: dict[str, Any], said: str) -> None:
    answer = server.post("/v1/messages", **{"max_tokens": 4, "messages": HELLO, **body})
    assert answer.status_code == 400, answer.text
    told = answer.json()
    assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
    assert said in told["error"]["message"]
    assert told["request_id"] == answer.headers["request-id"]


def test_errors_are_those_that_the_client_knows(client: anthropic.Anthropic) -> None:
    asked: Any = {"max_tokens": 4, "messages": HELLO}
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="other", **asked)
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(model="tiny", **{**asked, "messages": []})


def test_a_key_in_either_header() -> None:
    with served(settings=FrontSettings(keys=Keys([digest_of("secret")]))) as server:
        asked: Any = {"max_tokens": 2, "messages": HELLO}
        answer = server.post("/v1/messages", **asked)
        assert answer.status_code == 401
        assert answer.json()["error"]["type"] == "authentication_error"
        for headers in ({"x-api-key": "secret"}, {"Authorization": "Bearer secret"}):
            answer = server.client.post("/v1/messages", json=asked, headers=headers)
            assert answer.status_code == 200
        with anthropic.Anthropic(base_url=server.url, api_key="secret") as client:
            assert client.messages.create(model="tiny", **asked).content


def test_a_stream_that_fails_ends_with_an_error(server: Served) -> None:
    """What an engine says in the middle of a stream raises in the client, and is no end."""
    link, error = server.front.link, anthropic.APIStatusError
    with dying(link), client_of(server) as client, pytest.raises(error) as raised:
        streamed(client, model="tiny", max_tokens=50, messages=HELLO)
    assert "the engine died" in str(raised.value)
    body = raised.value.body
    assert isinstance(body, dict) and body["error"]["type"] == "overloaded_error"
