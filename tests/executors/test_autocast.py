"""A block of `torch.autocast` around a call changes nothing of what the executor computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from everystep.api.model import LanguageModel
from everystep.executors.torch_executor import TorchExecutor
from everystep.testing.models import tiny_document, tiny_llama, tiny_vision
from everystep.types import Prompt, Verb
from tests.executors.models import SPECS, random_model
from tests.executors.works import one_feed
from tests.models.tiny import ours, reference_t5

IDS = [3, 9, 30, 4, 4, 17, 25, 6, 1, 39]
AUTOCAST = ("cpu", torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["plain", "experts", "biases"])
def test_logits_are_those_of_the_weights_own_type(name: str, dtype: torch.dtype) -> None:
    model = random_model(SPECS[name], dtype=dtype)
    wanted = TorchExecutor(model).run(one_feed(IDS, verbs=(Verb("allocate", 0),))).logits
    with torch.autocast(*AUTOCAST):
        found = TorchExecutor(model).run(one_feed(IDS, verbs=(Verb("allocate", 0),))).logits
    assert torch.equal(found, wanted)


def test_encoders_compute_as_outside() -> None:
    """Those of ids, of pictures and of what a document shows."""
    listening, seeing, reading = (
        ours(reference_t5(torch.float32)),
        tiny_vision(dtype=torch.float32),
        tiny_document(),
    )
    tower = seeing.core.tower
    assert tower is not None
    pixels = torch.randn(16, tower.patch[0].numel())
    patches, boxes = reading.core.encoders
    page = torch.randn(1, 3, 32, 32)

    def all_of_them() -> list[torch.Tensor]:
        states = listening.encode(Prompt(np.array(IDS)))
        found, _ = tower.encode(pixels, (1, 4, 4))
        return [states, found, *patches(page), *boxes(torch.tensor([[[0, 0, 10, 10]]]))]

    wanted = all_of_them()
    with torch.autocast(*AUTOCAST):
        found = all_of_them()
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"penalty_alpha": 0.6, "top_k": 4}, {"prompt_lookup_num_tokens": 3}],
    ids=str,
)
@pytest.mark.parametrize("executor", ["torch", pytest.param("native", marks=pytest.mark.native)])
def test_generate_gives_the_same_tokens(executor: Any, options: dict[str, Any]) -> None:
    tiny = tiny_llama(dtype=torch.float32)
    model = LanguageModel(tiny.core, tiny.generation_config, executor=executor)
    ids = torch.tensor([IDS, IDS[::-1]])
    wanted = model.generate(ids, max_new_tokens=24, **options)
    with torch.autocast(*AUTOCAST):
        assert torch.equal(model.generate(ids, max_new_tokens=24, **options), wanted)
