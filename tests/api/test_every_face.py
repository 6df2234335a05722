"""What a prompt may bring reaches every way of calling alike: many prompts, streams, runs that are
rewound, explained, forked and saved, and the asynchronous engine."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

import everystep as es
from everystep.api.model import LanguageModel
from everystep.errors import EverystepError, RequestError
from tests.api.document import Document, boxes, images
from tests.bridge.families import model_of
from tests.executors.layout import SIDES, layout_model
from tests.executors.models import family_model, narrow_model

IDS = [5, 6, 7, 8, 9, 10]
QUIET: dict[str, Any] = {"max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0, "seed": 3}
SEARCHES: dict[str, dict[str, Any]] = {
    "sampled": {"do_sample": True, "temperature": 1.3},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
}


@dataclass(frozen=True)
class Shaking(es.Hook):
    """Adds to each embedding what only its position says; counts tokens."""

    size: float = 0.5
    gives: tuple[str, ...] = ("embeds",)

    def on_prompt(self, prompt: es.PromptMoment) -> int:
        return 0

    def before_step(self, step: es.BeforeStep) -> dict[str, Tensor]:
        embeds, places = step.embeds, torch.tensor([*step.positions])
        wave = torch.sin(places.double()[:, None] * torch.arange(1, embeds.shape[1] + 1))
        return {"embeds": embeds + self.size * wave.to(embeds)}

    def after_step(self, step: es.AfterStep) -> es.Next:
        return es.Next(memory=step.memory + 1)


@dataclass(frozen=True)
class Asked:
    """A model, a prompt of it, and the options that go with the prompt; `again`: those of them that
    no file can hold."""

    model: Any
    prompt: Any
    options: dict[str, Any]
    again: tuple[str, ...] = ()

    def call(self, search: str) -> dict[str, Any]:
        return {**QUIET, **SEARCHES[search], **self.options}


def embedded(model: Any, ids: list[int] = IDS) -> Tensor:
    core = es.wrap(model).core
    return core.network.embed(torch.tensor(ids)).detach()


@cache
def native() -> LanguageModel:
    return LanguageModel(narrow_model("llama", None, panels=True))


@cache
def ours() -> LanguageModel:
    return LanguageModel(family_model("llama"), executor="torch")


@cache
def document() -> Document:
    return Document()


def of_document() -> Asked:
    tokens = document().ids(2, 0)
    prompt = {"input_ids": tokens, "pixel_values": images(1), "bbox": boxes((2,))}
    return Asked(document().model, prompt, {})


def after_document() -> Asked:
    """A document in two parts, each with features; the prefix has those of the first."""
    first, second = of_document().prompt, {**of_document().prompt, "pixel_values": images(2)[1:]}
    prefix = es.prefill(document().model, prompt=first)
    return Asked(document().model, second, {"prefix": prefix}, ("prefix",))


def of_layout() -> Asked:
    sides = torch.randint(0, SIDES, (len(IDS), 4), generator=torch.Generator().manual_seed(1))
    model = LanguageModel(layout_model(), executor="torch")
    return Asked(model, {"input_ids": IDS, "bbox": sides}, {})


def hooked(model: Any) -> Asked:
    return Asked(model, IDS, {"hooks": [Shaking()]}, ("hooks",))


def after(model: Any, rest: Any) -> Asked:
    return Asked(model, rest, {"prefix": es.prefill(model, prompt=IDS[:3])}, ("prefix",))


MODELS: dict[str, Callable[[], Any]] = {
    "native": native,
    "torch": ours,
    "wrapped": lambda: model_of("llama"),
}
PROMPTS: dict[str, Callable[[Any], Asked]] = {
    "ids": lambda model: Asked(model, IDS, {}),
    "embeds": lambda model: Asked(model, {"inputs_embeds": embedded(model)}, {}),
    "both": lambda model: Asked(
        model, {"inputs_embeds": embedded(model), "input_ids": IDS[:4]}, {}
    ),
    "positions": lambda model: Asked(
        model, {"input_ids": IDS, "position_ids": [0, 1, 2, 6, 7, 11]}, {}
    ),
    "hooks": hooked,
    "hooks beside embeds": lambda model: Asked(
        model, {"inputs_embeds": embedded(model)}, {"hooks": [Shaking()]}, ("hooks",)
    ),
    "prefix": lambda model: after(model, IDS[3:]),
    "prefix and embeds": lambda model: after(model, {"inputs_embeds": embedded(model, IDS[3:])}),
}
CASES: dict[str, Callable[[], Asked]] = {
    **{
        f"{name}, {prompt}": lambda made=made, ask=ask: ask(made())
        for name, made in MODELS.items()
        for prompt, ask in PROMPTS.items()
    },
    **{
        f"{name}, {what}": lambda made=made, mask=mask: Asked(
            made(), {"input_ids": IDS, "attention_mask": mask}, {}
        )
        for name, made in MODELS.items()
        if name != "native"
        for what, mask in {
            "holes": [1, 0, 1, 1, 0, 1],
            "square": (torch.rand(6, 6, generator=torch.Generator().manual_seed(2)) < 0.7).tril(),
        }.items()
    },
    "features": of_document,
    "features and hooks": lambda: replace(
        of_document(), options={"hooks": [Shaking()]}, again=("hooks",)
    ),
    "features after a prefix": after_document,
    "named inputs": of_layout,
}


def found(result: Any) -> list[tuple[int, ...]]:
    return [one.tokens for one in (result if isinstance(result, list) else [result])]


def generated(one: Asked, search: str) -> list[tuple[int, ...]]:
    options = {**one.call(search), "seed": [3], "return_dict_in_generate": True}
    (result,) = es.generate(one.model, None, [one.prompt], **options)
    return found(result)


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("case", CASES)
def test_every_face_reads_the_prompt_alike(case: str, search: str) -> None:
    one = CASES[case]()
    wanted = generated(one, search)
    options = one.call(search)
    stream = es.stream(one.model, None, [one.prompt], **{**options, "seed": [3]})
    assert len([*stream]) > 0 and found(stream.results()[0]) == wanted
    run = es.open(one.model, None, one.prompt, **{**options, "seed": [3]})
    assert found(run.result()) == wanted

    async def asked() -> Any:
        async with es.AsyncEngine(one.model) as engine:
            first = engine.generate(one.prompt, **options, return_dict_in_generate=True)
            return await asyncio.gather(first, engine.generate(one.prompt, **options))

    first, second = asyncio.run(asked())
    assert found(first) == wanted
    assert [tuple(ids) for ids in (second if search == "beams" else [second])] == wanted


def opened(case: str, search: str) -> tuple[Asked, es.Run]:
    one = CASES[case]()
    return one, es.open(one.model, None, one.prompt, **{**one.call(search), "seed": 3})


@pytest.mark.parametrize("case", CASES)
def test_a_run_is_rewound_edited_explained_and_forked_on_every_prompt(case: str) -> None:
    one, run = opened(case, "sampled")
    twin = run.fork()
    wanted = twin.result().tokens
    assert [*islice(run, 3)] and run.tokens == wanted[:3]
    explained = run.explain(1)
    draw = explained.draw
    assert explained.chosen.token == wanted[1] and draw.low <= draw.number < draw.high
    run.rewind(2)
    assert run.result().tokens == wanted
    run.edit(2, [11])
    edited = es.open(one.model, None, one.prompt, **{**one.call("sampled"), "seed": 3})
    [*islice(edited, 2)]
    edited.send([11])
    run.rewind(3)
    assert run.tokens == edited.tokens == (*wanted[:2], 11)
    run.set(max_new_tokens=8), edited.set(max_new_tokens=8)
    assert run.result().tokens == edited.result().tokens


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("case", CASES)
def test_a_run_is_saved_and_resumed_on_every_prompt(case: str, search: str, tmp_path: Path) -> None:
    one, run = opened(case, search)
    [*islice(run, 3)]
    run.save(tmp_path / "a.run")
    again = {name: one.options[name] for name in one.again}
    resumed = es.resume(tmp_path / "a.run", one.model, **again)
    wanted = found(run.result())
    assert found(resumed.result()) == wanted
    for name in one.again:
        with pytest.raises(RequestError, match=name):
            es.resume(tmp_path / "a.run", one.model, **{n: again[n] for n in again if n != name})


def test_a_saved_run_knows_its_prefix_and_its_wrapped_model(tmp_path: Path) -> None:
    file, model = tmp_path / "a.run", copy.deepcopy(model_of("llama"))
    prefixes = [
        es.prefill(model, inputs_embeds=embedded(model, ids)[None]) for ids in ([5, 6], [5, 7])
    ]
    run = es.open(model, None, IDS, prefix=prefixes[0], **QUIET)
    [*islice(run, 2)]
    run.save(file)
    with pytest.raises(RequestError, match="another prefix"):
        es.resume(file, model, prefix=prefixes[1])
    with pytest.raises(RequestError, match="another prefix"):
        es.resume(file, model, prefix=None)
    assert es.resume(file, model, prefix=prefixes[0]).result().tokens == run.result().tokens
    for change in (0.5, 0.0):
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.lm_head.weight += change
        made = es.prefill(other, inputs_embeds=embedded(model, [5, 6])[None])
        if change:
            with pytest.raises(RequestError, match="another model"):
                es.resume(file, other, prefix=made)
        else:  # of another process, say
            assert es.resume(file, other, prefix=made).result().tokens == run.result().tokens


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_a_run_of_other_adapters_is_of_another_model(tmp_path: Path) -> None:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(copy.deepcopy(model_of("llama")), config)
    model.add_adapter("other", config)
    run = es.open(model, None, IDS, **QUIET)
    [*islice(run, 2)]
    run.save(tmp_path / "a.run")
    assert es.resume(tmp_path / "a.run", model).result() == run.result()
    model.set_adapter("other")
    with pytest.raises(RequestError, match="another model"):
        es.resume(tmp_path / "a.run", model)
    tails = {
        name: es.prefill(model, prompt=IDS[:3], adapter_names=name) for name in ("default", "other")
    }
    for name, prefix in tails.items():
        asked = {**QUIET, "adapter_names": name}
        wanted = es.generate(model, None, [IDS], **asked)
        assert es.generate(model, None, [IDS[3:]], prefix=prefix, **asked) == wanted
    with pytest.raises(RequestError, match="other adapters"):
        es.generate(model, None, [IDS[3:]], prefix=tails["other"], **QUIET, adapter_names="default")


def test_what_cannot_be_saved_or_changed_is_refused(tmp_path: Path) -> None:
    where = {"input_ids": IDS, "position_ids": lambda places: 2 * places}
    run = es.open(ours(), None, where, **QUIET)
    with pytest.raises(RequestError, match="position_ids as a tensor"):
        run.save(tmp_path / "a.run")
    prefix = es.prefill(ours(), prompt=IDS[:3])
    for name, value in {
        "prefix": prefix, "hooks": [Shaking()], "adapter_names": "a", "cache_salt": "b",
    }.items():  # fmt: skip
        with pytest.raises(EverystepError, match=name):
            run.set(**{name: value})
    with pytest.raises(RequestError, match="return_dict_in_generate"):
        es.open(ours(), None, IDS, return_dict_in_generate=False)
    for given in ({"hooks": [Shaking()]}, {"max_new_tokens": 3}, {"seed": 2}, {"logprobs": 1}):
        with pytest.raises(RequestError, match=next(iter(given))):
            es.prefill(ours(), input_ids=torch.tensor([IDS]), **given)


def test_features_after_a_prefix_are_those_of_one_prompt() -> None:
    one, parts = after_document(), of_document().prompt
    ids = torch.tensor(one.prompt["input_ids"])
    each = [document().embeds(ids, pixels, parts["bbox"][0]) for pixels in images(2)]
    embeds = torch.cat(each, dim=1)[0]
    wanted = es.generate(document().model, None, [{"inputs_embeds": embeds}], **QUIET)
    assert es.generate(one.model, None, [one.prompt], **one.options, **QUIET) == wanted


@dataclass(frozen=True)
class Watching(es.Hook):
    """Keeps what it is shown of the prompt, and gives the same."""

    seen: list[Tensor]
    gives: tuple[str, ...] = ("embeds",)

    def before_step(self, step: es.BeforeStep) -> dict[str, Tensor]:
        if not len(step.generated):
            self.seen.append(step.embeds.clone())
        return {"embeds": step.embeds}


@pytest.mark.parametrize("chunk", [None, 3])
def test_a_hook_sees_features_at_their_places(chunk: int | None) -> None:
    one, parts = of_document(), of_document().prompt
    ids = torch.tensor(parts["input_ids"])
    wanted = document().embeds(ids, parts["pixel_values"][0], parts["bbox"][0])[0]
    seen: list[Tensor] = []
    given = {
        "input_ids": ids[None], "pixel_values": images(1), "bbox": parts["bbox"],
        "prefill_chunk_size": chunk, "num_beams": 2, **QUIET,
    }  # fmt: skip
    found = one.model.generate(**given, hooks=[Watching(seen)])
    assert found.tolist() == one.model.generate(**given).tolist()
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_a_prefix_of_a_mapping_is_continued_by_embeddings(name: str) -> None:
    model = MODELS[name]()
    embeds, places = embedded(model), torch.tensor([0, 1, 2, 5, 6, 9])
    first = {"inputs_embeds": embeds[:3], "position_ids": places[:3]}
    rest = {"inputs_embeds": embeds[3:], "position_ids": places[3:]}
    whole = {"inputs_embeds": embeds, "position_ids": places}
    for search in SEARCHES.values():
        options = {**QUIET, **search}
        wanted = es.generate(model, None, [whole], **options)
        assert es.generate(
            model, None, [rest], prefix=es.prefill(model, prompt=first), **options
        ) == (wanted)
    of_ids = es.prefill(model, prompt={"input_ids": IDS[:3], "position_ids": places[:3]})
    run = es.open(model, None, rest, prefix=of_ids, **QUIET)
    assert [list(run.result().tokens)] == es.generate(model, None, [whole], **QUIET)


def test_prompts_with_equal_features_share_them_in_an_engine_and_others_never() -> None:
    model, ids = document().model, [*of_document().prompt["input_ids"], *range(5, 25)]
    image, other = images(2)[:1], images(2)[1:]
    given = {"bbox": boxes((2,))}
    prompts = [{"input_ids": ids, "pixel_values": one, **given} for one in (image, image, other)]
    asked = {**QUIET, "return_dict_in_generate": True}
    alone = [es.generate(model, None, [prompt], **asked)[0] for prompt in prompts]
    first, again, new = es.generate(model, None, prompts, **asked)
    assert [one.tokens for one in (first, again, new)] == [one.tokens for one in alone]
    assert (first.cached_tokens, again.cached_tokens) == (0, len(ids) - 1)
    assert new.cached_tokens == 0
    hooked = es.generate(model, None, prompts[:2], hooks=[Shaking()], **asked)
    assert [one.cached_tokens for one in hooked] == [0, 0]
