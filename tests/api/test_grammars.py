"""Grammars through every way of calling and under every strategy: what comes out follows them, and
nothing else about a call changes it."""

from __future__ import annotations

import asyncio
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import everystep as es
from everystep.api.model import LanguageModel
from everystep.engine import Continuous, Engine, Lockstep, PromptLookup, audit
from everystep.engine.forced import ForcedTokens
from everystep.errors import EverystepError, RequestError
from everystep.processors.grammars.grammar import GrammarPlace
from everystep.processors.grammars.mask import GrammarMask
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer
from everystep.types import Prompt, Request

TOKENIZER = tiny_tokenizer()
PROMPTS = ["Hi", "Tell the truth", "a"]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,4}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["dog", "cat"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
EXPRESSION = r"[ab]{2,5}( the| and)+c?"
LARK = 'start: "x" start "y" | " was"'
CHOICES = ["yes", "no", "perhaps the"]
GRAMMARS: dict[str, dict[str, Any]] = {
    "schema": {"schema": SCHEMA},
    "regex": {"regex": EXPRESSION},
    "grammar": {"grammar": LARK},
    "choices": {"choices": CHOICES},
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True},
    "top_k": {"do_sample": True, "top_k": 4, "temperature": 0.8, "top_p": 0.9},
    "several": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "beam sampling": {"num_beams": 3, "do_sample": True},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "guidance": {"guidance_scale": 1.5},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 9},
}
LENGTH = 110
COMMON: dict[str, Any] = {"max_new_tokens": LENGTH, "seed": 5, "return_dict_in_generate": True}


@cache
def model(seed: int = 0) -> LanguageModel:
    size = {"vocab_size": 320, "hidden_size": 16, "max_position_embeddings": 1024}
    return tiny_llama(seed, dtype=torch.float32, **size)


def follows(kind: str, text: str) -> bool:
    """Whether a text is of the grammar, by other means than the library's."""
    if kind == "schema":
        value = json.loads(text)
        fits = re.fullmatch("[a-z]{1,4}", value["name"]) and value["kind"] in ("dog", "cat")
        return bool(fits) and 0 <= value["age"] <= 99 and list(value) == ["name", "age", "kind"]
    if kind == "grammar":
        middle = text.strip("xy")
        return middle == " was" and text.count("x") == text.count("y") == text.find(" ")
    return text in CHOICES if kind == "choices" else bool(re.fullmatch(EXPRESSION, text))


def flat(results: Any) -> list[es.Generated]:
    listed = results if isinstance(results, list) else [results]
    return [one for part in listed for one in (flat(part) if isinstance(part, list) else [part])]


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("kind", GRAMMARS)
def test_what_ends_follows_its_grammar(kind: str, name: str) -> None:
    asked = {**GRAMMARS[kind], **STRATEGIES[name], **COMMON}
    found = flat(es.generate(model(), TOKENIZER, PROMPTS, **asked))
    ended = [one for one in found if one.finish_reason.kind == "stop"]
    assert ended
    assert [one.text for one in ended if not follows(kind, one.text)] == []
    assert all(one.finish_reason.matched == 2 == one.tokens[-1] for one in ended)


@pytest.mark.parametrize("name", STRATEGIES)
def test_what_is_cut_could_have_gone_on(name: str) -> None:
    """A text that ends at its length is the beginning of one of the grammar."""
    asked = {**GRAMMARS["schema"], **STRATEGIES[name], **COMMON, "max_new_tokens": 9}
    mask = es.open(model(), TOKENIZER, "a", schema=SCHEMA)._group.request.processors[0]
    for one in flat(es.generate(model(), TOKENIZER, PROMPTS, **asked)):
        place = GrammarPlace(mask.grammar, 0, (2,))
        assert one.finish_reason.kind == "length"
        assert place.mask(torch.tensor([*one.tokens, 0]).numpy(), len(one.tokens)) is not None


