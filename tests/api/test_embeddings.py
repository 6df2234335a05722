"""Prompts given as embeddings: alone, beside ids of any number, in every kind of call."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import everystep as es
from everystep.api.model import LanguageModel
from everystep.errors import RequestError, UnknownArgumentError, UnsupportedError
from tests.models.tiny import ours as built
from tests.models.tiny import reference_decoder

QUIET = {"pad_token_id": 0, "eos_token_id": 96, "do_sample": False}
MASK = torch.tensor([[1] * 7, [0, 0, 1, 1, 1, 1, 1]])
IDS = torch.tensor([[5, 9, 23, 41, 5, 9, 80], [0, 0, 33, 60, 2, 71, 15]])


def _pair(**changes: Any) -> tuple[Any, LanguageModel]:
    torch.manual_seed(1)
    reference = reference_decoder("llama", torch.float64, **changes)
    config = es.GenerationConfig.from_model_config(reference.config)
    return reference, LanguageModel(built(reference), config)


REFERENCE, MODEL = _pair()
EMBEDS = REFERENCE.get_input_embeddings()(IDS).detach()
# Embeddings that belong to no id.
SOFT = EMBEDS + 0.1 * torch.randn(EMBEDS.shape, dtype=torch.float64)


def both(**given: Any) -> tuple[Tensor, Tensor]:
    """What transformers answers, and what we do."""
    options = {"max_new_tokens": 6, **QUIET, **given}
    if "max_length" in given:
        del options["max_new_tokens"]
    return REFERENCE.generate(**options), MODEL.generate(**options)


BESIDE: dict[str, dict[str, Any]] = {
    "no ids": {},
    "empty ids": {"input_ids": IDS[:, :0]},
    "their own ids": {"input_ids": IDS},
    "fewer ids": {"input_ids": IDS[:, 2:5]},
    "more ids": {"input_ids": torch.cat([IDS, IDS[:, :2]], 1)},
    "ids beyond the vocabulary": {"input_ids": IDS + 1000},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "a length": {"max_length": 23},
    "a least length": {"max_length": 23, "min_length": 17, "eos_token_id": list(range(0, 97, 2))},
    "a static cache": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
}


IDS_SEEN: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.8},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[41, 5], [30]]},
    "sequence_bias": {"sequence_bias": {(9, 80): 9.0, (31,): 2.0}},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.4},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 2},
}


IN_BOTH = [
    *product(BESIDE, OPTIONS),
    *product(["their own ids", "fewer ids"], list(IDS_SEEN)[:4]),  # processors see those ids
]


@pytest.mark.parametrize(("beside", "option"), IN_BOTH)
def test_embeddings_are_continued_as_in_the_reference(beside: str, option: str) -> None:
    asked = {**OPTIONS, **IDS_SEEN}[option]
    theirs, ours = both(inputs_embeds=SOFT, attention_mask=MASK, **BESIDE[beside], **asked)
    assert torch.equal(ours, theirs)


OURS_ALONE = {
    "dry_multiplier": {"dry_multiplier": 1.0},
    "presence_penalty": {"presence_penalty": 1.5},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 4},
    "watermark": {"watermarking_config": es.WatermarkingConfig(bias=2.5)},
}


@pytest.mark.filterwarnings("ignore:.*a prompt given as embeddings has no ids")
@pytest.mark.parametrize("option", [*IDS_SEEN, *OURS_ALONE])
def test_ids_beyond_the_vocabulary_harm_no_processor(option: str) -> None:
    """What looks at ids passes them over: the rest is as without them."""
    options = {**IDS_SEEN, **OURS_ALONE}[option]
    given = {"inputs_embeds": SOFT[:1], **QUIET, "max_new_tokens": 8, **options}
    beyond = MODEL.generate(input_ids=IDS[:1] + 150000, **given)
    assert beyond.shape[1] > 7 and (beyond[:, :7] == IDS[:1] + 150000).all()
    if option in ("encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "watermark"):
        assert (beyond[:, 7:] < 97).all()
        return
    alone = MODEL.generate(**given)
    assert torch.equal(beyond[:, 7:], alone)


def test_a_prompt_of_one_embedding_is_fed_once(fed: list[int]) -> None:
    theirs, ours = both(inputs_embeds=SOFT[:, 3:4])
    assert torch.equal(ours, theirs)
    assert fed[-1] == 2 * (1 + 5)


@pytest.mark.parametrize("beside", BESIDE)
def test_a_filled_cache_is_continued_by_embeddings(beside: str) -> None:
    whole = MODEL.generate(inputs_embeds=SOFT, max_new_tokens=6, **QUIET)
    held = MODEL.generate(
        inputs_embeds=SOFT[:, :4], max_new_tokens=1, return_dict_in_generate=True, **QUIET
    ).past_key_values
    for embeds in (SOFT, SOFT[:, 4:]):
        past = es.DynamicCache.from_legacy_cache(held.to_legacy_cache())
        ids = BESIDE[beside].get("input_ids")
        out = MODEL.generate(
            inputs_embeds=embeds,
            past_key_values=past,
            attention_mask=torch.ones(2, 7),
            max_new_tokens=6,
            **QUIET,
            **({} if ids is None else {"input_ids": ids}),
        )
        assert torch.equal(out[:, 0 if ids is None else ids.shape[1] :], whole)


def rows() -> list[dict[str, Any]]:
    """The same prompts one by one, without padding."""
    return [{"inputs_embeds": SOFT[0]}, {"inputs_embeds": SOFT[1:, 2:]}]


MANY: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "returned": {"num_beams": 3, "num_return_sequences": 2, "early_stopping": True},
    "sampled": {"do_sample": True, "num_return_sequences": 2},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 3},
}


@pytest.mark.parametrize("way", MANY)
def test_many_prompts_of_embeddings_are_those_of_a_batch(way: str) -> None:
    options = {"max_new_tokens": 6, **QUIET, **MANY[way], "seed": 5}
    batch = MODEL.generate(inputs_embeds=SOFT, attention_mask=MASK, **options)
    found = es.generate(MODEL, None, rows(), **options)
    flat = found if isinstance(found[0][0], int) else [one for each in found for one in each]
    told = [[*row, *[0] * (batch.shape[1] - len(row))] for row in flat]
    assert told == batch.tolist()


def test_streams_and_results_of_embeddings() -> None:
    expected = MODEL.generate(inputs_embeds=SOFT[:1], max_new_tokens=6, **QUIET)[0].tolist()
    single = {"inputs_embeds": SOFT[0], "input_ids": IDS[0]}
    with es.stream(MODEL, None, single, max_new_tokens=6, **QUIET) as stream:
        told = [event.token for event in stream]
    assert told == expected
    (done,) = stream.results()[0]
    assert (list(done.tokens), done.prompt_tokens) == (expected, 7)
    assert es.generate(MODEL, None, single, max_new_tokens=6, **QUIET) == expected
    out = MODEL.generate(
        inputs_embeds=SOFT, return_dict_in_generate=True, max_new_tokens=6, **QUIET
    )
    assert out.prompt_length == 7 and out.new_tokens[0] == expected


def test_prompt_logprobs_need_one_id_per_position() -> None:
    given = {"return_dict_in_generate": True, "prompt_logprobs": 0, "max_new_tokens": 2, **QUIET}
    out = MODEL.generate(inputs_embeds=SOFT[:1], input_ids=IDS[:1], **given)
    with torch.no_grad():
        logits = REFERENCE(inputs_embeds=SOFT[:1]).logits[0].log_softmax(-1)
    chosen = logits[:-1].gather(1, IDS[0, 1:, None])[:, 0].float()
    torch.testing.assert_close(out.prompt_logprobs[0].logprobs, chosen)
    generated = es.generate(
        MODEL, None, {"inputs_embeds": SOFT[0], "input_ids": IDS[0]}, **given
    ).prompt_logprobs
    torch.testing.assert_close(generated.logprobs, chosen)


WRONG: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "neither": ({"attention_mask": [1]}, {}, RequestError, "exactly one content.*none of them"),
    "text and ids": ({"text": "a", "input_ids": [5]}, {}, RequestError, "got input_ids, text"),
    "text and embeddings": ({"text": "a", "inputs_embeds": SOFT[0]}, {}, RequestError, "content"),
    "several rows": ({"inputs_embeds": SOFT}, {}, RequestError, "several rows"),
    "a key": ({"inputs_embed": SOFT[0]}, {}, UnknownArgumentError, "you meant inputs_embeds"),
    "a stranger": ({"input_ids": [5], "zzz": 1}, {}, UnknownArgumentError, "Keys are text"),
    "a keyword": ([[5, 9]], {"inputs_embeds": SOFT}, RequestError, "belongs to one prompt"),
    "positions of all": ([[5]], {"position_ids": IDS}, RequestError, "belongs to one prompt"),
    "float ids": ({"input_ids": torch.tensor([1.0])}, {}, RequestError, "integers"),
    "bare embeddings": (SOFT[0, 0], {}, RequestError, "{'inputs_embeds'"),
    "rows of embeddings": (SOFT, {}, RequestError, "not a row of ids"),
    "flags": (torch.tensor([True, False]), {}, RequestError, "integers"),
    "ragged ids": ({"input_ids": [[5], [6, 7]]}, {}, RequestError, "input_ids is not a tensor"),
    "integers for embeddings": ({"inputs_embeds": IDS[0]}, {}, RequestError, "floating point"),
    "a mask of another length": (
        {"inputs_embeds": SOFT[0], "attention_mask": [1, 1]}, {}, RequestError, "attention_mask"
    ),
    "text without a tokenizer": ({"text": "a"}, {}, RequestError, "needs a tokenizer"),
    "a cache": ({"input_ids": [5], "past_key_values": 1}, {}, UnknownArgumentError, "past_key_v"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("call", [es.generate, es.stream])
def test_a_wrong_prompt_is_refused(call: Any, name: str) -> None:
    prompts, options, error, said = WRONG[name]
    with pytest.raises(error, match=said):
        call(MODEL, None, prompts, max_new_tokens=2, **options)


def test_a_wrong_prompt_ends_alone() -> None:
    found = es.generate(
        MODEL, None, [rows()[0], {"inputs_embeds": SOFT[0, :, :4]}], on_error="return",
        max_new_tokens=6, return_dict_in_generate=True, **QUIET,
    )  # fmt: skip
    assert (
        list(found[0].tokens)
        == MODEL.generate(inputs_embeds=SOFT[:1], max_new_tokens=6, **QUIET)[0].tolist()
    )
    assert found[1].finish_reason.kind == "error"
    assert "48 values" in str(found[1].finish_reason.matched)


def test_the_native_executor_reads_embeddings_beside_other_ids() -> None:
    from everystep.testing.models import tiny_llama

    model = tiny_llama(dtype=torch.float32)
    if not model.runs_on.startswith("native"):
        pytest.skip("the native executor cannot be built here")
    table = model.get_input_embeddings()
    ids = torch.tensor([[5, 9, 23, 41]])
    plain = model.generate(ids, max_new_tokens=6, do_sample=False)[:, 4:]
    given = {"inputs_embeds": table(ids), "max_new_tokens": 6, "do_sample": False}
    for beside in (ids[:, :2], ids + 1000, ids.repeat(1, 2)):
        out = model.generate(input_ids=beside, **given)
        assert torch.equal(out[:, beside.shape[1] :], plain)


def test_without_attention_a_hole_is_refused() -> None:
    from tests.models.tiny import reference_mamba

    model = LanguageModel(built(reference_mamba(torch.float64)), es.GenerationConfig())
    with pytest.raises(UnsupportedError, match="mask"):
        model.generate(IDS, attention_mask=torch.tensor([[1, 0, 1, 1, 1, 1, 1]] * 2))
