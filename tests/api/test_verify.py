"""`es.verify` and `everystep verify`: equal where it is, different where something is broken."""

from __future__ import annotations

import importlib
import json
import re
import warnings
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import peft
import pytest
import torch
import transformers

import everystep as es
from everystep.api.verify import Comparison
from everystep.bridge.reference import Reference
from everystep.errors import (
    EverystepError,
    FormatError,
    MissingExtraError,
    RequestError,
    UnsupportedError,
)
from everystep.testing.tokenizer import tiny_tokenizer
from tests.cli.conftest import call  # noqa: F401  (a fixture)
from tests.cli.running import Caller
from tests.cli.tiny_model import write_tiny_model
from tests.models.tiny import reference_pair

FEW: dict[str, Any] = {"tokens": 5, "text": "the cat sat on the mat"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny")


def test_a_model_of_floats_is_equal(folder: Path) -> None:
    found = es.verify(folder, **FEW)
    (one,) = found.comparisons
    assert (one.form, one.verdict, found.holds) == ("as it runs", "equal", True)
    assert one.agrees.all() and one.equal_tokens == len(one.tokens) == 5
    assert (
        0 < float(one.differences.max()) < 1e-4 and len(one.differences) == len(one.margins) == 22
    )
    assert abs(float(one.divergence.mean())) < 1e-5


def test_a_rounded_model_is_equal_in_float32(folder: Path) -> None:
    found = es.verify(folder, quantize="int8", executor="auto", **FEW)
    rounded, exact = found.comparisons
    assert [one.verdict for one in found.comparisons] == ["rounded", "equal"]
    assert float(rounded.differences.max()) > 10 * float(exact.differences.max())
    assert found.holds


def test_an_encoder_and_a_decoder_are_equal(tmp_path: Path) -> None:
    sizes = {"vocab_size": 320, "num_layers": 3, "num_decoder_layers": 3}
    reference = reference_pair("t5", torch.float32, decoder_start_token_id=0, **sizes)
    reference.save_pretrained(tmp_path / "pair")
    tiny_tokenizer(320).save_pretrained(tmp_path / "pair")
    (one,) = es.verify(tmp_path / "pair", **FEW).comparisons
    assert one.verdict == "equal" and one.equal_tokens == 5


@pytest.mark.parametrize("place", [0, 3, -1])
def test_one_wrong_logit_is_different(
    place: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Reference.logits

    def wrong(self: Reference, *given: Any) -> torch.Tensor:
        found = right(self, *given)
        found[place, 7] += 0.1
        return found

    monkeypatch.setattr(Reference, "logits", wrong)
    found = es.verify(folder, **FEW)
    assert (found.holds, found.comparisons[0].verdict) == (False, "different")


def test_what_was_found_is_shown_in_short(folder: Path) -> None:
    found = es.verify(folder, **FEW)
    assert re.fullmatch(
        r"Verification\('tiny', beside transformers [\d.]+: as it runs equal\)", repr(found)
    )
    (one,) = found.comparisons
    assert repr(one).startswith("Comparison(as it runs: equal, differences up to ")
    assert "same greedy tokens 5 of 5" in repr(one) and len(repr(one)) < 200
    table = found._repr_html_()
    assert table.count("<tr>") == 2 and ">same best token</th>" in table and "5 of 5" in table


def compared(margin: float = 1.0) -> Comparison:
    """Three positions; at the second one another token is the best."""
    return Comparison(
        form="as it runs",
        differences=torch.tensor([0.0, 1e-4, 2e-4]),
        divergence=torch.zeros(3),
        agrees=torch.tensor([True, False, True]),
        margins=torch.tensor([1.0, margin, 1.0]),
        tokens=(5, 6, 7, 8),
        wanted=(5, 9, 7, 8),
        largest=10.0,
        rounded=False,
    )


@pytest.mark.parametrize(("margin", "verdict"), [(1e-3, "equal"), (3e-3, "different")])
def test_a_best_token_counts_where_the_two_best_are_apart(margin: float, verdict: str) -> None:
    assert compared(margin).verdict == verdict


def test_figures_are_over_all_positions() -> None:
    figures = compared().summary()
    assert figures["largest difference"] == pytest.approx(2e-4)
    assert figures["same best token"] == "2 of 3"
    assert figures["same greedy tokens"] == "1 of 4"  # before the first difference


def test_the_picture_has_a_dot_for_each_position(folder: Path) -> None:
    found = es.verify(folder, quantize="int8", **FEW)
    drawn = ElementTree.fromstring(found.picture())
    dots = drawn.findall("{http://www.w3.org/2000/svg}circle")
    assert len(dots) == sum(len(one.differences) for one in found.comparisons)
    assert "in float32: equal" in found.picture()


def test_the_command_line_says_the_same(
    folder: Path,
    call: Caller,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "text").write_text(FEW["text"])
    picture = tmp_path / "a.svg"
    line = ["verify", str(folder), "--text", str(tmp_path / "text"), "--tokens", "5"]
    outcome = call(*line, "--picture", str(picture), "--json")
    found = json.loads(outcome.out)
    assert (outcome.code, outcome.err, found["holds"]) == (0, "", True)
    assert found["forms"][0]["same_best_token"] == "22 of 22"
    assert picture.read_text().startswith("<svg")
    monkeypatch.setattr(Reference, "greedy", lambda self, ids, count: [0] * count)
    monkeypatch.setattr(Reference, "logits", lambda self, ids, source=None: torch.zeros(22, 259))
    outcome = call(*line)
    assert outcome.code == 1 and "differs from transformers" in outcome.err
    assert outcome.out.split("\t")[:2] == ["as it runs", "different"]


@pytest.mark.parametrize("options", [{"tokens": 0}, {"tokens": True}, {"text": ""}, {"dtype": 5}])
def test_what_cannot_be_compared_is_refused(folder: Path, options: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        es.verify(folder, **options)


def test_without_transformers_it_says_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(UnsupportedError, match=r"pip install 'everystep\[transformers\]'"):
        Reference(folder, pair=False)


def test_a_folder_that_transformers_cannot_read_is_explained(folder: Path, tmp_path: Path) -> None:
    es.load_model(folder, quantize="int8")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FormatError, match="transformers cannot read this model"):
        Reference(tmp_path / "empty", pair=False)
    with pytest.raises(EverystepError):
        es.verify(tmp_path / "empty", **FEW)


# --- adapters -------------------------------------------------------------------------------------


@pytest.fixture
def adapter(folder: Path, tmp_path: Path) -> Path:
    """An adapter that changes projections, the head, norms and rows of tokens, as PEFT saves it."""
    torch.manual_seed(5)
    config = peft.LoraConfig(
        r=2,
        target_modules=["q_proj", "lm_head"],
        modules_to_save=["input_layernorm"],
        trainable_token_indices=[40, 41],
        init_lora_weights=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = peft.get_peft_model(
            transformers.AutoModelForCausalLM.from_pretrained(folder), config
        )
        with torch.no_grad():
            for _, weight in made.named_parameters():
                if weight.requires_grad:
                    weight.add_(0.1 * torch.randn(weight.shape))
        made.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_a_model_with_an_adapter_is_compared_with_pefts(
    call: Caller,  # noqa: F811
    folder: Path,
    adapter: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = es.verify(folder, adapter=adapter, **FEW)
    (one,) = found.comparisons
    assert one.verdict == "equal" and one.equal_tokens == 5
    assert one.largest != es.verify(folder, **FEW).comparisons[0].largest
    rounded, exact = es.verify(folder, adapter=adapter, quantize="int8", **FEW).comparisons
    assert (rounded.verdict, exact.verdict) == ("rounded", "equal")
    said = folder.parent / "text.txt"
    said.write_text(FEW["text"])
    line = ("verify", str(folder), "--text", str(said), "--tokens", "3", "--json")
    outcome = call(*line, "--adapter", f"mine={adapter}")
    assert (outcome.code, json.loads(outcome.out)["adapter"]) == (0, str(adapter))
    for asked in ([f"{adapter}@0.5"], [str(adapter), f"b={adapter}"]):
        refused = call(*line, *(part for one in asked for part in ("--adapter", one)))
        assert refused.code == 2 and "is compared as a whole, with PEFT's" in refused.err
    # Where transformers computes without it, the comparison says so.
    monkeypatch.setattr(Reference, "adapt", lambda self, folder: None)
    assert not es.verify(folder, adapter=adapter, **FEW).holds


def test_an_adapter_without_peft_is_an_error(
    folder: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = importlib.import_module

    def missing(name: str) -> Any:
        if name == "peft":
            raise ImportError(name)
        return load(name)

    monkeypatch.setattr("everystep.bridge.reference.importlib.import_module", missing)
    with pytest.raises(MissingExtraError, match=r"PEFT.*everystep\[transformers\]"):
        es.verify(folder, adapter=adapter, **FEW)
