"""The table of fields: unknown names, other kinds and conflicts are 400, with what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from everystep.requests.door import KEYWORDS
from everystep.server.documents import openapi, reference
from everystep.server.fields import NOT_ON_THE_WIRE, OF_MESSAGES
from everystep.server.routes import CHAT, COMPLETIONS, IGNORED, MANAGED, ROUTES
from tests.reading import ROOT
from tests.server.serving import Served

HELLO = {"prompt": "hello", "max_tokens": 2}
ASKED = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


def message(server: Served, path: str = "/v1/completions", **body: Any) -> str:
    """The text of the error that a body is answered with."""
    answer = server.post(path, **body)
    assert answer.status_code == 400, answer.text
    assert len(answer.content) < 4096
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert answer.headers["x-request-id"]
    return str(error["message"])


def test_every_keyword_is_a_field_or_has_a_reason_why_not() -> None:
    for row in KEYWORDS.values():
        if "texts" in row.calls:
            assert row.name in CHAT.fields or row.name in NOT_ON_THE_WIRE, row.name
    assert not {*CHAT.fields} & {*NOT_ON_THE_WIRE}


@pytest.mark.parametrize("name", sorted(NOT_ON_THE_WIRE))
def test_what_no_request_can_bring_is_refused_by_name(server: Served, name: str) -> None:
    assert message(server, **HELLO, **{name: "x"}).startswith(f"{name} ")


def test_an_unknown_field_is_told_the_nearest(server: Served) -> None:
    assert "Perhaps you meant temperature" in message(server, **HELLO, temprature=1)
    assert "Perhaps you meant prompt" in message(server, "/tokenize", promt="x")
    assert "no field 'foo'" in message(server, "/v1/chat/completions", **ASKED, foo=None)
    assert "no field" in message(server, **HELLO, **{"x" * 100_000: 1})


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("embeds", ["gASVAAAA", ["gASVAAAA"], [[0.5, 0.25]], "", [], {}])
def test_prompts_that_are_tensors_are_refused_by_name(
    server: Served, path: str, embeds: object
) -> None:
    """With a prompt beside them and without: they are not read."""
    beside = (HELLO, {"max_tokens": 2}) if path == "/v1/completions" else (ASKED,)
    for body in beside:
        answer = server.post(path, **body, prompt_embeds=embeds)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == "prompt_embeds"
        assert error["message"].startswith("there is no field 'prompt_embeds'")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_least_number_of_tokens_has_one_name(server: Served, path: str) -> None:
    """Load generators send the other one, and have to be told."""
    asked = HELLO if path == "/v1/completions" else ASKED
    assert "Perhaps you meant min_new_tokens" in message(server, path, **asked, min_tokens=2)
    assert server.post(path, **asked, min_new_tokens=2).status_code == 200


def test_what_means_nothing_here_changes_nothing(server: Served) -> None:
    plain = server.completion(**HELLO)["choices"]
    assert server.completion(**HELLO, **dict.fromkeys(IGNORED, "x"))["choices"] == plain
    assert server.completion(**HELLO, tools=None, suffix=None, n=None)["choices"] == plain


@pytest.mark.parametrize("n", [-1, 65, 10**9, 10**40, 1.5, "2", True, [2]])
def test_impossible_counts(server: Served, n: Any) -> None:
    for name in ("n", "best_of", "num_beams", "logprobs"):
        assert name in message(server, **{**HELLO, name: n})
    assert n == 65 or "max_tokens" in message(server, **{**HELLO, "max_tokens": n})
    for name in ("n", "best_of", "num_beams", "max_tokens"):
        assert name in message(server, **{**HELLO, name: 0})


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 3]}, "prompt"),
        ({"prompt": [[1], "a", 2]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [320]}, "beyond the vocabulary"),
        ({"prompt": ""}, "empty"),
        ({}, "prompt is missing"),
        ({**HELLO, "temperature": "hot"}, "temperature"),
        ({**HELLO, "temperature": -1}, "temperature"),
        ({**HELLO, "top_p": 3}, "top_p"),
        ({**HELLO, "stop": ["a"] * 17}, "stop"),
        ({**HELLO, "stop": ""}, "stop"),
        ({**HELLO, "logit_bias": {"a": 1}}, "logit_bias"),
        ({**HELLO, "logit_bias": {"999": 1}}, "logit_bias"),
        ({**HELLO, "logit_bias": {"9": "x"}}, "logit_bias"),
        ({**HELLO, "stream_options": {"include_usage": True}}, "stream_options"),
        (
            {**HELLO, "stream": True, "stream_options": {"include_usage": 1}},
            "stream_options.include_usage",
        ),
        (
            {**HELLO, "stream": True, "stream_options": {"include_use": True}},
            "Perhaps you meant include_usage",
        ),
        ({**HELLO, "stream": True, "stream_options": {"x": 1}}, "stream_options"),
        ({**HELLO, "max_new_tokens": 3}, "max_tokens and max_new_tokens"),
        ({**HELLO, "max_tokens": 0}, "max_tokens=0"),
        ({**HELLO, "max_tokens": 5000}, "longer than the model's context"),
        ({"prompt": [9] * 5000, "max_tokens": 1}, "longer than the model's context"),
        ({**HELLO, "regex": "(", "seed": 1}, "regex"),
        ({**HELLO, "schema": {"type": 3}}, "schema"),
        ({**HELLO, "guided_json": {"type": "object"}}, "schema"),
        ({**HELLO, "strategy": "beem"}, "beam"),
        ({**HELLO, "tools": [{"type": "function"}]}, "tools belongs to messages"),
        ({**HELLO, "num_beams": 3, "num_return_sequences": 5}, "num_return_sequences"),
        ({**HELLO, "adapters": {"nobody": 1.0}}, "nobody"),
    ],
)
def test_impossible_completions(server: Served, body: dict[str, Any], said: str) -> None:
    assert said in message(server, **body)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"messages": []}, "messages"),
        ({"messages": ["hello"]}, "messages"),
        ({"messages": [{"role": "god", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0] is a picture",
        ),
        ({**ASKED, "top_logprobs": 2}, "top_logprobs needs logprobs"),
        ({**ASKED, "response_format": {"type": "xml"}}, "response_format"),
        ({**ASKED, "response_format": {"type": "json_schema"}}, "json_schema"),
        ({**ASKED, "response_format": {"type": "json_object"}, "regex": "a"}, "response_format"),
        ({**ASKED, "max_completion_tokens": 10**7}, "max_completion_tokens"),
    ],
)
def test_impossible_chats(server: Served, body: dict[str, Any], said: str) -> None:
    text = message(server, "/v1/chat/completions", **body)
    assert said in text or "context" in text


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {}, "prompt"),
        ("/v1/completions", {**HELLO, "temperature": "hot"}, "temperature"),
        ("/v1/completions", {**HELLO, "temprature": 1}, "temprature"),
        ("/v1/completions", {**HELLO, "n": 3, "temperature": 0}, "n"),
        ("/v1/completions", {**HELLO, "regex": "("}, "regex"),
        ("/v1/completions", {**HELLO, "hooks": "x"}, "hooks"),
        ("/v1/completions", {**HELLO, "num_beams": 3, "n": 5}, "n"),
        ("/v1/completions", {**HELLO, "prompt": [320]}, "prompt"),
        ("/v1/completions", {"prompt": [9] * 5000, "max_tokens": 1}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "god"}]}, "messages[0].role"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "x"}]}]},
            "messages[0].content[0].type",
        ),
        ("/v1/chat/completions", {**ASKED, "response_format": {"type": "xml"}}, "response_format"),
        ("/v1/chat/completions", {**ASKED, "max_tokens": 9**6}, "messages"),
        ("/v1/chat/completions", {**ASKED, "model": "tinny"}, "model"),
        ("/tokenize", {"promt": "x"}, "promt"),
        ("/apply-template", {}, "messages"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/v1/everystep/score", {"texts": 3}, "texts"),
    ],
)
def test_errors_name_their_field(
    server: Served, path: str, body: dict[str, Any], param: str
) -> None:
    answer = server.post(path, **body)
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["param"] == param, answer.text


def test_an_error_about_no_field_names_none(server: Served) -> None:
    headers = {"content-type": "application/json"}
    answer = server.client.post("/v1/completions", content=b"{", headers=headers)
    assert answer.json()["error"]["param"] is None
    assert server.client.get("/nowhere").json()["error"]["param"] is None
    long = server.post("/v1/completions", prompt=[9] * 5000, max_tokens=1).json()["error"]
    assert long["code"] == "context_length_exceeded"


def test_an_error_of_the_library_names_what_the_request_named(server: Served) -> None:
    text = message(server, **HELLO, n=3, temperature=0)
    assert "num_return_sequences" not in text and "n" in text


def test_another_model_is_not_found(server: Served) -> None:
    answer = server.post("/v1/completions", **HELLO, model="tinny")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    assert "Perhaps you meant tiny" in answer.json()["error"]["message"]


def test_the_table_is_the_documents(server: Served) -> None:
    path = Path(ROOT) / "docs" / "reference" / "wire.md"
    told = "Run: python -m everystep.server.documents docs/reference/wire.md"
    assert path.read_text() == reference(), told
    described = server.client.get("/openapi.json").json()
    assert described == openapi()
    served = server.front.application.routes
    posts = {one.path for one in served if "POST" in (one.methods or ()) and "{" not in one.path}  # type: ignore[attr-defined]
    bytes_not_fields = {"/v1/files", "/v1/everystep/runs/resume"}
    assert posts - bytes_not_fields == {one.path for one in (*ROUTES, *MANAGED)} & posts
    assert posts - bytes_not_fields <= {*described["paths"]}
    for route in ROUTES:
        schema = described["paths"][route.path]["post"]["requestBody"]["content"]
        ((kind, described_body),) = schema.items()
        assert kind == ("multipart/form-data" if route.is_form else "application/json")
        form = {"file"} if route.is_form else set()
        properties = {*described_body["schema"]["properties"]}
        assert properties == {*route.fields, *route.ignored, *form}
    assert {*COMPLETIONS.fields} - {*CHAT.fields} == {"prompt", "echo"}
    assert {*COMPLETIONS.fields} & {*OF_MESSAGES} == set()
