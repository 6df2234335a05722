"""Named inputs of wrapped models: images and types beside ids, as transformers reads them."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

import everystep as es
from everystep.bridge.named_inputs import placed
from everystep.engine import Continuous, Engine
from everystep.engine.prefixes import Reuse
from everystep.errors import RequestError, UnsupportedError
from everystep.testing.models import tiny_llama
from everystep.types import Prompt
from tests.bridge.pictures import IMAGE, PAD, PATCH, START, TEXT, configured
from tests.judges.drive import Drive
from tests.requested import requested

GRIDS = ((1, 4, 4), (1, 4, 6), (1, 2, 4))


def randomised(module: Any) -> Any:
    """The module in float64 with weights wide enough for choices to depend on everything."""
    generator = torch.Generator().manual_seed(7)
    module = module.to(torch.float64).eval()
    with torch.no_grad():
        for weight in module.parameters():
            weight.normal_(0, 0.3, generator=generator)
    return module


@cache
def pictures() -> Any:
    """A tiny Qwen3-VL, vision tower included."""
    config = configured()
    config.text_config.eos_token_id = None
    model = randomised(transformers.Qwen3VLForConditionalGeneration(config))
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    return model


def batch() -> dict[str, Tensor]:
    """Two rows, of two images and of one, the second padded on the left."""

    def image(grid: tuple[int, int, int]) -> list[int]:
        return [START, *[IMAGE] * (grid[1] * grid[2] // 4), 52]

    rows = [[5, *image(GRIDS[0]), 6, *image(GRIDS[1]), 7, 8], [9, 10, *image(GRIDS[2]), 11]]
    width = max(map(len, rows))
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
    patches = sum(t * h * w for t, h, w in GRIDS)
    generator = torch.Generator().manual_seed(11)
    return {
        "input_ids": ids,
        "attention_mask": (ids != PAD).long(),
        "pixel_values": torch.randn(patches, PATCH, generator=generator, dtype=torch.float64),
        "image_grid_thw": torch.tensor(GRIDS),
        "mm_token_type_ids": (ids == IMAGE).int(),
    }


def rows_of_batch() -> list[dict[str, Any]]:
    """The rows of the batch, each a prompt of its own."""
    whole, patches, grids = batch(), [0, 40, 48], [0, 2, 3]
    found = []
    for row in range(2):
        real = whole["attention_mask"][row].bool()
        found.append(
            {
                "input_ids": whole["input_ids"][row, real],
                "mm_token_type_ids": whole["mm_token_type_ids"][row, real],
                "pixel_values": whole["pixel_values"][patches[row] : patches[row + 1]],
                "image_grid_thw": whole["image_grid_thw"][grids[row] : grids[row + 1]],
            }
        )
    return found


def answers(new: int = 8, **given: Any) -> list[list[int]]:
    """What transformers generates after each row by itself."""
    found = []
    for one in rows_of_batch():
        row = {n: v[None] if n.endswith("_ids") else v for n, v in one.items()}
        out = pictures().generate(**row, max_new_tokens=new, **given)
        found += out[:, len(one["input_ids"]) :].tolist()
    return found


class TestImages:
    @pytest.mark.parametrize("use_cache", [True, False])
    @pytest.mark.parametrize("beams", [1, 2])
    def test_they_are_read_as_the_reference_reads_them(self, beams: int, use_cache: bool) -> None:
        given = {"num_beams": beams, "use_cache": use_cache, "do_sample": False}
        ours = es.wrap(pictures()).generate(**batch(), max_new_tokens=8, **given)
        theirs = pictures().generate(**batch(), max_new_tokens=8, **given)
        assert ours.tolist() == theirs.tolist()

    def test_they_matter(self) -> None:
        other = batch()
        other["pixel_values"] = other["pixel_values"].flip(0)
        wrapped = es.wrap(pictures())
        one = wrapped.generate(**batch(), max_new_tokens=8)
        assert one.tolist() != wrapped.generate(**other, max_new_tokens=8).tolist()

    def test_a_list_gives_each_row_its_own(self) -> None:
        whole, rows = batch(), rows_of_batch()
        for name in ("pixel_values", "image_grid_thw"):
            whole[name] = [one[name] for one in rows]  # type: ignore[assignment]
        ours = es.wrap(pictures()).generate(**whole, max_new_tokens=8)
        assert ours[:, whole["input_ids"].shape[1] :].tolist() == answers()

    def test_a_prompt_is_fed_whole_whatever_a_step_may_feed(self) -> None:
        whole = batch()
        ours = es.wrap(pictures()).generate(**whole, max_new_tokens=8, prefill_chunk_size=3)
        assert ours[:, whole["input_ids"].shape[1] :].tolist() == answers()

    def test_several_returns_of_many_prompts(self) -> None:
        given = {"num_beams": 3, "num_return_sequences": 2, "do_sample": False}
        found = es.generate(pictures(), None, rows_of_batch(), max_new_tokens=6, **given)
        flat = [list(ids) for one in found for ids in one]
        assert flat == answers(6, **given)

    def test_they_come_and_go_with_prompts_in_a_stream(self) -> None:
        own: dict[str, list[int]] = {}
        prompts = [*rows_of_batch(), {"input_ids": [5, 6, 7]}]
        for event in es.stream(pictures(), None, prompts, max_new_tokens=8):
            own.setdefault(event.request_id, []).append(event.token)
        plain = pictures().generate(torch.tensor([[5, 6, 7]]), max_new_tokens=8)[0, 3:]
        assert list(own.values()) == [*answers(), plain.tolist()]

    @pytest.mark.parametrize(("beams", "room"), [(1, 30), (3, 45)])
    @pytest.mark.parametrize("budget", [4, 40])
    def test_rows_that_lose_their_cache_read_them_again(
        self, budget: int, beams: int, room: int
    ) -> None:
        wrapped = es.wrap(pictures())
        requests = requested(wrapped, {**batch(), "num_beams": beams, "max_new_tokens": 8})
        rows = Continuous(budget, max_positions=room, reuse=Reuse(kept=100, least=2))
        run = Drive(Engine(wrapped.executor(requests[0].needs), rows))
        for request in requests:
            run.submit(request)
        run.finish()
        assert run.engine.counts.preemptions
        found = [list(run.results[one.request_id][0].tokens) for one in requests]
        assert found == answers(num_beams=beams)

    def test_a_prefix_may_hold_them(self) -> None:
        """What follows an image stands where the image's positions end."""
        wrapped, (first, _) = es.wrap(pictures()), rows_of_batch()
        prefix = es.prefill(wrapped, None, first)
        (ours,) = es.generate(wrapped, None, [[13, 14]], prefix=prefix, max_new_tokens=8)
        more = torch.cat([first["input_ids"], torch.tensor([13, 14])])[None]
        types = (more == IMAGE).int()
        whole = {**first, "input_ids": more, "mm_token_type_ids": types}
        theirs = pictures().generate(**whole, max_new_tokens=8)[0, more.shape[1] :]
        assert list(ours) == theirs.tolist()

    def test_equal_ids_with_other_images_share_no_row(self) -> None:
        one = rows_of_batch()[0]
        other = {**one, "pixel_values": one["pixel_values"].flip(0)}
        found = es.generate(pictures(), None, [one, other, one], max_new_tokens=8)
        alone = [
            es.generate(pictures(), None, [each], max_new_tokens=8)[0] for each in (one, other)
        ]
        assert [list(ids) for ids in found] == [list(alone[i]) for i in (0, 1, 0)]
        assert list(alone[0]) == answers()[0] != list(alone[1])

    def test_logits_are_those_of_the_reference(self) -> None:
        given = {"max_new_tokens": 4, "output_logits": True, "return_dict_in_generate": True}
        ours = es.wrap(pictures()).generate(**batch(), **given)
        theirs = pictures().generate(**batch(), **given)
        for own, their in zip(ours.logits, theirs.logits, strict=True):
            torch.testing.assert_close(own.double(), their.double(), rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize(
        "asked", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3, "seed": 1}]
    )
    def test_an_image_is_encoded_once_for_all_sequences(self, asked: dict[str, Any]) -> None:
        model, seen = pictures(), []
        handle = model.model.visual.register_forward_hook(lambda *_: seen.append(1))
        try:
            es.wrap(model).generate(**batch(), max_new_tokens=6, **asked)
        finally:
            handle.remove()
        assert len(seen) == 2  # once per row

    def test_nothing_stays_on_the_module(self) -> None:
        model = pictures()
        model.model.rope_deltas = before = torch.tensor([[5]])
        es.wrap(model).generate(**batch(), max_new_tokens=2)
        assert model.model.rope_deltas is before


