"""Watermarks mark and are recognised as in transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from everystep.api.model import LanguageModel
from everystep.config import SynthIDTextWatermarkingConfig, WatermarkingConfig
from everystep.errors import RequestError
from everystep.processors.synthid import (
    SynthIDTextWatermarkDetector,
    SynthIDTextWatermarkLogitsProcessor,
    WeightedMeanDetector,
)
from everystep.processors.watermark import (
    WatermarkDetector,
    WatermarkLogitsProcessor,
    green_bits,
    is_green,
    seed_of,
)
from everystep.testing.models import tiny_llama
from tests.processors.making import FINITE_MAXIMUM, VOCABULARY, rectangle, rows_of, some_scores

KEYS = [654, 400, 836, 123, -340, 443]
SYNTHID = {"ngram_len": 4, "keys": KEYS, "sampling_table_seed": 3, "context_history_size": 8}


@pytest.mark.parametrize("seed", [0, 77, 15485863 * 77, 2**63 - 11, -5, 2**64 - 1])
@pytest.mark.parametrize(("vocabulary", "size"), [(5000, 1250), (97, 48), (64, 63), (10, 1)])
def test_green_ids_are_the_first_of_the_shuffle(seed: int, vocabulary: int, size: int) -> None:
    generator = torch.Generator().manual_seed(seed % (2**64 - 1))
    wanted = np.zeros(vocabulary, dtype=bool)
    wanted[torch.randperm(vocabulary, generator=generator)[:size]] = True
    short = seed_of(seed)
    assert (np.unpackbits(green_bits(vocabulary, size, short))[:vocabulary] == wanted).all()
    tokens = range(min(vocabulary, 200))
    assert [is_green(vocabulary, size, short, token) for token in tokens] == [
        bool(one) for one in wanted[: len(tokens)]
    ]


def test_a_short_shuffle_may_swap_a_place_again_and_again() -> None:
    for seed in range(300):
        shuffled = torch.randperm(7, generator=torch.Generator().manual_seed(seed))
        bits = np.unpackbits(green_bits(7, 4, seed_of(seed)))[:7]
        assert np.flatnonzero(bits).tolist() == sorted(shuffled[:4].tolist())


@pytest.mark.parametrize("scheme", ["lefthash", "selfhash"])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("kind", FINITE_MAXIMUM)
def test_green_lists_are_the_references(scheme: str, width: int, kind: str) -> None:
    values: dict[str, Any] = {"seeding_scheme": scheme, "context_width": width, "bias": 2.5}
    ours = WatermarkLogitsProcessor(500, "cpu", hashing_key=15485863, **values)
    theirs = transformers.WatermarkLogitsProcessor(500, "cpu", hashing_key=15485863, **values)
    scores = torch.randn(3, 500) if kind == "plain" else some_scores(3, kind, 500)
    if kind == "ties" and scheme == "selfhash":
        scores = scores + torch.arange(500) * 1e-3  # which of equals are the best 40 is open
    ids = torch.randint(0, 500, (3, 6))
    assert torch.equal(ours(ids, scores), theirs(ids, scores.clone()))


def test_prefixes_that_are_too_short_are_not_marked() -> None:
    ours = WatermarkLogitsProcessor(VOCABULARY, context_width=3)
    scores = some_scores(2)
    marked = ours(rows_of([[1, 2], [1, 2, 3]]), scores)
    assert torch.equal(marked[0], scores[0])
    assert not torch.equal(marked[1], scores[1])


@pytest.mark.parametrize("further", [{}, {"skip_first_ngram_calls": True}, {"debug_mode": True}])
@pytest.mark.parametrize("size", [2**10, 1000])
def test_synthid_by_hand_is_the_references(size: int, further: dict[str, Any]) -> None:
    values = {**SYNTHID, "sampling_table_size": size, **further}
    ours = SynthIDTextWatermarkLogitsProcessor(**values, device="cpu")
    theirs = transformers.SynthIDTextWatermarkLogitsProcessor(**values, device="cpu")
    ids = torch.tensor(rectangle(3, 30, 2))
    for length in range(5, 30):
        scores = torch.randn(3, 3000)
        assert torch.equal(ours(ids[:, :length], scores), theirs(ids[:, :length], scores.clone()))


def test_synthid_by_rows_is_by_hand_and_knows_drafts() -> None:
    ids, scores = torch.tensor(rectangle(2, 25, 2)), torch.randn(20, 2, VOCABULARY)
    values = {**SYNTHID, "sampling_table_size": 2**8}
    by_hand = SynthIDTextWatermarkLogitsProcessor(**values)
    wanted = [by_hand(ids[:, : 5 + n], scores[n]) for n in range(20)]
    ours = SynthIDTextWatermarkLogitsProcessor(**values)
    rows = rows_of(ids.tolist(), prompt=5)
    for n in (0, 1, 7, 3, 19, 4):  # forth and back
        rows.lengths[:] = 5 + n
        assert torch.equal(ours(rows, scores[n]), wanted[n])


@pytest.mark.parametrize("scheme", ["lefthash", "selfhash"])
@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("begins", [False, True])
def test_the_detector_counts_as_the_reference(scheme: str, repeated: bool, begins: bool) -> None:
    config = SimpleNamespace(vocab_size=300, bos_token_id=1, is_encoder_decoder=False)
    values = {"seeding_scheme": scheme, "context_width": 2}
    ids = torch.randint(2, 40, (3, 80))
    ids[:, 0] = 1 if begins else 5
    ours = WatermarkDetector(config, "cpu", WatermarkingConfig(**values), repeated)
    theirs = transformers.WatermarkDetector(
        config, "cpu", transformers.WatermarkingConfig(**values), repeated
    )
    found, wanted = ours(ids, return_dict=True), theirs(ids, return_dict=True)
    assert isinstance(found.green_fraction, np.ndarray)
    for name, value in vars(wanted).items():
        np.testing.assert_array_equal(getattr(found, name), value)
    np.testing.assert_array_equal(ours(ids, 0.5), theirs(ids, 0.5))


def test_the_detector_refuses_what_it_cannot_count() -> None:
    config = SimpleNamespace(vocab_size=300, bos_token_id=1, is_encoder_decoder=False)
    detector = WatermarkDetector(config, "cpu", WatermarkingConfig(context_width=4))
    with pytest.raises(RequestError, match="too short to score"):
        detector(torch.tensor([[5, 6, 7, 8]]))
    with pytest.raises(RequestError, match="others do not; wanted all or none; got 1 of 2"):
        detector(torch.tensor([[1, 6, 7, 8, 9, 9], [5, 6, 7, 8, 9, 9]]))


def test_g_values_and_masks_are_the_references() -> None:
    values = {**SYNTHID, "sampling_table_size": 999}
    ours = SynthIDTextWatermarkLogitsProcessor(**values)
    theirs = transformers.SynthIDTextWatermarkLogitsProcessor(**values, device="cpu")
    ids = torch.tensor(rectangle(4, 60, 3))
    for name in ("compute_g_values", "compute_context_repetition_mask"):
        assert torch.equal(getattr(ours, name)(ids), getattr(theirs, name)(ids))
    ends = ours.compute_eos_token_mask(ids, 2), theirs.compute_eos_token_mask(ids, 2)
    assert torch.equal(*ends)
    assert ours.expected_mean_g_value(100) == theirs.expected_mean_g_value(100)
    seen = []
    judge = lambda *parts: seen.append(parts)  # noqa: E731
    tokenizer = SimpleNamespace(eos_token_id=2)
    SynthIDTextWatermarkDetector(judge, ours, tokenizer)(ids)
    transformers.SynthIDTextWatermarkDetector(judge, theirs, tokenizer)(ids)
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def test_a_trained_detector_of_the_reference_judges_as_there() -> None:
    """Any `BayesianDetectorModel` is taken as it is."""
    ours = SynthIDTextWatermarkLogitsProcessor(**SYNTHID, sampling_table_size=64)
    theirs = transformers.SynthIDTextWatermarkLogitsProcessor(
        **SYNTHID, sampling_table_size=64, device="cpu"
    )
    config = transformers.BayesianDetectorConfig(watermarking_depth=len(KEYS), base_rate=0.4)
    trained = transformers.BayesianDetectorModel(config)
    for weights in trained.parameters():
        torch.nn.init.normal_(weights.data, 0.3, 0.2)
    ids, tokenizer = torch.randint(0, VOCABULARY, (5, 20)), SimpleNamespace(eos_token_id=3)
    with torch.no_grad():
        (found,) = SynthIDTextWatermarkDetector(trained, ours, tokenizer)(ids)
        (wanted,) = transformers.SynthIDTextWatermarkDetector(trained, theirs, tokenizer)(ids)
    assert found.shape == (5,) and len(found.unique()) == 5
    assert torch.equal(found, wanted)


def test_the_weighted_mean_is_its_formula() -> None:
    g, mask = torch.randint(0, 2, (3, 20, 5)), torch.randint(0, 2, (3, 20))
    weights = np.linspace(10, 1, 5)
    weights *= 5 / weights.sum()
    wanted = (g.numpy() * weights * mask.numpy()[..., None]).sum((1, 2)) / (5 * mask.sum(1).numpy())
    np.testing.assert_allclose(WeightedMeanDetector()(g, mask).numpy(), wanted)


# --- generate -------------------------------------------------------------------------------------

CONFIGS = {
    "lefthash": WatermarkingConfig(bias=3.0),
    "selfhash": WatermarkingConfig(seeding_scheme="selfhash", context_width=2, bias=3.0),
    "synthid": SynthIDTextWatermarkingConfig(ngram_len=3, keys=KEYS, sampling_table_size=2**10),
}
PROMPTS = torch.tensor([[5, 6, 7], [11, 12, 13], [20, 21, 22]])


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return tiny_llama()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    "options", [{}, {"do_sample": True}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}]
)
def test_a_marked_row_is_the_same_alone(
    model: LanguageModel, name: str, options: dict[str, Any]
) -> None:
    values = {"max_new_tokens": 12, "watermarking_config": CONFIGS[name], **options}
    seeds = [1, 2, 3] if "do_sample" in options else None
    batch = model.generate(PROMPTS, **values, **({"seed": seeds} if seeds else {}))
    for row in range(3):
        seed = {"seed": row + 1} if seeds else {}
        alone = model.generate(PROMPTS[row : row + 1], **values, **seed)[0]
        assert batch[row, : len(alone)].tolist() == alone.tolist()


@pytest.mark.parametrize("name", CONFIGS)
def test_drafts_change_no_mark(model: LanguageModel, name: str) -> None:
    values = {"max_new_tokens": 20, "watermarking_config": CONFIGS[name]}
    plain = model.generate(PROMPTS, **values)
    assert torch.equal(model.generate(PROMPTS, prompt_lookup_num_tokens=4, **values), plain)
    assert not torch.equal(model.generate(PROMPTS, max_new_tokens=20), plain)


def test_what_was_marked_is_recognised(model: LanguageModel) -> None:
    config = SimpleNamespace(vocab_size=model.vocab_size, bos_token_id=None)
    detector = WatermarkDetector(config, "cpu", CONFIGS["lefthash"])
    base = {"max_new_tokens": 60, "min_new_tokens": 60, "do_sample": True, "top_k": 0, "seed": 3}
    marked = model.generate(PROMPTS, watermarking_config=CONFIGS["lefthash"], **base)
    assert detector(marked[:, 3:]).all()
    assert not detector(model.generate(PROMPTS, **base)[:, 3:]).any()
