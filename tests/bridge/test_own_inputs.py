"""A class that prepares its inputs itself, as code written for transformers does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

import everystep as es
from everystep.bridge.own_inputs import Carried, require_new
from everystep.errors import ForeignModelError, ModelClassError, RequestError, UnsupportedError
from tests.bridge.families import END, PAD, VOCABULARY, randomise
from tests.models.pictures import IMAGE, reference_of


class Counting(transformers.LlamaForCausalLM):
    """Adds to every embedding how many tokens were chosen before."""

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> Any:
        given = super().prepare_inputs_for_generation(input_ids, **kwargs)
        given["chosen"] = kwargs.get("chosen", torch.zeros(len(input_ids), dtype=torch.float64))
        return given

    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: dict[str, Any], **kwargs: Any
    ) -> dict[str, Any]:
        kept = super()._update_model_kwargs_for_generation(outputs, model_kwargs, **kwargs)
        before = kept.get("chosen", torch.zeros(len(outputs.logits), dtype=torch.float64))
        return {**kept, "chosen": before + 1}

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        chosen: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        hidden = inputs_embeds
        if hidden is None:
            hidden = self.get_input_embeddings()(input_ids)
        if chosen is not None:
            hidden = hidden + 0.3 * chosen[:, None, None]
        return super().forward(inputs_embeds=hidden, attention_mask=attention_mask, **kwargs)


class Leaning(transformers.LlamaForCausalLM):
    """Hides every position but the last four, by a mask of its own."""

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> Any:
        given = super().prepare_inputs_for_generation(input_ids, **kwargs)
        mask = given["attention_mask"].clone()
        mask[:, :-4] = 0
        return {**given, "attention_mask": mask}


def made(kind: Any) -> Any:
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=128,
        pad_token_id=PAD,
        eos_token_id=END,
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind(config).to(torch.float64).eval()
        randomise(model)
    return model


IDS = torch.tensor([[PAD, PAD, 7, 8, 9], [5, 6, 7, 8, 11], [PAD, 12, 13, 7, 7]])
WAYS = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_k": 0},
    "chunks": {"prefill_chunk_size": 2},
}


@pytest.mark.parametrize("kind", [Counting, Leaning])
@pytest.mark.parametrize("way", WAYS)
def test_it_is_called_as_the_reference_calls_it(kind: Any, way: str) -> None:
    model = made(kind)
    mask = (IDS != PAD).long()
    given = {"attention_mask": mask, "max_new_tokens": 16, **WAYS[way]}
    torch.manual_seed(1)
    expected = model.generate(IDS, **given)
    torch.manual_seed(1)
    assert es.wrap(model).generate(IDS, **given).tolist() == expected.tolist()
    plain = made(transformers.LlamaForCausalLM)
    torch.manual_seed(1)
    assert es.wrap(plain).generate(IDS, **given).tolist() != expected.tolist()


def test_beams_carry_what_is_theirs() -> None:
    model = made(Counting)
    given = {"max_new_tokens": 16, "num_beams": 3}
    expected = model.generate(IDS[1:2], **given)
    assert es.wrap(model).generate(IDS[1:2], **given).tolist() == expected.tolist()


class Without:
    """A processor of the caller's own class: one token is never chosen."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_fill(1, torch.tensor([self.token]), -torch.inf)


class Stepped:
    """A sequence that grows, each forward of which leans as `Leaning` says."""

    def __init__(self, model: Any, ids: Tensor) -> None:
        self.model, self.fed, self.length = model, ids, 0
        self.cache = transformers.DynamicCache()

    def likely(self, kind: Any) -> Tensor:
        """(1, V) log-probabilities of what comes next, after what was not fed yet."""
        count, first = self.fed.shape[1], self.length
        self.length += count
        mask = torch.ones(1, self.length, dtype=torch.int64)
        given: dict[str, Any] = {"attention_mask": mask}
        if kind is Leaning:
            mask[:, :-4] = 0
        else:
            given["chosen"] = torch.full((1,), float(first and self.chosen), dtype=torch.float64)
        given["position_ids"] = torch.arange(first, self.length)[None]
        with torch.no_grad():
            out = self.model(self.fed, past_key_values=self.cache, use_cache=True, **given)
        self.chosen = getattr(self, "chosen", 0) + 1
        return out.logits[:, -1].float().log_softmax(-1)