class Placing(torch.nn.Module):
    """Finds positions on two axes, and how far what is generated stands from the length."""

    def __init__(self, found: list[list[int]], shift: int) -> None:
        super().__init__()
        self.found, self.shift = torch.tensor(found), shift

    def get_rope_index(self, input_ids: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
        assert input_ids.shape[1] == self.found.shape[1] and grid.shape == (1, 3)
        return self.found[:, None], torch.tensor([[self.shift]])


def place(shift: int) -> Tensor:
    """(2, n) positions of four ids, of which the greatest is 5."""
    module = Placing([[0, 1, 1, 4], [0, 1, 2, 5]], shift)
    foreign: Any = SimpleNamespace(base=module, device=torch.device("cpu"))
    prompt = Prompt(ids=np.arange(4) + 5, whole={"grid": torch.ones(1, 3)})
    found = placed(foreign, prompt).positions
    assert found is not None
    return found


@pytest.mark.parametrize(("shift", "first"), [(2, None), (3, 7), (9, 13)])
def test_the_next_position_is_told_where_it_is_not_the_one_after(
    shift: int, first: int | None
) -> None:
    wanted = [[0, 1, 1, 4], [0, 1, 2, 5]]
    assert place(shift).tolist() == [row + [first] * (first is not None) for row in wanted]


@pytest.mark.parametrize("shift", [1, 0, -3])
def test_generated_tokens_cannot_stand_before_the_end_of_the_prompt(shift: int) -> None:
    with pytest.raises(UnsupportedError, match=f"wanted 6 or more; got {4 + shift}"):
        place(shift)


class TestImagesWithoutGrids:
    """Rows of a LLaVA, whose pixels have a batch dimension that counts images."""

    @pytest.mark.parametrize("counts", [(1, 1), (2, 1), (0, 2), (0, 0, 1)])
    def test_they_go_to_the_rows_with_their_places(self, counts: tuple[int, ...]) -> None:
        model = llava()
        rows = [[5, *[IMAGE] * (4 * count), 6, 7] for count in counts]
        width = max(map(len, rows))
        ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
        generator = torch.Generator().manual_seed(3)
        shape = (sum(counts), 3, 8, 8)
        given = {
            "attention_mask": (ids != PAD).long(),
            "pixel_values": torch.randn(shape, generator=generator, dtype=torch.float64),
            "max_new_tokens": 6,
            "num_beams": 2,
        }
        ours, theirs = es.wrap(model).generate(ids, **given), model.generate(ids, **given)
        assert ours.tolist() == theirs.tolist()

    def test_images_that_cannot_be_told_apart_are_to_be_listed(self) -> None:
        ids = torch.tensor([[5, 6], [7, 8]])
        with pytest.raises(RequestError, match="one tensor per row"):
            es.wrap(llava()).generate(ids, pixel_values=torch.randn(3, 3, 8, 8), max_new_tokens=1)

    def test_a_picture_of_a_mapping_has_the_shape_of_the_forward(self) -> None:
        model, ids = llava(), [5, *[IMAGE] * 4, 6, 7]
        pixels = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(3)).double()
        theirs = model.generate(torch.tensor([ids]), pixel_values=pixels, max_new_tokens=6)

        def asked(value: Tensor) -> Any:
            prompt = {"input_ids": ids, "pixel_values": value}
            return es.generate(model, None, [prompt], max_new_tokens=6)

        assert asked(pixels) == theirs[:, 7:].tolist()
        for value in (pixels[0], pixels[None]):
            with pytest.raises(RequestError, match="given by name does not fit the prompt"):
                asked(value)


