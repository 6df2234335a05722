"""The loss of labels equals transformers': in chunks, over a whole batch, smoothed, recomputed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.trainer_pt_utils import LabelSmoother

import everystep as es
import everystep.nn.loss
from everystep.api.model import LanguageModel
from everystep.errors import RequestError, UnsupportedError
from tests.models.tiny import ids, ours, reference_decoder, reference_pair, reference_t5

IDS = ids(3, 11)
LABELS = IDS.clone()
LABELS[0, :5] = LABELS[1, 9:] = LABELS[2, 3] = -100


@pytest.fixture
def pair() -> tuple[Any, LanguageModel]:
    reference = reference_decoder("llama", torch.float64)
    return reference, LanguageModel(ours(reference)).requires_grad_()


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: one.grad.clone() for name, one in model.named_parameters()}


def alike(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, one in found.items():
        # transformers takes root mean squares in float32, gradients included.
        assert (one - wanted[name]).abs().max() <= 1e-6 * wanted[name].abs().max() + 1e-12, name


@pytest.mark.parametrize("at_once", [1 << 22, 300, 1])
@pytest.mark.parametrize("items", [None, 40, torch.tensor(17)])
def test_a_loss_without_logits_is_the_references(
    pair: tuple[Any, LanguageModel], items: Any, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(everystep.nn.loss, "_AT_ONCE", at_once)
    reference, model = pair
    wanted = reference(IDS, labels=LABELS, num_items_in_batch=items)
    found = model(IDS, labels=LABELS, num_items_in_batch=items, output_logits=False)
    assert found.logits is None
    # transformers takes losses in float32.
    assert float(found.loss.detach()) == pytest.approx(float(wanted.loss.detach()), rel=1e-6)
    wanted.loss.backward()
    found.loss.backward()
    alike(gradients(model), gradients(reference))


class Largest(TorchDispatchMode):
    """Notes the most values that a tensor had which an operator returned."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for one in found if isinstance(found, tuple | list) else (found,):
            if isinstance(one, Tensor):
                self.most = max(self.most, one.numel())
        return found


def test_no_tensor_has_a_value_for_each_position_and_each_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wide = reference_decoder("llama", torch.float32, vocab_size=1000)
    model, many = LanguageModel(ours(wide)).requires_grad_(), ids(4, 64)
    monkeypatch.setattr(everystep.nn.loss, "_AT_ONCE", 8 * model.vocab_size)
    all_logits = many.numel() * model.vocab_size
    for output_logits, is_smaller in ((False, True), (True, False)):
        with Largest() as seen:
            loss = model(many, labels=many, output_logits=output_logits).loss
            loss.backward()
        assert (seen.most < all_logits) is is_smaller


