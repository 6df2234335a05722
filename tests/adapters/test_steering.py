"""Vectors after layers: each call is transformers with a hook, each row its own, natively too."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import everystep as es
from everystep.adapters import EVERY_PART, STEERED_LAYERS, read_steering
from everystep.adapters import adapter as adapter_module
from everystep.api.model import LanguageModel
from everystep.errors import RequestError, UnsupportedError
from everystep.inspector.counterfactuals import repeat, speller
from everystep.inspector.inside import lens
from everystep.models.decoder import Decoder
from everystep.records import read_record
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer
from tests.judges.mutants import replaced
from tests.models.tiny import ours, reference_decoder, reference_mamba, reference_t5

PROMPT = [5, 9, 23, 41, 7]
LONG: dict[str, Any] = {"max_new_tokens": 8, "eos_token_id": None}
Vectors = Mapping[int, Tensor]


def drawn(width: int, layers: tuple[int, ...], seed: int = 0, size: float = 1.0) -> Vectors:
    made = torch.Generator().manual_seed(seed)
    return {one: torch.randn(width, generator=made) * size for one in layers}


@contextmanager
def hooked(reference: PreTrainedModel, vectors: Vectors) -> Iterator[None]:
    """By hand: transformers' layers, whose outputs get the vectors."""
    inner = reference.get_decoder()
    layers = next(one for one in inner.modules() if isinstance(one, torch.nn.ModuleList))

    def adding(vector: Tensor) -> Any:
        def hook(module: Any, given: Any, out: Any) -> Any:
            if isinstance(out, tuple):
                return (out[0] + vector.to(out[0].dtype), *out[1:])
            return out + vector.to(out.dtype)

        return hook

    handles = [layers[at].register_forward_hook(adding(one)) for at, one in vectors.items()]
    try:
        yield
    finally:
        for one in handles:
            one.remove()


def by_hand(reference: PreTrainedModel, vectors: Vectors, count: int) -> tuple[list[int], Tensor]:
    """Greedy ids and (count, V) logits, without a cache."""
    read, rows = [*PROMPT], []
    with hooked(reference, vectors), torch.no_grad():
        for _ in range(count):
            rows.append(reference(torch.tensor([read]), use_cache=False).logits[0, -1])
            read.append(int(rows[-1].argmax()))
    return read[len(PROMPT) :], torch.stack(rows)


KINDS = ("llama", "gemma2", "opt", "gpt_neox", "olmo2", "phi", "mixtral", "qwen3_moe", "falcon")


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_transformers_with_a_hook(kind: str) -> None:
    torch.manual_seed(3)
    reference = reference_decoder(kind, torch.float64)
    lm = es.LanguageModel(ours(reference), es.GenerationConfig(), executor="torch")
    vectors = drawn(lm.width, (0, 1))
    ids, logits = by_hand(reference, vectors, 8)
    given = {**LONG, "do_sample": False, "steer": vectors}
    shows = {"return_dict_in_generate": True, "output_logits": True}
    found = lm.generate(torch.tensor([PROMPT]), **given, **shows, output_hidden_states=True)
    assert found.sequences[0, len(PROMPT) :].tolist() == ids
    assert torch.allclose(torch.cat(found.logits).double(), logits, atol=1e-4)
    plain = lm.generate(torch.tensor([PROMPT]), **{**given, "steer": None}, **shows,
                        output_hidden_states=True)  # fmt: skip
    if kind != "gpt_neox":  # the first layer's states are those without it, plus the vector
        first = [one.hidden_states[0][1][0] for one in (found, plain)]
        assert torch.allclose(first[0].double(), first[1].double() + vectors[0], atol=1e-6)
    assert not torch.allclose(found.logits[0], plain.logits[0], atol=1e-2)


@pytest.mark.native
@pytest.mark.parametrize("kind", ["llama", "opt", "gpt_neox", "phi"])
def test_natively_it_is_the_same(kind: str) -> None:
    torch.manual_seed(3)
    reference = reference_decoder(kind, torch.float32)
    lm = es.LanguageModel(ours(reference), es.GenerationConfig(), executor="native")
    vectors = drawn(lm.width, (0, 1))
    _, logits = by_hand(reference, vectors, 1)
    shows = {"return_dict_in_generate": True, "output_logits": True}
    found = lm.generate(torch.tensor([PROMPT]), **LONG, **shows, steer=vectors)
    assert torch.allclose(found.logits[0][0], logits[0], atol=2e-4)


