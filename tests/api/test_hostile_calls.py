"""Calls that no caller means well: each is one of our errors, and harms nobody after it."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import everystep as es
from everystep.api.load import from_weights
from everystep.errors import EverystepError, UnknownArgumentError
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer

TOKENIZER = tiny_tokenizer(320)
MODEL = tiny_llama(vocab_size=320, dtype=torch.float32)
IDS = torch.tensor([[5, 6, 7], [8, 9, 10]])
ITSELF: list[Any] = []
ITSELF.append(ITSELF)
MESSAGE: dict[str, Any] = {"role": "user"}
MESSAGE["content"] = MESSAGE
DEEP: Any = "end"
for _ in range(100_000):
    DEEP = [DEEP]
HUGE, LONG = 10**400, 10**5000  # beyond floats; beyond what Python prints


def generate(ids: Any = IDS, **options: Any) -> Any:
    return MODEL.generate(ids, **{"max_new_tokens": 3, "pad_token_id": 0, **options})


def sample(**options: Any) -> Any:
    return generate(do_sample=True, seed=1, **options)


def allowing(answer: Any) -> Callable[[], Any]:
    return lambda: generate(prefix_allowed_tokens_fn=lambda batch_id, ids: answer)


def many(prompts: Any, **options: Any) -> Any:
    return es.generate(MODEL, TOKENIZER, prompts, max_new_tokens=2, **options)


def filled(value: str) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    return lambda ids, scores: torch.full_like(scores, float(value))


CALLS: dict[str, Callable[[], Any]] = {
    # tensors
    "sparse ids": lambda: generate(IDS.to_sparse()),
    "compressed ids": lambda: generate(IDS.to_sparse_csr()),
    "quantised ids": lambda: generate(torch.quantize_per_tensor(IDS.float(), 1.0, 0, torch.qint8)),
    "ids on meta": lambda: generate(IDS.to("meta")),
    "complex ids": lambda: generate(IDS + 1j),
    "ids of text": lambda: generate([["a", "b"]]),
    "ids beyond 64 bits": lambda: generate([[10**19]]),
    "ids that are themselves": lambda: generate(ITSELF),
    "a sparse mask": lambda: generate(attention_mask=torch.ones_like(IDS).to_sparse()),
    "a mask on meta": lambda: generate(attention_mask=torch.ones_like(IDS).to("meta")),
    "sparse positions": lambda: generate(position_ids=IDS.to_sparse()),
    "a forward of nothing": lambda: MODEL(torch.zeros(1, 0, dtype=torch.long)),
    "a forward of no rows": lambda: MODEL(torch.zeros(0, 3, dtype=torch.long)),
    "a forward of floats": lambda: MODEL(torch.zeros(1, 3)),
    "a forward of flags": lambda: MODEL(torch.ones(1, 3, dtype=torch.bool)),
    "a forward of negative ids": lambda: MODEL(-IDS),
    "a forward beyond the vocabulary": lambda: MODEL(IDS + 10**6),
    "negative ids": lambda: generate(-IDS),
    "ids beyond the vocabulary": lambda: generate(IDS + 10**6),
    # prompts
    "prompts in prompts": lambda: many([[["a"]], "b"]),
    "prompts that are themselves": lambda: many(ITSELF),
    "prompts nested deep": lambda: many(DEEP),
    "an id beyond 64 bits": lambda: many([[10**19]]),
    "a mapping of text ids": lambda: many({"input_ids": ["a"]}),
    "a chat that is itself": lambda: es.chat(MODEL, TOKENIZER, [MESSAGE]),
    "a chat nested deep": lambda: es.chat(MODEL, TOKENIZER, [{"role": "user", "content": DEEP}]),
    "a lone surrogate": lambda: many("\ud800"),
    "a stop of a lone surrogate": lambda: generate(stop_strings=["\ud800"], tokenizer=TOKENIZER),
    # numbers
    **{
        f"{name} of {size}": partial(sample, **{name: value})
        for size, value in {"400 digits": HUGE, "5,000 digits": LONG}.items()
        for name in (
            *("temperature", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"),
            *("repetition_penalty", "guidance_scale", "length_penalty", "num_beams", "top_k"),
            *("num_return_sequences", "max_new_tokens", "min_new_tokens", "no_repeat_ngram_size"),
            *("eos_token_id", "bos_token_id", "pad_token_id", "prompt_lookup_num_tokens"),
        )
    },
    "a bias of 400 digits": lambda: generate(sequence_bias={(5,): HUGE}),
    "a length exponent of 1e300": lambda: generate(num_beams=2, length_penalty=1e300),
    "a billion rows": lambda: generate(num_beams=10**9),
    "a billion samples": lambda: sample(num_return_sequences=10**9),
    "padding to 10^12": lambda: TOKENIZER("a", padding="max_length", max_length=10**12),
    "padding to multiples": lambda: TOKENIZER(["a"], padding=True, pad_to_multiple_of=10**12),
    # what callbacks return
    "nothing allowed": allowing(None),
    "text allowed": allowing("abc"),
    "floats allowed": allowing([1.5]),
    "flags allowed": allowing([True]),
    "rows allowed": allowing([[1]]),
    "ids beyond 64 bits allowed": allowing([2**63]),
    "ids beyond the vocabulary allowed": allowing([10**6]),
    "negative ids allowed": allowing([-1]),
    "no id allowed": allowing([]),
    # scores
    **{
        f"scores of {value} under {how}": partial(
            generate, logits_processor=[filled(value)], **options
        )
        for value in ("nan", "-inf")
        for how, options in {
            "greedy decoding": {},
            "sampling": {"do_sample": True},
            "prompt lookup": {"prompt_lookup_num_tokens": 2},
        }.items()
    },
    **{
        f"scores of nan under {how}": partial(generate, logits_processor=[filled("nan")], **options)
        for how, options in {
            "beams": {"num_beams": 3, "num_return_sequences": 2},
            "beam sampling": {"num_beams": 3, "do_sample": True, "seed": 1},
        }.items()
    },
    # names
    "a path that is too long": lambda: es.load("a" * 5000),
    "a folder of nobody": lambda: es.load("~nobody-of-this-name/x"),
    "a path with a zero byte": lambda: es.load("a\0b"),
    "an option of 100,000 characters": lambda: generate(**{"x" * 100_000: 1}),
    "a device without numbers": lambda: es.load(device="meta"),
    "a device of another machine": lambda: es.load(device="xpu"),
    "a move to meta": lambda: MODEL.to("meta"),
    "a tokenizer and a model the other way round": lambda: es.generate(TOKENIZER, MODEL, "x"),
    "an encoding without **": lambda: MODEL.generate(TOKENIZER("a", return_tensors="pt")),
    "a type by its name": lambda: es.load(dtype="float32"),
    "a model instead of its folder": lambda: es.load(MODEL),
    "nothing to pad": lambda: TOKENIZER.pad([]),
    "nothing in a mapping to pad": lambda: TOKENIZER.pad({}),
}


def sentinel() -> torch.Tensor:
    """What a well-meant request gets."""
    return sample(return_dict_in_generate=True, output_scores=True, top_k=5).scores[-1]


BEFORE = sentinel()


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:torch.quantize")
@pytest.mark.parametrize("ask", [pytest.param(ask, id=name) for name, ask in CALLS.items()])
def test_it_is_one_of_our_errors_and_harms_nobody(ask: Callable[[], Any]) -> None:
    with pytest.raises(EverystepError) as caught:
        ask()
    assert 20 < len(str(caught.value)) < 2000
    assert torch.equal(sentinel(), BEFORE)


@pytest.mark.parametrize("executor", ["auto", "torch"])
def test_weights_that_are_no_numbers(executor: Any, tmp_path: Path) -> None:
    weights = {name: one.clone() for name, one in MODEL.state_dict().items()}
    weights["model.norm.weight"].fill_(float("nan"))
    from_weights(MODEL.config.to_dict(), weights).save_pretrained(tmp_path / "broken")
    broken = es.load_model(tmp_path / "broken", executor=executor)
    with pytest.raises(EverystepError, match="hold nan"):
        broken.generate(IDS, max_new_tokens=2)


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sample": {"do_sample": True},
    "beams": {"num_beams": 3},
    "beams that draw": {"num_beams": 3, "do_sample": True},
    "diverse beams": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "constrained beams": {"num_beams": 3, "force_words_ids": [[9]]},
    "contrastive search": {"penalty_alpha": 0.5, "top_k": 4},
    "dola": {"dola_layers": "low"},
    "drafts": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("way", WAYS)
def test_scores_that_leave_no_choice_are_an_error_in_every_strategy(
    way: str, step: int, value: float
) -> None:
    class Broken(es.LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            late = input_ids.shape[1] >= IDS.shape[1] + step
            return torch.full_like(scores, value) if late else scores

    options = {**WAYS[way], "max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}
    with pytest.raises(EverystepError, match=r"no token can be drawn.*Relax the processors"):
        MODEL.generate(IDS, logits_processor=[Broken()], **options)
    assert torch.equal(sentinel(), BEFORE)


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("stop", "stop_strings"),
        ("max_tokens", "max_new_tokens"),
        ("n", "num_return_sequences"),
        ("stop_token_ids", "eos_token_id"),
    ],
)
def test_names_of_other_engines_lead_to_ours(name: str, ours: str) -> None:
    with pytest.raises(UnknownArgumentError, match=f"Perhaps you meant {ours} instead of {name}"):
        MODEL.generate(IDS, **{name: 1})


def test_a_folder_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> os.stat_result:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "lstat", refuse)
    with pytest.raises(EverystepError, match="cannot be looked at; got Permission denied"):
        es.load(str(tmp_path))
