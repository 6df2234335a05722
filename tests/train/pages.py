"""A run that trains half of a tiny document model on questions about pages, in any process."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image, ImageDraw
from torch import Tensor

import everystep as es
from everystep.testing.models import tiny_document
from everystep.testing.tokenizer import tiny_tokenizer

HALF = (r"layers\.1\.", "_projector", "layout_embedder", "lm_head")
"""Patterns of what is trained: the last layer, the head, and what reads boxes and patches."""
PRICES = (3, 7, 12, 40, 55, 81)


class Pages:
    """Pages with lines of text, a question about each, and its answer as labels."""

    def __init__(self, model: es.LanguageModel, tokenizer: Any) -> None:
        self._model, self._tokenizer = model, tokenizer

    def __len__(self) -> int:
        return len(PRICES)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        page, lines = drawn(index)
        question = ("What is the total?", "Whose is it?")[index % 2]
        answer = (f"{PRICES[index]}.50", f"number {index}")[index % 2]
        prompt = es.layout_prompt(self._model, self._tokenizer, question, lines=lines, image=page)
        ids = torch.tensor([*self._tokenizer.encode(answer), self._tokenizer.eos_token_id])
        before = prompt["input_ids"][0]
        return {
            "input_ids": torch.cat([before, ids]),
            "labels": torch.cat([torch.full_like(before, -100), ids]),
            "pixel_values": prompt["pixel_values"][0],
            "bbox": prompt["bbox"][0],
        }


def drawn(index: int) -> tuple[Image.Image, list[tuple[str, tuple[int, int, int, int]]]]:
    """The picture of a page, and what stands where on it."""
    page = Image.new("RGB", (200, 280), "white")
    draw, lines = ImageDraw.Draw(page), []
    for number, text in enumerate([f"Invoice {index}", f"Total {PRICES[index]}.50"][: 1 + index]):
        place = (20 + 3 * index, 30 + 60 * number)
        draw.text(place, text, fill="black")
        left, top, right, bottom = draw.textbbox(place, text)
        lines.append((text, (int(left), int(top), int(right), int(bottom))))
    return page, lines


def run_on_pages(
    folder: Path, save_strategy: Literal["no", "steps"] = "steps", steps: int = 10
) -> es.Trainer:
    """A run of small batches over the pages, with the default collator of a tokenizer."""
    model, tokenizer = tiny_document(), tiny_tokenizer()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    args = es.TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=2e-2,
        logging_steps=1,
        save_strategy=save_strategy,
        save_steps=2,
        trainable=HALF,
        predict_with_generate=True,
        generation_max_length=10,
        disable_tqdm=True,
    )
    pages = Pages(model, tokenizer)
    return es.Trainer(model, args, None, pages, pages, tokenizer)


def train_on_pages(folder: str) -> None:
    """Go on with the run in a folder, or begin it, and end it."""
    torch.set_num_threads(1)
    whole = any(Path(folder).glob("checkpoint-*"))
    run_on_pages(Path(folder)).train(resume_from_checkpoint=whole)