# --- nothing else changes it ----------------------------------------------------------------------


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_batch_is_its_prompts(name: str) -> None:
    """Together, each alone, in a rectangle, and without drafts: the same."""
    asked = {**GRAMMARS["schema"], **STRATEGIES[name], **COMMON, "max_new_tokens": 30, "seed": 7}
    together = es.generate(model(), TOKENIZER, PROMPTS, **{**asked, "seed": [7, 8, 9]})
    for index, prompt in enumerate(PROMPTS):
        alone = es.generate(model(), TOKENIZER, prompt, **{**asked, "seed": 7 + index})
        found = [one.tokens for one in flat(together[index])]
        assert found == [one.tokens for one in flat(alone)]
    if name != "guidance":  # whose negative prompts are not padded alike
        encoded = TOKENIZER(PROMPTS, padding=True, return_tensors="pt")
        out = model().generate(**encoded, tokenizer=TOKENIZER, **{**asked, "seed": [7, 8, 9]})
        assert out.text == [one.text for one in flat(together)]


def requests(name: str, drafts: bool = True) -> list[Request]:
    found = []
    for index, (prompt, kind) in enumerate(zip(PROMPTS, GRAMMARS, strict=False)):
        asked = {**GRAMMARS[kind], **STRATEGIES[name], "max_new_tokens": 40, "seed": index}
        run = es.open(model(), TOKENIZER, prompt, **asked)
        request = run._group.request
        parts = {one: getattr(request, one) for one in ("strategy", "draws", "processors")}
        found.append(
            Request(
                str(index),
                Prompt(ids=request.prompt.ids),
                **parts,
                stops=request.stops,
                companions=request.companions,
                readout=request.readout,
                drafter=request.drafter if drafts else None,
                max_length=request.max_length,
            )
        )
    return found


def outcome(engine: Engine, asked: list[Request], *at: int) -> list[Any]:
    """Tokens, scores and reasons; with preemptions of all groups after so many steps."""
    groups = [engine.submit(one) for one in asked]
    while engine.pending:
        engine.step()
        if engine.counts.steps in at:
            for group in list(engine.scheduler.groups):
                engine.preempt(group)
    audit(engine)
    return [
        [
            (done.tokens.tolist(), done.score, done.reason.kind)
            for done in g.request.strategy.finish(g)
        ]
        for g in groups
    ]


@pytest.mark.parametrize("name", ["sampled", "several", "beams", "contrastive", "lookup"])
def test_scheduling_and_drafts_are_invisible(name: str) -> None:
    own = tiny_llama(0, vocab_size=320, hidden_size=16)  # in float64

    def run(scheduler: Any, *at: int, drafts: bool = True) -> tuple[list[Any], int]:
        engine = Engine(own.executor(frozenset({"hidden"})), scheduler)
        return outcome(engine, requests(name, drafts), *at), engine.counts.drafted

    wanted, none = run(Lockstep(), drafts=False)
    found, drafted = run(Lockstep())
    assert (found, none) == (wanted, 0)
    assert bool(drafted) is (name not in ("beams", "contrastive"))
    assert run(Continuous(token_budget=16, max_rows=9), 7, 20)[0] == wanted


def test_forced_tokens_are_drafts_that_are_never_rejected() -> None:
    ids = TOKENIZER(PROMPTS[0], return_tensors="pt")
    out = model().generate(**ids, tokenizer=TOKENIZER, schema=SCHEMA, **COMMON)
    told = out.speculation
    assert told["drafted"] == told["accepted"] >= 10
    (request, *_) = requests("greedy")
    assert request.drafter == ForcedTokens()
    assert requests("lookup")[0].drafter == ForcedTokens(PromptLookup(3, 2, (2,), "costs"))
    assert requests("beams")[0].drafter is None


# --- runs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["greedy", "sampled", "beams", "contrastive"])
def test_a_saved_run_ends_as_the_one_that_went_on(name: str, tmp_path: Path) -> None:
    asked = {"schema": SCHEMA, **STRATEGIES[name], "max_new_tokens": 60, "seed": 3}
    run = es.open(model(), TOKENIZER, PROMPTS[1], **asked)
    for _ in range(7):
        next(run)
    run.save(tmp_path / "run")
    fork = run.fork()
    wanted = flat(run.result())
    again = es.resume(tmp_path / "run", model(), TOKENIZER)
    for other in (fork, again):
        assert [one.tokens for one in flat(other.result())] == [one.tokens for one in wanted]