@pytest.mark.parametrize("kind", [Counting, Leaning])
def test_guidance_beside_a_processor_of_an_own_class(kind: Any) -> None:
    model, ids = made(kind), IDS[1:2]
    rows = [Stepped(model, ids), Stepped(model, ids[:, -1:])]
    tokens: list[int] = []
    for _ in range(8):
        towards, away = (row.likely(kind) for row in rows)
        mixed = Without(tokens[0] if tokens else 0)(ids, away + 2.5 * (towards - away))
        tokens.append(int(mixed.argmax()))
        for row in rows:
            row.fed = torch.tensor([tokens[-1:]])
    assert len({*tokens}) > 1
    first = tokens[0]

    class Once(Without):
        """Rules out the first token, once that was chosen."""

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            known = input_ids.shape[1] > ids.shape[1]
            return super().__call__(input_ids, scores) if known else Without(0)(input_ids, scores)

    given = {"guidance_scale": 2.5, "logits_processor": [Once(first)], "eos_token_id": None}
    found = es.wrap(model).generate(ids, max_new_tokens=8, **given)
    assert found[0, ids.shape[1] :].tolist() == tokens


@pytest.mark.parametrize("option", [{"use_cache": False}, {"prompt_lookup_num_tokens": 3}])
def test_what_would_call_it_in_another_order_is_an_error(option: dict[str, Any]) -> None:
    with pytest.raises(es.EverystepError, match=r"fed again|truncate"):
        es.wrap(made(Counting)).generate(IDS[1:2], max_new_tokens=5, **option)


def carried(ids: list[int], chosen: int) -> Carried:
    found = Carried()
    found.ids, found.chosen = torch.tensor([ids]), chosen
    return found


@pytest.mark.parametrize(
    ("ids", "chosen", "again"),
    [
        ([5, 6, 7, 8], 1, True),  # the prompt, and what was chosen after it
        ([5, 6, 7, 8, 9], 1, False),  # a longer prompt that begins with the other one
        ([5, 6, 7, 8, 9], 2, True),
        ([5, 6, 7], 1, False),
        ([5, 6, 7], 3, False),
        ([5, 6, 9, 8], 2, False),
        ([5, 6], 2, False),
    ],
)
def test_who_was_fed_before_is_known_by_its_ids(ids: list[int], chosen: int, again: bool) -> None:
    row, freed = carried(ids, 0), [carried([1], 4), carried([5, 6, 7], chosen)]
    if again:
        with pytest.raises(UnsupportedError, match=f"{len(ids)} positions that are fed again"):
            require_new(row, freed)
    else:
        require_new(row, freed)
    require_new(row, [])


BOX = 150_000
"""The id at which a box stands, far beyond the vocabulary."""
BOXES = torch.tensor([[[0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.8]]], dtype=torch.float64)
PAGE = torch.tensor([[7, BOX, 8, BOX, 9]])
QUIET: dict[str, Any] = {
    "max_new_tokens": 5,
    "do_sample": False,
    "pad_token_id": PAD,
    "eos_token_id": None,
}


