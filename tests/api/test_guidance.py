"""Guidance in calls about prompts: the tokens are those of `model.generate` with the same ids."""

from __future__ import annotations

import asyncio
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

import everystep as es
from everystep.errors import EverystepError, RequestError
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer

MODEL, TOKENIZER = tiny_llama(vocab_size=320), tiny_tokenizer(320)
PROMPT, AWAY = "Is it so", "Why not"
IDS, AWAY_IDS = TOKENIZER.encode(PROMPT), TOKENIZER.encode(AWAY)
QUIET: dict[str, Any] = {"max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}
GUIDED: dict[str, Any] = {**QUIET, "guidance_scale": 3.0}
USER = {"role": "user", "content": AWAY}


def wanted(away: list[int] = AWAY_IDS, **given: Any) -> list[int]:
    """The tokens of `model.generate`, after the prompt unless that is given as embeddings."""
    given = {"input_ids": torch.tensor([IDS]), **given}
    found = MODEL.generate(**given, negative_prompt_ids=torch.tensor([away]), **GUIDED)[0].tolist()
    return found[len(IDS) :] if "inputs_embeds" not in given else found


def asked(prompt: Any, **given: Any) -> list[list[int]]:
    """The tokens of every call about prompts."""
    given = {**GUIDED, **given}
    whole = {**given, "return_dict_in_generate": True}
    one = es.generate(MODEL, TOKENIZER, [prompt], **whole)[0]
    stream = es.stream(MODEL, TOKENIZER, [prompt], **given)
    assert len([*stream]) > 0
    run = es.open(MODEL, TOKENIZER, prompt, **given).result()

    async def submitted() -> Any:
        async with es.AsyncEngine(MODEL, TOKENIZER) as engine:
            return await engine.generate(prompt, **whole)

    results = (one, stream.results()[0][0], run, asyncio.run(submitted()))
    return [[*each.tokens] for each in results]


def test_a_text_is_guided_away_from_in_every_call() -> None:
    expected = wanted()
    assert expected != MODEL.generate(torch.tensor([IDS]), **GUIDED)[0, len(IDS) :].tolist()
    for away in (AWAY, AWAY_IDS, {"text": AWAY}, {"input_ids": AWAY_IDS}):
        assert asked(PROMPT, negative_prompt=away) == [expected] * 4


def test_messages_are_read_by_the_template() -> None:
    away = TOKENIZER.apply_chat_template([USER], add_generation_prompt=True, return_dict=False)
    assert asked(IDS, negative_prompt=[USER]) == [wanted([*away])] * 4


def test_a_prompt_of_embeddings_is_guided_by_a_text() -> None:
    embeds = MODEL.get_input_embeddings()(torch.tensor([IDS]))
    expected = wanted(inputs_embeds=embeds, input_ids=None)
    assert asked({"inputs_embeds": embeds[0]}, negative_prompt=AWAY) == [expected] * 4
    with pytest.raises(RequestError, match="or negative_prompt to another call"):
        es.generate(MODEL, TOKENIZER, [{"inputs_embeds": embeds[0]}], **GUIDED)


def test_each_prompt_of_a_batch_may_have_its_own() -> None:
    options = [{"negative_prompt": AWAY, "guidance_scale": 3.0}, {}]
    guided, plain = es.generate(MODEL, None, [IDS, IDS], options=options[1:] * 2, **QUIET)
    assert guided == plain
    given = [{**one, "negative_prompt": AWAY_IDS} if one else one for one in options]
    guided, plain = es.generate(MODEL, None, [IDS, IDS], options=given, **QUIET)
    assert guided == wanted() != plain


def test_a_chat_is_guided() -> None:
    message = {"role": "user", "content": PROMPT}
    ids = TOKENIZER.apply_chat_template([message], add_generation_prompt=True, return_dict=False)
    expected = wanted(input_ids=torch.tensor([[*ids]]))
    greedy = {"do_sample": False, "negative_prompt": AWAY, **GUIDED}
    found = es.chat(MODEL, TOKENIZER, PROMPT, **greedy)
    assert found == TOKENIZER.decode(expected[len(ids) - len(IDS) :], skip_special_tokens=True)


def test_a_guided_run_is_saved_and_resumed(tmp_path: Path) -> None:
    run = es.open(MODEL, TOKENIZER, PROMPT, negative_prompt=AWAY, **GUIDED)
    [*islice(run, 3)]
    run.save(tmp_path / "a.run")
    assert [*es.resume(tmp_path / "a.run", MODEL, TOKENIZER).result().tokens] == wanted()
    with pytest.raises(EverystepError, match="negative_prompt"):
        run.set(negative_prompt=PROMPT)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"guidance_scale": None}, "negative_prompt has no effect without guidance_scale"),
        ({"negative_prompt": {"inputs_embeds": torch.zeros(2, 32)}}, "is read as ids alone"),
        ({"negative_prompt": []}, "empty"),
        ({"negative_prompt_ids": [AWAY_IDS]}, "negative_prompt_ids.* Pass negative_prompt, or"),
    ],
)
def test_what_cannot_guide_is_refused(given: dict[str, Any], said: str) -> None:
    options = {**GUIDED, "negative_prompt": AWAY, **given}
    with pytest.raises(EverystepError, match=said):
        es.generate(MODEL, TOKENIZER, PROMPT, **options)
    with pytest.raises(EverystepError, match=said):
        es.open(MODEL, TOKENIZER, PROMPT, **options)


def test_what_prompts_have_in_common_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    encode = type(TOKENIZER).encode

    def noted(self: Any, text: Any, **how: Any) -> Any:
        read.append(text)
        return encode(self, text, **how)

    monkeypatch.setattr(type(TOKENIZER), "encode", noted)
    prompts = [PROMPT, "It is", "So it is", "So"]
    found = es.generate(MODEL, TOKENIZER, prompts, negative_prompt=AWAY, **GUIDED)
    assert read.count(AWAY) == 1 and {*read} == {AWAY, *prompts}
    own = [{"negative_prompt": one} for one in (AWAY, "Not so", AWAY, "Not so")]
    apart = es.generate(MODEL, TOKENIZER, prompts, options=own, **GUIDED)
    assert (apart[0], apart[2]) == (found[0], found[2]) and apart[1] != found[1]


def test_a_rectangle_takes_ids() -> None:
    with pytest.raises(EverystepError, match=r"negative_prompt .* Pass negative_prompt_ids"):
        MODEL.generate(torch.tensor([IDS]), negative_prompt=AWAY, **GUIDED)