def test_where_the_kernels_cannot_torch_operators_do() -> None:
    torch.manual_seed(3)
    lm = es.LanguageModel(ours(reference_decoder("gemma2", torch.float32)), es.GenerationConfig())
    assert STEERED_LAYERS in EVERY_PART
    assert STEERED_LAYERS not in lm.executor().abilities or lm.executor_name == "torch"
    vectors = drawn(lm.width, (1,))
    shows = {"return_dict_in_generate": True, "output_logits": True}
    rows = [
        torch.cat(lm.generate(torch.tensor([PROMPT]), **LONG, **shows, steer=one).logits)
        for one in (vectors, None)
    ]
    assert not torch.allclose(*rows, atol=1e-3)
    only = es.LanguageModel(lm.core, es.GenerationConfig(), executor="native")
    if STEERED_LAYERS not in only.executor().abilities:
        with pytest.raises(UnsupportedError, match=STEERED_LAYERS):
            es.generate(only, None, [PROMPT], **LONG, steer=vectors)


# --- rows, strategies, calls ----------------------------------------------------------------------

MODEL = tiny_llama(vocab_size=320, hidden_size=16, dtype=torch.float32)
TOKENIZER = tiny_tokenizer(320)
ONE, OTHER = drawn(16, (0,), 1, 8.0), drawn(16, (0, 1), 2, 8.0)
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_k": 20, "seed": 5},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "diverse": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "guided": {"guidance_scale": 1.5},
    "dola": {"dola_layers": [0, 1]},
    "grammar": {"regex": "[ab ]+", "eos_token_id": 2},
}


def texts(found: Any) -> list[Any]:
    return [[*one] if isinstance(one, list) else one for one in found]


@pytest.mark.parametrize("way", WAYS)
def test_each_row_has_its_own(way: str) -> None:
    """To the bit, whatever the rows beside it are steered by."""
    given = {**LONG, **WAYS[way]}
    shows = {"return_dict_in_generate": True, "logprobs": 2}
    each: list[Vectors | None] = [ONE, None, OTHER]
    alone = [
        es.generate(MODEL, TOKENIZER, ["ab ab c"], **given, **shows, steer=one)[0] for one in each
    ]
    options: list[Any] = [{"steer": one} for one in each]
    if way == "sampled":
        options = [{**one, "seed": 5} for one in options]
        given.pop("seed")
        alone = [es.generate(MODEL, TOKENIZER, ["ab ab c"], **given, **shows, seed=None,
                             options=[one])[0] for one in options]  # fmt: skip
    prompts = ["ab ab c"] * 3
    together = es.generate(MODEL, TOKENIZER, prompts, **given, **shows, options=options)
    for one, other in zip(alone, together, strict=True):
        pairs = zip(*(x if isinstance(x, list) else [x] for x in (one, other)), strict=True)
        for a, b in pairs:
            assert (a.tokens, a.score) == (b.tokens, b.score)
            assert torch.equal(a.logprobs.logprobs, b.logprobs.logprobs)
    if way != "grammar":
        assert len({str(one[0].tokens if isinstance(one, list) else one.tokens)
                    for one in alone}) > 1  # fmt: skip


@pytest.mark.parametrize("drafts", [{"prompt_lookup_num_tokens": 3}, {"assistant_early_exit": 1}])
def test_drafts_change_nothing(drafts: dict[str, Any]) -> None:
    plain = es.generate(MODEL, TOKENIZER, "ab ab ab", **LONG, steer=OTHER)
    assert es.generate(MODEL, TOKENIZER, "ab ab ab", **LONG, steer=OTHER, **drafts) == plain


def test_every_call_takes_it(tmp_path: Path) -> None:
    prompt = "ab ab c"
    ids = torch.tensor([TOKENIZER.encode(prompt)])
    expected = es.generate(MODEL, TOKENIZER, prompt, **LONG, steer=ONE)
    assert expected != es.generate(MODEL, TOKENIZER, prompt, **LONG)
    rows = MODEL.generate(ids.repeat(2, 1), **LONG, do_sample=False, steer=[ONE, None])
    shows = {"return_dict_in_generate": True, **LONG}
    each = [es.generate(MODEL, TOKENIZER, prompt, **shows, steer=one) for one in (ONE, None)]
    assert [[*one.tokens] for one in each] == rows[:, ids.shape[1] :].tolist()
    events = es.stream(MODEL, TOKENIZER, prompt, **LONG, steer=ONE)
    assert "".join(event.text or "" for event in events) == expected
    run = es.open(MODEL, TOKENIZER, prompt, **LONG, steer=ONE)
    next(run), next(run)
    run.save(tmp_path / "run")
    assert run.fork().result().text == run.result().text == expected
    assert es.resume(tmp_path / "run", MODEL, TOKENIZER).result().text == expected
    with pytest.raises(RequestError, match="no use for steer"):
        es.resume(tmp_path / "run", MODEL, TOKENIZER, steer=OTHER)
    coarse = {layer: vector.bfloat16() for layer, vector in ONE.items()}
    run = es.open(MODEL, TOKENIZER, prompt, **LONG, steer=[coarse])
    next(run)
    run.save(tmp_path / "coarse")
    assert es.resume(tmp_path / "coarse", MODEL, TOKENIZER).result() == run.result()
    with pytest.raises(RequestError, match="steer"):
        run.fork().set(steer=OTHER)

    async def served() -> list[str]:
        async with es.AsyncEngine(MODEL, TOKENIZER) as engine:
            both = (engine.generate(prompt, **LONG, steer=ONE), engine.generate(prompt, **LONG))
            return [str(one) for one in await asyncio.gather(*both)]

    assert asyncio.run(served())[0] == expected


