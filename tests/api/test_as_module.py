"""A model as a `torch.nn.Module`: named as a checkpoint, trained by what trains such modules, and
followed by the model whatever is put in the places of its weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainingArguments

import everystep as es
from everystep.api.model import LanguageModel
from everystep.errors import RequestError, UnsupportedError
from everystep.models import Model, WeightModule
from everystep.testing.models import tiny_document, tiny_llama, tiny_vision
from tests.api import processes
from tests.executors.models import narrow_model
from tests.models.tiny import ours, reference_decoder
from tests.ranks import found_together, shared_folder

READ = torch.tensor([[5, 9, 17, 8, 44], [3, 6, 7, 22, 80]])
PROMPT = [*range(4, 44)]
KINDS: dict[str, Mapping[str, Any]] = {
    "llama": {},
    "gpt2": {},  # whose projections lie transposed
    "gpt_neox": {},  # whose queries, keys and values take turns
    "qwen2": {"tie_word_embeddings": True},
    "qwen3_moe": {"norm_topk_prob": True},
}


def pair(kind: str) -> tuple[PreTrainedModel, LanguageModel]:
    reference = reference_decoder(kind, torch.float64, **KINDS[kind])
    return reference, LanguageModel(ours(reference), executor="torch")


def changed(module: nn.Module) -> None:
    with torch.no_grad():
        for one in module.parameters():
            one.add_(torch.randn_like(one), alpha=0.3)


@pytest.mark.parametrize("kind", KINDS)
def test_names_and_values_are_those_of_a_checkpoint(kind: str) -> None:
    _, model = pair(kind)
    module, held = model.as_module(), model.state_dict()
    assert module is model.as_module()
    found = module.state_dict()
    named = {name: value for name, value in held.items() if name in found}
    assert found.keys() == dict(module.named_parameters()).keys()
    assert found.keys() == held.keys() or kind == "qwen3_moe"  # whose experts are named one by one
    assert all(torch.equal(found[name], value) for name, value in named.items())
    own = dict(model.named_parameters())
    assert all(one is own[name] for name, one in module.named_parameters())


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_neox", "qwen2"])
def test_it_loads_what_transformers_has(kind: str) -> None:
    reference, _ = pair(kind)
    _, model = pair(kind)
    module = model.as_module()
    changed(module)
    before = model(READ, use_cache=False).logits
    own, given = module.state_dict().keys(), reference.state_dict()
    given["embed_out.weight"] = given["lm_head.weight"]  # as GPT-NeoX's files name it
    module.load_state_dict({k: v for k, v in given.items() if k in own})
    with torch.no_grad():
        wanted = reference(READ, use_cache=False).logits
    torch.testing.assert_close(model(READ, use_cache=False).logits, wanted, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(before, wanted, atol=1e-2)


def test_its_forward_is_that_of_the_model_and_trains_it() -> None:
    model, other = tiny_llama(vocab_size=97), tiny_llama(vocab_size=97).requires_grad_()
    module = model.as_module()
    steps = [torch.optim.AdamW(one, lr=1e-2) for one in (module.parameters(), other.parameters())]
    for _ in range(2):
        out = module(READ, labels=READ)
        loss = other(READ, labels=READ).loss
        assert torch.equal(out.loss, loss) and out.past_key_values is None
        out.loss.backward()
        loss.backward()
        for step in steps:
            step.step()
            step.zero_grad()
    for name, value in other.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert model.generate(READ, max_new_tokens=8).equal(other.generate(READ, max_new_tokens=8))


@pytest.mark.parametrize("made", [tiny_document, tiny_vision])
def test_encoders_and_towers_are_in_it(made: Callable[[], LanguageModel]) -> None:
    model = made()
    names = {name for name, _ in model.as_module().named_parameters()}
    assert any("visual" in name for name in names)
    assert names == {name for name, _ in model.named_parameters()}


def test_what_is_frozen_stays_frozen() -> None:
    model = tiny_llama(vocab_size=97).requires_grad_()
    name, weight = next(iter(model.named_parameters()))
    weight.requires_grad_(False)
    assert not dict(model.as_module().named_parameters())[name].requires_grad


def follows(model: LanguageModel) -> None:
    """Check that the model reads the weights that stand in its module now."""
    module = model.as_module()
    model.generate(READ, max_new_tokens=2)
    values = {name: torch.randn_like(one) for name, one in module.state_dict().items()}
    module.load_state_dict(values, assign=True)
    with torch.no_grad():
        wanted = module(READ).logits
    assert all(torch.equal(model.state_dict()[name], one) for name, one in values.items())
    assert torch.equal(model(READ, use_cache=False).logits, wanted)
    assert dict(model.named_parameters())["lm_head.weight"].equal(values["lm_head.weight"])
    native = model.frozen()
    torch.testing.assert_close(native(READ).logits, wanted, rtol=1e-4, atol=1e-4)
    assert native.generate(READ, max_new_tokens=6).equal(model.generate(READ, max_new_tokens=6))


def test_the_model_follows_tensors_in_the_places_of_its_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    follows(tiny_llama(vocab_size=97))
    # The check would find a model that keeps the tensors of before.
    monkeypatch.setattr(WeightModule, "followed", lambda _, model: model)
    with pytest.raises(AssertionError):
        follows(tiny_llama(vocab_size=97))


def test_a_half_precision_module_is_a_half_precision_model() -> None:
    model = tiny_llama(vocab_size=97)
    model.as_module().to(torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert model(READ, use_cache=False).logits.dtype == torch.bfloat16


def test_an_engine_reads_no_rows_of_weights_of_before() -> None:
    """Its prompts are computed with the weights of now, and it says when those are others'."""
    learning, packed = tiny_llama(vocab_size=97), tiny_llama(vocab_size=97)
    learning.requires_grad_()

    async def told(engine: es.AsyncEngine, model: LanguageModel) -> tuple[Any, Any]:
        await engine.generate(PROMPT, max_new_tokens=6)
        changed(model.as_module())
        return await engine.generate(PROMPT, max_new_tokens=6), es.generate(
            model, None, PROMPT, max_new_tokens=6
        )

    async def both() -> None:
        async with es.AsyncEngine(learning) as engine:
            found, wanted = await told(engine, learning)
            assert found == wanted
        async with es.AsyncEngine(packed) as engine:
            with pytest.raises(RequestError, match="other weights than those"):
                await told(engine, packed)

    asyncio.run(both())


