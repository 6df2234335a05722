"""Conversations with pictures become rows, batches and steps, and are evaluated by generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import everystep as es
from everystep.errors import RequestError, UnsupportedError
from everystep.images import PictureTokenizer
from everystep.images.tokenizer import IMAGE_PAD
from everystep.testing.tokenizer import tiny_tokenizer
from tests.images.making import drawn, write_folder

PICTURES = (drawn(16, 24, 1), drawn(32, 16, 2))


@pytest.fixture
def loaded(tmp_path: Path) -> tuple[es.LanguageModel, PictureTokenizer]:
    model, tokenizer = es.load(write_folder(tmp_path / "model"), dtype=torch.float32)
    assert isinstance(tokenizer, PictureTokenizer)
    model.generation_config.eos_token_id = [2, 4]
    return model, tokenizer


def conversation(image: Any, answer: str) -> dict[str, Any]:
    part = {"type": "image"} if image is None else {"type": "image", "image": image}
    asked = [part, {"type": "text", "text": "what is it?"}]
    return {
        "messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    }


DATA = [conversation(PICTURES[0], "a cat"), conversation(PICTURES[1], "the sea")]


def test_a_row_holds_what_the_template_makes_and_learns_the_answer(loaded: Any) -> None:
    model, tokenizer = loaded
    row = es.read_rows(DATA, model, tokenizer)[1]
    given = tokenizer.apply_chat_template(DATA[1]["messages"], return_tensors="pt")
    assert {*row} == {"input_ids", "labels", "pixel_values", "image_grid_thw"}
    for name in ("input_ids", "pixel_values", "image_grid_thw"):
        wanted = given[name][0] if name == "input_ids" else given[name]
        assert torch.equal(row[name], wanted)
    told = tokenizer.decode(row["input_ids"][row["labels"] != -100])
    assert told.startswith("the sea") and "what" not in told
    every = es.read_rows(DATA, model, tokenizer, es.DataForm(assistant_only_loss=False))[1]
    shown = every["input_ids"] == tokenizer.convert_tokens_to_ids(IMAGE_PAD)
    assert shown.any() and torch.equal(every["labels"] == -100, shown)


def test_images_may_stand_beside_messages(loaded: Any) -> None:
    model, tokenizer = loaded
    inside = es.read_rows(DATA, model, tokenizer)
    apart = [
        {**conversation(None, answer), "images": [image]}
        for image, answer in zip(PICTURES, ("a cat", "the sea"), strict=True)
    ]
    beside = es.read_rows(apart, model, tokenizer)
    asked, answer = DATA[0]["messages"]
    pairs = es.read_rows([{"prompt": [asked], "completion": [answer]}], model, tokenizer)
    for one, other in ((inside[0], beside[0]), (inside[1], beside[1]), (inside[0], pairs[0])):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("lora", [True, False])
def test_what_is_seen_is_learned(loaded: Any, lora: bool, tmp_path: Path) -> None:
    """The question is always the same, so that the picture alone says the answer."""
    model, tokenizer = loaded
    config = es.LoraConfig(r=8, target_modules="all-linear")
    args = es.TrainingArguments(
        output_dir=tmp_path / "run",
        max_steps=36,
        learning_rate=1e-2,
        per_device_train_batch_size=2,
        logging_steps=9,
        save_strategy="no",
        disable_tqdm=True,
        predict_with_generate=True,
        generation_max_length=12,
    )
    torch.manual_seed(1)
    run = es.Trainer(model, args, None, DATA, None, tokenizer, peft_config=config if lora else None)
    run.train()
    losses = [one["loss"] for one in run.state.log_history if "loss" in one]
    assert losses[-1] < 0.3 * losses[0]
    found = run.predict(DATA)
    assert found.texts is not None
    for example, text in zip(DATA, found.texts, strict=True):
        given = tokenizer.apply_chat_template(
            example["messages"][:1], add_generation_prompt=True, return_tensors="pt"
        )
        own = {"adapter_names": "default"} if lora else {}
        out = model.generate(**given, max_new_tokens=12, do_sample=False, **own)
        new = out[0, given["input_ids"].shape[1] :]
        assert tokenizer.decode(new, skip_special_tokens=True) == text
    assert len({*found.texts}) == 2


def test_pictures_that_do_not_fit_are_refused(loaded: Any) -> None:
    model, tokenizer = loaded
    bare = conversation(None, "a cat")
    for example, told in (
        ({**bare, "images": [*PICTURES]}, "images and messages do not fit"),
        ({**bare, "images": []}, "announces an image and holds none"),
        ({**bare, "images": "a.png"}, "images are no list"),
        ({"prompt": "a", "completion": " b", "images": [PICTURES[0]]}, "images are for messages"),
        ({**DATA[0], "images": [PICTURES[0]]}, "images and messages do not fit"),
    ):
        with pytest.raises(RequestError, match=told):
            es.read_rows([example], model, tokenizer)[0]
    with pytest.raises(UnsupportedError, match="this tokenizer reads none"):
        es.read_rows(DATA, model, tiny_tokenizer())[0]
    with pytest.raises(RequestError, match="a row with pixel_values cannot be shortened"):
        es.read_rows(DATA, model, tokenizer, es.DataForm(max_length=5))[0]
