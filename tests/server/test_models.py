"""Several models and adapters behind one engine, each asked for by its name."""

from __future__ import annotations

import httpx
import torch

import everystep as es
from everystep.server.local import serving
from everystep.testing.models import tiny_llama
from tests.server.serving import TOKENIZER


def test_adapters_and_further_models_answer_by_name() -> None:
    first, second = tiny_llama(vocab_size=320), tiny_llama(1, vocab_size=320)
    adapter = first.add_adapter("poet", es.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for one in adapter.parameters():
            one.copy_(torch.randn(one.shape, generator=generator, dtype=one.dtype) * 0.5)
    asked = {"prompt": "hello", "max_tokens": 12}
    wanted = {
        "first": es.generate(first, TOKENIZER, "hello", max_new_tokens=12),
        "poet": es.generate(first, TOKENIZER, "hello", max_new_tokens=12, adapter_names="poet"),
        "second": es.generate(second, TOKENIZER, "hello", max_new_tokens=12),
    }
    assert len(set(wanted.values())) == 3
    models = {"first": (first, TOKENIZER), "second": (second, TOKENIZER)}
    with serving(models) as address, httpx.Client(base_url=address, timeout=60) as client:
        for name, text in wanted.items():
            answer = client.post("/v1/completions", json={**asked, "model": name}).json()
            assert (answer["model"], answer["choices"][0]["text"]) == (name, text)
        answer = client.post("/v1/completions", json=asked).json()
        assert answer["choices"][0]["text"] == wanted["first"], "the first is meant by none"
        mixed = {**asked, "adapters": {"poet": 1.0}}
        answer = client.post("/v1/completions", json=mixed).json()
        assert answer["choices"][0]["text"] == wanted["poet"]
        listed = {one["id"]: one["parent"] for one in client.get("/v1/models").json()["data"]}
        assert listed == {"first": None, "poet": "first", "second": None}
        score = {"texts": "hello the", "model": "poet"}
        (scored,) = client.post("/v1/everystep/score", json=score).json()["data"]
    wanted_score = es.score(first, TOKENIZER, "hello the", adapter_names="poet")
    assert scored["logprobs"] == wanted_score.logprobs.tolist()
