"""Embeddings are what the last hidden states of a forward come to."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch

import everystep as es
from everystep.api.model import LanguageModel
from everystep.server.local import serving
from everystep.testing.models import tiny_llama
from tests.models.tiny import ours, reference_t5
from tests.server.serving import TOKENIZER, Served, chunks_of, joined, tiny

TEXTS = ["hello the and of", "it was", "in a " * 40, "ünï 日本"]


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as one:
        yield one


def by_hand(text: str, pooling: str, model: Any = None) -> np.ndarray:
    """The vector, from a forward that shows every layer."""
    ids = torch.tensor([TOKENIZER.encode(text)])
    (states,) = (model or tiny())(ids, output_hidden_states=True).hidden_states[-1]
    vector = states.mean(0) if pooling == "mean" else states[-1]
    return np.asarray(vector.detach().float().numpy())


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_vectors_are_those_of_the_last_hidden_states(client: openai.OpenAI, pooling: str) -> None:
    own: Any = {"pooling": pooling, "normalize": False}
    found = client.embeddings.create(model="tiny", input=TEXTS, extra_body=own)
    for text, one in zip(TEXTS, found.data, strict=True):
        np.testing.assert_allclose(one.embedding, by_hand(text, pooling), rtol=1e-4, atol=1e-5)
    assert [one.index for one in found.data] == list(range(len(TEXTS)))
    assert found.to_dict()["pooling"] == pooling
    sizes = [len(TOKENIZER.encode(text)) for text in TEXTS]
    assert found.usage.prompt_tokens == found.usage.total_tokens == sum(sizes)


def test_vectors_have_the_length_1_unless_asked_otherwise(client: openai.OpenAI) -> None:
    (one,) = client.embeddings.create(model="tiny", input=TEXTS[0]).data
    wanted = by_hand(TEXTS[0], "mean")
    np.testing.assert_allclose(one.embedding, wanted / np.linalg.norm(wanted), rtol=1e-4, atol=1e-5)


def test_numbers_and_base64_hold_the_same(server: Served) -> None:
    ids = TOKENIZER.encode(TEXTS[0])
    asked: Any = {"input": [ids, TEXTS[1]], "model": "tiny", "user": "me"}
    plain = server.post("/v1/embeddings", **asked).json()["data"]
    packed = server.post("/v1/embeddings", **asked, encoding_format="base64").json()["data"]
    for one, other in zip(plain, packed, strict=True):
        raw = np.frombuffer(base64.b64decode(other["embedding"]), dtype="<f4")
        assert np.array(one["embedding"], dtype="<f4").tolist() == raw.tolist()
    single = server.post("/v1/embeddings", input=TEXTS[0]).json()["data"]
    assert single == plain[:1], "ids are the text that they stand for"


def test_vectors_and_texts_share_the_engine(server: Served) -> None:
    """Prompts of both kinds in the same steps leave one another as they are."""
    body = {"prompt": "hello", "max_tokens": 40, "ignore_eos": True}
    wanted = server.completion(**body)["choices"][0]["text"]
    alone = server.post("/v1/embeddings", input=TEXTS).json()["data"]
    with server.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        with httpx.Client(base_url=server.url, timeout=60) as other:
            beside = [other.post("/v1/embeddings", json={"input": TEXTS}).json() for _ in range(3)]
        answer.read()
    assert joined(chunks_of(answer.text)) == wanted
    for found in beside:
        for one, same in zip(found["data"], alone, strict=True):
            np.testing.assert_allclose(one["embedding"], same["embedding"], rtol=1e-4, atol=1e-5)


def test_an_adapter_changes_vectors() -> None:
    model = tiny_llama(vocab_size=320)
    adapter = model.add_adapter("poet", es.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    with torch.no_grad():
        for one in adapter.parameters():
            one.copy_(torch.linspace(-1, 1, one.numel()).view(one.shape))
    ids = torch.tensor([TOKENIZER.encode("hello the")])
    out = model(ids, output_hidden_states=True, adapter_names="poet")
    wanted = out.hidden_states[-1][0].mean(0).detach().float().numpy()
    with serving({"tiny": (model, TOKENIZER)}) as address:
        asked = {"input": "hello the", "model": "poet", "normalize": False}
        (found,) = httpx.post(f"{address}/v1/embeddings", json=asked).json()["data"]
    np.testing.assert_allclose(found["embedding"], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", 3]}, "input"),
        ({"input": [320]}, "input"),
        ({"input": "x " * 5000}, "input"),
        ({"input": "x", "dimensions": 8}, "dimensions"),
        ({"input": "x", "pooling": "first"}, "pooling"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "x", "normalise": True}, "normalise"),
    ],
)
def test_impossible_embeddings(server: Served, body: dict[str, Any], param: str) -> None:
    answer = server.post("/v1/embeddings", **body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param, answer.text


def test_a_model_with_an_encoder_has_none() -> None:
    with serving({"t5": (LanguageModel(ours(reference_t5(torch.float64))), TOKENIZER)}) as address:
        answer = httpx.post(f"{address}/v1/embeddings", json={"input": [5, 6]})
    assert answer.status_code == 400 and "encoder" in answer.json()["error"]["message"]