def test_a_prefix_is_not_made_of_weights_that_change() -> None:
    model = tiny_llama(vocab_size=97).requires_grad_()
    with pytest.raises(UnsupportedError, match=r"weights that may change.*model\.frozen"):
        es.prefill(model, None, PROMPT)
    prefix = es.prefill(model.frozen(), None, PROMPT)
    with pytest.raises(RequestError, match="another model"):
        es.generate(model, None, [5, 6], prefix=prefix, max_new_tokens=2)


def test_what_it_cannot_be_is_refused() -> None:
    model = tiny_llama(vocab_size=97)
    model.add_adapter("policy", es.LoraConfig(r=2, target_modules=["q_proj"]))
    module = model.as_module()
    with pytest.raises(RequestError, match="not an adapter's"):
        module(READ, labels=READ, adapter_names="policy")
    with pytest.raises(RequestError, match=r"belong to a torch\.nn\.Module"):
        model.to(torch.float32)
    quantised = LanguageModel(narrow_model("llama", "int8"))
    with pytest.raises(UnsupportedError, match="cannot learn"):
        quantised.as_module()


def test_of_a_wrapped_model_it_is_the_module() -> None:
    reference, _ = pair("llama")
    assert es.wrap(reference).as_module() is reference


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found."""
    return found_together("tests.api.processes", shared_folder(tmp_path_factory, "processes"))


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """What one process finds, which has the rows of both."""
    model = processes.model_of_now()
    losses = processes.trained(model.as_module(), 0, 1)
    return {"losses": losses, "weights": model.state_dict(), "answer": processes.answer(model)}


@pytest.mark.parametrize("way", ["replicated", "sharded", "layer by layer"])
def test_two_processes_train_what_one_does(
    way: str, together: list[dict[str, Any]], alone: dict[str, Any]
) -> None:
    """With DistributedDataParallel and with fully_shard, of the whole and of each layer: losses,
    weights and what is generated."""
    for one in together:
        found = one[way]
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-6)
        assert found["answer"] == alone["answer"]
    weights: dict[str, Tensor] = together[0][way]["weights"]
    assert weights.keys() == alone["weights"].keys()
    for name, wanted in alone["weights"].items():
        torch.testing.assert_close(weights[name], wanted, rtol=1e-5, atol=1e-6, msg=name)


def test_parts_on_several_processes_are_never_read(together: list[dict[str, Any]]) -> None:
    """Neither before the first step nor after the last; whole weights are those of now."""
    for one in together:
        found = one["sharded"]
        assert len(found["errors"]) == 5
        assert all("lie in parts on several processes" in error for error in found["errors"])
        assert found["before"] != found["answer"]
        assert "21.7k parameters" in found["shown"]
        errors = one["layer by layer"]["errors"]
        assert all("lie in parts on several processes" in error for error in errors)


def test_calls_that_all_make_gather_the_weights(together: list[dict[str, Any]]) -> None:
    """Those of now, before and after training; each process finds what it finds with whole ones,
    however unlike the lengths are."""
    for one in together:
        found = one["sharded"]
        assert found["gathered"] == [found["before"], found["answer"]]
        assert found["asked"] == found["asked alone"]
    first, second = (one["sharded"]["asked"] for one in together)
    assert len(first[0][0]) < len(second[0][0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile's own
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # inductor's own
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_it_is_compiled(backend: str) -> None:
    torch._dynamo.reset()
    model = tiny_llama(vocab_size=97)
    module = model.as_module()
    compiled = torch.compile(module, backend=backend)
    found = {}
    for name, call in {"plain": module, "compiled": compiled}.items():
        module.zero_grad()
        loss = call(READ, labels=READ, output_logits=False).loss
        loss.backward()
        found[name] = [loss.detach(), *(one.grad.clone() for one in module.parameters())]
    for one, other in zip(*found.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_network_that_cannot_follow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tensors would be those of before."""
    model = tiny_llama(vocab_size=97)
    module = model.as_module()
    core = model.core
    assert isinstance(core, Model)
    monkeypatch.setattr("everystep.models.weight_module.with_tensors", lambda part, _: part)
    module.load_state_dict(
        {name: one.clone() for name, one in module.state_dict().items()}, assign=True
    )
    with pytest.raises(UnsupportedError, match="cannot take other tensors"):
        model.generate(READ, max_new_tokens=2)


