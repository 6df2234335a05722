"""The inside of the model at a choice, against the states and attentions of transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import everystep as es
from everystep.errors import RequestError, UnsupportedError
from everystep.inspector.counterfactuals import speller
from everystep.inspector.inside import Lens, Looks, lens, lens_lines, looks, looks_lines
from everystep.inspector.sessions import LiveSession, Reading
from everystep.records import Record, read_record
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer
from tests.models.tiny import (
    DECODERS,
    ours,
    reference_decoder,
    reference_mamba,
    reference_t5,
    with_norms,
)

PROMPT = [5, 9, 23, 41, 7]
LONG: dict[str, Any] = {"max_new_tokens": 6, "eos_token_id": None}
Executor = Literal["torch", "native"]


def recorded(lm: Any, file: Path, **given: Any) -> Record:
    es.generate(lm, None, [PROMPT], **{**LONG, **given}, record=file)
    return read_record(file)


def seen(
    reference: PreTrainedModel, record: Record, at: int, index: int = 0
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """By hand: logits (V,) of each layer's state, and attentions (H, S), of the last position."""
    run = record.runs["0"]
    read = torch.tensor([[*run.prompt, *run.tokens[index][:at]]])
    with torch.no_grad():
        out = reference(read, output_hidden_states=True, output_attentions=True, use_cache=False)
        inner = reference.get_decoder()
        norm = next(getattr(inner, name) for name in ("norm", "norm_f", "final_layer_norm", "ln_f")
                    if getattr(inner, name, None) is not None)  # fmt: skip
        states = [norm(one[0, -1]) for one in out.hidden_states[:-1]]
        logits = [reference.lm_head(one) for one in (*states, out.hidden_states[-1][0, -1])]
    cap = getattr(reference.config, "final_logit_softcapping", None)
    if cap is not None:
        logits = [torch.tanh(one / cap) * cap for one in logits]
    return logits, [one[0, :, -1] for one in getattr(out, "attentions", None) or ()]


def check_lens(one: Lens, logits: list[torch.Tensor], near: float) -> None:
    assert [layer.layer for layer in one.layers] == list(range(len(logits)))
    for layer, row in zip(one.layers, logits, strict=True):
        share = row.double().softmax(dim=-1)
        entropy = float(torch.special.entr(share).sum())
        assert layer.share == pytest.approx(float(share[one.token]), abs=near)
        assert layer.entropy == pytest.approx(entropy, abs=20 * near)
        assert layer.rank == int((row > row[one.token]).sum())
        best = share.topk(3)
        assert [id for id, _ in layer.best] == best.indices.tolist()
        assert [value for _, value in layer.best] == pytest.approx(best.values.tolist(), abs=near)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "opt", "gpt_neox"])
