"""Stop strings in whole calls: every way of generating stops at the same place, trimmed or not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import everystep as es
from everystep.api.model import LanguageModel
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer
from everystep.text import Trimmer

PROMPTS = ["Hello", "Why is it", "日本"]
WAYS: list[dict[str, Any]] = [
    {},
    {"do_sample": True},
    {"do_sample": True, "num_return_sequences": 2},
    {"prompt_lookup_num_tokens": 3},
    {"prompt_lookup_num_tokens": 3, "do_sample": True},
]


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return tiny_llama(vocab_size=320)


def generated(model: LanguageModel, prompts: Any = PROMPTS, **options: Any) -> list[Any]:
    given = {"max_new_tokens": 20, "seed": 3, "eos_token_id": None, **options}
    found = es.generate(model, tiny_tokenizer(), prompts, return_dict_in_generate=True, **given)
    return [one for each in found for one in (each if isinstance(each, list) else [each])]


def middle(tokens: tuple[int, ...], start: int, count: int) -> str:
    """A part of what was generated that is text."""
    text = str(tiny_tokenizer().decode(tokens))
    good = [p for p in text[start:].split("\ufffd") if len(p) >= count and "<" not in p]
    return good[0][:count] if good else text[-1]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_way_stops_at_the_first_token_that_completes_a_string(
    model: LanguageModel, way: dict[str, Any]
) -> None:
    tokenizer = tiny_tokenizer()
    free = generated(model, **way)
    string = middle(free[0].tokens, 3, 2)
    for plain, stopped in zip(free, generated(model, stop_strings=string, **way), strict=True):
        assert stopped.tokens == plain.tokens[: len(stopped.tokens)]
        text = tokenizer.decode(stopped.tokens)
        assert string not in tokenizer.decode(stopped.tokens[:-1])
        assert (string in text) == (stopped.finish_reason.kind == "stop")
        assert stopped.finish_reason.matched in (string, None)


@pytest.mark.parametrize("beams", [2, 4])
def test_beams_end_with_the_string(model: LanguageModel, beams: int) -> None:
    free = generated(model, PROMPTS[:1], num_beams=beams)
    string = middle(free[0].tokens, 2, 1)
    (one,) = generated(model, PROMPTS[:1], num_beams=beams, stop_strings=[string])
    tokenizer = tiny_tokenizer()
    assert string not in tokenizer.decode(one.tokens[:-1])
    assert (string in tokenizer.decode(one.tokens)) == (one.finish_reason.matched == string)


@pytest.mark.parametrize("way", [*WAYS, {"num_beams": 3}], ids=str)
@pytest.mark.parametrize("count", [1, 3])
def test_trimmed_text_lacks_the_string_streamed_or_not(
    model: LanguageModel, way: dict[str, Any], count: int
) -> None:
    options = {"stop_strings": middle(generated(model, **way)[0].tokens, 4, count), **way}
    options |= {"max_new_tokens": 20, "seed": 3, "eos_token_id": None}
    whole = generated(model, **options)
    trimmed = generated(model, trim_stop_strings=True, **options)
    for one, other in zip(whole, trimmed, strict=True):
        assert one.tokens == other.tokens
        if one.finish_reason.kind == "stop":
            assert one.text.startswith(other.text)
            assert options["stop_strings"] not in other.text
        else:
            assert one.text == other.text
    told: dict[tuple[int, int], str] = {}
    for event in es.stream(model, tiny_tokenizer(), PROMPTS, trim_stop_strings=True, **options):
        key = (int(event.request_id), event.index)
        told[key] = told.get(key, "") + event.text
    assert [told[key] for key in sorted(told)] == [one.text for one in trimmed]


@pytest.mark.parametrize(
    ("strings", "before", "text", "matched", "left"),
    [
        (("stop",), "", "please stopping", "stop", "please "),
        (("stop",), "", "please sto", None, "please sto"),
        (("stop", "op"), "", "please stop", "op", "please st"),
        (("stop",), "a st", "op", "stop", ""),
        (("aab",), "", "aaaab", "aab", "aa"),
        (("日本",), "", "中日本", "日本", "中"),
        (("\n<eos>",), "", "end\n", "\n<eos>", "end"),
        (("<eos>",), "", "end", "<eos>", "end"),
        ((), "", "end", 7, "end"),
    ],
)
def test_however_text_is_divided_the_same_is_left(
    strings: tuple[str, ...], before: str, text: str, matched: Any, left: str
) -> None:
    rng = np.random.default_rng(0)
    assert Trimmer(strings, before).finish(text, matched) == left
    for _ in range(20):
        last = text.find(matched) + len(matched) - 1 if isinstance(matched, str) else len(text)
        last = last if isinstance(matched, str) and matched in text else max(len(text) - 1, 0)
        cuts = sorted(rng.integers(0, max(last, 0) + 1, 3).tolist())
        trimmer = Trimmer(strings, before)
        pieces = [trimmer.push(text[a:b]) for a, b in zip([0, *cuts], cuts, strict=False)]
        assert "".join(pieces) + trimmer.finish(text[cuts[-1] :], matched) == left


def test_a_whole_string_within_the_prompt_trims_nothing() -> None:
    assert Trimmer(("e",), " the").finish("abe", "e") == "ab"
    assert Trimmer(("he a",), " the a the").finish(" a", "he a") == ""
    trimmer = Trimmer(("e",), " the")
    assert trimmer.push("ab") + trimmer.finish("e", "e") == "ab"


def test_a_string_of_the_prompt_does_not_end_but_may_begin_there(model: LanguageModel) -> None:
    ids = torch.tensor([tiny_tokenizer().encode("Q: who")])
    options: dict[str, Any] = {"tokenizer": tiny_tokenizer(), "max_new_tokens": 4}
    plain = model.generate(ids, max_new_tokens=4)
    assert torch.equal(model.generate(ids, stop_strings="Q:", **options), plain)
    first = str(tiny_tokenizer().decode([int(plain[0, ids.shape[1]])]))
    stopped = model.generate(ids, stop_strings="who" + first, **options)
    assert stopped.shape[1] == ids.shape[1] + 1


def test_trimming_without_stop_strings_is_told_of(model: LanguageModel) -> None:
    tokenizer, given = tiny_tokenizer(), {"max_new_tokens": 2, "trim_stop_strings": True}
    with pytest.warns(UserWarning, match="trim_stop_strings has no effect without stop_strings"):
        es.generate(model, tokenizer, PROMPTS, **given)
    with pytest.warns(UserWarning, match="trim_stop_strings has no effect without stop_strings"):
        es.stream(model, tokenizer, PROMPTS[0], **given).close()
    with pytest.warns(UserWarning, match="trim_stop_strings has no effect without stop_strings"):
        es.open(model, tokenizer, PROMPTS[0], **given)