def test_a_run_can_be_taken_back_explained_and_given_text() -> None:
    asked = {"schema": SCHEMA, "do_sample": True, "max_new_tokens": 60, "seed": 3}
    run = es.open(model(), TOKENIZER, PROMPTS[1], **asked)
    wanted = run.result().tokens
    run.rewind(9)
    assert run.result().tokens == wanted
    why = run.explain(4)
    assert why.chosen.token == wanted[4] and "GrammarMask" in str(why)
    run.rewind(len(wanted))
    run.send('{"name": "zoe"')
    text = run.result().text
    assert text.startswith('{"name": "zoe"') and follows("schema", text)


def test_what_is_given_has_to_follow_too() -> None:
    run = es.open(model(), TOKENIZER, PROMPTS[1], schema=SCHEMA, max_new_tokens=20)
    next(run)
    run.send("nonsense")
    with pytest.raises(RequestError, match="no token is left that schema allows"):
        run.result()


def test_a_stream_gives_the_text() -> None:
    asked = {"regex": EXPRESSION, "do_sample": True, "max_new_tokens": 30, "seed": 4}
    events = list(es.stream(model(), TOKENIZER, PROMPTS[0], **asked))
    text = "".join(event.text or "" for event in events)
    assert text == es.generate(model(), TOKENIZER, PROMPTS[0], **asked)
    assert follows("regex", text)


def test_an_asynchronous_engine_follows_them() -> None:
    async def ask() -> list[str]:
        async with es.AsyncEngine(model(), TOKENIZER) as engine:
            asked = [
                engine.generate(prompt, max_new_tokens=60, seed=1, **GRAMMARS[kind])
                for prompt, kind in zip(PROMPTS, ("regex", "choices", "regex"), strict=True)
            ]
            return list(await asyncio.gather(*asked))

    first, second, third = asyncio.run(ask())
    assert follows("regex", first) and follows("choices", second) and follows("regex", third)


def test_every_prompt_may_have_its_own() -> None:
    options = [GRAMMARS["choices"], GRAMMARS["regex"], {}]
    found = es.generate(model(), TOKENIZER, PROMPTS, options=options, max_new_tokens=30, seed=1)
    plain = es.generate(model(), TOKENIZER, PROMPTS, max_new_tokens=30, seed=1)
    assert follows("choices", found[0]) and follows("regex", found[1]) and found[2] == plain[2]


# --- what goes wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"schema": {}, "regex": "a"}, "schema and regex at once"),
        ({"choices": ["a"], "grammar": LARK}, "grammar and choices at once"),
        ({"regex": "a", "eos_token_id": None}, "needs a token that ends a text"),
        ({"schema": {"not": {}}}, "'not' at #"),
        ({"regex": "("}, "unclosed group"),
        ({"choices": []}, "not a list of texts"),
    ],
)
def test_what_is_impossible_is_refused_before_compute(asked: dict[str, Any], told: str) -> None:
    ids = TOKENIZER("a", return_tensors="pt")
    calls = (
        lambda: es.generate(model(), TOKENIZER, PROMPTS, **asked),
        lambda: es.stream(model(), TOKENIZER, PROMPTS, **asked),
        lambda: es.open(model(), TOKENIZER, PROMPTS[0], **asked),
        lambda: model().generate(**ids, tokenizer=TOKENIZER, **asked),
    )
    for call in calls:
        with pytest.raises(RequestError, match=re.escape(told)):
            call()


def test_a_grammar_needs_a_tokenizer() -> None:
    ids = TOKENIZER("a", return_tensors="pt")
    for name, value in (("schema", {}), ("regex", "a"), ("choices", ["a"]), ("grammar", LARK)):
        with pytest.raises(RequestError, match=f"{name} needs a tokenizer"):
            model().generate(**ids, **{name: value})


@pytest.mark.parametrize("name", ["greedy", "sampled", "several", "beams", "lookup"])
def test_where_nothing_is_left_that_prompt_fails_alone(name: str) -> None:
    """Choices are complete after a few tokens, and may not end so soon."""
    asked = {**STRATEGIES[name], "max_new_tokens": 30, "seed": 1}
    options = [{"choices": ["yes"], "min_new_tokens": 20}, {}, {"choices": ["a"]}]
    found = es.generate(
        model(), TOKENIZER, PROMPTS, options=options, on_error="return",
        return_dict_in_generate=True, **asked,
    )  # fmt: skip
    reason = flat(found[0])[0].finish_reason
    assert reason.kind == "error" and isinstance(reason.matched, EverystepError)
    assert "yes".startswith(flat(found[0])[0].text)
    assert {one.text for one in flat(found[2])} == {"a"}


