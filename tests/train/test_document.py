"""A document model is trained on pages: boxes and patches in a forward, and the whole way."""

from __future__ import annotations

import multiprocessing
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import everystep as es
from everystep.errors import RequestError, UnknownArgumentError
from everystep.testing.tokenizer import tiny_tokenizer
from tests.api.document import Document, boxes, images, padded
from tests.train.pages import HALF, Pages, run_on_pages, train_on_pages
from tests.train.runs import outcome, require_equal

pytestmark = pytest.mark.filterwarnings("ignore:.*are trained on.*", "ignore:.*fork.*")
COUNTS = (2, 5, 1)


def batch(document: Document) -> dict[str, Any]:
    given = padded([document.ids(count, row) for row, count in enumerate(COUNTS)])
    labels = given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)
    labels[labels > 1000] = -100
    first = given["attention_mask"].argmax(1)  # before these stands padding
    labels[torch.arange(3), first] = -100
    return {**given, "labels": labels, "pixel_values": images(3), "bbox": boxes(COUNTS)}


def test_gradients_reach_what_reads_boxes_and_patches(tmp_path: Path) -> None:
    """They are those of transformers' Llama and LayoutLMv3, joined by hand."""
    document = Document(tmp_path / "model")
    given = batch(document)
    own = document.model.requires_grad_()
    loss = own(**given, use_cache=False).loss
    loss.backward()
    names = document.weights()
    ids, table = given["input_ids"], document.reference.get_input_embeddings()
    places, flat = ids.flatten(), table(ids.masked_fill(ids > 1000, 0)).flatten(0, 1)
    patches = document.reference_patches(given["pixel_values"]).flatten(0, 1)
    marks = torch.cat(document.reference_boxes(given["bbox"]))
    flat = flat.index_copy(0, (places == 150001).nonzero()[:, 0], patches)
    flat = flat.index_copy(0, (places == 150000).nonzero()[:, 0], marks)
    reference = document.reference(
        inputs_embeds=flat.view(*ids.shape, -1),
        attention_mask=given["attention_mask"],
        labels=given["labels"],
    ).loss
    reference.backward()
    assert loss.item() == pytest.approx(reference.item(), abs=1e-6)
    modules = (document.reference, document.reference_patches, document.reference_boxes)
    held = [one for module in modules for one in module.parameters()]
    wanted = {
        name: next(one for one in held if one.data_ptr() == value.data_ptr()).grad
        for name, value in names.items()
    }
    for name, weight in own.named_parameters():
        expected = wanted[name]
        assert weight.grad is not None, name
        if expected is not None:  # of a class token, which is not read here, there is none
            assert torch.allclose(weight.grad, expected, atol=1e-6), name  # its loss: float32


def test_a_forward_says_what_generation_says(tmp_path: Path) -> None:
    document = Document(tmp_path / "model", torch.float32)
    model, given = document.model, batch(document)
    del given["labels"]
    told = model.generate(
        **given, max_new_tokens=1, output_logits=True, return_dict_in_generate=True
    )
    assert torch.allclose(model(**given).logits[:, -1], told.logits[0], atol=1e-4)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    document = Document(tmp_path / "model", torch.float32)
    model, given = document.model, batch(document)
    with pytest.raises(RequestError, match="the features of bbox differ in number"):
        model(**{**given, "bbox": given["bbox"][:, :1]})
    with pytest.raises(RequestError, match="bbox and the prompt differ in rows"):
        model(**{**given, "bbox": given["bbox"][:2]})
    with pytest.raises(RequestError, match="places of features among ids"):
        embeds = torch.zeros(3, 4, model.width)
        model(inputs_embeds=embeds, pixel_values=given["pixel_values"])
    with pytest.raises(UnknownArgumentError, match="Perhaps you meant bbox"):
        model(**{**given, "bboxes": given["bbox"]})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> es.Trainer:
    """A run that was never stopped."""
    torch.set_num_threads(1)
    run = run_on_pages(tmp_path_factory.mktemp("whole"))
    run.train()
    return run


