"""Where transformers is wrong, this library is right; one test, or more, per heading of parity.md.

Most tests show both: what transformers does, so that a heading can go when it is repaired, and
what this library does.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

import everystep as es
from tests.parity.defects import DEFECTS
from tests.parity.draws import Draw, Earlier
from tests.parity.judge import ROUNDED, UNFILLED, judge
from tests.parity.models import pair, subject
from tests.parity.options import Shape
from tests.parity.sides import ours, plain_reference
from tests.parity.text import own_tokenizer
from tests.reading import ROOT

PAGE = (ROOT / "docs" / "parity.md").read_text(encoding="utf-8")
LAYERS = {"return_dict_in_generate": True, "output_hidden_states": True, "output_attentions": True}


def _draw(mode: str = "greedy", *prompts: tuple[int, ...], eos: tuple[int, ...] = (), **rest: Any):
    """A draw of the plain model; `rest`: settings."""
    prompts = prompts or ((7, 8, 9, 10),)
    beams = rest.get("num_beams", 1)
    shape = Shape(mode, 40, len(prompts), max(map(len, prompts)), eos, beams)  # type: ignore[arg-type]
    settings = {"max_new_tokens": 6, **({"eos_token_id": list(eos)} if eos else {}), **rest}
    return Draw(0, "llama-plain", shape, prompts, "left", 0, True, False, settings)


@pytest.mark.parametrize("heading", [*(one.heading for one in DEFECTS), UNFILLED, ROUNDED])
def test_every_known_defect_is_explained(heading: str) -> None:
    assert f"\n### {heading}\n" in PAGE


# --- Padding with the token 0 after beams ---------------------------------------------------------


def test_what_follows_the_end_of_a_beam_is_the_pad_token_also_when_it_is_0() -> None:
    prompts = ((1, 8, 9, 10), (1, 3))
    draw = _draw(
        "beam", *prompts, eos=(20, 25, 30, 35), num_beams=2, pad_token_id=0, max_new_tokens=9
    )
    theirs, mine = plain_reference(draw).result, ours(draw).result
    after = theirs != mine
    assert after.any()
    assert (mine[after] == 0).all()
    assert (theirs[after] == 20).all()


# --- Layer outputs --------------------------------------------------------------------------------


def test_drafted_tokens_have_the_hidden_states_that_they_have_without_drafts() -> None:
    drafted = _draw(
        "lookup", (19, 14, 19, 14, 19), prompt_lookup_num_tokens=3, max_new_tokens=12, **LAYERS
    )
    plain = replace(drafted, settings={"max_new_tokens": 12, **LAYERS})
    expected = plain_reference(plain).result.hidden_states
    assert _furthest(ours(drafted).result.hidden_states, expected) < 1e-8
    assert _furthest(plain_reference(drafted).result.hidden_states, expected) > 0.1


def _furthest(found: Any, expected: Any) -> float:
    pairs = zip(found, expected, strict=True)
    return max(
        float((one - other).abs().max()) for a, b in pairs for one, other in zip(a, b, strict=True)
    )


def test_a_chunked_prompt_has_the_hidden_states_of_all_its_positions() -> None:
    draw = _draw(prefill_chunk_size=3, **LAYERS)
    assert plain_reference(draw).result.hidden_states[0][0].shape[1] == 1
    assert ours(draw).result.hidden_states[0][0].shape[1] == 4
    assert ours(draw).result.attentions[0][0].shape[2:] == (4, 4)


def test_padding_has_hidden_states_of_zero() -> None:
    mine = ours(_draw("greedy", (7, 8, 9), (5,), **LAYERS)).result
    assert mine.hidden_states[0][1][1, :2].abs().max() == 0
    assert mine.attentions[1][0][1, :, :, :2].abs().max() == 0


# --- Processors and criteria ----------------------------------------------------------------------


def test_raw_logits_stay_raw_when_a_processor_writes_into_the_scores() -> None:
    plain = _draw(output_logits=True, return_dict_in_generate=True, max_new_tokens=1)
    written = replace(plain, processors=("WritesInPlace",))
    raw = plain_reference(plain).result.logits[0]
    assert torch.equal(ours(written).result.logits[0], raw)
    assert not torch.equal(plain_reference(written).result.logits[0], raw)


def test_a_criterion_is_asked_after_every_token_of_a_draft() -> None:
    found = []
    for prompt in ((5, 6, 5, 6, 5), (3, 3, 3), (9, 1, 9, 1), (30, 31, 30, 31)):
        draw = _draw("lookup", prompt, eos=(39,), prompt_lookup_num_tokens=5, max_new_tokens=30)
        draw = replace(draw, criteria=("StopsOnSum",))
        alone = replace(draw, settings={"max_new_tokens": 30, "eos_token_id": [39]})
        expected = plain_reference(alone).result
        assert torch.equal(ours(draw).result, expected)
        found.append(plain_reference(draw).result.shape == expected.shape)
    assert not all(found)


def test_a_repetition_penalty_counts_every_new_token_after_padded_embeddings() -> None:
    draw = replace(
        _draw("greedy", (7, 8, 9, 10), (5,), repetition_penalty=5.0, max_new_tokens=8),
        embedded=True,
    )
    alone = replace(draw, prompts=draw.prompts[1:], shape=replace(draw.shape, batch=1, width=1))
    expected = plain_reference(alone).result[0]
    assert torch.equal(ours(draw).result[1], expected)
    assert not torch.equal(plain_reference(draw).result[1], expected)


def test_penalties_read_a_prompt_as_it_was_healed() -> None:
    penalty, found = {"encoder_repetition_penalty": 0.2, "encoder_no_repeat_ngram_size": 1}, []
    for text in ("ab", "klo", "pgj", "cane", "hedge"):
        prompt = tuple(own_tokenizer(40).encode(text))
        draw = _draw("greedy", prompt, token_healing=True, max_new_tokens=1)
        healed = tuple(plain_reference(draw).result[0, :-1].tolist())
        alone = plain_reference(_draw("greedy", healed, max_new_tokens=4, **penalty)).result
        draw = _draw("greedy", prompt, token_healing=True, max_new_tokens=4, **penalty)
        assert torch.equal(ours(draw).result, alone)
        found.append(torch.equal(plain_reference(draw).result, alone))
    assert not all(found)


def test_guidance_follows_its_beams() -> None:
    """The best beam's score is its guided log-probability, computed from its tokens alone."""
    prompt = [7, 8, 9, 10]
    given = {"num_beams": 3, "guidance_scale": 1.7, "max_new_tokens": 8, "length_penalty": 0.0}
    flags = {"return_dict_in_generate": True, "output_scores": True}
    result = subject("llama-plain").generate(input_ids=torch.tensor([prompt]), **given, **flags)
    theirs = pair("llama-plain").reference.generate(
        input_ids=torch.tensor([prompt]), **given, **flags
    )
    best = float(result.sequences_scores[0])
    assert best == pytest.approx(_guided(result, prompt), abs=1e-4)
    assert best > _guided(theirs, prompt)
    assert float(theirs.sequences_scores[0]) > 0


