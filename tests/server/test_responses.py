"""OpenAI's Responses as OpenAI's own client reads them, whole and as events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

import everystep as es
from everystep.server.access import Keys, digest_of
from everystep.server.asking import Caller
from everystep.server.exchange import FrontSettings, HttpError
from everystep.server.responses_wire import KeptResponses
from tests.server.serving import TOKENIZER, Served, dying, served, tiny
from tests.server.test_tools import TOKENIZER as WITH_TOOLS
from tests.server.test_tools import TOOL
from tests.server.test_tools import server as tools_server  # noqa: F401  # a fixture

HELLO: Any = [{"role": "user", "content": "hello"}]
SHAPE: Any = {"temperature": 1.0, "extra_body": {"seed": 5}}
SAMPLED: Any = {"do_sample": True, "temperature": 1.0, "seed": 5}
ADD: Any = {"type": "function", "strict": None, **TOOL["function"]}


def client_of(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with client_of(server) as one:
        yield one


def plain(items: Any) -> list[Any]:
    """Items without the ids that every response has of its own, and what the client parsed."""
    own = ("id", "parsed", "parsed_arguments")

    def without(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: without(one) for name, one in value.items() if name not in own}
        return [without(one) for one in value] if isinstance(value, list) else value

    return [without(one.to_dict()) for one in items]


def streamed(client: openai.OpenAI, **asked: Any) -> Any:
    """The last event of the client's own stream, which has the whole response."""
    last = None
    with client.responses.stream(**asked) as stream:
        for number, event in enumerate(stream):
            assert event.sequence_number == number
            last = event
    return last


def test_a_response_is_that_of_the_library_and_a_stream_adds_up_to_it(
    client: openai.OpenAI,
) -> None:
    asked: Any = {"model": "tiny", "input": "hello", "max_output_tokens": 12, **SHAPE}
    whole = client.responses.create(**asked)
    assert whole.output_text == es.chat(tiny(), TOKENIZER, HELLO, max_new_tokens=12, **SAMPLED)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")  # type: ignore[union-attr]
    last = streamed(client, **asked)
    assert last.type == "response.incomplete"
    assert plain(last.response.output) == plain(whole.output)
    assert last.response.usage.output_tokens == whole.usage.output_tokens == 12  # type: ignore[union-attr]
    parts = [{"type": "input_text", "text": "hello"}]
    items: Any = [{"type": "message", "role": "user", "content": parts}]
    assert client.responses.create(**{**asked, "input": items}).output_text == whole.output_text


def test_a_response_that_ends_by_itself(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "input": "hello", "extra_body": {"choices": ["red"]}}
    whole = client.responses.create(**asked, metadata={"a": "b"}, temperature=0)
    assert (whole.status, whole.output_text, whole.metadata) == ("completed", "red", {"a": "b"})
    assert whole.incomplete_details is None and whole.temperature == 0
    with client.responses.stream(**asked) as stream:
        final = stream.get_final_response()
    assert final.output_text == "red" and final.output[0].status == "completed"


def test_the_events_of_a_stream(server: Served) -> None:
    body = {"input": "hello", "max_output_tokens": 3, "stream": True, "temperature": 0}
    answer = server.post("/v1/responses", **body)
    events = [one.split("\n") for one in answer.text.strip().split("\n\n")]
    told = [(name.removeprefix("event: "), json.loads(data[6:])) for name, data in events]
    assert all(name == data["type"] for name, data in told)
    names = [name for name, _ in told if name != "response.output_text.delta"]
    begun = ("created", "in_progress", "output_item.added", "content_part.added")
    ended = ("output_text.done", "content_part.done", "output_item.done", "incomplete")
    assert names == [f"response.{one}" for one in (*begun, *ended)]
    deltas = [data for name, data in told if name == "response.output_text.delta"]
    (done,) = (data for name, data in told if name == "response.output_text.done")
    assert "".join(one["delta"] for one in deltas) == done["text"]
    assert all(one["logprobs"] == [] for one in deltas)
    assert told[0][1]["response"]["usage"] is None


