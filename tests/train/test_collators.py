"""Collators give the batches of transformers' under the same names, and lose nothing in silence."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import everystep as es
from everystep.errors import RequestError, UnknownArgumentError, UnsupportedError
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer
from tests.bridge.families import model_of

OWN = tiny_tokenizer()


def both(side: str, **special: str) -> tuple[Any, Any]:
    """The tiny tokenizer here, and as one of transformers."""
    own = tiny_tokenizer()
    named = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", **special}
    for name, token in named.items():
        setattr(own, name, token)
    own.padding_side = side
    other = transformers.PreTrainedTokenizerFast(
        tokenizer_object=copy.deepcopy(own.backend), padding_side=side, **named
    )
    return own, other


def drawn(seed: int, *, labels: bool, masks: bool = False) -> list[dict[str, list[int]]]:
    draw = random.Random(seed)
    rows = []
    for _ in range(draw.randint(1, 4)):
        ids = [draw.randrange(3, 300) for _ in range(draw.randint(2, 9))]
        row = {"input_ids": ids}
        if labels:
            row["labels"] = [-100 if draw.random() < 0.4 else one for one in ids]
        if masks:
            row["attention_mask"] = [1] * len(ids)
        rows.append(row)
    return rows


def without_firsts(theirs: Any) -> Any:
    """Transformers' batch, without the labels that are predicted from padding."""
    mask = theirs["attention_mask"]
    after_padding = mask.diff(dim=1, prepend=torch.ones_like(mask[:, :1])) == 1
    return {**theirs, "labels": theirs["labels"].masked_fill(after_padding, -100)}


def assert_equal(ours: dict[str, Any], theirs: Any) -> None:
    assert set(ours) == set(theirs)
    for name, value in ours.items():
        assert value.dtype == torch.as_tensor(theirs[name]).dtype
        assert torch.equal(value, torch.as_tensor(theirs[name])), name


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"pad_to_multiple_of": 4},
        {"padding": "max_length", "max_length": 12},
        {"padding": "longest", "pad_to_multiple_of": 8},
        {"padding": "max_length", "max_length": 10, "pad_to_multiple_of": 8},
    ],
)
def test_padding_is_that_of_transformers(side: str, how: dict[str, Any]) -> None:
    own, other = both(side)
    for seed in range(6):
        rows = drawn(seed, labels=False, masks=seed % 2 == 0)
        ours = es.DataCollatorWithPadding(own, **how)(rows)
        assert_equal(ours, transformers.DataCollatorWithPadding(other, **how)(rows))
        rows = drawn(seed, labels=True)
        ours = es.DataCollatorForSeq2Seq(own, **how)(rows)
        assert_equal(ours, transformers.DataCollatorForSeq2Seq(other, **how)(rows))


@pytest.mark.parametrize("side", ["left", "right"])
def test_language_modelling_is_that_of_transformers(side: str) -> None:
    own, other = both(side)
    for seed in range(6):
        rows = drawn(seed, labels=False, masks=seed % 2 == 0)
        how: dict[str, Any] = {"mlm": False, "pad_to_multiple_of": 4 if seed > 3 else None}
        ours = es.DataCollatorForLanguageModeling(own, **how)(rows)
        theirs = transformers.DataCollatorForLanguageModeling(other, **how)(rows)
        assert_equal(ours, without_firsts(theirs))
        lists = [row["input_ids"] for row in rows]
        same = es.DataCollatorForLanguageModeling(own, **how)(lists)
        assert_equal(same, ours)


def test_flattening_is_that_of_transformers() -> None:
    for seed in range(8):
        rows = drawn(seed, labels=seed % 2 == 0)
        ours = es.DataCollatorWithFlattening()(rows)
        assert_equal(ours, transformers.DataCollatorWithFlattening()(rows))
    ours = es.DataCollatorWithFlattening(position_ids_start=2)(rows)
    assert_equal(ours, transformers.DataCollatorWithFlattening(position_ids_start=2)(rows))