def _guided(result: Any, prompt: list[int]) -> float:
    model, ids = pair("llama-plain").reference, result.sequences[0]
    new = ids[len(prompt) :]
    with torch.no_grad():
        asked = model(ids[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        free = model(ids[None, len(prompt) - 1 :]).logits[0, :-1].log_softmax(-1)
    guided = (1.7 * (asked - free) + free).log_softmax(-1)
    return float(guided[torch.arange(len(new)), new].sum())


# --- Prompts --------------------------------------------------------------------------------------


def test_prompts_padded_on_the_right_give_what_those_padded_on_the_left_give() -> None:
    ids, mask = torch.tensor([[7, 8, 9, 10], [1, 30, 0, 0]]), torch.tensor([[1] * 4, [1, 1, 0, 0]])
    left, left_mask = torch.tensor([[7, 8, 9, 10], [0, 0, 1, 30]]), mask.flip(1)
    reference, mine = pair("llama-plain").reference, subject("llama-plain")
    expected = reference.generate(input_ids=left, attention_mask=left_mask, max_new_tokens=8)
    found = mine.generate(input_ids=ids, attention_mask=mask, max_new_tokens=8)
    theirs = reference.generate(input_ids=ids, attention_mask=mask, max_new_tokens=8)
    assert torch.equal(found, expected)
    assert not torch.equal(theirs[1, 4:], expected[1, 4:])


def test_embeddings_count_in_the_default_length() -> None:
    draw = _draw("greedy", tuple(range(1, 12)))
    draw = replace(draw, model="llama-dynamic", embedded=True, settings={})
    assert plain_reference(draw).result.shape[1] == 14
    assert ours(draw).result.shape[1] == 14 - 11


def test_embeddings_can_be_chunked() -> None:
    draw = replace(_draw(prefill_chunk_size=3), embedded=True)
    whole = replace(draw, settings={"max_new_tokens": 6})
    assert isinstance(plain_reference(draw).error, RuntimeError)
    assert torch.equal(ours(draw).result, plain_reference(whole).result)


def _encoded(*prompts: tuple[int, ...], **settings: Any) -> Draw:
    draw = _draw("greedy", *prompts, decoder_start_token_id=3, **settings)
    return replace(draw, model="t5-plain", shape=replace(draw.shape, width=1, encodes=True))


def test_an_encoder_does_not_read_padding() -> None:
    draw = replace(_encoded((7, 8, 9, 10), (1, 30), pad_token_id=5), fill=5, masked=False)
    told = plain_reference(replace(draw, masked=True)).result
    assert torch.equal(ours(draw).result, told)
    assert not torch.equal(plain_reference(draw).result, told)


def test_a_begin_token_is_read_also_where_it_is_the_pad_token() -> None:
    draw = _draw("greedy", (7,), bos_token_id=7, pad_token_id=7, max_new_tokens=12)
    draw = replace(draw, unsaid=True, masked=False)
    told = plain_reference(replace(draw, masked=True)).result
    assert torch.equal(ours(draw).result, told)
    assert not torch.equal(plain_reference(draw).result, told)


def test_a_decoder_prompt_in_chunks_sees_the_whole_encoder() -> None:
    draw = _encoded((7, 8, 9, 10), (1, 30), prefill_chunk_size=2)
    draw = replace(draw, begun=((3, 4, 5), (3, 6, 7)), shape=replace(draw.shape, width=3))
    whole = replace(draw, settings={"max_new_tokens": 6, "decoder_start_token_id": 3})
    assert torch.equal(ours(draw).result, plain_reference(whole).result)
    assert isinstance(plain_reference(draw).error, RuntimeError)


def test_drafts_after_a_cache_read_nothing_twice() -> None:
    flags = {"return_dict_in_generate": True, "output_logits": True}
    draw = _draw("lookup", (19, 14, 19, 14, 19), prompt_lookup_num_tokens=3, **flags)
    draw = replace(draw, earlier=Earlier(read=2, cached=3, kind="dynamic", apart=False))
    mine, theirs = ours(draw).result, plain_reference(draw).result
    plain = plain_reference(replace(draw, settings={"max_new_tokens": 6, **flags})).result
    torch.testing.assert_close(mine.logits[0], plain.logits[0], rtol=0, atol=1e-8)
    assert (theirs.logits[0] - plain.logits[0]).abs().max() > 1e-3
    assert mine.past_key_values.get_seq_length() == 10
    assert theirs.past_key_values.get_seq_length() == 13


def test_attentions_over_a_static_cache_end_with_what_is_cached() -> None:
    draw = _draw(cache_implementation="static", max_cache_len=30, **LAYERS)
    assert plain_reference(draw).result.attentions[0][0].shape[3] == 30
    assert ours(draw).result.attentions[0][0].shape[3] == 4
    assert judge(draw).problems == ()


# --- Beams that never end -------------------------------------------------------------------------


def test_a_beam_that_never_ended_is_an_empty_continuation() -> None:
    only = _draw("beam", num_beams=2, num_return_sequences=2, max_new_tokens=1, pad_token_id=5)
    draw = replace(only, settings={**only.settings, "forced_eos_token_id": 12})
    mine = ours(draw).result
    assert mine[:, 4:].tolist() == [[12], [5]]
    assert UNFILLED in judge(draw).explained
    assert judge(draw).problems == ()


# --- Frequencies that depend on the length --------------------------------------------------------


@pytest.mark.parametrize("model", ["llama-dynamic", "llama-longrope"])
def test_the_frequencies_of_a_row_do_not_depend_on_its_neighbours(model: str) -> None:
    long, short = tuple(range(1, 14)), (5, 6, 7)
    together = replace(_draw("greedy", long, short), model=model)
    alone = replace(_draw("greedy", short), model=model)
    expected = plain_reference(alone).result[0]
    assert torch.equal(ours(together).result[1, 10:], expected)
    logits = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 6}
    theirs = plain_reference(replace(together, settings=logits)).result.logits[-1][1]
    own = plain_reference(replace(alone, settings=logits)).result.logits[-1][0]
    assert not torch.allclose(theirs, own, atol=1e-4)


# --- Rows that cannot be drawn from ---------------------------------------------------------------


def test_a_row_without_a_possible_token_is_refused_by_name() -> None:
    draw = _draw("sample", do_sample=True, suppress_tokens=list(range(40)))
    assert isinstance(plain_reference(draw).error, RuntimeError)
    assert "no token can be drawn" in str(ours(draw).error)


# --- Criteria and processors of the caller --------------------------------------------------------

READ = {"return_dict_in_generate": True, "output_scores": True, "max_new_tokens": 4}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 2},
    "drafts": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("told", [True, False])