@pytest.mark.parametrize("seed", range(3))
def test_a_forced_call_and_its_result(
    tools_server: Served,  # noqa: F811
    seed: int,
) -> None:
    asked: Any = {"model": "tiny", "max_output_tokens": 200, "input": HELLO, "tools": [ADD]}
    asked |= {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 1.0}
    asked["extra_body"] = {"seed": seed, "thinking_budget": 4}
    with client_of(tools_server) as client:
        whole = client.responses.create(**asked)
        last = streamed(client, **asked)
        assert plain(last.response.output) == plain(whole.output)
        own: Any = {"tool_choice": "required", "parallel_tool_calls": False, "thinking_budget": 4}
        shape: Any = {"do_sample": True, "temperature": 1.0, "max_new_tokens": 200, "seed": seed}
        wanted = es.chat(tiny(), WITH_TOOLS, HELLO, tools=[TOOL], **own, **shape)
        call = whole.output[-1]
        assert call.type == "function_call" and call.status == whole.status == "completed"
        assert (call.name, call.arguments) == ("add", wanted.tool_calls[0].arguments)
        assert call.call_id == last.response.output[-1].call_id
        thoughts = [one for one in whole.output if one.type == "reasoning"]
        said = "".join(part.text for one in thoughts for part in one.content or ())
        assert said == (wanted.reasoning_content or "")
        usage = whole.usage
        assert usage is not None and (usage.output_tokens_details.reasoning_tokens > 0) == bool(
            said
        )
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
        by_items = [*HELLO, *(one.to_dict() for one in whole.output), result]
        more: Any = {**asked, "input": by_items, "tool_choice": "auto", "max_output_tokens": 5}
        later = client.responses.create(**more)
        by_id = {**more, "input": [result], "previous_response_id": whole.id}
        again = client.responses.create(**by_id)
        assert plain(again.output) == plain(later.output)
        assert again.previous_response_id == whole.id
        counted = [
            client.responses.input_tokens.count(model="tiny", tools=[ADD], **one).input_tokens
            for one in (
                {"input": by_items},
                {"input": [result], "previous_response_id": whole.id},
            )
        ]
    assert later.usage is not None and counted == [later.usage.input_tokens] * 2


def test_thoughts_are_items(tools_server: Served) -> None:  # noqa: F811
    forced = {"regex": r"<think>\n[ab]{3}\n</think>\n\n[cd]{3}", "seed": 1}
    asked: Any = {"model": "tiny", "input": "hello", "temperature": 1.0, "extra_body": forced}
    with client_of(tools_server) as client:
        whole = client.responses.create(**asked)
        last = streamed(client, **asked)
    thought, said = whole.output
    assert thought.type == "reasoning" and set(thought.content[0].text) <= {"a", "b"}  # type: ignore[index]
    assert said.type == "message" and set(whole.output_text) <= {"c", "d"}
    assert plain(last.response.output) == plain(whole.output)
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens  # type: ignore[union-attr]


class Colour(BaseModel):
    """A colour."""

    warm: bool


def test_an_answer_that_follows_a_schema(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "input": "hello", "max_output_tokens": 60, **SHAPE}
    found = client.responses.parse(text_format=Colour, **asked)
    assert isinstance(found.output_parsed, Colour)


def test_log_probabilities_of_a_text(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "input": "hello", "max_output_tokens": 6, **SHAPE}
    asked |= {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = client.responses.create(**asked)
    chat = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=6, logprobs=True, top_logprobs=2, **SHAPE
    )
    told = whole.output[0].content[0].logprobs  # type: ignore[union-attr,index]
    wanted = chat.choices[0].logprobs.content  # type: ignore[union-attr]
    assert [one.to_dict() for one in told] == [one.to_dict() for one in wanted]  # type: ignore[union-attr]
    pieces = [
        known
        for event in client.responses.create(**asked, stream=True)
        if event.type == "response.output_text.delta"
        for known in event.logprobs
    ]
    assert [one.token for one in pieces] == [one.token for one in told][: len(pieces)]  # type: ignore[union-attr]