@pytest.mark.parametrize(
    "beams",
    [
        {"num_beams": 4},
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
        {"num_beams": 4, "force_words_ids": [[9]]},
    ],
)
def test_there_are_no_more_hypotheses_than_texts_of_the_grammar(beams: dict[str, Any]) -> None:
    asked = {"choices": ["yes", "no"], "num_return_sequences": 4, **beams}
    found = es.generate(model(), TOKENIZER, PROMPTS[0], **asked, **COMMON)
    texts = [one.text for one in found]
    if "force_words_ids" in beams:  # no text has the word, and what fulfils nothing is not kept
        assert texts and {*texts} <= {"yes", "no"}
    else:
        assert {*texts} == {"yes", "no"}
    if "num_beam_groups" not in beams:  # groups may find the same
        assert len(texts) == len({*texts})
    out = model().generate(**TOKENIZER(PROMPTS[0], return_tensors="pt"), tokenizer=TOKENIZER,
                           **asked, **COMMON)  # fmt: skip
    assert len(out.sequences) == 4  # a rectangle is filled up


def test_the_callers_own_processor_sees_what_it_saw() -> None:
    seen: list[tuple[int, ...]] = []

    def watch(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(ids.shape))
        return scores

    asked = {"choices": CHOICES, "logits_processor": [watch], "max_new_tokens": 20}
    text = es.generate(model(), TOKENIZER, PROMPTS[0], **asked)
    assert follows("choices", text)
    assert [shape[0] for shape in seen] == [1] * len(seen)
    assert [shape[1] for shape in seen] == list(range(seen[0][1], seen[0][1] + len(seen)))


def test_the_mask_is_one_of_the_processors() -> None:
    (request, *_) = requests("top_k")
    assert [type(one) is GrammarMask for one in request.processors] == [True, False, False, False]


@pytest.mark.native
def test_the_best_of_a_row_decide_as_whole_rows_do() -> None:
    """Natively, greedy search sees the best of a row, unless somebody watches it."""
    own = tiny_tokenizer(9_000)
    wide = tiny_llama(1, dtype=torch.float32, vocab_size=9_000, hidden_size=16)
    reads: list[int] = []
    for kind, asked in GRAMMARS.items():
        given = {**asked, "max_new_tokens": 50}
        (found,) = es.generate(wide, own, PROMPTS[:1], **given, return_dict_in_generate=True)
        run = es.open(wide, own, PROMPTS[0], **given)
        engine = Engine(wide.executor(), Continuous(64, 4))
        reads.append(engine.submit(run._group.request).best)
        assert found.tokens == run.result().tokens
        assert found.finish_reason.kind == "length" or follows(kind, found.text)
    assert "native" in wide.runs_on and reads == [64] * len(GRAMMARS)


GROUPS: dict[str, Any] = {"num_beams": 2, "num_beam_groups": 2, "diversity_penalty": 0.5}


@pytest.mark.parametrize(
    "searched", [{}, {"num_beams": 2}, GROUPS], ids=["greedy", "beams", "groups"]
)
@pytest.mark.parametrize("alpha", [0.1, 1.0])
def test_what_bans_all_that_is_plausible_leaves_what_else_is_allowed(
    searched: dict[str, Any], alpha: float
) -> None:
    """Beside an amateur few tokens are plausible; others are looked for before anything is said."""
    beside = {"amateur_model": model(3), "contrast_alpha": alpha, "max_new_tokens": 6, **searched}
    (no, *_), banned = TOKENIZER.encode("no"), "no token is left that choices allows"
    asked = {**beside, "bad_words_ids": [[no]]}
    found = es.generate(model(), TOKENIZER, PROMPTS, choices=["no", "yes"], **asked)
    assert found == ["yes"] * len(PROMPTS)
    with pytest.raises(RequestError, match=banned):
        es.generate(model(), TOKENIZER, PROMPTS, choices=["no"], **asked)
    plain = es.generate(model(), TOKENIZER, PROMPTS, return_dict_in_generate=True, **beside)
    bans = [[int(one.tokens[0])] for one in plain]
    free = es.generate(model(), TOKENIZER, PROMPTS, bad_words_ids=bans, **beside)
    assert all(free) and not any(map(str.__eq__, free, (one.text for one in plain)))