def test_criteria_read_the_scores_of_every_step(way: str, told: bool) -> None:
    """Asked after the last token, both know the same; without output_scores, nothing."""
    found = []
    for model in (pair("llama-plain").reference, subject("llama-plain")):
        seen: dict[int, Any] = {}

        def criterion(ids: torch.Tensor, scores: Any, seen: dict[int, Any] = seen, **_: Any) -> Any:
            seen[ids.shape[1]] = scores and torch.stack(scores)
            return torch.zeros(len(ids), dtype=torch.bool)

        given = {**READ, "output_scores": told, **WAYS[way]}
        ids = torch.tensor([[7, 8, 7, 8]])
        criteria = transformers.StoppingCriteriaList([criterion])
        model.generate(input_ids=ids, stopping_criteria=criteria, **given)
        found.append(seen[8])
    if told:
        torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-8)
    else:
        assert found == [None, None]


def test_confidence_ends_a_sequence_where_the_reference_does() -> None:
    ids, given = torch.tensor([[7, 8, 9, 10]]), {**READ, "max_new_tokens": 12}
    found = []
    for model, kind in (
        (pair("llama-plain").reference, transformers.generation.ConfidenceCriteria),
        (subject("llama-plain"), es.ConfidenceCriteria),
    ):
        criteria = transformers.StoppingCriteriaList([kind(0.3)])
        result = model.generate(input_ids=ids, stopping_criteria=criteria, **given)
        found.append(result.sequences.tolist())
    assert found[0] == found[1]
    assert 5 < len(found[0][0]) < 16


