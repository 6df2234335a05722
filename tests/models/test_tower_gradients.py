"""A forward with labels trains what reads pictures too: its gradients are those of transformers."""

from __future__ import annotations

import pytest
import torch

from tests.models.pictures import OWN, ROWS, model_of, prompt_of, reference_of


@pytest.mark.parametrize("kind", OWN)
def test_gradients_of_a_tower_are_those_of_transformers(kind: str) -> None:
    """Of its weights, and of those of the text that stands around the pictures."""
    torch.manual_seed(1)
    reference = reference_of(kind)
    model = model_of(reference).requires_grad_()
    apart, patch = kind.startswith("qwen3"), 96
    given = prompt_of(ROWS["two images"], apart=apart, patch=patch)
    labels = given["input_ids"].masked_fill(given["mm_token_type_ids"] > 0, -100)
    theirs = reference(**given, labels=labels).loss
    theirs.backward()
    del given["mm_token_type_ids"]
    module = model.as_module()
    loss = module(**given, labels=labels, output_logits=False).loss
    loss.backward()
    torch.testing.assert_close(loss.detach().double(), theirs.detach().double(), rtol=1e-5, atol=0)
    wanted = {
        name.replace("model.language_model.", "model."): one.grad
        for name, one in reference.named_parameters()
    }
    towers = 0
    for name, weight in module.named_parameters():
        if (expected := wanted.get(name)) is None:
            continue
        assert weight.grad is not None, name
        close = 1e-4 * float(expected.abs().max()) + 1e-7
        assert float((weight.grad - expected).abs().max()) < close, name
        towers += "visual" in name and bool(expected.abs().max() > 0)
    assert towers > 10
