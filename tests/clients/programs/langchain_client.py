"""ChatOpenAI of langchain-openai."""

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel
from seen import run, seen

MODEL = "smollm2-135m-instruct"


def chat(address: str, **options) -> ChatOpenAI:
    known = {"temperature": 0, "max_tokens": 24, "api_key": "none", "max_retries": 0}
    return ChatOpenAI(base_url=f"{address}/v1", model=MODEL, **{**known, **options})


@tool
def weather(city: str) -> str:
    """Return the weather of a city."""
    return f"sunny in {city}"


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@seen("answers, streamed and whole alike, with usage")
def answers(address: str) -> None:
    asked = [("system", "You are brief."), ("human", "Name a colour.")]
    whole = chat(address).invoke(asked)
    assert whole.content and whole.usage_metadata["output_tokens"] > 0
    pieces = [*chat(address, stream_usage=True).stream(asked)]
    assert "".join(one.content for one in pieces) == whole.content
    joined = pieces[0]
    for one in pieces[1:]:
        joined += one
    for name in ("input_tokens", "output_tokens"):
        assert joined.usage_metadata[name] == whole.usage_metadata[name]
    assert joined.response_metadata["finish_reason"] == whole.response_metadata["finish_reason"]


@seen("batches")
def batches(address: str) -> None:
    found = chat(address).batch(["Name a fruit.", "Name a town.", "Name a fruit."])
    assert found[0].content == found[2].content and found[1].content


@seen("tools: a forced call, whole and streamed, and the answer to its result")
def tools(address: str) -> None:
    forced = chat(address, max_tokens=64).bind_tools([weather], tool_choice="weather")
    (call,) = forced.invoke("What is the weather in Paris?").tool_calls
    assert call["name"] == "weather" and [*call["args"]] == ["city"]
    joined = None
    for one in forced.stream("What is the weather in Paris?"):
        joined = one if joined is None else joined + one
    (again,) = joined.tool_calls
    assert (again["name"], again["args"]) == (call["name"], call["args"])
    answer = forced.invoke("What is the weather in Paris?")
    told = [
        ("human", "What is the weather in Paris?"),
        answer,
        weather.invoke(answer.tool_calls[0]),
    ]
    free = chat(address).bind_tools([weather])
    assert free.invoke(told).content is not None


@seen("structured output, by schema and by tool, streamed too")
def structured(address: str) -> None:
    long = chat(address, max_tokens=96)
    for method in ("json_schema", "function_calling"):
        found = long.with_structured_output(Person, method=method).invoke("Invent a person.")
        assert isinstance(found, Person), found
    *_, last = long.with_structured_output(Person, method="json_schema").stream("Invent a person.")
    assert isinstance(last, Person), last


@seen("log-probabilities")
def logprobs(address: str) -> None:
    found = chat(address, logprobs=True, top_logprobs=2, max_tokens=3).invoke("Hello")
    content = found.response_metadata["logprobs"]["content"]
    assert len(content) == 3 and all(len(one["top_logprobs"]) == 2 for one in content)


@seen("completions of plain text")
def completions(address: str) -> None:
    known = {"base_url": f"{address}/v1", "api_key": "none", "temperature": 0, "max_retries": 0}
    plain = OpenAI(model=MODEL, max_tokens=4, **known)
    text = plain.invoke("The capital of France is")
    assert text.startswith(" Paris")
    assert "".join(plain.stream("The capital of France is")) == text


@seen("embeddings, as ids in base64")
def embeddings(address: str) -> None:
    found = OpenAIEmbeddings(
        base_url=f"{address}/v1", model=MODEL, api_key="none", check_embedding_ctx_length=False
    )
    one, two = found.embed_documents(["a cat", "a dog"])
    assert len(one) == len(two) and found.embed_query("a cat") == one


@seen("the responses API")
def responses(address: str) -> None:
    own = chat(address, use_responses_api=True)
    whole = own.invoke("Name a colour.")
    assert whole.text
    assert "".join(one.text for one in own.stream("Name a colour.")) == whole.text


run()
