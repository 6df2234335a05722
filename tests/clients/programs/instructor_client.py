"""instructor over OpenAI's client."""

import asyncio

import instructor
import openai
from pydantic import BaseModel, Field
from seen import run, seen

MODEL = "smollm2-135m-instruct"
ASKED = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Invent a person of 30 years."}],
    "max_tokens": 96,
    "temperature": 0,
    "max_retries": 0,
}


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=99)


def raw(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


def patched(address: str, mode: instructor.Mode) -> instructor.Instructor:
    return instructor.from_openai(raw(address), mode=mode)


@seen("its default mode, a named tool: an object of the class at the first try")
def tools(address: str) -> None:
    found = instructor.from_openai(raw(address)).create(response_model=Person, **ASKED)
    assert isinstance(found, Person)


@seen("strict tools")
def strict(address: str) -> None:
    found = patched(address, instructor.Mode.TOOLS_STRICT)
    assert isinstance(found.create(response_model=Person, **ASKED), Person)


@seen("the mode JSON_SCHEMA")
def schema(address: str) -> None:
    found = patched(address, instructor.Mode.JSON_SCHEMA)
    assert isinstance(found.create(response_model=Person, **ASKED), Person)


@seen("partial objects of a stream")
def partial(address: str) -> None:
    found = instructor.from_openai(raw(address)).create_partial(response_model=Person, **ASKED)
    steps = [*found]
    assert len(steps) > 1 and isinstance(steps[-1].age, int)


@seen("lists, streamed one by one")
def iterable(address: str) -> None:
    asked = {**ASKED, "max_tokens": 200}
    client = instructor.from_openai(raw(address))
    try:
        found = [*client.create_iterable(response_model=Person, **asked)]
    except instructor.core.exceptions.IncompleteOutputException:
        found = []  # a model may write persons until its length ends
    assert all(isinstance(one, Person) for one in found)


@seen("an answer that is cut, as its own error")
def cut(address: str) -> None:
    client = instructor.from_openai(raw(address))
    try:
        client.create(response_model=Person, **{**ASKED, "max_tokens": 2})
    except Exception as error:
        assert "length" in str(error).lower() or "incomplete" in repr(error).lower(), repr(error)
    else:
        raise AssertionError("two tokens are no person")


@seen("asyncio")
def asynchronous(address: str) -> None:
    async def ask() -> Person:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as client:
            return await instructor.from_openai(client).create(response_model=Person, **ASKED)

    assert isinstance(asyncio.run(ask()), Person)


run()