def test_a_response_is_kept_for_its_key_alone_unless_that_is_not_wanted() -> None:
    settings = FrontSettings(keys=Keys([digest_of("a"), digest_of("b")]))
    with served(settings=settings) as server:
        own: Any = {"base_url": f"{server.url}/v1", "max_retries": 0}
        asked: Any = {"model": "tiny", "max_output_tokens": 4, "temperature": 0}
        with openai.OpenAI(api_key="a", **own) as a, openai.OpenAI(api_key="b", **own) as b:
            first = a.responses.create(**asked, input="hello", instructions="the")
            assert a.responses.retrieve(first.id).output_text == first.output_text
            second = a.responses.create(**asked, input="and", previous_response_id=first.id)
            said: Any = [*HELLO, *(one.to_dict() for one in first.output), {**HELLO[0]}]
            said[-1]["content"] = "and"
            whole = a.responses.create(**asked, input=said)
            assert second.output_text == whole.output_text, "without the instructions of before"
            for one in (b.responses.retrieve, b.responses.delete):
                with pytest.raises(openai.NotFoundError):
                    one(first.id)
            unkept = a.responses.create(**asked, input="hello", store=False)
            with pytest.raises(openai.NotFoundError) as raised:
                a.responses.create(**asked, input="x", previous_response_id=unkept.id)
            assert raised.value.param == "previous_response_id"
            a.responses.delete(first.id)
            with pytest.raises(openai.NotFoundError):
                a.responses.retrieve(first.id)


def test_what_is_kept_is_bounded() -> None:
    kept = KeptResponses(most=3, most_bytes=1000)
    own, other = Caller("a"), Caller("b")
    for number in range(5):
        kept.keep(own, {"id": f"r{number}"}, [])
    assert kept.find(own, "r4").shown == {"id": "r4"}
    kept.keep(other, {"id": "x"}, [])
    for id in ("r0", "r1"):
        with pytest.raises(HttpError):
            kept.find(own, id)
    kept.keep(own, {"id": "long", "text": "x" * 600}, [])
    kept.keep(own, {"id": "longer", "text": "x" * 600}, [])
    with pytest.raises(HttpError):
        kept.find(own, "long")
    kept.keep(own, {"id": "longest", "text": "x" * 2000}, [])
    with pytest.raises(HttpError):
        kept.find(own, "longest")
    assert kept.find(other, "x"), "of another key"


def test_the_asynchronous_client(server: Served) -> None:
    async def main() -> list[str]:
        own: Any = {"base_url": f"{server.url}/v1", "api_key": "none"}
        async with openai.AsyncOpenAI(**own) as client:

            async def ask(seed: int) -> str:
                asked: Any = {"model": "tiny", "input": "hello", "max_output_tokens": 9}
                asked |= {"temperature": 1.0, "extra_body": {"seed": seed}}
                stream = await client.responses.create(**asked, stream=True)
                return "".join(
                    [e.delta async for e in stream if e.type == "response.output_text.delta"]
                )

            return list(await asyncio.gather(*map(ask, range(8))))

    wanted = [
        es.chat(tiny(), TOKENIZER, HELLO, max_new_tokens=9, **{**SAMPLED, "seed": seed})
        for seed in range(8)
    ]
    assert asyncio.run(main()) == wanted


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "god", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": 3}]}, "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "call_id": "1"}]}, "input[0].name"),
        ({"input": [{"type": "function_call_output", "output": "1"}]}, "input[0].call_id"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"text": {"format": {"type": "xml"}}}, "text"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 5000}, "input"),
        ({"conversation": "c"}, "conversation"),
        ({"temprature": 1}, "temprature"),
        ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
def test_impossible_responses(server: Served, body: dict[str, Any], param: str) -> None:
    answer = server.post("/v1/responses", **{"input": "hello", "max_output_tokens": 4, **body})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] is not None and error["param"].startswith(param), error


def test_a_stream_that_fails_says_so_as_its_last_event(server: Served) -> None:
    with dying(server.front.link), client_of(server) as client:
        asked: Any = {"model": "tiny", "input": "hello", "stream": True}
        events = list(client.responses.create(**asked))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.message.startswith("the engine died")
    with client_of(server) as client, pytest.raises(openai.NotFoundError):
        client.responses.retrieve(events[-1].response.id)