@pytest.mark.parametrize("encodes", [False, True])
def test_smoothed_labels_are_the_references(encodes: bool) -> None:
    reference = (
        reference_t5(torch.float64) if encodes else reference_decoder("llama", torch.float64)
    )
    model = LanguageModel(ours(reference)).requires_grad_()
    given = {"decoder_input_ids": IDS} if encodes else {}
    for items in (None, 50):
        outputs = reference(IDS, **given)
        wanted = LabelSmoother(0.2)(
            outputs, LABELS, shift_labels=not encodes, num_items_in_batch=items
        )
        found = model(
            IDS, labels=LABELS, label_smoothing=0.2, num_items_in_batch=items, **given
        ).loss
        assert float(found.detach()) == pytest.approx(float(wanted.detach()), abs=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize(("targets", "times"), [(["q_proj"], 1), (["q_proj", "lm_head"], 2)])
def test_logits_of_a_frozen_head_are_made_once(
    targets: list[str], times: int, smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = LanguageModel(ours(reference_decoder("llama", torch.float64)))
    config = es.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    adapter = model.add_adapter(config)
    named = dict(adapter.named_parameters())
    scores = model(IDS, adapters="default").logits[:, :-1].log_softmax(-1)
    at, real = LABELS[:, 1:].clamp(min=0)[..., None], LABELS[:, 1:] != -100
    each = (1 - smoothing) * scores.gather(2, at)[..., 0] + smoothing * scores.mean(-1)
    (-each[real].sum() / real.sum() * 3).backward()
    wanted = gradients(adapter)
    for one in named.values():
        one.grad = None

    made, sums = [], everystep.nn.loss._sums
    monkeypatch.setattr(everystep.nn.loss, "_AT_ONCE", 5 * model.vocab_size)
    monkeypatch.setattr(everystep.nn.loss, "_sums", lambda *one: made.append(one) or sums(*one))
    loss = model(
        IDS, labels=LABELS, adapters="default", label_smoothing=smoothing, output_logits=False
    ).loss
    (loss * 3).backward()
    assert len(made) == times * -(-int(real.sum()) // 5)
    alike(gradients(adapter), wanted)


@pytest.mark.parametrize("encodes", [False, True])
def test_log_probabilities_of_labels_have_gradients(
    encodes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(everystep.nn.loss, "_AT_ONCE", 500)
    reference = reference_decoder("llama", torch.float64)
    if encodes:
        reference = reference_t5(torch.float64)
    model = LanguageModel(ours(reference)).requires_grad_()
    given = {"decoder_input_ids": IDS} if encodes else {}
    found = model(IDS, labels=LABELS, output_logits=False, output_logprobs=True, **given)
    assert found.logits is None and "logprobs" not in found and found.logprobs.shape == (3, 11)
    logits = reference(IDS, **given).logits.log_softmax(-1)
    if not encodes:
        logits = torch.cat([torch.zeros_like(logits[:, :1]), logits[:, :-1]], dim=1)
    wanted = logits.gather(2, LABELS.clamp(min=0)[..., None])[..., 0] * (LABELS != -100)
    if not encodes:
        wanted = wanted * (torch.arange(11) > 0)
    assert torch.allclose(found.logprobs, wanted, atol=1e-6)
    weights = torch.linspace(-1, 1, 33).view(3, 11)
    (found.logprobs * weights).sum().backward()
    (wanted * weights).sum().backward()
    own = gradients(model)
    for name, one in reference.named_parameters():
        if name in own and one.grad is not None:
            assert (own[name] - one.grad).abs().max() <= 1e-5 * one.grad.abs().max() + 1e-12, name


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3_moe"])
def test_recomputed_layers_have_the_same_gradients(kind: str) -> None:
    model = LanguageModel(ours(reference_decoder(kind, torch.float64))).requires_grad_()

    def run() -> tuple[float, dict[str, Tensor], int]:
        kept = 0

        def pack(one: Tensor) -> Tensor:
            nonlocal kept
            kept += one.numel()
            return one

        for weight in model.parameters():
            weight.grad = None
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
            loss = model(IDS, labels=LABELS, output_logits=False).loss
        loss.backward()
        named = model.named_parameters()
        return float(loss.detach()), {name: w.grad for name, w in named if w.grad is not None}, kept

    plain = run()
    model.gradient_checkpointing_enable()
    model.to(torch.float64)  # a conversion keeps the choice
    again = run()
    assert again[0] == plain[0] and again[2] < plain[2]
    assert all(torch.equal(again[1][name], one) for name, one in plain[1].items())
    with pytest.raises(RequestError, match="cache twice"):
        model(IDS, use_cache=True)
    with torch.no_grad():
        assert model(IDS).past_key_values is not None
    model.gradient_checkpointing_disable()
    assert run()[2] == plain[2]


def test_an_encoder_is_not_recomputed() -> None:
    model = LanguageModel(ours(reference_t5(torch.float64)))
    with pytest.raises(UnsupportedError, match=r"gradient checkpointing.*decoder"):
        model.gradient_checkpointing_enable()


def test_training_mode_changes_no_answer(pair: tuple[Any, LanguageModel]) -> None:
    model = pair[1]
    before = model.generate(IDS, max_new_tokens=5, do_sample=False)
    assert model.train() is model and model.training
    assert torch.equal(model.generate(IDS, max_new_tokens=5, do_sample=False), before)
    assert model.training
    assert model.eval() is model and not model.training


@pytest.mark.parametrize(
    "given, what",
    [
        ({"num_items_in_batch": 0}, "num_items_in_batch"),
        ({"num_items_in_batch": "many"}, "num_items_in_batch"),
        ({"label_smoothing": 1.0}, "label_smoothing"),
        ({"label_smoothing": -0.1}, "label_smoothing"),
        ({"output_logits": 1}, "output_logits"),
        ({"labels": None, "num_items_in_batch": 3}, "num_items_in_batch belongs"),
        ({"labels": None, "label_smoothing": 0.1}, "label_smoothing belongs"),
        ({"labels": None, "output_logprobs": True}, "output_logprobs belongs"),
        ({"output_logprobs": "all"}, "output_logprobs"),
        ({"labels": LABELS[:, :4]}, "labels do not fit"),
        ({"labels": LABELS.T}, "labels do not fit"),
        ({"labels": LABELS, "logits_to_keep": 1}, "labels do not fit"),
        ({"labels": LABELS.clamp(max=-1)}, "labels hold an id"),
        ({"labels": LABELS.double()}, "labels"),
    ],
)
def test_settings_of_a_loss_that_cannot_be(
    pair: tuple[Any, LanguageModel], given: dict[str, Any], what: str
) -> None:
    with pytest.raises(RequestError, match=what):
        pair[1](IDS, **{"labels": LABELS, **given})
    with pytest.raises(RequestError, match="mode is not valid"):
        pair[1].train("yes")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_labels_of_an_encoder_say_what_the_decoder_reads(kind: str) -> None:
    """As in transformers: each one's predecessor, after the start token."""
    reference = reference_pair(kind, torch.float64)
    reference.config.decoder_start_token_id, reference.config.pad_token_id = 3, 1
    config = es.GenerationConfig(decoder_start_token_id=3, pad_token_id=1)
    model = LanguageModel(ours(reference), config, executor="torch")
    with torch.no_grad():
        wanted = reference(IDS, labels=LABELS)
    found = model(IDS, labels=LABELS)
    assert (found.logits - wanted.logits).abs().max() < 1e-6
    assert float(found.loss) == pytest.approx(float(wanted.loss), rel=1e-6)
    with pytest.raises(RequestError, match=r"what its decoder reads.*or labels"):
        model(IDS)
    bare = LanguageModel(ours(reference_pair(kind, torch.float64)), executor="torch")
    if getattr(bare.config, "decoder_start_token_id", None) is None:
        with pytest.raises(RequestError, match="no first token of a decoder"):
            bare(IDS, labels=LABELS)


def test_a_loss_that_teaches_nothing_is_refused_in_training_mode() -> None:
    """torch says nothing of the model when its backward fails."""
    model = LanguageModel(ours(reference_decoder("llama", torch.float64)))
    with pytest.raises(RuntimeError, match="does not require grad"):  # as models are loaded
        model(IDS, labels=LABELS).loss.backward()
    model.train()
    with pytest.raises(RequestError, match=r"nothing learns from this loss.*requires_grad_\(\)"):
        model(IDS, labels=LABELS)
    with torch.no_grad():
        assert model(IDS, labels=LABELS).loss > 0
    model.requires_grad_()
    model(IDS, labels=LABELS).loss.backward()
    assert all(one.grad is not None for one in model.parameters())
    with pytest.raises(RequestError, match="this one has none"):
        model(IDS, decoder_input_ids=IDS)
