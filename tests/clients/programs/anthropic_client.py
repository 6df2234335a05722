"""Anthropic's own package: calls as people write them."""

import asyncio

import anthropic
from seen import run, seen

NAME = "smollm2-135m-instruct"
ASKED = [{"role": "user", "content": "Name a colour."}]
GREEDY = {"temperature": 0}  # which this release has no argument for
BRIEF = {"model": NAME, "messages": ASKED, "max_tokens": 16, "extra_body": GREEDY}
TOOL = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def client(address: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=address, api_key="none", max_retries=0)


@seen("messages, streamed and whole alike, with usage")
def answers(address: str) -> None:
    with client(address) as own:
        whole = own.messages.create(**BRIEF)
        with own.messages.stream(**BRIEF) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text != ""
    assert final.usage.output_tokens == whole.usage.output_tokens > 0


@seen("a system text, and an answer that is gone on with")
def begun(address: str) -> None:
    turns = [*ASKED, {"role": "assistant", "content": "The colour is"}]
    with client(address) as own:
        answer = own.messages.create(**{**BRIEF, "messages": turns}, system="Be brief.")
    assert answer.content and answer.stop_reason in ("end_turn", "max_tokens")


@seen("tools: a forced call, whole and streamed, and the answer to its result")
def tools(address: str) -> None:
    choice = {"type": "tool", "name": "weather"}
    asked = {**BRIEF, "max_tokens": 64, "tools": [TOOL], "tool_choice": choice}
    with client(address) as own:
        whole = own.messages.create(**asked)
        (call,) = [one for one in whole.content if one.type == "tool_use"]
        assert [*call.input] == ["city"] and whole.stop_reason == "tool_use"
        with own.messages.stream(**asked) as stream:
            final = stream.get_final_message()
        (again,) = [one for one in final.content if one.type == "tool_use"]
        assert again.input == call.input
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "It rains."}
        talk = [*ASKED, {"role": "assistant", "content": whole.content}]
        talk.append({"role": "user", "content": [result]})
        none = {"tools": [TOOL], "tool_choice": {"type": "none"}}
        assert own.messages.create(**{**BRIEF, "messages": talk, **none}).content


@seen("asyncio, several at once")
def asynchronous(address: str) -> None:
    async def ask() -> list:
        own = anthropic.AsyncAnthropic(base_url=address, api_key="none", max_retries=0)
        async with own:
            return await asyncio.gather(*(own.messages.create(**BRIEF) for _ in range(4)))

    assert len({one.content[0].text for one in asyncio.run(ask())}) == 1


@seen("the count of tokens, which is that of the answer's usage")
def counts(address: str) -> None:
    with client(address) as own:
        counted = own.messages.count_tokens(model=NAME, messages=ASKED).input_tokens
        used = own.messages.create(**BRIEF).usage
    assert counted == used.input_tokens + (used.cache_read_input_tokens or 0) > 0


@seen("fields of `generate` in extra_body")
def extras(address: str) -> None:
    with client(address) as own:
        answer = own.messages.create(**{**BRIEF, "extra_body": {"regex": "[ab]{3}"}})
    assert set(answer.content[0].text) <= {"a", "b"}


@seen("errors of the server as its own classes")
def errors(address: str) -> None:
    wrong = (
        ({**BRIEF, "extra_body": {"temperature": -1}}, anthropic.BadRequestError),
        ({**BRIEF, "model": "nobody"}, anthropic.NotFoundError),
    )
    with client(address) as own:
        for asked, kind in wrong:
            try:
                own.messages.create(**asked)
            except kind as error:
                assert error.body["error"]["message"] and error.request_id
            else:
                raise AssertionError(kind)


run()