class Document(transformers.LlamaForCausalLM):
    """Puts boxes among its embeddings, and hands them to every forward, as a model of documents
    that is in use does."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layout = torch.nn.Linear(4, config.hidden_size)

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> Any:
        given = super().prepare_inputs_for_generation(input_ids, **kwargs)
        return {**given, "bbox": kwargs.get("bbox")}

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        bbox: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        assert input_ids is not None
        places = input_ids == BOX
        hidden = self.get_input_embeddings()(input_ids.masked_fill(places, 0))
        if bbox is not None:
            hidden[places] = self.layout(bbox.flatten(0, 1))
        kwargs.pop("inputs_embeds", None)
        return super().forward(inputs_embeds=hidden, attention_mask=attention_mask, **kwargs)


FAILS = "fails if it gets bbox after the prompt .*shape mismatch.* prompt's alone"


@pytest.mark.parametrize("more", [{}, {"num_beams": 3}, {"repetition_penalty": 1.3}])
def test_a_prompts_boxes_go_to_its_forward_alone_where_they_fit_no_other(more: Any) -> None:
    model = made(Document)
    with pytest.raises(RuntimeError, match="shape mismatch"):
        model.generate(PAGE, bbox=BOXES, **QUIET)
    # The detour by which it runs in transformers: the page is read again for every token.
    long = {**QUIET, **more, "use_cache": False}
    # A penalty looks up every id of the prompt there, so that an id beyond the scores is an error.
    penalised = "repetition_penalty" in more
    expected = None if penalised else model.generate(PAGE, bbox=BOXES, **long)
    wrapped = es.wrap(model)
    with pytest.warns(UserWarning, match=FAILS):
        found = wrapped.generate(PAGE, bbox=BOXES, **QUIET, **more)
    assert found.shape == (1, 10)
    assert expected is None or torch.equal(found, expected)


def test_every_token_of_such_a_page_is_fed_once() -> None:
    model = made(Document)
    fed: list[int] = []
    model.model.register_forward_pre_hook(
        lambda _, __, given: fed.append(given["inputs_embeds"].shape[1]), with_kwargs=True
    )
    wrapped = es.wrap(model)
    fed.clear()
    rows, boxes = PAGE.repeat(3, 1), BOXES.repeat(3, 1, 1)
    with pytest.warns(UserWarning, match=FAILS):
        found = wrapped.generate(rows, bbox=boxes, **QUIET)
    assert (found == found[0]).all()
    assert sorted(fed) == [1] * 12 + [5] * 3


def test_one_box_that_fits_by_chance_is_read_by_other_prompts_too() -> None:
    # One row of values is spread over no place at all without an error.
    model = made(Document)
    wrapped, one = es.wrap(model), torch.tensor([[7, BOX, 8, 5, 9]])
    expected = model.generate(one, bbox=BOXES[:, :1], **QUIET)
    assert torch.equal(wrapped.generate(one, bbox=BOXES[:, :1], **QUIET), expected)
    with pytest.warns(UserWarning, match=FAILS):
        wrapped.generate(PAGE, bbox=BOXES, **QUIET)


class Stubborn(Document):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs["input_ids"].shape[1] == 1:
            raise KeyError("step")
        return super().forward(*args, **kwargs)


def test_an_error_of_its_code_says_whose_it_is_and_where() -> None:
    told = r"wrapped model Stubborn raised KeyError: 'step'; got 1 positions from 4 on, in 1 rows"
    with pytest.raises(ForeignModelError, match=told):
        es.wrap(made(Stubborn))


class Plain(transformers.LlamaForCausalLM):
    """Fails as often as it is told to."""

    error: Exception | None = None
    part: Any = slice(None)
    spoil: Callable[[Tensor], Any] = staticmethod(lambda logits: logits)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.error is not None:
            raise self.error
        output = super().forward(*args, **kwargs)
        logits = self.spoil(output.logits[self.part])
        return type(output)(logits=logits, past_key_values=output.past_key_values)


class OfTheCaller(Exception):
    pass


@pytest.mark.parametrize("error", [KeyError("x"), AttributeError("y"), ValueError("z")])
def test_every_error_of_a_model_is_one_of_ours(error: Exception) -> None:
    model = made(Plain)
    wrapped = es.wrap(model)
    model.error = error
    with pytest.raises(ForeignModelError, match=f"Plain raised {type(error).__name__}") as caught:
        wrapped.generate(torch.tensor([[7, 8, 9]]), **QUIET)
    assert caught.value.__cause__ is error


def test_a_class_of_the_callers_stays_what_it_is() -> None:
    model = made(Plain)
    wrapped = es.wrap(model)
    model.error = OfTheCaller("mine")
    with pytest.raises(OfTheCaller, match="mine"):
        wrapped.generate(torch.tensor([[7, 8, 9]]), **QUIET)


@pytest.mark.parametrize(
    ("part", "got"),
    [
        (np.s_[:0], r"\(0, "),
        (np.s_[..., :7], r", 7\)"),
        (np.s_[:, :0], r", 0, "),
        (np.s_[0], r"float64 of shape \(\d+, \d+\)"),
    ],
)
def test_logits_that_do_not_fit_are_said(part: Any, got: str) -> None:
    model = made(Plain)
    wrapped = es.wrap(model)
    model.part = part
    with pytest.raises(ForeignModelError, match=f"logits that do not fit.*got .*{got}"):
        wrapped.generate(torch.tensor([[7, 8, 9]]), **QUIET)


@pytest.mark.filterwarnings("ignore:.*quantized tensor")
@pytest.mark.parametrize("how", [{}, {"do_sample": True}, {"num_beams": 2}], ids=str)
@pytest.mark.parametrize(
    ("spoil", "got"),
    [
        (lambda x: x.to("meta"), "a meta tensor"),
        (lambda x: x.to_sparse(), "layout torch.sparse_coo"),
        (lambda x: x.long(), "torch.int64 of shape"),
        (lambda x: x > 0, "torch.bool of shape"),
        (lambda x: x.to(torch.complex64), "torch.complex64 of shape"),
        (lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8), "a quantised tensor"),
        (lambda x: x.tolist(), "list"),
        (lambda x: None, "NoneType"),
    ],
    ids=["meta", "sparse", "integers", "flags", "complex", "quantised", "list", "none"],
)
def test_logits_without_readable_floats_are_said(spoil: Any, got: str, how: dict[str, Any]) -> None:
    model = made(Plain)
    wrapped = es.wrap(model)
    model.spoil = spoil
    with pytest.raises(ForeignModelError, match=f"logits that do not fit.*got {got}"):
        wrapped.generate(torch.tensor([[7, 8, 9]]), **{**QUIET, **how})


@pytest.mark.parametrize("how", [{}, {"do_sample": True}, {"num_beams": 2}], ids=str)
def test_logits_of_nan_leave_no_choice(how: dict[str, Any]) -> None:
    model = made(Plain)
    wrapped = es.wrap(model)
    model.spoil = lambda logits: logits * torch.nan
    with pytest.raises(
        RequestError, match="no token can be drawn: the scores of a sequence hold nan"
    ):
        wrapped.generate(torch.tensor([[7, 8, 9]]), **{**QUIET, **how})


def test_a_model_that_gives_logits_of_one_position_is_refused_when_it_is_wrapped() -> None:
    model = made(Plain)
    model.part = np.s_[:, -1:]
    with pytest.raises(ModelClassError, match=r"other positions.*got \(1, 1, "):
        es.wrap(model)


def test_pixels_for_a_model_whose_tower_was_replaced_are_said_not_to_fit() -> None:
    model = reference_of("qwen3_vl", torch.float32)
    model.model.visual = torch.nn.Identity()
    wrapped = es.wrap(model)
    given = {"pixel_values": torch.zeros(4, 96), "image_grid_thw": torch.tensor([[1, 2, 2]])}
    ids = torch.tensor([[5, IMAGE, 7]])
    with pytest.raises(RequestError, match="given by name does not fit the prompt"):
        wrapped.generate(ids, mm_token_type_ids=(ids == IMAGE).long(), **given, **QUIET)
