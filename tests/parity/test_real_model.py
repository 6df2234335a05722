"""The default model in float32 gives transformers' tokens on the same weights, and so does every
other named model that is in the cache folder.

Tokens may differ from some place on where transformers itself was not sure: its margin, the gap
between its choice and ours by its own numbers, is below MARGIN there. Every such prompt is listed
at the end of the run. By default a few prompts and tokens are compared; with --all, 20 times 64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import everystep as es
from everystep.files.sources import DEFAULT_MODEL, cached_models

pytestmark = pytest.mark.model

MARGIN = 1e-3
PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a little robot who",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "The three laws of thermodynamics state that",
    "In 1969, the first human beings",
    "Q: What is 17 times 23?\nA:",
    "Dear Sir or Madam,\n\nI am writing to",
    "A good recipe for bread needs",
    "Photosynthesis is the process by which",
    "SELECT name, age FROM",
    "The quick brown fox",
    "My favourite season is autumn because",
    "To be, or not to be,",
    "The difference between a virus and a bacterium is",
    "1, 1, 2, 3, 5, 8, 13,",
    "El sol sale por",
    "Breaking news: scientists have discovered",
    "If all cats are animals and some animals are black, then",
    "Hello! How are you today? I",
)
OTHERS = [
    one.name for one in cached_models() if one.name != DEFAULT_MODEL and one.bytes < 1_000_000_000
]
"""Named models that are in the cache folder, without those whose floats, twice, take 20 GB."""
AMOUNTS = pytest.mark.parametrize(
    ("both", "count", "new"),
    [
        pytest.param(DEFAULT_MODEL, 3, 12, id="some"),
        pytest.param(DEFAULT_MODEL, len(PROMPTS), 64, id="all", marks=pytest.mark.slow),
        *(pytest.param(name, 3, 12, id=name, marks=pytest.mark.slow) for name in OTHERS),
    ],
    indirect=["both"],
)
EVERY_MODEL = pytest.mark.parametrize(
    "both",
    [DEFAULT_MODEL, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)],
    indirect=True,
)


@dataclass(frozen=True, eq=False)
class Both:
    """The two models and the tokenizer of one file."""

    ours: Any
    reference: Any
    tokenizer: Any

    @property
    def special(self) -> dict[str, Any]:
        """The special ids that both are told."""
        eos = self.tokenizer.eos_token_id
        pad = self.tokenizer.pad_token_id
        return {"eos_token_id": eos, "pad_token_id": eos if pad is None else pad}

    def generate(self, model: Any, batch: dict[str, Tensor], **settings: Any) -> Tensor:
        """(rows, new tokens), chosen without draws."""
        tokens = model.generate(**batch, do_sample=False, **self.special, **settings)
        return tokens[:, batch["input_ids"].shape[1] :]


@pytest.fixture(scope="module")
def both(request: pytest.FixtureRequest, model_path: Path) -> Iterator[Both]:
    path = model_path if request.param == DEFAULT_MODEL else request.param
    ours, tokenizer = es.load(path, dtype=torch.float32, offline=True)
    values = dict(ours.config)
    config = transformers.CONFIG_MAPPING[values["model_type"]].from_dict(values)
    # Its rotary tables and the factor of its embeddings are in no checkpoint.
    reference = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    reference.load_state_dict(weights, assign=True, strict=False)
    reference.tie_weights()
    reference.generation_config = transformers.GenerationConfig()
    yield Both(ours, reference.eval(), tokenizer)


Finding = Callable[[str, str], None]


@AMOUNTS
def test_prompts_alone(both: Both, record_property: Finding, count: int, new: int) -> None:
    for prompt in PROMPTS[:count]:
        batch = _batch(both, [prompt])
        expected = both.generate(both.reference, batch, max_new_tokens=new)
        found = both.generate(both.ours, batch, max_new_tokens=new)
        _require_choices(both, prompt, expected[0], found[0], record_property)


@AMOUNTS
def test_prompts_in_one_padded_batch(
    both: Both, record_property: Finding, count: int, new: int
) -> None:
    prompts = PROMPTS[:count]
    batch = _batch(both, list(prompts))
    expected = both.generate(both.reference, batch, max_new_tokens=new)
    found = both.generate(both.ours, batch, max_new_tokens=new)
    for row, prompt in enumerate(prompts):
        _require_choices(both, prompt, expected[row], found[row], record_property)


@AMOUNTS
def test_prompts_with_four_beams(
    both: Both, record_property: Finding, count: int, new: int
) -> None:
    prompts = PROMPTS[:count]
    batch = _batch(both, list(prompts))
    expected = both.generate(both.reference, batch, max_new_tokens=new, num_beams=4)
    found = both.generate(both.ours, batch, max_new_tokens=new, num_beams=4)
    for row, prompt in enumerate(prompts):
        _require_beams(both, prompt, expected[row], found[row], record_property)


@EVERY_MODEL
def test_the_reference_holds_our_weights(both: Both) -> None:
    ids = _batch(both, [PROMPTS[0]])["input_ids"]
    with torch.no_grad():
        expected = both.reference(ids).logits
    gap = (both.ours(ids).logits - expected).abs().max()
    assert gap < 1e-5 * expected.abs().max()


@EVERY_MODEL
def test_a_sure_choice_may_not_differ(both: Both) -> None:
    batch = _batch(both, [PROMPTS[0]])
    expected = both.generate(both.reference, batch, max_new_tokens=4)[0]
    changed = expected.clone()
    changed[1] += 1
    for require in (_require_choices, _require_beams):
        with pytest.raises(AssertionError, match="from token 1 on"):
            require(both, PROMPTS[0], expected, changed, lambda name, text: None)


def _batch(both: Both, prompts: list[str]) -> dict[str, Tensor]:
    encoded = both.tokenizer(prompts, padding=True, return_tensors="pt")
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}


def _require_choices(
    both: Both, prompt: str, expected: Tensor, found: Tensor, finding: Finding
) -> None:
    """Equal, or first different where transformers found both tokens about equally good."""
    place = _first_difference(expected, found)
    if place is None:
        return
    scores = _log_probs(both, prompt, expected[: place + 1])[-1]
    margin = float(scores[expected[place]] - scores[found[place]])
    _judge(prompt, place, margin, finding)


def _require_beams(
    both: Both, prompt: str, expected: Tensor, found: Tensor, finding: Finding
) -> None:
    """Equal, or of about the same score by transformers."""
    place = _first_difference(expected, found)
    if place is not None:
        margin = _score(both, prompt, expected) - _score(both, prompt, found)
        _judge(prompt, place, margin, finding)


def _judge(prompt: str, place: int, margin: float, finding: Finding) -> None:
    text = f"{prompt!r} differs from token {place} on, where transformers' margin is {margin:.2g}"
    finding("finding", f"default model: {text}")
    assert margin < MARGIN, text


def _first_difference(expected: Tensor, found: Tensor) -> int | None:
    """The first place where two rows differ, the shorter one's end included."""
    shared = min(len(expected), len(found))
    different = (expected[:shared] != found[:shared]).nonzero()
    if len(different):
        return int(different[0])
    return None if len(expected) == len(found) else shared


def _score(both: Both, prompt: str, new: Tensor) -> float:
    """transformers' score of a beam: its mean log-probability up to its end."""
    ends = (new == both.special["eos_token_id"]).nonzero()
    new = new[: int(ends[0]) + 1] if len(ends) else new
    return float(_log_probs(both, prompt, new)[torch.arange(len(new)), new].mean())


def _log_probs(both: Both, prompt: str, new: Tensor) -> Tensor:
    """(new, V): transformers' log-probabilities at the places of the new tokens."""
    ids = torch.cat([_batch(both, [prompt])["input_ids"][0], new])[None]
    with torch.no_grad():
        logits: Tensor = both.reference(ids).logits[0, -len(new) - 1 : -1]
    return logits.log_softmax(-1)
