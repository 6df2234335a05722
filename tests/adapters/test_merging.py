"""Adapters in the weights compute what they do beside them, and the weights come back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import everystep as es
from everystep.api.model import LanguageModel
from everystep.errors import RequestError, UnsupportedError
from tests.adapters.test_kinds import MADE, READ, base, close, trained
from tests.executors.models import narrow_model
from tests.models.tiny import ours


@pytest.mark.parametrize("name", [one for one in MADE if one != "lora with biases"])
def test_merged_is_unmerged_and_the_bits_come_back(name: str) -> None:
    model = LanguageModel(ours(base("llama")))
    model.load_adapter(trained("llama", name)[0], "a")
    model.load_adapter(trained("llama", "loha")[0], "b")
    before, digest = model(READ).logits, model.digest()
    for mix in ({"a": 1.0}, {"a": 0.5, "b": 2.0}):
        expected = model(READ, adapters=mix).logits
        model.merge_adapter([*mix.items()])
        assert close(model(READ).logits, expected, 1e-10)
        assert not close(expected, before, 1e-3)
        assert (model.adapters, model.digest() == digest) == ((), False)
        model.unmerge_adapter()
        assert torch.equal(model(READ).logits, before)
        assert (model.adapters, model.digest()) == (("a", "b"), digest)


@pytest.mark.parametrize("codes", [None, "int8", "int4"])
def test_it_is_merged_where_the_native_executor_runs(codes: Any) -> None:
    model = LanguageModel(narrow_model("llama", codes, panels=True))
    torch.manual_seed(3)
    config = es.LoraConfig(r=3, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    model.add_adapter("a", config)
    read, options = READ % 32, {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    plain = model.generate(read, **options)
    beside = model(read, adapters="a").logits.detach()
    model.merge_adapter(["a"])
    assert close(model(read).logits, beside, 1e-4 if codes is None else 0.1)
    assert model.runs_on.startswith("native")
    assert not torch.equal(model.generate(read, **options), plain)
    model.unmerge_adapter()
    assert torch.equal(model.generate(read, **options), plain)


def test_what_goes_with_merged_weights_is_refused(tmp_path: Any) -> None:
    model = LanguageModel(ours(base("llama")))
    with pytest.raises(RequestError, match="no adapter is merged"):
        model.unmerge_adapter()
    with pytest.raises(RequestError, match="which adapters to merge"):
        model.merge_adapter()
    folder = trained("llama", "lora")[0]
    model.load_adapter(folder, "a")
    with pytest.raises(RequestError, match="no such adapter"):
        model.merge_adapter(["b"])
    model.merge_adapter(["a"])
    with pytest.raises(RequestError, match="adapter_names"):
        model.generate(READ, adapter_names="a", max_new_tokens=1)
    for call in (
        lambda: model.merge_adapter(["a"]),
        lambda: model.load_adapter(folder, "b"),
        lambda: model.add_adapter("b", es.LoraConfig()),
        lambda: model.add_weighted_adapter(["a"], [1.0], "b"),
        lambda: model.delete_adapter("a"),
        lambda: model.to(torch.float32),
        lambda: model.requires_grad_(),
    ):
        with pytest.raises(RequestError, match="unmerge_adapter first"):
            call()
    model.save_pretrained(tmp_path)
    assert close(es.load_model(tmp_path, dtype=torch.float64)(READ).logits, model(READ).logits)
    model.unmerge_adapter()
    model.requires_grad_()
    with pytest.raises(UnsupportedError, match="weights that learn"):
        model.merge_adapter(["a"])