def test_a_declared_picture_may_lack_its_batch() -> None:
    model = tiny_llama(vocab_size=320)
    width = model.width

    def encoder(pixels: Tensor) -> Tensor:
        return pixels.flatten(1).sum(1)[:, None, None].expand(-1, 4, width)

    model.prompt_inputs = [es.PromptInput("pixel_values", encoder, (3, 8, 8), token=300)]
    pixels = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(3))
    row, one = (
        es.generate(
            model,
            None,
            [{"input_ids": [5, *[300] * 4, 6], "pixel_values": value}],
            max_new_tokens=4,
        )
        for value in (pixels[0], pixels)
    )
    assert row == one


@cache
def llava() -> Any:
    text = transformers.LlamaConfig(**{**TEXT, "rope_parameters": None}, eos_token_id=None)
    vision = transformers.CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
    )
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=IMAGE
    )
    model = randomised(transformers.LlavaForConditionalGeneration(config))
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    return model


class TestTypes:
    @pytest.mark.parametrize("use_cache", [True, False])
    @pytest.mark.parametrize("beams", [1, 2])
    def test_those_of_gpt2_go_on_with_the_last(self, beams: int, use_cache: bool) -> None:
        model = gpt2()
        ids = torch.tensor([[5, 6, 7, 8], [1, 9, 10, 11]])
        types = torch.tensor([[30, 31, 30, 31], [0, 33, 34, 35]])
        given = {
            "attention_mask": (ids != PAD).long(),
            "token_type_ids": types,
            "num_beams": beams,
            "use_cache": use_cache,
            "max_new_tokens": 8,
        }
        ours, theirs = es.wrap(model).generate(ids, **given), model.generate(ids, **given)
        assert ours.tolist() == theirs.tolist()
        plain = {**given, "token_type_ids": None}
        assert es.wrap(model).generate(ids, **plain).tolist() != ours.tolist()

    def test_prompts_that_begin_alike_do_not_share_what_differs(self) -> None:
        model, ids = gpt2(), list(range(5, 25))
        kinds = [np.full(20, 30), np.r_[np.full(19, 30), 31], np.full(20, 41)]
        prompts = [{"input_ids": ids, "token_type_ids": kind} for kind in kinds]
        prompts += [{"input_ids": ids}, {"input_ids": ids, "position_ids": range(20)}]
        found = es.generate(model, None, prompts, max_new_tokens=8)
        for own, kind in zip(found, [*kinds, None, None], strict=True):
            given = {} if kind is None else {"token_type_ids": torch.tensor(kind)[None]}
            theirs = model.generate(torch.tensor([ids]), max_new_tokens=8, **given)
            assert list(own) == theirs[0, 20:].tolist()


