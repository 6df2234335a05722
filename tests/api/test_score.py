"""`es.score`: the log-probabilities of a text are those of the logits of transformers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import everystep as es
from everystep.api.model import LanguageModel
from everystep.errors import RequestError, TokenizerError, UnknownArgumentError
from everystep.testing.tokenizer import tiny_tokenizer
from tests.executors.models import family_model, narrow_model
from tests.models.tiny import ids, ours, reference_decoder, reference_pair

DECODERS = ("llama", "qwen2", "gemma2", "mixtral")


def of_logits(logits: Tensor, tokens: Tensor) -> Tensor:
    """(n,) the log-probability of each of (n,) tokens in (n, V) logits."""
    return logits.float().log_softmax(-1).gather(1, tokens[:, None])[:, 0]


def pair(kind: str) -> tuple[PreTrainedModel, LanguageModel]:
    reference = reference_decoder(kind, torch.float64)
    return reference, LanguageModel(ours(reference), executor="torch")


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return LanguageModel(narrow_model("llama", None, panels=True))


@pytest.mark.parametrize("kind", DECODERS)
def test_scores_are_those_of_transformers(kind: str) -> None:
    reference, model = pair(kind)
    rows = [ids(1, count)[0] for count in (2, 30, 7)]
    for row, score in zip(rows, es.score(model, None, [r.tolist() for r in rows]), strict=True):
        with torch.no_grad():
            logits = reference(row[None], use_cache=False).logits[0]
        wanted = of_logits(logits[:-1], row[1:])
        assert score.tokens.tolist() == row[1:].tolist()
        torch.testing.assert_close(score.logprobs, wanted, rtol=1e-5, atol=1e-5)
        assert score.total == pytest.approx(float(wanted.double().sum()), rel=1e-5)
        assert score.perplexity == pytest.approx(math.exp(-wanted.double().mean()), rel=1e-5)


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_an_encoder_reads_what_stands_before(kind: str) -> None:
    reference = reference_pair(kind, torch.float64)
    config = es.GenerationConfig(decoder_start_token_id=3)
    model = LanguageModel(ours(reference), config, executor="torch")
    source, text = ids(1, 9), ids(1, 6)
    start = torch.tensor([[3]])
    with torch.no_grad():
        read = torch.cat([start, text], dim=1)
        logits = reference(input_ids=source, decoder_input_ids=read, use_cache=False).logits[0]
    score = es.score(model, None, text[0].tolist(), after=source[0].tolist())
    torch.testing.assert_close(
        score.logprobs, of_logits(logits[:-1], text[0]), rtol=1e-5, atol=1e-5
    )
    with pytest.raises(RequestError, match="after what its encoder reads"):
        es.score(model, None, text[0].tolist())


def test_what_stands_before_is_not_scored(model: LanguageModel) -> None:
    whole = ids(1, 20, model.vocab_size)[0].tolist()
    every = es.score(model, None, whole)
    part = es.score(model, None, whole[12:], after=whole[:12])
    assert part.tokens.tolist() == whole[12:]
    assert torch.equal(part.logprobs, every.logprobs[11:])
    again = es.score(model, None, [whole[12:], whole[3:5]], after=[whole[:12], whole[:3]])
    assert torch.equal(again[0].logprobs, part.logprobs)
    assert torch.equal(again[1].logprobs, every.logprobs[2:4])


def test_nothing_depends_on_what_is_scored_beside_it(model: LanguageModel) -> None:
    rows = [ids(1, 2 + 3 * n, model.vocab_size)[0].tolist() for n in range(12)]
    together = es.score(model, None, rows, best=3)
    for row, found in zip(rows, together, strict=True):
        alone = es.score(model, None, row, best=3)
        assert torch.equal(found.logprobs, alone.logprobs)
        assert torch.equal(found.top_tokens, alone.top_tokens)
        assert found.top_tokens.shape == (len(row) - 1, 3)
        assert torch.all(found.top_logprobs[:, 0] >= found.logprobs)


@pytest.mark.parametrize("size, stride", [(8, 7), (8, 1), (12, 9), (5, 2), (2, 1)])
@pytest.mark.parametrize("before", [0, 1, 5, 8, 30])
def test_windows_score_each_token_once_after_what_they_hold(
    model: LanguageModel, size: int, stride: int, before: int
) -> None:
    whole = ids(1, 43, model.vocab_size)[0].tolist()
    first = before or 1
    options: dict[str, Any] = {"window": size, "stride": stride}
    if before:
        options["after"] = whole[:before]
    found = es.score(model, None, whole[before:], **options)
    assert found.tokens.tolist() == whole[first:]
    start, place = 0, first
    while place < len(whole):
        start = start if place < start + size else place + stride - size
        end = min(start + size, len(whole))
        window = es.score(model, None, whole[start:end])
        part = found.logprobs[place - first : end - first]
        assert torch.equal(part, window.logprobs[place - start - 1 :])
        start, place = start + stride, end


def test_texts_and_messages() -> None:
    tokenizer = tiny_tokenizer()
    model = LanguageModel(family_model("llama", vocab_size=len(tokenizer)))
    text = "the cat sat"
    score = es.score(model, tokenizer, text)
    assert score.tokens.tolist() == tokenizer.encode(text)[1:]
    assert score.bits_per_byte == pytest.approx(-score.total / math.log(2) / len(text))
    own = tokenizer.encode(text, add_special_tokens=False)
    after = es.score(model, tokenizer, text, after="on the mat")
    assert after.tokens.tolist() == own
    asked = [{"role": "user", "content": "hi"}]
    head = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    answered = es.score(model, tokenizer, text, after=asked)
    assert torch.equal(answered.logprobs, es.score(model, None, own, after=head).logprobs)
    assert es.score(model, None, own).bits_per_byte is None


def test_a_model_of_transformers_is_scored_too() -> None:
    reference, model = pair("llama")
    row = ids(1, 9)[0].tolist()
    found = es.score(reference, None, row)
    torch.testing.assert_close(found.logprobs, es.score(model, None, row).logprobs)


def test_an_impossible_token_has_no_finite_perplexity(model: LanguageModel) -> None:
    score = es.Score(torch.tensor([1]), torch.tensor([-math.inf]), *[torch.empty(1, 0)] * 2)
    assert (score.total, score.perplexity) == (-math.inf, math.inf)


WRONG: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "one id": ([5], {}, RequestError, "nothing to score.*1 tokens"),
    "no ids": ([[]], {}, RequestError, "nothing to score"),
    "floats": ([0.5, 1.5], {}, RequestError, "no row of ids"),
    "a rectangle": ([[[5, 6], [7, 8]]], {}, RequestError, "no row of ids"),
    "a text without a tokenizer": ("hi", {}, RequestError, "text needs a tokenizer"),
    "messages": ([{"role": "user", "content": "a"}], {}, RequestError, "scored is a text or ids"),
    "a mapping": ({"input_ids": [5, 6]}, {}, RequestError, "scored is a text or ids"),
    "an unknown id": ([5, 10**6], {}, RequestError, "outside the vocabulary"),
    "a negative id": ([5, -1], {}, RequestError, "outside the vocabulary"),
    "nothing": (None, {}, RequestError, "no known kind"),
    "as many prompts as texts": (
        [[5, 6]],
        {"after": [[1, 2], [3, 4]]},
        RequestError,
        "after does not fit the texts; wanted 1; got 2",
    ),
    "no embeddings": (
        [5, 6],
        {"after": {"inputs_embeds": torch.zeros(3, 32)}},
        RequestError,
        "after ids alone",
    ),
    "a window of one": ([5, 6], {"window": 1}, RequestError, "window is impossible"),
    "a window of True": ([5, 6], {"window": True}, RequestError, "window is impossible"),
    "a stride of nothing": ([5, 6], {"stride": 0}, RequestError, "stride is impossible"),
    "a stride of a window": ([5, 6], {"window": 4, "stride": 4}, RequestError, "1 to 3 ids"),
    "a negative best": ([5, 6], {"best": -1}, RequestError, "best is impossible"),
    "a best of all and one": ([5, 6], {"best": 10**6}, RequestError, "best is impossible"),
    "an unknown adapter": ([5, 6], {"adapter_names": "x"}, RequestError, "x"),
}


@pytest.mark.parametrize("text, options, kind, match", WRONG.values(), ids=WRONG)
def test_what_cannot_be_scored_is_an_error(
    model: LanguageModel, text: Any, options: dict[str, Any], kind: type[Exception], match: str
) -> None:
    with pytest.raises(kind, match=match):
        es.score(model, None, text, **options)
    assert len(es.score(model, None, [5, 6, 7]).tokens) == 2


def test_messages_need_a_template(model: LanguageModel) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(TokenizerError, match="chat template"):
        es.score(model, tokenizer, "a", after=[{"role": "user", "content": "a"}])


def test_a_window_beyond_the_context_is_refused() -> None:
    _, model = pair("llama")
    assert model.context == 64
    with pytest.raises(RequestError, match="2 to 64 ids, the model's context; got 65"):
        es.score(model, None, [5, 6], window=65)
    long = ids(1, 200)[0].tolist()
    assert es.score(model, None, long).tokens.tolist() == long[1:]


def test_an_unknown_keyword_is_refused(model: LanguageModel) -> None:
    with pytest.raises((TypeError, UnknownArgumentError), match="windwo"):
        es.score(model, None, [5, 6], windwo=3)


def differentiable(kind: str = "llama") -> tuple[PreTrainedModel, LanguageModel]:
    reference, model = pair(kind)
    return reference.requires_grad_(), model.requires_grad_()


def test_gradients_of_scores_are_those_of_transformers() -> None:
    reference, model = differentiable()
    rows, before = [ids(1, count)[0] for count in (9, 3)], ids(1, 5)[0]
    scores = es.score(
        model, None, [r.tolist() for r in rows], after=before.tolist(), requires_grad=True
    )
    factors = [torch.linspace(-1, 2, len(row)) for row in rows]
    loss = sum((one.logprobs * f).sum() for one, f in zip(scores, factors, strict=True))
    assert isinstance(loss, Tensor)
    loss.backward()
    wanted = torch.zeros(())
    for row, factor in zip(rows, factors, strict=True):
        read = torch.cat([before, row])[None]
        logits = reference(read, use_cache=False).logits[0, len(before) - 1 : -1]
        wanted = wanted + (of_logits(logits, row) * factor).sum()
    wanted.backward()
    torch.testing.assert_close(loss.detach(), wanted.detach(), rtol=1e-5, atol=1e-5)
    theirs = dict(reference.named_parameters())
    for name, weight in model.named_parameters():
        assert weight.grad is not None and theirs[name].grad is not None
        torch.testing.assert_close(weight.grad, theirs[name].grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [8, None])
def test_a_score_with_gradients_has_the_values_of_one_without(size: int | None) -> None:
    """Also in windows, and no value is missing from its table."""
    _, model = differentiable()
    row = ids(1, 30)[0].tolist()
    found = es.score(model, None, row, window=size, requires_grad=True)
    plain = es.score(model, None, row, window=size)
    assert found.logprobs.requires_grad and not plain.logprobs.requires_grad
    torch.testing.assert_close(found.logprobs.detach(), plain.logprobs, rtol=1e-5, atol=1e-5)
    assert found.tokens.tolist() == plain.tokens.tolist()
    assert found.top_tokens.shape == plain.top_tokens.shape
    assert found.perplexity == pytest.approx(plain.perplexity, rel=1e-5)
    assert found._repr_html_()


def test_an_adapter_learns_from_scores(model: LanguageModel) -> None:
    """Beside weights that are packed for the native executor."""
    adapter = model.add_adapter("policy", es.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    row = ids(1, 12, model.vocab_size)[0].tolist()
    try:
        es.score(
            model, None, row, adapter_names="policy", requires_grad=True
        ).logprobs.sum().backward()
        grads = [one.grad for one in adapter.parameters()]
        assert any(one is not None and bool(one.abs().sum() > 0) for one in grads)
    finally:
        model.delete_adapter("policy")


def test_what_stands_before_an_encoder_has_gradients_too() -> None:
    reference = reference_pair("t5", torch.float64)
    config = es.GenerationConfig(decoder_start_token_id=3)
    model = LanguageModel(ours(reference), config, executor="torch").requires_grad_()
    source, text = ids(1, 9)[0].tolist(), ids(1, 6)[0].tolist()
    found = es.score(model, None, text, after=source, requires_grad=True)
    plain = es.score(model, None, text, after=source)
    torch.testing.assert_close(found.logprobs.detach(), plain.logprobs, rtol=1e-5, atol=1e-5)
    found.logprobs.sum().backward()
    named = dict(model.named_parameters())
    assert all(one.grad is not None for name, one in named.items() if "encoder" in name)


def test_a_wrapped_module_has_gradients_of_its_own() -> None:
    reference, model = differentiable()
    row = ids(1, 12)[0].tolist()
    found = es.score(reference, None, row, requires_grad=True)
    own = es.score(model, None, row, requires_grad=True)
    torch.testing.assert_close(found.logprobs, own.logprobs, rtol=1e-5, atol=1e-5)
    found.logprobs.sum().backward()
    assert all(one.grad is not None for one in reference.parameters())


def test_gradients_that_there_cannot_be_are_refused(model: LanguageModel) -> None:
    row = ids(1, 12, model.vocab_size)[0].tolist()
    with pytest.raises(RequestError, match="nothing that this text is scored with learns"):
        es.score(model, None, row, requires_grad=True)
    with torch.no_grad(), pytest.raises(RequestError, match="no gradients are recorded"):
        es.score(model, None, row, requires_grad=True)
    with pytest.raises(RequestError, match="best tokens of a place"):
        es.score(model, None, row, best=2, requires_grad=True)
    with pytest.raises(RequestError, match="requires_grad"):
        es.score(model, None, row, requires_grad=1)  # type: ignore[call-overload]