def test_half_of_it_learns(whole: es.Trainer) -> None:
    first = dict(run_on_pages(Path("unused"), "no").model.state_dict())
    trained = {*whole.weights.named()}
    assert any("layout_embedder" in one for one in trained)
    assert any("visual_projector" in one for one in trained)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, first[name]) == (name not in trained), name
    losses = [one["loss"] for one in whole.state.log_history if "loss" in one]
    assert losses[-1] < 0.5 * losses[0]
    assert len(HALF) == 4 and 0.3 < len(trained) / len(first) < 0.7


def test_evaluation_writes_what_generation_would(whole: es.Trainer) -> None:
    """After page and question alone."""
    metrics = whole.evaluate()
    assert metrics["eval_loss"] < 3
    found = whole.predict(Pages(whole.model, tiny_tokenizer()))
    page = Pages(whole.model, tiny_tokenizer())[3]
    first = int((page["labels"] != -100).nonzero()[0])
    prompt = {"input_ids": page["input_ids"][None, :first], "bbox": page["bbox"][None]}
    prompt["pixel_values"] = page["pixel_values"][None]
    out = whole.model.generate(**prompt, max_new_tokens=10, do_sample=False)[0, first:]
    assert found.texts is not None
    assert tiny_tokenizer().decode(out, skip_special_tokens=True) == found.texts[3]


def test_a_run_that_is_killed_goes_on_to_the_bit(whole: es.Trainer, tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.train.pages"])
    draw, killed = random.Random(4), 0
    while True:
        child = context.Process(target=train_on_pages, args=(str(tmp_path),))
        child.start()
        if killed < 1:
            # A moment within the run: some checkpoint is there, the last one is not.
            while child.is_alive() and len(list(tmp_path.glob("checkpoint-*"))) <= killed:
                child.join(0.01)
            child.join(draw.uniform(0, 0.05))
            assert child.is_alive(), "the run was over before it could be killed"
            child.kill()
            child.join()
            assert child.exitcode == -signal.SIGKILL
            killed += 1
            continue
        child.join()
        assert child.exitcode == 0
        break
    again = run_on_pages(tmp_path)
    again.train(resume_from_checkpoint=tmp_path / "checkpoint-10")
    wanted, found = outcome(whole), outcome(again)
    told = [[one for one in each["logs"] if "loss" in one] for each in (wanted, found)]
    require_equal({**found, "logs": told[1]}, {**wanted, "logs": told[0]})


def test_what_was_trained_is_served_and_its_text_part_is_transformers(
    whole: es.Trainer, tmp_path: Path
) -> None:
    whole.save_model(tmp_path / "model")
    model, tokenizer = es.load(tmp_path / "model")
    page = Pages(model, tokenizer)[2]
    first = int((page["labels"] != -100).nonzero()[0])
    prompt = {name: page[name][None] for name in ("pixel_values", "bbox")}
    prompt["input_ids"] = page["input_ids"][None, :first]
    answer = es.generate(model, tokenizer, prompt, max_new_tokens=10, do_sample=False)
    assert answer == whole.generate(prompt, max_new_tokens=10, do_sample=False)
    config = transformers.AutoConfig.for_model("llama", **_text(model))
    llama = transformers.LlamaForCausalLM(config).float().eval()
    weights = load_file(tmp_path / "model" / "model.safetensors")
    text = {name: one for name, one in weights.items() if name.startswith(("model.", "lm_head"))}
    missing, unexpected = llama.load_state_dict(text, strict=False)
    assert not unexpected and all("rotary" in one for one in missing)
    ids = torch.tensor([[5, 9, 11, 40, 7]])
    with torch.no_grad():
        assert torch.allclose(llama(ids).logits, model(ids).logits, atol=1e-4)


def _text(model: es.LanguageModel) -> dict[str, Any]:
    """The configuration without what reads pages."""
    given = model.config.to_dict()
    return {name: one for name, one in given.items() if name not in ("model_type", "layout_config")}