@pytest.mark.parametrize(
    "rows",
    [
        [{"input_ids": [1, 2], "label": 0}, {"input_ids": [3, 4], "label": 3}],
        [{"a": [1.0, 2.5], "label": 0.5}, {"a": [3.0, 4.0], "label": 1.5}],
        [
            {"a": torch.ones(2, 3), "label_ids": [1, 2]},
            {"a": torch.zeros(2, 3), "label_ids": [3, 4]},
        ],
        [{"a": np.arange(4), "labels": torch.tensor([1])}] * 3,
        [{"a": 1, "b": None}, {"a": 2, "b": None}],
    ],
)
def test_default_collating_is_that_of_transformers(rows: list[dict[str, Any]]) -> None:
    assert_equal(es.default_data_collator(rows), transformers.default_data_collator(rows))


def test_the_decoder_reads_its_labels_after_the_start_token() -> None:
    model = model_of("bart")
    own, other = both("right")
    wrapped = es.wrap(copy.deepcopy(model))
    rows = [{"input_ids": [5, 6, 7], "labels": [8, 9, -100, 3]}, {"input_ids": [5], "labels": [3]}]
    theirs = transformers.DataCollatorForSeq2Seq(other, model=model)(rows)
    assert_equal(es.DataCollatorForSeq2Seq(own, model=wrapped)(rows), theirs)
    assert theirs["decoder_input_ids"].shape == (2, 4)


