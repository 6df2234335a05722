"""OpenAI's own package: calls as people write them."""

import asyncio
import json

import openai
from pydantic import BaseModel
from seen import run, seen

NAME = "smollm2-135m-instruct"
ASKED = [{"role": "user", "content": "Name a colour."}]
BRIEF = {"model": NAME, "messages": ASKED, "temperature": 0, "max_tokens": 16}
SHORT = {"extra_body": {"choices": ["Blue it is.", "Red it is."]}}  # an answer that ends
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def client(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


@seen("answers, streamed and whole alike, with usage")
def answers(address: str) -> None:
    with client(address) as own:
        whole = own.chat.completions.create(**BRIEF)
        stream = own.chat.completions.create(
            **BRIEF, stream=True, stream_options={"include_usage": True}
        )
        chunks = [*stream]
    pieces = [one.choices[0].delta.content or "" for one in chunks if one.choices]
    assert "".join(pieces) == whole.choices[0].message.content != ""
    one, other = chunks[-1].usage, whole.usage  # the cache may hold more of the second
    assert one.completion_tokens == other.completion_tokens > 0
    assert one.prompt_tokens == other.prompt_tokens > 0


@seen("`.stream()`, with its events and its final message")
def streams(address: str) -> None:
    with client(address) as own:
        wanted = own.chat.completions.create(**BRIEF, **SHORT).choices[0].message.content
        with own.chat.completions.stream(**BRIEF, **SHORT) as stream:
            deltas = [one.delta for one in stream if one.type == "content.delta"]
            final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content == wanted


@seen("`.parse()`: an object of a pydantic class")
def parses(address: str) -> None:
    asked = {**BRIEF, "max_tokens": 120, "response_format": Person}
    with client(address) as own:
        message = own.chat.completions.parse(**asked).choices[0].message
    assert isinstance(message.parsed, Person)


@seen("tools: a forced call, whole and streamed, and the answer to its result")
def tools(address: str) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
    choice = {"type": "function", "function": {"name": "weather"}}
    asked = {**BRIEF, "max_tokens": 64, "tools": [tool], "tool_choice": choice}
    with client(address) as own:
        message = own.chat.completions.create(**asked).choices[0].message
        (call,) = message.tool_calls
        assert [*json.loads(call.function.arguments)] == ["city"]
        with own.chat.completions.stream(**asked) as stream:
            (again,) = stream.get_final_completion().choices[0].message.tool_calls
        assert again.function.arguments == call.function.arguments
        result = {"role": "tool", "tool_call_id": call.id, "content": "It rains."}
        talk = [*ASKED, message.model_dump(exclude_none=True), result]
        asked = {**BRIEF, "messages": talk, "tools": [tool], "tool_choice": "none"}
        assert own.chat.completions.create(**asked).choices[0].message.content


@seen("asyncio, several at once")
def asynchronous(address: str) -> None:
    async def ask() -> list:
        own = openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        async with own:
            return await asyncio.gather(*(own.chat.completions.create(**BRIEF) for _ in range(4)))

    assert len({one.choices[0].message.content for one in asyncio.run(ask())}) == 1


@seen("seeds, n, stops and log-probabilities")
def options(address: str) -> None:
    asked = {**BRIEF, "temperature": 0.8, "seed": 7, "n": 2, "logprobs": True, "top_logprobs": 2}
    with client(address) as own:
        one, two = (own.chat.completions.create(**asked, stop=["x"]) for _ in range(2))
    assert [c.message for c in one.choices] == [c.message for c in two.choices]
    for choice in one.choices:
        assert all(len(each.top_logprobs) == 2 for each in choice.logprobs.content)


@seen("completions of plain text, of several prompts")
def completions(address: str) -> None:
    prompts = ["The capital of France is", "One, two,"]
    with client(address) as own:
        both = own.completions.create(model=NAME, prompt=prompts, max_tokens=8, temperature=0)
        each = [
            own.completions.create(model=NAME, prompt=one, max_tokens=8, temperature=0)
            for one in prompts
        ]
    assert [one.text for one in both.choices] == [one.choices[0].text for one in each]


@seen("the responses API, whole, streamed, and gone on with")
def responses(address: str) -> None:
    asked = {"model": NAME, "max_output_tokens": 16, "temperature": 0, **SHORT}
    with client(address) as own:
        first = own.responses.create(input="Name a colour.", **asked)
        with own.responses.stream(input="Name a colour.", **asked) as stream:
            assert stream.get_final_response().output_text == first.output_text != ""
        after = own.responses.create(input="Another.", previous_response_id=first.id, **asked)
        assert after.output_text and own.responses.retrieve(first.id).id == first.id


@seen("embeddings, and the list of models")
def vectors(address: str) -> None:
    with client(address) as own:
        found = own.embeddings.create(model=NAME, input=["Hello", "Goodbye"])
        assert [one.id for one in own.models.list()] == [NAME]
    lengths = [sum(value * value for value in one.embedding) for one in found.data]
    assert all(abs(one - 1) < 1e-3 for one in lengths) and len(lengths) == 2


@seen("fields of `generate` in extra_body")
def extras(address: str) -> None:
    with client(address) as own:
        answer = own.chat.completions.create(**BRIEF, extra_body={"regex": "[ab]{3}"})
    assert set(answer.choices[0].message.content) <= {"a", "b"}


@seen("errors of the server as its own classes")
def errors(address: str) -> None:
    wrong = (
        ({**BRIEF, "temperature": -1}, openai.BadRequestError),
        ({**BRIEF, "model": "nobody"}, openai.NotFoundError),
    )
    with client(address) as own:
        for asked, kind in wrong:
            try:
                own.chat.completions.create(**asked)
            except kind as error:
                assert error.body["message"] and error.request_id
            else:
                raise AssertionError(kind)


run()