@pytest.mark.parametrize("executor", ["torch", "native"])
def test_a_lens_is_the_head_of_each_state_by_hand(
    kind: str, executor: Executor, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    wide = executor == "torch"
    reference = reference_decoder(kind, torch.float64 if wide else torch.float32)
    reference.set_attn_implementation("eager")
    lm = es.LanguageModel(ours(reference), es.GenerationConfig(), executor=executor)
    record = recorded(lm, tmp_path / "a")
    spell = speller(record, None)
    for at in (0, 3):
        logits, attentions = seen(reference, record, at)
        found = lens(record, "0", lm, None, at, spell)
        check_lens(found, logits, 1e-6 if wide else 1e-4)
        # The record rounds to float32, and torch operators add up by the shape of a step.
        assert found.difference is not None and found.difference < 1e-5
        assert executor == "torch" or found.difference == 0.0
        assert found.layers[-1].rank == 0 and found.first is not None
        assert all(layer.rank == 0 for layer in found.layers[found.first :])
        looked = looks(record, "0", lm, None, at, spell)
        assert looked.read == (*PROMPT, *record.runs["0"].tokens[0][:at])
        for own, theirs in zip(looked.weights, attentions, strict=True):
            assert torch.allclose(own, theirs.double(), atol=1e-6 if wide else 1e-4)
        assert looked.mean.sum() == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("executor", ["torch", "native"])
@pytest.mark.parametrize("kind", DECODERS)
def test_of_every_family_the_last_lens_is_the_logits(
    kind: str, executor: Executor, tmp_path: Path
) -> None:
    """And what each head looked at adds up to one, where a layer has a window too."""
    reference = with_norms(reference_decoder(kind, torch.float32))
    lm = es.LanguageModel(ours(reference), es.GenerationConfig(), executor=executor)
    record = recorded(lm, tmp_path / "a")
    spell, at = speller(record, None), 4
    read = torch.tensor([[*PROMPT, *record.runs["0"].tokens[0][:at]]])
    found = lens(record, "0", lm, None, at, spell)
    layers = reference.config.num_hidden_layers
    assert [one.layer for one in found.layers] == [*range(layers + 1)]
    last = replace(found, layers=(replace(found.layers[-1], layer=0),))
    with torch.no_grad():
        check_lens(last, [reference(read, use_cache=False).logits[0, -1]], 1e-4)
    weights = looks(record, "0", lm, None, at, spell).weights
    assert weights.shape == (layers, reference.config.num_attention_heads, read.shape[1])
    assert (weights >= 0).all() and torch.allclose(weights.sum(-1), torch.ones(()).double())


CHOICES: dict[str, dict[str, Any]] = {
    "sampled": {"do_sample": True, "seed": 3, "top_k": 20, "temperature": 1.5},
    "beams": {"num_beams": 3, "num_return_sequences": 3},
    "diverse": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "drafted": {"prompt_lookup_num_tokens": 3},
    "penalised": {"repetition_penalty": 1.6, "no_repeat_ngram_size": 2},
    "quantised rows": {"cache_implementation": "quantized"},
}


@pytest.mark.parametrize("kind", CHOICES)
def test_however_it_was_chosen_it_is_the_recorded_choice(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    reference = reference_decoder("llama", torch.float64)
    lm = es.LanguageModel(ours(reference), es.GenerationConfig(), executor="torch")
    record = recorded(lm, tmp_path / "a", **CHOICES[kind])
    spell = speller(record, None)
    for index, ids in record.runs["0"].tokens.items():
        found = lens(record, "0", lm, None, 4, spell, index=index)
        assert found.token == ids[4] and found.difference is not None
        assert found.difference < 1e-5
        if kind != "quantised rows":
            check_lens(found, seen(reference, record, 4, index)[0], 1e-6)


def test_adapters_are_looked_through(tmp_path: Path) -> None:
    lm = tiny_llama(dtype=torch.float32)
    own = lm.add_adapter("tone", es.LoraConfig(r=2, target_modules=["q_proj", "lm_head"]))
    torch.manual_seed(3)
    with torch.no_grad():
        for one in own.parameters():
            one.normal_(std=0.5)
    record = recorded(lm, tmp_path / "a", adapters={"tone": 0.7})
    found = lens(record, "0", lm, None, 2, speller(record, None))
    read = torch.tensor([[*PROMPT, *record.runs["0"].tokens[0][:2]]])
    with torch.no_grad():
        out = lm(read, adapters={"tone": 0.7}).logits[0, -1]
        plain = lm(read).logits[0, -1]
    share = out.double().softmax(dim=-1)[found.token]
    assert found.layers[-1].share == pytest.approx(float(share), abs=1e-5)
    assert found.difference == pytest.approx(0.0, abs=1e-4)
    assert not torch.allclose(out, plain, atol=1e-2)


def test_a_decoder_looks_across_at_its_prompt(tmp_path: Path) -> None:
    torch.manual_seed(3)
    reference = reference_t5(torch.float64)
    reference.set_attn_implementation("eager")
    given = es.GenerationConfig(decoder_start_token_id=0, pad_token_id=0)
    lm = es.LanguageModel(ours(reference), given, executor="torch")
    record = recorded(lm, tmp_path / "a")
    ids = record.runs["0"].tokens[0]
    decoded = torch.tensor([[0, *ids[:3]]])
    with torch.no_grad():
        out = reference(torch.tensor([PROMPT]), decoder_input_ids=decoded, output_attentions=True)
    found = looks(record, "0", lm, None, 3, speller(record, None))
    assert found.difference is not None and found.difference < 1e-5
    assert found.across and found.read == tuple(PROMPT)
    for own, theirs in zip(found.weights, out.cross_attentions, strict=True):
        assert torch.allclose(own, theirs[0, :, -1].double(), atol=1e-6)
    share = out.logits[0, -1].softmax(dim=-1)[ids[3]]
    last = lens(record, "0", lm, None, 3, speller(record, None)).layers[-1]
    assert last.share == pytest.approx(float(share), abs=1e-6)


def test_what_a_model_does_not_have_is_refused_by_name(tmp_path: Path) -> None:
    torch.manual_seed(3)
    reference = reference_mamba(torch.float32)
    lm = es.LanguageModel(ours(reference), es.GenerationConfig())
    record = recorded(lm, tmp_path / "a")
    spell = speller(record, None)
    assert lens(record, "0", lm, None, 2, spell).layers[-1].rank == 0
    with pytest.raises(UnsupportedError, match="attentions"):
        looks(record, "0", lm, None, 2, spell)
    other = reference_decoder("llama", torch.float32)
    other.set_attn_implementation("eager")
    wrapped = es.wrap(other)
    record = recorded(wrapped, tmp_path / "b")
    with pytest.raises(UnsupportedError, match="final norm and the head"):
        lens(record, "0", wrapped, None, 2, spell)
    found = looks(record, "0", wrapped, None, 2, spell)
    for own, theirs in zip(found.weights, seen(other, record, 2)[1], strict=True):
        assert torch.allclose(own, theirs.double(), atol=1e-5)
    for at, index, says in ((9, 0, "no token of the record"), (0, 4, "no such sequence")):
        with pytest.raises(RequestError, match=says):
            looks(record, "0", wrapped, None, at, spell, index=index)


def test_lines_and_tables_say_it(tmp_path: Path) -> None:
    model, tokenizer = tiny_llama(vocab_size=320, dtype=torch.float32), tiny_tokenizer(320)
    session = LiveSession.opened(model, tokenizer, "ab ab", tmp_path / "a", "live", **LONG)
    session.obey("step 4")
    said = session.obey("lens 2").said
    assert "token 2" in said[0] and "to the bit" in said[0]
    assert len(said) == 2 + 3 + 1 and said[-1].endswith("from layer 2 on")
    said = session.obey("attention").said
    assert "token 3" in said[0] and len(said) == 2 + 2 * 4
    record = session.record()
    spell = speller(record, tokenizer)
    one: Lens = lens(record, "0", model, tokenizer, 2, spell)
    other: Looks = looks(record, "0", model, tokenizer, 2, spell)
    assert lens_lines(one) == session.obey("lens 2 0").said
    assert looks_lines(other) == session.obey("attention 2 0").said
    assert one._repr_html_().count("<tr>") == 1 + 3
    assert other._repr_html_().count("<tr>") == 1 + 8
    session.obey("pick #1 3")
    assert "given" in session.obey("lens 3").said[0]
    for line, says in (("lens 99", "no token"), ("lens x", "not a place"), ("lens 1 2 3", "much")):
        with pytest.raises(RequestError, match=says):
            session.obey(line)
    with pytest.raises(RequestError, match="needs the model"):
        Reading(("a", record)).obey("lens 1")
    best = np.array([value for _, value in one.layers[0].best])
    assert (np.diff(best) <= 0).all()