def test_an_end_token_that_pads_is_learned_where_it_ends_a_row() -> None:
    own, other = both("right", pad_token="<eos>")
    end = own.eos_token_id
    rows = [{"input_ids": [7, 8, end]}, {"input_ids": [9, end]}]
    ours = es.DataCollatorForLanguageModeling(own, mlm=False)(rows)
    assert ours["labels"].tolist() == [[7, 8, end], [9, end, -100]]
    assert ours["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    theirs = transformers.DataCollatorForLanguageModeling(other, mlm=False)(rows)
    assert end not in theirs["labels"], "there it is lost, which is why ours differs"


def test_labels_that_a_row_brings_are_kept() -> None:
    rows = [{"input_ids": [7, 8, 9], "labels": [-100, 8, 9]}]
    batch = es.DataCollatorForLanguageModeling(OWN, mlm=False)(rows)
    assert batch["labels"].tolist() == [[-100, 8, 9]]


def test_padding_in_a_row_is_not_learned() -> None:
    rows = [{"input_ids": [7, 8, 9], "attention_mask": [0, 1, 1]}, {"input_ids": [7, 8, 9]}]
    batch = es.DataCollatorForLanguageModeling(OWN, mlm=False)(rows)
    assert batch["labels"].tolist() == [[-100, -100, 9], [7, 8, 9]]


def test_what_rows_bring_beside_ids_is_in_the_batch() -> None:
    """Boxes get rows of -100, pictures are stacked, patches follow one another."""
    rows = [
        {
            "input_ids": list(range(5, 6 + n)),
            "labels": [-100, *range(6, 6 + n)],
            "bbox": torch.full((n, 4), n),
            "pixel_values": torch.full((3, 2, 2), float(n)),
        }
        for n in (1, 3)
    ]
    batch = es.DataCollatorWithPadding(OWN)(rows)
    assert batch["bbox"].tolist() == [[[1] * 4, [-100] * 4, [-100] * 4], [[3] * 4] * 3]
    assert batch["pixel_values"].shape == (2, 3, 2, 2)
    patches = [
        {
            "input_ids": [5, 6],
            "labels": [5, 6],
            "pixel_values": torch.full((4 * n, 6), float(n)),
            "image_grid_thw": torch.tensor([[1, 2, 2]] * n),
        }
        for n in (1, 2)
    ]
    batch = es.DataCollatorWithPadding(OWN)(patches)
    assert batch["pixel_values"].shape == (12, 6) and batch["image_grid_thw"].shape == (3, 3)


def test_embeddings_are_padded_at_their_positions() -> None:
    rows = [
        {"inputs_embeds": torch.ones(n, 4), "labels": torch.arange(n)} for n in (2, 3)
    ]  # fmt: skip
    batch = es.DataCollatorWithPadding(OWN)(rows)
    assert batch["inputs_embeds"][:, :, 0].tolist() == [[0, 1, 1], [1, 1, 1]]
    assert batch["labels"].tolist() == [[-100, -100, 1], [0, 1, 2]]


def test_flattened_rows_see_nothing_of_one_another() -> None:
    """The loss of a flattened batch is that of its rows by themselves."""
    model = tiny_llama(vocab_size=320)
    rows = [{"input_ids": [5, 6, 7, 8]}, {"input_ids": [9]}, {"input_ids": [30, 31, 32]}]
    flat = es.DataCollatorWithFlattening()(rows)
    apart = sum(
        model(torch.tensor([row["input_ids"]]), labels=torch.tensor([row["input_ids"]])).loss
        * (len(row["input_ids"]) - 1)
        for row in rows
        if len(row["input_ids"]) > 1
    )
    together = model(**flat, use_cache=False).loss * 5
    torch.testing.assert_close(together, apart, rtol=1e-10, atol=0)
    leaking = {**flat, "position_ids": torch.arange(8)[None]}
    assert abs(model(**leaking, use_cache=False).loss * 5 - apart) > 1e-3, (
        "the comparison would notice a leak"
    )


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["padding", "modelling", "seq2seq"])
def test_padded_rows_have_the_loss_of_rows_by_themselves(side: str, name: str) -> None:
    """On the left the first id of a row follows padding, and must not be learned from it."""
    model, own = tiny_llama(vocab_size=320), both(side)[0]
    collate: Any = {
        "padding": es.DataCollatorWithPadding(own),
        "modelling": es.DataCollatorForLanguageModeling(own, mlm=False),
        "seq2seq": es.DataCollatorForSeq2Seq(own, model=model),
    }[name]
    rows = [{"input_ids": one, "labels": one} for one in ([5, 6, 7, 8], [30, 31, 32])]
    alone = [model(**collate([row])) for row in rows]
    both_rows = model(**collate(rows))
    total = alone[0].loss * 3 + alone[1].loss * 2
    # Padding on the left moves a row, and rotations of positions are computed in float32.
    torch.testing.assert_close(both_rows.loss * 5, total, rtol=1e-5, atol=0)


SENSELESS: list[tuple[type, dict[str, Any], type[Exception], str]] = [
    (es.DataCollatorForLanguageModeling, {}, UnsupportedError, "mlm=False"),
    (es.DataCollatorForLanguageModeling, {"mlm": False, "seed": 1}, RequestError, "masked"),
    (es.DataCollatorForLanguageModeling, {"mlm": False, "mlm_probability": 0.3}, RequestError, "m"),
    (es.DataCollatorWithPadding, {"padding": "both"}, RequestError, "padding"),
    (es.DataCollatorWithPadding, {"max_length": 8}, RequestError, "max_length alone"),
    (es.DataCollatorWithPadding, {"pad_to_multiple_of": 0}, RequestError, "pad_to_multiple_of"),
    (
        es.DataCollatorWithPadding,
        {"padding": False, "pad_to_multiple_of": 8},
        RequestError,
        "without padding",
    ),
    (es.DataCollatorWithPadding, {"return_tensors": "np"}, UnsupportedError, "torch"),
    (es.DataCollatorWithPadding, {"tokenizer": None}, RequestError, "needs a tokenizer"),
    (es.DataCollatorWithPadding, {"tokenizer": 3}, RequestError, "tokenizer"),
    (es.DataCollatorForSeq2Seq, {"label_pad_token_id": 0}, UnsupportedError, "label_pad_token_id"),
    (es.DataCollatorForSeq2Seq, {"max_length": -1, "padding": "max_length"}, RequestError, "max"),
    (es.DataCollatorWithFlattening, {"separator_id": 0}, UnsupportedError, "separator_id"),
    (es.DataCollatorWithFlattening, {"return_position_ids": False}, UnsupportedError, "see"),
    (es.DataCollatorWithFlattening, {"return_seq_idx": True}, UnsupportedError, "seq_idx"),
    (es.DataCollatorWithFlattening, {"position_ids_start": -1}, RequestError, "position_ids_start"),
]


