"""AdaLoRA after its budget has acted: ranks that PEFT has pruned while it trained."""

from __future__ import annotations

import copy
import json
import warnings
from dataclasses import replace
from itertools import islice
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import everystep as es
from everystep.adapters import read_adapter
from everystep.api.model import LanguageModel
from everystep.executors.native import NativeExecutor
from everystep.types import Extra, Verb
from tests.adapters.test_kinds import READ, base, close, logits
from tests.executors.works import one_feed
from tests.models.tiny import ours


@pytest.fixture(scope="module")
def pruned() -> tuple[Path, Tensor, dict[str, Any]]:
    """The folder, PEFT's logits, and the ranks of modules after six steps with a budget."""
    folder = Path(mkdtemp())
    config = peft.AdaLoraConfig(
        init_r=4,
        target_r=1,
        tinit=1,
        tfinal=1,
        deltaT=1,
        total_step=6,
        target_modules=["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"],
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = peft.get_peft_model(copy.deepcopy(base("llama")), config).double()
        # PEFT never saves its divisor of scales, which an optimizer may move.
        learned = [one for name, one in made.named_parameters() if "ranknum" not in name]
        optimizer = torch.optim.AdamW(learned, lr=0.05)
        for step in range(6):
            made(READ, labels=READ).loss.backward()
            optimizer.step()
            made.base_model.update_and_allocate(step)
            optimizer.zero_grad()
        made.eval()
        made.save_pretrained(folder)
        with torch.no_grad():
            expected = made(READ).logits
    ranks = json.loads((folder / "adapter_config.json").read_text())["rank_pattern"]
    return folder, expected, ranks


def loaded(folder: Path) -> LanguageModel:
    model = LanguageModel(ours(base("llama")))
    model.load_adapter(folder, "a")
    return model


def test_pruned_ranks_are_those_that_are_computed(
    pruned: tuple[Path, Tensor, dict[str, Any]],
) -> None:
    """On torch operators and natively; modules have ranks of their own, some of them none."""
    folder, expected, ranks = pruned
    left = [sum(one) for one in ranks.values()]
    assert 0 in left and len({*left}) > 2 and sum(left) < 4 * len(left), left
    held = load_file(folder / "adapter_model.safetensors")
    saved = {len(one) for name, one in held.items() if name.endswith("lora_A")}
    assert saved == {*left}
    model = ours(base("llama"))
    adapter = read_adapter(folder, model).now()
    assert close(logits(model, [("a", adapter, 1.0)]), expected)
    assert not close(model.forward(READ), expected, 1e-2)
    subject = LanguageModel(ours(base("llama"))).to(torch.float32)
    adapter = read_adapter(folder, subject.core).now()
    executor = subject.executor(adapter.needs)
    assert isinstance(executor, NativeExecutor)
    work = one_feed(READ[0].tolist(), verbs=(Verb("allocate", 0),))
    work = replace(work, extras={0: Extra(adapters=(("a", 1.0),), resolved=(adapter,))})
    found = executor.run(work).logits
    assert (found - expected[0]).abs().max() <= 1e-4 * expected.abs().max()


def test_pruned_ranks_are_saved_again_as_peft_reads_them(
    pruned: tuple[Path, Tensor, dict[str, Any]], tmp_path: Path
) -> None:
    folder, expected, ranks = pruned
    loaded(folder).save_adapter(tmp_path, "a")
    then, now = (load_file(one / "adapter_model.safetensors") for one in (folder, tmp_path))
    assert then.keys() == now.keys()
    assert all(torch.equal(one, now[name]) for name, one in then.items())
    assert json.loads((tmp_path / "adapter_config.json").read_text())["rank_pattern"] == ranks
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = peft.PeftModel.from_pretrained(copy.deepcopy(base("llama")), tmp_path).double()
    with torch.no_grad():
        assert close(again.eval()(READ).logits, expected)


def test_a_saved_run_goes_on_with_pruned_ranks(
    pruned: tuple[Path, Tensor, dict[str, Any]], tmp_path: Path
) -> None:
    """Natively, to the bit, and after them the tokens of a run that was not saved."""
    model = loaded(pruned[0]).to(torch.float32)
    given: dict[str, Any] = {
        "max_new_tokens": 12,
        "logprobs": 0,
        "eos_token_id": None,
        "adapters": {"a": 0.8},
    }
    given |= {"do_sample": True, "seed": 3}
    whole = es.open(model, None, READ[0].tolist(), **given).result()
    run = es.open(model, None, READ[0].tolist(), **given)
    assert len([*islice(run, 4)]) == 4
    run.save(tmp_path / "a.run")
    again = es.resume(tmp_path / "a.run", model, None).result()
    assert again.tokens == whole.tokens
    assert torch.equal(again.logprobs.logprobs, whole.logprobs.logprobs)
    plain = es.open(model, None, READ[0].tolist(), **{**given, "adapters": None}).result()
    assert plain.tokens != whole.tokens