@pytest.mark.parametrize("executor", ["torch", "native"])
def test_scores_are_those_of_what_it_generates(executor: str) -> None:
    """The likelihoods of a steered text, read from its steps, from a score, and by a forward."""
    model = LanguageModel(tiny_llama(seed=2, dtype=torch.float32).core, executor=executor)  # type: ignore[arg-type]
    steer = drawn(model.width, (0, 1), 3)
    given = {**LONG, "return_dict_in_generate": True, "logprobs": 0}
    out = es.generate(model, None, PROMPT, **given, steer=steer)
    plain = es.score(model, None, list(out.tokens), after=PROMPT)
    score = es.score(model, None, list(out.tokens), after=PROMPT, steer=steer)
    known = out.logprobs.logprobs
    assert torch.allclose(score.logprobs, known, atol=1e-4)
    assert not torch.allclose(plain.logprobs, known, atol=1e-2)
    if executor == "torch":
        ids = torch.tensor([[*PROMPT, *out.tokens]])
        logits = model(ids, steer=steer).logits.log_softmax(-1)
        at = logits[0, len(PROMPT) - 1 : -1].gather(1, ids[0, len(PROMPT) :, None])[:, 0]
        assert torch.allclose(at, known, atol=1e-4)


def test_a_forward_steers_each_row_by_itself() -> None:
    torch.manual_seed(3)
    reference = reference_decoder("llama", torch.float32)
    model = es.LanguageModel(ours(reference), es.GenerationConfig(), executor="torch")
    one, two = drawn(model.width, (0,), 1), drawn(model.width, (1,), 2)
    ids = torch.tensor([PROMPT, PROMPT[::-1], PROMPT])
    rows = model(ids, steer=[one, None, two]).logits
    for row, vectors in enumerate((one, {}, two)):
        with hooked(reference, vectors), torch.no_grad():
            wanted = reference(ids[row : row + 1]).logits
        assert torch.allclose(rows[row : row + 1], wanted, atol=1e-4)
    both = model(ids, steer=one)
    assert torch.equal(both.logits[0], rows[0])
    with pytest.raises(RequestError, match="steer does not fit"):
        model(ids, steer=[one])


def test_gradients_pass_through_steering() -> None:
    model = tiny_llama(seed=2, dtype=torch.float32)
    model.requires_grad_()
    steer = drawn(model.width, (0,), 3)
    score = es.score(model, None, PROMPT, steer=steer, requires_grad=True)
    score.logprobs.sum().backward()
    frozen = es.score(model, None, PROMPT, steer=steer)
    assert torch.allclose(score.logprobs.detach(), frozen.logprobs, atol=1e-5)
    assert any(one.grad is not None and one.grad.abs().sum() > 0 for one in model.parameters())


@pytest.mark.parametrize("executor", ["torch", "native"])
def test_a_prefix_is_steered_as_the_calls_that_go_on_from_it(executor: str) -> None:
    model = LanguageModel(tiny_llama(seed=2, dtype=torch.float32).core, executor=executor)  # type: ignore[arg-type]
    steer = drawn(model.width, (0, 1), 3)
    prefix = es.prefill(model, None, PROMPT, steer=steer)
    whole = es.generate(model, None, [*PROMPT, 8, 9], **LONG, steer=steer)
    assert es.generate(model, None, [8, 9], prefix=prefix, **LONG, steer=steer) == whole
    other = drawn(model.width, (0, 1), 4)
    for wrong in ({}, {"steer": other}):
        with pytest.raises(RequestError, match="prefix"):
            es.generate(model, None, [8, 9], prefix=prefix, **LONG, **wrong)
    longer = es.prefill(model, None, [8], prefix=prefix, steer=steer)
    assert es.generate(model, None, [9], prefix=longer, **LONG, steer=steer) == whole


def test_rows_are_shared_by_equal_steering_alone() -> None:
    async def fed(*each: Vectors | None) -> list[int]:
        async with es.AsyncEngine(MODEL, TOKENIZER) as engine:
            found = []
            for one in each:
                done = await engine.generate(
                    list(range(4, 104)), **LONG, steer=one, return_dict_in_generate=True
                )
                found.append(done.cached_tokens)
            return found

    again = {layer: vector.clone() for layer, vector in ONE.items()}
    first, same, other, plain = asyncio.run(fed(ONE, again, OTHER, None))
    assert (first, other, plain) == (0, 0, 0) and same > 50