@pytest.mark.parametrize(("collator", "arguments", "error", "says"), SENSELESS)
def test_senseless_arguments_are_refused(
    collator: type, arguments: dict[str, Any], error: type[Exception], says: str
) -> None:
    own = {} if collator is es.DataCollatorWithFlattening else {"tokenizer": OWN}
    with pytest.raises(error, match=says):
        collator(**{**own, **arguments})


PAD = es.DataCollatorWithPadding(OWN)
FLAT = es.DataCollatorWithFlattening()
ROW = {"input_ids": [5, 6], "labels": [5, 6]}
UNFIT: list[tuple[Any, Any, str]] = [
    (PAD, [], "no rows"),
    (PAD, ROW, "list of rows"),
    (PAD, [ROW, [5, 6]], "row 1 of the batch is no mapping"),
    (PAD, [ROW, {**ROW, "bbox": [[1, 2, 3, 4]]}], "row 1 of the batch has bbox, and row 0"),
    (PAD, [{**ROW, "source": "web"}], "source is a text"),
    (PAD, [{**ROW, "extra": [1]}, {**ROW, "extra": [1, 2]}], "shape of extra"),
    (PAD, [{**ROW, "labels": [5]}], "labels has another length"),
    (PAD, [{**ROW, "label": 1}], "labels and label"),
    (es.DataCollatorWithPadding(OWN, False), [ROW, {"input_ids": [1], "labels": [1]}], "differ"),
    (es.DataCollatorWithPadding(OWN, "max_length", 1), [ROW], "longer than max_length"),
    (es.DataCollatorForSeq2Seq(OWN), [ROW, {"input_ids": [1]}], "some rows have labels"),
    (FLAT, [{**ROW, "attention_mask": [0, 1]}], "attention_mask cannot be flattened"),
    (FLAT, [{**ROW, "bbox": [[1, 2, 3, 4]]}], "bbox cannot be flattened"),
    (FLAT, [{**ROW, "position_ids": [3, 4]}], "position_ids cannot be flattened"),
    (FLAT, [{"inputs_embeds": torch.ones(2, 4), "labels": [5, 6]}], "embeds cannot be flattened"),
    (es.default_data_collator, [{"a": [1]}, {"a": [1, 2]}], "shape of a"),
    (es.default_data_collator, [{"a": "one"}], "a is a text"),
]


@pytest.mark.parametrize(("collator", "rows", "says"), UNFIT)
def test_rows_that_do_not_fit_are_refused(collator: Any, rows: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        collator(rows)


def test_a_padding_length_may_be_that_of_the_tokenizer() -> None:
    own = tiny_tokenizer()
    own.model_max_length = 6
    assert es.DataCollatorWithPadding(own, "max_length")([ROW])["input_ids"].shape == (1, 6)
    own.model_max_length = None
    with pytest.raises(RequestError, match="without a length"):
        es.DataCollatorWithPadding(own, "max_length")([ROW])


def test_a_key_that_only_a_model_knows_is_named_by_the_model() -> None:
    rows = es.read_rows([{**ROW, "box": [1]}])
    with pytest.raises(UnknownArgumentError, match="takes no 'box'"):
        es.inspect_rows(rows, tiny_llama(vocab_size=320))
