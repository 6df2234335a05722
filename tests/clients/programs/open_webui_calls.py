"""The calls of Open WebUI, in the shapes that the source of its release 0.12.4 sends.

Not the program itself: its requests are written again here, with Python's own library.
"""

import json
import urllib.error
import urllib.request

from seen import run, seen

PEOPLE = {"X-OpenWebUI-User-Name": "Ada", "X-OpenWebUI-User-Email": "ada@example.org"}
ASKED = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": [{"type": "text", "text": "Name a colour."}]},
]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"], "description": "Which."}},
            "required": ["city"],
        },
    },
}


def ask(address: str, path: str, body: dict | None = None) -> tuple[int, str, bytes]:
    """Return status, type and bytes of an answer."""
    headers = {"Authorization": "Bearer none", "Content-Type": "application/json", **PEOPLE}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{address}/v1{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.headers["content-type"], answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["content-type"], error.read()


def model(address: str) -> str:
    status, _, body = ask(address, "/models")
    assert status == 200
    return json.loads(body)["data"][0]["id"]


def streamed(address: str, **body) -> tuple[str, list, dict]:
    """Return the text of a stream as the program reads it, its calls, and its last usage."""
    asked = {"stream": True, "model": model(address), "stream_options": {"include_usage": True}}
    status, kind, data = ask(address, "/chat/completions", {**asked, **body})
    assert status == 200 and "text/event-stream" in kind, data
    text, calls, usage, done = "", {}, {}, False
    for line in data.decode().split("\n"):
        if not line.startswith("data:"):
            continue
        value = line[len("data:") :].strip()
        if value == "[DONE]":
            done = True
            break
        event = json.loads(value)
        usage = {**(event.get("usage") or {}), **event.get("timings", {})} or usage
        for choice in event.get("choices", []):
            delta = choice.get("delta", {})
            text += delta.get("content") or ""
            for one in delta.get("tool_calls") or []:
                call = calls.setdefault(
                    one.get("index"), {**one, "function": {"name": "", "arguments": ""}}
                )
                for name in ("name", "arguments"):
                    call["function"][name] += one["function"].get(name) or ""
    assert done
    return text, [*calls.values()], usage


@seen("the list of models")
def models(address: str) -> None:
    assert model(address)


@seen("a chat, streamed with usage, with each parameter of its settings")
def chats(address: str) -> None:
    settings = {
        "temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "max_tokens": 12, "seed": 3,
        "frequency_penalty": 0.1, "presence_penalty": 0.1, "stop": ["\n\n\n"],
        "logit_bias": {"30": 1}, "response_format": {"type": "text"}, "repetition_penalty": 1.1,
    }  # fmt: skip
    text, _, usage = streamed(address, messages=ASKED, **settings)
    assert text and 0 < usage["completion_tokens"] <= 12
    whole = {"stream": False, "model": model(address), "messages": ASKED, **settings}
    status, _, body = ask(address, "/chat/completions", whole)
    assert status == 200 and json.loads(body)["choices"][0]["message"]["content"] == text


@seen("a title, whole")
def titles(address: str) -> None:
    task = [{"role": "user", "content": "### Task:\nGenerate a concise title."}]
    asked = {"model": model(address), "messages": task, "stream": False, "max_tokens": 1000}
    status, kind, body = ask(address, "/chat/completions", {**asked, "temperature": 0})
    assert status == 200 and "application/json" in kind
    assert isinstance(json.loads(body)["choices"][0]["message"]["content"], str)


@seen("tools: a call of a stream, and the conversation with its result")
def tools(address: str) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    asked = {"messages": ASKED, "tools": [WEATHER], "max_tokens": 200, "temperature": 0}
    _, (call, *_), _ = streamed(address, **asked, tool_choice=choice)
    assert call["function"]["name"] == "weather" and json.loads(call["function"]["arguments"])
    told = [
        *ASKED,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "sunny"},
    ]
    streamed(address, messages=told, tools=[WEATHER], max_tokens=12, temperature=0)


@seen("an answer that is gone on with")
def continues(address: str) -> None:
    begun = [*ASKED, {"role": "assistant", "content": "My favourite"}]
    flags = {"continue_final_message": True, "add_generation_prompt": False}
    text, _, _ = streamed(address, messages=begun, max_tokens=6, temperature=0, **flags)
    assert text and not text.startswith("My favourite")


@seen("embeddings of several texts")
def embeddings(address: str) -> None:
    asked = {"input": ["a cat", "a dog"], "model": model(address)}
    status, _, body = ask(address, "/embeddings", asked)
    vectors = [one["embedding"] for one in json.loads(body)["data"]]
    assert status == 200 and len(vectors) == 2 and isinstance(vectors[0][0], float)


@seen("an error, as it shows one")
def errors(address: str) -> None:
    asked = {"model": "nobody", "messages": ASKED, "stream": True}
    status, _, body = ask(address, "/chat/completions", asked)
    assert status == 404 and "nobody" in json.loads(body)["error"]["message"]


run()