def test_it_stands_around_the_adapters_of_a_mix() -> None:
    lm = tiny_llama(dtype=torch.float32)
    torch.manual_seed(3)
    config = es.LoraConfig(r=2, target_modules=["down_proj"], init_lora_weights=False)
    lm.add_adapter("tone", config)
    vectors = drawn(lm.width, (0, 1), 1)
    shows = {"return_dict_in_generate": True, "output_logits": True, **LONG}
    both = lm.generate(torch.tensor([PROMPT]), **shows, steer=vectors, adapters={"tone": 0.5})
    merged = tiny_llama(dtype=torch.float32)
    torch.manual_seed(3)
    merged.add_adapter("tone", config)
    merged.merge_adapter([("tone", 0.5)])
    found = merged.generate(torch.tensor([PROMPT]), **shows, steer=vectors)
    assert torch.allclose(torch.cat(both.logits), torch.cat(found.logits), atol=1e-3)


def test_a_record_names_it_and_is_repeated(tmp_path: Path) -> None:
    es.generate(MODEL, TOKENIZER, "ab ab c", **LONG, steer=OTHER, record=tmp_path / "a")
    record = read_record(tmp_path / "a")
    assert set(record.runs["0"].about["steer"]) == {"0", "1"}  # type: ignore[call-overload]
    found = repeat(record, "0", MODEL, TOKENIZER)
    assert found.difference == 0.0
    assert [*found.run.tokens] == record.runs["0"].tokens[0]
    assert lens(record, "0", MODEL, TOKENIZER, 3, speller(record, TOKENIZER)).difference == 0.0
    record.runs["0"].about["steer"]["1"].pop("float32")  # type: ignore[index]
    with pytest.raises(RequestError, match="does not hold the vector"):
        repeat(record, "0", MODEL, TOKENIZER)


@pytest.mark.parametrize(
    ("steer", "says"),
    [
        ({}, "says no layers"),
        ([1, 2], "says no layers"),
        (torch.zeros(16), "says no layers"),
        ({2: torch.zeros(16)}, "does not have"),
        ({-1: torch.zeros(16)}, "does not have"),
        ({"0": torch.zeros(16)}, "does not have"),
        ({0: torch.zeros(15)}, "does not fit the model"),
        ({0: torch.full((16,), torch.nan)}, "not finite"),
        ({0: [0.0] * 16}, "does not fit"),
        ({0: torch.zeros(16, dtype=torch.int64)}, "does not fit"),
        ({0: torch.zeros(1, 16)}, "does not fit"),
        ([ONE, ONE, ONE], "does not fit"),
    ],
)
def test_what_cannot_be_is_refused(steer: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        MODEL.generate(torch.tensor([PROMPT]), **LONG, steer=steer)


def test_models_without_such_layers_refuse_it_by_name() -> None:
    torch.manual_seed(3)
    vectors = {0: torch.zeros(16)}
    wrapped = es.wrap(reference_decoder("llama", torch.float32))
    for lm in (
        es.LanguageModel(ours(reference_mamba(torch.float32)), es.GenerationConfig()),
        es.LanguageModel(ours(reference_t5(torch.float32)), es.GenerationConfig()),
        wrapped,
    ):
        with pytest.raises(UnsupportedError, match="steer adds to the layers of a decoder"):
            es.generate(lm, None, [PROMPT], **LONG, steer=vectors)
    lm = tiny_llama()
    with pytest.raises(RequestError, match="cannot have this name"):
        lm.add_adapter("steer:a", es.LoraConfig())


def test_a_mutant_of_the_layer_is_found() -> None:
    """A vector after the layer before is noticed; equal vectors are one adapter."""
    torch.manual_seed(3)
    reference = reference_decoder("llama", torch.float64)
    lm = es.LanguageModel(ours(reference), es.GenerationConfig(), executor="torch")
    vectors = drawn(lm.width, (1,))
    _, logits = by_hand(reference, vectors, 1)
    shows = {"return_dict_in_generate": True, "output_logits": True}
    before = adapter_module.SteeredStates.__call__

    def earlier(self: Any, layer: int, hidden: Tensor) -> Tensor:
        found: Tensor = before(self, layer + 1, hidden)
        return found

    with replaced(earlier, (adapter_module.SteeredStates, "__call__")):
        found = lm.generate(torch.tensor([PROMPT]), **LONG, **shows, steer=vectors)
    assert not torch.allclose(found.logits[0][0].double(), logits[0], atol=1e-3)
    core = lm.core
    assert isinstance(core.network, Decoder)
    one, two = (read_steering(core, vectors) for _ in range(2))
    assert one is not None and two is not None and one.adapter is two.adapter
