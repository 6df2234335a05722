"""How scripts call the library: everything here passes mypy in strict mode, and none of it runs.

`mistakes.py` beside it holds what must not pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import everystep as es


def texts(model: es.LanguageModel, tokenizer: es.Tokenizer) -> None:
    """Text in, text out."""
    one: str = es.generate(model, tokenizer, "Once", max_new_tokens=8, do_sample=True, top_p=0.9)
    several: list[str] = es.generate(
        model, tokenizer, ["a", "b"], temperature=[0.5, 1.5], seed=[1, 2]
    )
    whole: es.Generated = es.generate(model, tokenizer, "Once", return_dict_in_generate=True)
    wholes = es.generate(model, tokenizer, ["a", "b"], return_dict_in_generate=True, logprobs=3)
    reasons: list[str] = [each.finish_reason.kind for each in wholes]
    answer: str = es.chat(model, tokenizer, [{"role": "user", "content": "Hi"}], max_new_tokens=9)
    print(one.upper(), several[0], whole.text, whole.tokens[0] + 1, reasons, answer.strip())
    es.generate(model, tokenizer, "Once", strategy="beam", num_beams=4, num_return_sequences=2)
    es.generate(model, tokenizer, [[1, 2], [3]], options=[{"top_k": 5}, es.GenerationConfig()])
    es.generate(model, tokenizer, "Yes or no?", choices=["yes", "no"], stop_strings="\n")
    es.generate(model, tokenizer, "x", schema={"type": "object"}, stop_strings=["\n", "."])
    es.generate(
        model, tokenizer, "x", early_stopping="never", dola_layers="low", eos_token_id=[1, 2]
    )


def without_a_tokenizer(model: es.LanguageModel) -> None:
    """Ids in, ids out."""
    ids = es.generate(model, None, [1, 2, 3], max_new_tokens=8, return_dict_in_generate=False)
    print(ids)


def tensors(model: es.LanguageModel, tokenizer: es.Tokenizer) -> None:
    """As with transformers."""
    batch = tokenizer(["a", "b"], padding=True, return_tensors="pt")
    out = model.generate(**batch, max_new_tokens=4, num_beams=2, logprobs=1, seed=3)
    ids: Tensor = model.generate(torch.tensor([[1, 2]]), es.GenerationConfig(top_k=5), top_p=0.5)
    own: dict[str, Any] = {"features": torch.zeros(1, 2, 3)}
    model.generate(ids, **own, max_new_tokens=4, tokenizer=tokenizer, stop_strings=["."])
    model.generate(input_features=torch.zeros(1, 80, 100), language="en", return_timestamps=True)
    pixels = torch.zeros(4, 16)
    model.generate(ids, pixel_values=pixels, image_grid_thw=torch.tensor([[1, 2, 2]]))
    print(out)


def streams(model: es.LanguageModel, tokenizer: es.Tokenizer) -> None:
    """Events as they happen."""
    for event in es.stream(model, tokenizer, "Once", max_new_tokens=8, prefix=None):
        position: int = event.position
        text: str = event.text or ""
        if event.finish is not None and event.finish.kind == "length":
            print(position, text)
    for each in es.stream(model, tokenizer, ["a"], num_beams=3, beam_events=True):
        if isinstance(each, es.BeamEvent):
            print(each.beams[0].score)
    with es.stream(model, tokenizer, ["a", "b"], cache_salt="mine") as stream:
        list(stream)
        print(stream.results()[0][0].text)
    for event in es.chat(model, tokenizer, "Hi", stream=True, max_new_tokens=9):
        print(event.text)


def runs(model: es.LanguageModel, tokenizer: es.Tokenizer) -> None:
    """A generation in your hands."""
    with es.open(model, tokenizer, "Once", max_new_tokens=8, do_sample=True, seed=3) as run:
        step = next(run)
        ids: tuple[int, ...] = run.tokens
        run.set(temperature=0.5, seed=4)
        twin = run.fork(top_k=3)
        chances: list[float] = [rival.probability for rival in run.explain(0).rivals]
        print(step.text, ids, twin.done, chances)
        run.save("run.es")
    again = es.resume("run.es", model, tokenizer, logits_processor=[lambda ids, scores: scores])
    print(again.given)


async def users(model: es.LanguageModel, tokenizer: es.Tokenizer) -> None:
    """One engine for many."""
    async with es.AsyncEngine(model, tokenizer, max_rows=8) as engine:
        async for event in engine.stream("Once", max_new_tokens=8, seed=3):
            token: int = event.token
            print(token)
        print(await engine.generate("Once", adapter_names="mine", trim_stop_strings=True))


def scores(model: es.LanguageModel, tokenizer: es.Tokenizer) -> None:
    """How likely texts are."""
    total: float = es.score(model, tokenizer, "Once", after="A tale.", best=3).total
    of_ids: float | None = es.score(model, None, [1, 2, 3]).bits_per_byte
    several: list[es.Score] = es.score(model, tokenizer, ["a", "b"], after=["c", "d"], window=64)
    rows = es.score(model, None, [[1, 2], [3, 4]])
    print(total + 1, of_ids, [one.perplexity for one in several], rows[0].tokens.shape)
    print(es.score(model, tokenizer, (text for text in ("a", "b")), progress=True)[0].total)


def others(model: es.LanguageModel, tokenizer: es.Tokenizer) -> None:
    """Prefixes, scores, configurations."""
    prefix: es.Prefix = es.prefill(model, tokenizer, "Rules.", adapter_names="mine")
    print(es.generate(model, tokenizer, " So", prefix=prefix), len(prefix))
    config = es.GenerationConfig(max_new_tokens=5, watermarking_config=es.WatermarkingConfig())
    most: int | Sequence[int] | None = config.max_new_tokens
    shares: Mapping[str, object] = config.to_diff_dict()
    print(most, shares, es.load(device="cpu", quantize="int8", executor="torch"))