@cache
def gpt2() -> Any:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 60, "n_positions": 64}
    config = transformers.GPT2Config(
        **sizes, eos_token_id=None, bos_token_id=None, tie_word_embeddings=False
    )
    config.pad_token_id = PAD
    return randomised(transformers.GPT2LMHeadModel(config))


class TestRefusals:
    def test_a_wrong_name_proposes_the_nearest(self) -> None:
        wrapped = es.wrap(pictures())
        with pytest.raises(es.EverystepError, match="pixel_values"):
            wrapped.generate(torch.tensor([[5]]), pixel_value=torch.ones(1))
        prompt = {"input_ids": [5], "pixel_value": torch.ones(1)}
        with pytest.raises(es.EverystepError, match="pixel_values"):
            es.generate(wrapped, None, [prompt], max_new_tokens=1)

    def test_a_model_that_takes_none_says_so(self) -> None:
        with pytest.raises(es.EverystepError, match="pixel_values"):
            es.wrap(gpt2()).generate(torch.tensor([[5]]), pixel_values=torch.ones(1))

    @pytest.mark.parametrize(
        ("name", "change"),
        [
            ("image_grid_thw", lambda value: value[:2]),
            ("pixel_values", lambda value: value[:-4]),
            ("mm_token_type_ids", lambda value: value[:, 1:]),
            ("mm_token_type_ids", lambda value: None),
            ("pixel_values", lambda value: [value]),
            ("pixel_values", lambda value: torch.tensor(1.0)),
            ("pixel_values", lambda value: "a picture"),
        ],
    )
    def test_counts_that_do_not_fit(self, name: str, change: Any) -> None:
        given = batch()
        given[name] = change(given[name])
        with pytest.raises(RequestError):
            es.wrap(pictures()).generate(**given, max_new_tokens=2)

    def test_an_image_after_cached_positions(self) -> None:
        wrapped = es.wrap(pictures())
        prefix = es.prefill(wrapped, None, [5, 6])
        with pytest.raises(RequestError, match="after cached positions"):
            es.generate(wrapped, None, [rows_of_batch()[1]], prefix=prefix, max_new_tokens=2)
