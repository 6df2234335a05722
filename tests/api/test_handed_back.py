"""What a caller's code hands back is judged like an argument: whatever it is, it is taken or one of
our errors, in every kind of callback and on every executor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import everystep as es
from everystep.api.model import LanguageModel
from everystep.errors import EverystepError, RequestError
from everystep.testing.models import tiny_llama
from tests.executors.models import narrow_model
from tests.models.tiny import reference_decoder

IDS = torch.tensor([[5, 6, 7, 8]])
QUIET: dict[str, Any] = {"max_new_tokens": 4, "eos_token_id": None, "pad_token_id": 0}
MODEL = tiny_llama(vocab_size=320)
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(nested tensors|quantized tensor|Sparse|extremely slow)"
)


def _quantised(x: Tensor) -> Tensor:
    return torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8)


SPOILT: dict[str, Callable[[Tensor], Any]] = {
    "meta": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(),
    "compressed": lambda x: x.reshape(-1, x.shape[-1]).to_sparse_csr(),
    "nested": lambda x: torch.nested.nested_tensor([*x]),
    "quantised": _quantised,
    "complex": lambda x: x.to(torch.complex64),
    "flags": lambda x: x > 0,
    "integers": lambda x: x.long(),
    "another shape": lambda x: x[..., :1],
    "no dimension": lambda x: x.sum(),
    "an array": lambda x: x.detach().numpy(),
    "a list": lambda x: x.tolist(),
    "nothing": lambda x: None,
    "itself twice": lambda x: (x, x),
}
"""What is made of the right answer."""


@dataclass(frozen=True, eq=False)
class Gives(es.Hook):
    """Hands back what `spoil` makes of the embeddings."""

    spoil: Callable[[Tensor], Any]
    gives: tuple[str, ...] = ("embeds",)

    def before_step(self, step: es.BeforeStep) -> dict[str, Any]:
        return {"embeds": self.spoil(step.embeds)}


@pytest.mark.parametrize("how", [{}, {"do_sample": True, "seed": 1}, {"num_beams": 2}])
@pytest.mark.parametrize("kind", SPOILT)
def test_processors(kind: str, how: dict[str, Any]) -> None:
    spoil = SPOILT[kind]
    with pytest.raises(RequestError, match=r"logits processor .* returned something else"):
        MODEL.generate(IDS, logits_processor=[lambda _, x: spoil(x)], **QUIET, **how)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_scores_of_another_width_are_taken_as_transformers_takes_them(dtype: torch.dtype) -> None:
    theirs = reference_decoder("llama", torch.float32)
    ids = torch.tensor([[5, 6, 7, 8]])
    change = [lambda _, x: (x * 3).to(dtype)]
    asked = {"logits_processor": change, "do_sample": False, "max_new_tokens": 8}
    found, wanted = (one.generate(ids, **asked) for one in (es.wrap(theirs), theirs))
    assert found.tolist() == wanted.tolist()


@pytest.mark.parametrize("kind", SPOILT)
@pytest.mark.parametrize("native", [pytest.param(True, marks=pytest.mark.native), False])
def test_hooks(kind: str, native: bool) -> None:
    model = LanguageModel(narrow_model("llama", None, panels=True)) if native else MODEL
    with pytest.raises(RequestError, match="gives as embeds does not fit"):
        es.generate(model, None, [[5, 6, 7]], hooks=[Gives(SPOILT[kind])], **QUIET)
    (found,) = es.generate(model, None, [[5, 6, 7]], hooks=[Gives(lambda x: x.double())], **QUIET)
    assert found == es.generate(model, None, [[5, 6, 7]], **QUIET)[0]


NO_CHOICE = "no token can be drawn: the scores of a sequence hold nan"
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "seed": 1},
    "beams": {"num_beams": 2},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 3},
}
EITHER = pytest.mark.parametrize("native", [pytest.param(True, marks=pytest.mark.native), False])


@EITHER
@pytest.mark.parametrize("way", WAYS)
def test_embeddings_of_nan_leave_no_choice(way: str, native: bool) -> None:
    model = LanguageModel(narrow_model("llama", None, panels=True)) if native else MODEL
    asked = {**QUIET, **WAYS[way], "return_dict_in_generate": True, "on_error": "return"}
    nan = {"hooks": [Gives(lambda x: x * torch.nan)]}
    bad, good = es.generate(model, None, [[5, 6, 7]] * 2, options=[nan, {}], **asked)
    assert isinstance(bad.finish_reason.matched, RequestError)
    assert NO_CHOICE in str(bad.finish_reason.matched)
    _, wanted = es.generate(model, None, [[5, 6, 7]] * 2, **asked)
    assert good.tokens == wanted.tokens and good.finish_reason.kind == "length"


@EITHER
@pytest.mark.parametrize("way", WAYS)
def test_features_of_nan_leave_no_choice(way: str, native: bool) -> None:
    model = LanguageModel(narrow_model("llama", None, panels=True)) if native else None
    model = model or tiny_llama(vocab_size=320)
    width = model.get_input_embeddings()(torch.tensor([1])).shape[-1]

    def encoder(values: Tensor) -> Tensor:
        return values.new_full((len(values), 2, width), torch.nan)

    model.prompt_inputs = [es.PromptInput("picture", encoder, (3,), positions=(1, 2))]
    prompt = {"input_ids": [5, 6, 7, 8], "picture": torch.ones(3)}
    with pytest.raises(RequestError, match=NO_CHOICE):
        es.generate(model, None, [prompt], **QUIET, **WAYS[way])


@pytest.mark.parametrize("kind", sorted({*SPOILT} - {"flags", "itself twice"}))
def test_stopping_criteria(kind: str) -> None:
    spoil = SPOILT[kind]
    with pytest.raises(RequestError, match=r"stopping criterion .* returned something else"):
        MODEL.generate(IDS, stopping_criteria=[lambda i, s: spoil(i[:, :3].float())], **QUIET)


@pytest.mark.parametrize("kind", sorted({*SPOILT} - {"integers", "a list", "no dimension"}))
def test_prefix_functions(kind: str) -> None:
    spoil = SPOILT[kind]
    with pytest.raises(RequestError, match=r"prefix_allowed_tokens_fn returned no list of ids"):
        MODEL.generate(IDS, prefix_allowed_tokens_fn=lambda b, i: spoil(i[None].float()), **QUIET)


@pytest.mark.parametrize("kind", sorted({*SPOILT} - {"flags", "integers", "no dimension"}))
def test_scorers(kind: str) -> None:
    spoil = SPOILT[kind]
    with pytest.raises(RequestError, match="scorer returned something else"):
        es.generate(MODEL, None, [[5, 6, 7]], do_sample=True, best_of=2, seed=1,
                    scorer=lambda _: spoil(torch.ones(2, 2)), **QUIET)  # fmt: skip


def test_a_scorer_that_says_nan_is_refused() -> None:
    with pytest.raises(RequestError, match="scorer returned something else"):
        es.generate(MODEL, None, [[5, 6, 7]], do_sample=True, best_of=2, seed=1,
                    scorer=lambda _: float("nan"), **QUIET)  # fmt: skip


@pytest.mark.parametrize("kind", sorted({*SPOILT} - {"integers", "a list"}))
def test_encoders(kind: str) -> None:
    spoil = SPOILT[kind]
    model = tiny_llama(vocab_size=320)
    width = model.get_input_embeddings()(torch.tensor([1])).shape[-1]

    def encoder(values: Tensor) -> Any:
        return spoil(values.new_ones(len(values), 2, width))

    model.prompt_inputs = [es.PromptInput("picture", encoder, (3,), positions=(1, 2))]
    prompt = {"input_ids": [5, 6, 7, 8], "picture": torch.ones(3)}
    with pytest.raises(EverystepError, match="returned something else than features"):
        es.generate(model, None, [prompt], **QUIET)


def test_a_neighbour_of_such_code_gets_its_answer() -> None:
    bad = {"logits_processor": [lambda _, x: x.to("meta")]}
    found = es.generate(
        MODEL, None, [[5, 6, 7]] * 3, options=[{}, bad, {}], on_error="return",
        return_dict_in_generate=True, **QUIET,
    )  # fmt: skip
    assert [one.finish_reason.kind for one in found] == ["length", "error", "length"]
    assert found[0].tokens == found[2].tokens
