"""litellm's functions, with its two providers for servers of OpenAI's wire, and Anthropic's."""

import asyncio
import json

import litellm
from pydantic import BaseModel
from seen import run, seen

NAME = "smollm2-135m-instruct"
ASKED = [{"role": "user", "content": "Name a colour."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
        },
    },
}


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def known(address: str, provider: str = "hosted_vllm", **options) -> dict:
    base = {"api_base": f"{address}/v1", "api_key": "none", "num_retries": 0}
    return {"model": f"{provider}/{NAME}", **base, "temperature": 0, "max_tokens": 24, **options}


@seen("hosted_vllm/ and openai/: answers, streamed and whole alike")
def answers(address: str) -> None:
    texts = set()
    for provider in ("hosted_vllm", "openai"):
        whole = litellm.completion(messages=ASKED, **known(address, provider))
        texts.add(whole.choices[0].message.content)
        assert whole.usage.completion_tokens > 0
        stream = litellm.completion(
            messages=ASKED, stream=True, stream_options={"include_usage": True},
            **known(address, provider),
        )  # fmt: skip
        chunks = [*stream]
        texts.add("".join(one.choices[0].delta.content or "" for one in chunks if one.choices))
        built = litellm.stream_chunk_builder(chunks, messages=ASKED)
        texts.add(built.choices[0].message.content)
        assert built.usage.completion_tokens == whole.usage.completion_tokens
    assert len(texts) == 1 and texts.pop()


@seen("asyncio, several at once")
def asynchronous(address: str) -> None:
    async def ask() -> list:
        asked = (litellm.acompletion(messages=ASKED, **known(address)) for _ in range(4))
        return await asyncio.gather(*asked)

    found = asyncio.run(ask())
    assert len({one.choices[0].message.content for one in found}) == 1


@seen("tools: a forced call, whole and streamed")
def tools(address: str) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    asked = known(address, max_tokens=64, tools=[WEATHER], tool_choice=choice)
    (call,) = litellm.completion(messages=ASKED, **asked).choices[0].message.tool_calls
    assert [*json.loads(call.function.arguments)] == ["city"]
    chunks = [*litellm.completion(messages=ASKED, stream=True, **asked)]
    (again,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert again.function.arguments == call.function.arguments


@seen("a pydantic class as response_format")
def structured(address: str) -> None:
    asked = known(address, max_tokens=96, response_format=Person)
    text = litellm.completion(messages=ASKED, **asked).choices[0].message.content
    Person.model_validate_json(text)


@seen("log-probabilities, seeds, stops and n")
def options(address: str) -> None:
    asked = known(address, temperature=0.8, seed=7, n=2, logprobs=True, top_logprobs=2, stop=["x"])
    one, two = (litellm.completion(messages=ASKED, **asked) for _ in range(2))
    assert len(one.choices) == 2
    texts = [[choice.message.content for choice in both.choices] for both in (one, two)]
    assert texts[0] == texts[1]
    assert one.choices[0].logprobs.content[0].top_logprobs


@seen("completions of plain text")
def completions(address: str) -> None:
    for provider in ("text-completion-openai", "hosted_vllm"):
        asked = known(address, provider, max_tokens=4)
        found = litellm.text_completion(prompt="The capital of France is", **asked)
        assert found.choices[0].text.startswith(" Paris"), (provider, found)


@seen("embeddings")
def embeddings(address: str) -> None:
    found = litellm.embedding(
        model=f"hosted_vllm/{NAME}", input=["a", "b"], api_base=f"{address}/v1", api_key="none"
    )
    assert len(found.data) == 2


@seen("a field of `generate` in extra_body")
def beams(address: str) -> None:
    asked = known(address, extra_body={"num_beams": 2})
    assert litellm.completion(messages=ASKED, **asked).choices[0].message.content


@seen("anthropic/: answers, streamed and whole alike")
def anthropic(address: str) -> None:
    asked = {"model": f"anthropic/{NAME}", "api_base": address, "api_key": "none", "max_tokens": 24}
    whole = litellm.completion(messages=ASKED, temperature=0, **asked).choices[0].message.content
    chunks = litellm.completion(messages=ASKED, temperature=0, stream=True, **asked)
    assert "".join(one.choices[0].delta.content or "" for one in chunks) == whole


@seen("errors of the server as its own classes")
def errors(address: str) -> None:
    try:
        litellm.completion(messages=ASKED, **{**known(address), "temperature": 7})
    except litellm.BadRequestError as error:
        assert "temperature" in str(error)
    try:
        litellm.completion(messages=ASKED, **{**known(address), "model": "hosted_vllm/nobody"})
    except litellm.NotFoundError as error:
        assert "nobody" in str(error)
    long = [{"role": "user", "content": "a b c d " * 9000}]
    try:
        litellm.completion(messages=long, **known(address))
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("a prompt of 36,000 tokens was taken")


run()