def test_guidance_of_the_callers_is_not_applied_twice() -> None:
    ids, found = torch.tensor([[7, 8, 9, 10]]), []
    kinds = (
        (pair("llama-plain").reference, transformers),
        (subject("llama-plain"), es),
    )
    for model, source in kinds:
        for scale in (None, 3.0):
            own = source.UnbatchedClassifierFreeGuidanceLogitsProcessor(
                1.7, pair("llama-plain").reference
            )
            warned = pytest.warns(UserWarning, match="replaces the guidance")
            with warned if scale and source is es else nullcontext():
                result = model.generate(
                    input_ids=ids,
                    logits_processor=transformers.LogitsProcessorList([own]),
                    guidance_scale=scale,
                    no_repeat_ngram_size=2,
                    max_new_tokens=8,
                )
            found.append(result.tolist())
    # With a scale, it stands before the ban of pairs; without, behind it.
    assert found[0] == found[2]
    assert found[1] == found[3]


def test_all_sequences_of_a_prompt_are_guided_away_from_its_negative_prompt() -> None:
    draw = _draw("sample", (7, 8), (1, 2), do_sample=True, num_return_sequences=2)
    guided = {"guidance_scale": 1.5, "negative_prompt_ids": [[3, 4], [5, 6]]}
    draw = replace(draw, settings={**draw.settings, **guided})
    assert isinstance(plain_reference(draw).error, RuntimeError)
    assert judge(draw).problems == ()
    assert judge(draw).ran


def test_a_length_of_the_callers_may_be_beyond_the_configurations_under_beams() -> None:
    model, found = subject("llama-plain"), []
    given = {"num_beams": 2, "early_stopping": "never", "length_penalty": 0.7}
    ids = torch.tensor([[7, 8, 9, 10]])
    criteria = transformers.StoppingCriteriaList([transformers.MaxLengthCriteria(10)])
    with pytest.raises(IndexError):
        pair("llama-plain").reference.generate(
            input_ids=ids, max_new_tokens=3, stopping_criteria=criteria, **given
        )
    own = es.StoppingCriteriaList([es.MaxLengthCriteria(10)])
    with pytest.warns(UserWarning, match="takes the place"):
        found = model.generate(input_ids=ids, max_new_tokens=3, stopping_criteria=own, **given)
    assert torch.equal(found, model.generate(input_ids=ids, max_new_tokens=6, **given))


def test_a_row_that_a_criterion_ended_gets_no_further_tokens_without_an_end_token() -> None:
    """Without an end token transformers goes on writing into rows that ended."""
    ids, found = torch.tensor([[7, 8, 9, 10], [1, 2, 3, 4]]), []

    def first_ends(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.tensor([input_ids.shape[1] >= 6, False])

    for model in (pair("llama-plain").reference, subject("llama-plain")):
        criteria = transformers.StoppingCriteriaList([first_ends])
        result = model.generate(
            input_ids=ids, max_new_tokens=6, pad_token_id=5, stopping_criteria=criteria
        )
        found.append(result)
    assert torch.equal(found[0][1], found[1][1])
    assert torch.equal(found[0][0, :6], found[1][0, :6])
    assert found[1][0, 6:].tolist() == [5] * 4
    assert found[0][0, 6:].tolist() != [5] * 4