# --- names of torch and transformers --------------------------------------------------------------


@pytest.mark.parametrize("name", ["modules", "_modules", "register_forward_hook", "half", "cuda"])
def test_names_of_modules_lead_to_the_module(name: str) -> None:
    _, model = pair("llama")
    assert not hasattr(model, name)
    with pytest.raises(AttributeError, match=r"no torch\.nn\.Module.*as_module\(\)"):
        getattr(model, name)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        model.nothing  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_neox"])
def test_values_of_a_checkpoint_are_loaded(kind: str) -> None:
    _, model = pair(kind)
    _, other = pair(kind)
    changed(other.as_module())
    values = {name: value.clone() for name, value in other.as_module().state_dict().items()}
    found: Any = model.load_state_dict(values)
    assert not found.missing_keys and not found.unexpected_keys
    assert torch.equal(model(READ).logits, other(READ).logits)
    with pytest.raises(RuntimeError, match="nothing"):
        model.load_state_dict({**values, "nothing": torch.zeros(1)})


def test_gradients_are_forgotten() -> None:
    _, model = pair("llama")
    with pytest.raises(UnsupportedError, match="requires_grad_"):
        model.zero_grad()
    model.requires_grad_()
    model(READ, labels=READ).loss.backward()
    model.zero_grad(set_to_none=False)
    assert all(one.grad is not None and not one.grad.any() for one in model.parameters())
    model.zero_grad()
    assert all(one.grad is None for one in model.parameters())


def test_the_trainer_of_transformers_trains_the_module(tmp_path: Path) -> None:
    reference, model = pair("llama")
    rows = [{"input_ids": one.tolist(), "labels": one.tolist()} for one in READ]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=4,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
    )
    found = []
    for module in (reference, model.as_module()):
        trainer = Trainer(module, arguments, train_dataset=rows)
        trainer.train()
        found.append([one["loss"] for one in trainer.state.log_history if "loss" in one])
    assert len(found[0]) == 4 and found[1] == pytest.approx(found[0], rel=1e-5)
    assert torch.allclose(model(READ).logits, reference(READ).logits, atol=1e-4)
