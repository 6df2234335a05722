"""A run in somebody's hands: looked at, spoken to, changed, forked, explained, cancelled."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import everystep as es
from everystep.api.model import LanguageModel
from everystep.drivers.generated import Reply
from everystep.engine import Engine, audit
from everystep.errors import CapacityError, RequestError, UnsupportedError
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer
from tests.api.runs import PLAIN, PROMPT, SINGLE, STRATEGIES, TOKENIZER, engine_of, opened, take
from tests.executors.models import family_model


@pytest.fixture(scope="module", params=["torch", "native"])
def model(request: pytest.FixtureRequest) -> LanguageModel:
    dtype = torch.float32 if request.param == "native" else torch.float64
    return tiny_llama(vocab_size=320, dtype=dtype)


# --- looking --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_run_ends_as_a_call_does(model: LanguageModel, name: str) -> None:
    options = {**STRATEGIES[name], "return_dict_in_generate": True}
    wanted = es.generate(model, TOKENIZER, PROMPT, seed=3, **options)
    run = opened(model, name)
    steps = list(run)
    assert run.result() == wanted
    audit(engine_of(run))
    first = wanted[0] if isinstance(wanted, list) else wanted
    assert run.done and run.tokens == first.tokens
    assert tuple(token for step in steps for token in step.tokens) == first.tokens
    assert "".join(step.text or "" for step in steps) == first.text
    assert [step.finish for step in steps if step.finish] == [first.finish_reason]
    assert [step.number for step in steps] == list(range(len(steps)))


@pytest.mark.parametrize("name", STRATEGIES)
def test_changes_lead_from_logits_to_scores(model: LanguageModel, name: str) -> None:
    """The processors, run again one at a time, make what the strategy chose from."""
    for step in opened(model, name):
        assert step.logits is not None and step.scores is not None
        before = step.logits
        for change in step.changes:
            assert torch.equal(change.before, before), change.name
            before = change.after
        assert torch.equal(before, step.scores)


def test_a_step_that_was_kept_still_says_what_it_saw(model: LanguageModel) -> None:
    run = opened(model, "sampled")
    kept, second = take(run, 1)[0], opened(model, "sampled")
    list(run)
    run.rewind(10)
    run.send([1, 2, 3])
    list(run)
    for kept_change, change in zip(kept.changes, take(second, 1)[0].changes, strict=True):
        assert kept_change.name == change.name and torch.equal(kept_change.after, change.after)


def test_greedy_takes_the_best_of_the_scores_that_are_shown(model: LanguageModel) -> None:
    for step in opened(model, "greedy"):
        assert step.scores is not None
        assert step.tokens == tuple(step.scores.argmax(-1).tolist())


def test_branches_are_the_tree_of_beams(model: LanguageModel) -> None:
    run = opened(model, "beams")
    lines: dict[int, tuple[int, ...]] = {0: (), 1: (), 2: ()}
    for step in run:
        grown = {
            one.index: (*lines[one.parent], *one.tokens)
            for one in step.branches
            if one.finish is None
        }
        live = {beam.tokens for beam in step.beams}
        settled = run.tokens if live else ()
        assert live == {line[len(settled) :] for line in grown.values()} or not live
        lines = grown


def test_what_is_asked_for_comes_with_the_steps() -> None:
    model = tiny_llama(vocab_size=320)
    asked = ("output_hidden_states", "output_attentions", "output_scores", "output_logits")
    options = {**PLAIN, **dict.fromkeys(asked, True)}
    output = model.generate(
        **TOKENIZER(PROMPT, return_tensors="pt"), **options, return_dict_in_generate=True
    )
    steps = list(es.open(model, TOKENIZER, PROMPT, **options))
    for step, scores, hidden in zip(steps, output.scores, output.hidden_states, strict=True):
        assert torch.allclose(step.scores, scores)  # type: ignore[arg-type]
        assert step.hidden_states is not None and step.attentions is not None
        for ours, theirs in zip(step.hidden_states, hidden, strict=True):
            assert torch.allclose(ours, theirs[0])
    with pytest.raises(UnsupportedError, match="use_cache"):
        es.open(model, TOKENIZER, PROMPT, use_cache=False)


def test_steps_come_to_an_event_loop_too(model: LanguageModel) -> None:
    wanted = [step.tokens for step in opened(model, "sampled")]

    async def read() -> list[tuple[int, ...]]:
        run, found = opened(model, "sampled"), []
        async for step in run:
            found.append(step.tokens)
            if len(found) == 4:
                task = asyncio.ensure_future(anext(run))
                await asyncio.sleep(0)
                task.cancel()  # the step that was waited for comes next
        return found

    assert asyncio.run(read()) == wanted


# --- changing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SINGLE)
def test_what_is_sent_is_all_that_is_fed(model: LanguageModel, name: str) -> None:
    """After any number of steps and after the end, and it goes on as from a longer prompt."""
    for steps in (0, 3, 100):
        run = opened(model, name)
        take(run, steps)
        if run.done:
            run.set(max_new_tokens=20)
        before, fed = run.tokens, engine_of(run).counts.fed
        run.send([7, 8, 9])
        assert run.tokens == (*before, 7, 8, 9)
        assert run.given == tuple(range(len(before), len(before) + 3))
        (step,) = take(run, 1)
        audit(engine_of(run))
        plain = name in ("greedy", "sampled", "mirostat")
        if steps and plain:
            assert engine_of(run).counts.fed - fed == 4
        if name == "greedy":
            ids = torch.tensor([[*TOKENIZER.encode(PROMPT), *before, 7, 8, 9]])
            assert step.tokens == tuple(model(ids).logits[:, -1].argmax(-1).tolist())
        assert len(run.result().tokens) - 3 == (20 if steps == 100 else 12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_chat_with_tools(dtype: torch.dtype) -> None:
    """An answer calls a tool, the result enters, the answer goes on: nothing starts again."""
    model, tokenizer = tiny_llama(vocab_size=285, dtype=dtype), tiny_tokenizer(285)
    messages = [{"role": "user", "content": "What is 6 * 7?"}]
    options = {"eos_token_id": list(range(20, 70)), "max_new_tokens": 200}
    run = es.open(model, tokenizer, messages, **options)
    answers: list[str] = []
    for result in ("42", " and done", "!"):
        answers.append("".join(step.text or "" for step in run))
        assert run.result().finish_reason == es.FinishReason("stop", run.tokens[-1])
        run.send(f"[{result}]")
    answers.append("".join(step.text or "" for step in run))
    whole = f"{answers[0]}[42]{answers[1]}[ and done]{answers[2]}[!]{answers[3]}"
    assert run.result().text == whole
    fed = engine_of(run).counts.fed
    assert fed == run.result().prompt_tokens + len(run.tokens) - 1  # each id once


@pytest.mark.parametrize("name", SINGLE)
def test_what_is_taken_back_is_drawn_again(model: LanguageModel, name: str) -> None:
    wanted = opened(model, name).result()
    for n in (1, 5, 12):
        run = opened(model, name)
        list(run)
        run.rewind(n)
        assert run.tokens == wanted.tokens[:-n]
        audit(engine_of(run))
        steps = list(run)
        assert run.result() == wanted
        assert "".join(step.text or "" for step in steps) in wanted.text
        audit(engine_of(run))


RIGID: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "windows": ("mistral", {"sliding_window": 5}, {}),
    "states": ("mamba", {"state_size": 4}, {}),
    "codes": ("llama", {}, {"cache_implementation": "quantized"}),
}


@pytest.mark.parametrize("kind", RIGID)
def test_rows_that_cannot_be_cut_are_fed_again(kind: str) -> None:
    """Greedy, so that a run that begins with those ids says what comes next."""
    family, config, more = RIGID[kind]
    model = LanguageModel(family_model(family, **config), executor="torch")
    ids, asked = [5, 9, 23, 1, 7, 30, 12, 8], {**PLAIN, **more}
    wanted = es.open(model, None, ids, **asked).result().tokens
    run = es.open(model, None, ids, **asked)
    list(run)
    fed = engine_of(run).counts.fed
    run.rewind(4)
    assert run.result().tokens == wanted
    assert engine_of(run).counts.fed - fed >= len(ids) + 8
    run.rewind(4)
    run.edit(2, [11])
    anew = es.open(model, None, [*ids, *wanted[:2], 11, *wanted[3:8]], **asked)
    assert take(run, 1)[0].tokens == take(anew, 1)[0].tokens
    audit(engine_of(run))


def test_only_what_follows_an_edit_is_fed_again(model: LanguageModel) -> None:
    run = opened(model, "greedy")
    take(run, 6)
    before, fed = run.tokens, engine_of(run).counts.fed
    run.edit(3, [11])
    assert run.tokens == (*before[:3], 11, *before[4:]) and run.given == (3,)
    (step,) = take(run, 1)
    assert engine_of(run).counts.fed - fed == 3
    ids = torch.tensor([[*TOKENIZER.encode(PROMPT), *before[:3], 11, *before[4:]]])
    assert step.tokens == tuple(model(ids).logits[:, -1].argmax(-1).tolist())


def test_what_is_set_holds_from_then_on(model: LanguageModel) -> None:
    run = opened(model, "greedy")
    take(run, 4)
    run.set(suppress_tokens=[int(opened(model, "greedy").result().tokens[4])])
    assert run.result().tokens[:4] == opened(model, "greedy").result().tokens[:4]
    assert run.result().tokens[4] != opened(model, "greedy").result().tokens[4]
    run = opened(model, "greedy")
    take(run, 2)
    run.set(do_sample=True, temperature=5.0)
    assert take(run, 1)[0].changes[0].name == "TemperatureLogitsWarper"
    assert len(run.result().tokens) == 12


def test_a_run_that_ended_at_its_length_goes_on_with_more_room(model: LanguageModel) -> None:
    long = opened(model, "sampled", max_new_tokens=20).result()
    run = opened(model, "sampled")
    assert run.result().finish_reason.kind == "length"
    run.set(max_new_tokens=20)
    assert run.result() == long


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_fork_goes_its_own_way(model: LanguageModel, name: str) -> None:
    wanted = opened(model, name).result()
    run = opened(model, name)
    take(run, 4)
    twin = run.fork()
    fed = engine_of(run).counts.fed
    assert twin.result() == wanted and not run.done
    assert engine_of(run).counts.fed - fed < 4 * 12 * 4
    assert run.result() == wanted
    twin.cancel(), run.cancel()
    audit(engine_of(run))
    assert engine_of(run).executor.audit() == {}


def test_a_fork_with_another_seed_draws_something_else(model: LanguageModel) -> None:
    run = opened(model, "sampled")
    take(run, 3)
    twin = run.fork(seed=99)
    assert twin.result().tokens[:3] == run.result().tokens[:3]
    assert twin.result().tokens != run.result().tokens


@pytest.mark.parametrize(
    ("act", "broken"),
    [
        (lambda run: run.fork(num_beams=3), None),
        (lambda run: run.fork(), (Reply, "trim")),
        (lambda run: run.explain(1), (Engine, "replace")),
    ],
)
def test_a_fork_that_came_to_nothing_holds_no_row(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch, act: Any, broken: Any
) -> None:
    def breaks(*_: object) -> None:
        raise OSError("in the middle")

    take(run := opened(model, "sampled"), 3)
    with monkeypatch.context() as patch, pytest.raises(OSError if broken else RequestError):
        if broken:
            patch.setattr(*broken, breaks)
        act(run)
    assert engine_of(run).scheduler.groups == [run._group]
    audit(engine_of(run))
    assert run.result() == opened(model, "sampled").result()


def test_a_run_that_is_cancelled_keeps_its_tokens(model: LanguageModel) -> None:
    for name in STRATEGIES:
        with opened(model, name) as run:
            take(run, 4)
            tokens = run.tokens
            run.cancel()
            (last,) = run
            assert last.finish == es.FinishReason("cancelled")
            assert run.tokens[: len(tokens)] == tokens
        assert engine_of(run).executor.audit() == {}
    run = opened(model, "greedy")
    take(run, 4)
    run.cancel()
    run.send([5])
    assert run.result().tokens[4] == 5


# --- why ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_token_is_explained(model: LanguageModel, name: str) -> None:
    run = opened(model, name)
    steps = list(run)
    tokens = run.tokens
    for position, token in enumerate(tokens):
        why = run.explain(position)
        assert why.chosen.token == token and not why.given
        if name in ("greedy", "guided", "sampled"):
            step = steps[position]
            assert step.logits is not None and step.scores is not None
            tolerance = 1e-4 if model.runs_on.startswith("torch") else 0.0
            assert why.chosen.logit == pytest.approx(float(step.logits[0, token]), abs=tolerance)
            assert why.chosen.score == pytest.approx(float(step.scores[0, token]), abs=tolerance)
        if why.draw is not None:
            assert why.draw.low - 1e-6 <= why.draw.number <= why.draw.high + 1e-6
            assert why.draw.high - why.draw.low == pytest.approx(why.chosen.probability)
        if name == "greedy":
            assert why.rivals[0].token == token
        assert str(token) in str(why)
    audit(engine_of(run))
    assert run.tokens == tokens


def test_an_explanation_goes_by_what_was_set_then(model: LanguageModel) -> None:
    run = opened(model, "sampled")
    take(run, 4)
    run.set(temperature=3.0, top_k=5)
    list(run)
    early, late = run.explain(2), run.explain(7)
    assert [one.ruled_out for one in early.effects][-1] == 320 - 30
    assert [one.ruled_out for one in late.effects][-1] == 320 - 5
    run.edit(2, [77])
    assert run.explain(2).given and "it was given" in str(run.explain(2))


def test_a_processor_of_the_callers_own_is_named(model: LanguageModel) -> None:
    def never_even(input_ids: Any, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:, ::2] = -torch.inf
        return scores

    run = es.open(model, TOKENIZER, PROMPT, logits_processor=[never_even], **PLAIN)
    list(run)
    (effect,) = run.explain(0).effects
    assert (effect.name, effect.ruled_out) == ("never_even", 160)


# --- wrong ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["several", "beams"])
def test_what_needs_one_sequence_says_so(model: LanguageModel, name: str) -> None:
    run = opened(model, name)
    take(run, 2)
    for change in (
        lambda: run.send([5]),
        lambda: run.rewind(1),
        lambda: run.edit(0, [5]),
        lambda: run.set(temperature=0.5),
    ):
        with pytest.raises(RequestError, match="one sequence"):
            change()


def test_wrong_changes_are_refused_and_change_nothing(model: LanguageModel) -> None:
    run = opened(model, "sampled")
    take(run, 3)
    for wrong, told in (
        (lambda: run.set(num_beams=3), "num_beams"),
        (lambda: run.set(temperature=-1.0), "temperature"),
        (lambda: run.set(temprature=1.0), "temprature"),
        (lambda: run.set(logprobs=3), "logprobs"),
        (lambda: run.set(guidance_scale=2.0), "guidance_scale"),
        (lambda: run.set(add_generation_prompt=False), "add_generation_prompt"),
        (lambda: run.send([320]), "320"),
        (lambda: run.send([]), "no ids"),
        (lambda: run.send([0.5]), "no ids"),
        (lambda: run.edit(2, [1, 2]), "positions"),
        (lambda: run.edit(-1, [1]), "positions"),
        (lambda: run.rewind(4), "taken back"),
        (lambda: run.explain(3), "position"),
        (lambda: es.open(model, TOKENIZER), "prompt"),
    ):
        with pytest.raises(RequestError, match=told):
            wrong()
    assert run.result() == opened(model, "sampled").result()
    with pytest.raises(RequestError, match="room"):
        run.send([5])
    with pytest.raises(RequestError, match="tokenizer"):
        es.open(model, None, [5, 6], **PLAIN).send("text")


def test_an_error_of_a_processor_is_raised(model: LanguageModel) -> None:
    def broken(input_ids: Any, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] > 10:
            raise OSError("out of ideas")
        return scores

    run = es.open(model, TOKENIZER, [5, 6, 7], logits_processor=[broken], **{**PLAIN, "seed": 1})
    with pytest.raises(OSError, match="out of ideas"):
        list(run)
    assert len(run.tokens) == 8
    with pytest.raises(RequestError, match="failed"):
        run.send([5])


def test_likelihoods_follow_what_was_taken_back_and_sent(model: LanguageModel) -> None:
    wanted = opened(model, "greedy", logprobs=2).result()
    run = opened(model, "greedy", logprobs=2)
    list(run)
    run.rewind(5)
    assert torch.equal(run.result().logprobs.logprobs, wanted.logprobs.logprobs)
    run.rewind(5)
    run.send([5, 6])
    known = run.result().logprobs
    assert known.tokens.tolist() == list(run.tokens)
    assert torch.isnan(known.logprobs).nonzero().flatten().tolist() == [7, 8]


# --- inside a step --------------------------------------------------------------------------------

CHANGES: dict[str, Any] = {
    "next": lambda run: next(run),
    "result": lambda run: run.result(),
    "send": lambda run: run.send([5]),
    "edit": lambda run: run.edit(0, [5]),
    "rewind": lambda run: run.rewind(1),
    "set": lambda run: run.set(temperature=0.5),
    "fork": lambda run: run.fork(),
    "save": lambda run: run.save("never.run"),
    "explain": lambda run: run.explain(0),
    "anext": lambda run: asyncio.run(run.__anext__()),
}


class Inside:
    """A callback of each kind that does something, once, in the step after three tokens."""

    def __init__(self, act: Any) -> None:
        self.act, self.found, self.run = act, [], None
        self.length: int | None = len(TOKENIZER.encode(PROMPT)) + 3

    def __call__(self, ids: Any) -> None:
        at = self.length in (None, len(ids))
        if at and not self.found and self.run is not None:
            self.found.append(None)
            try:
                self.act(self.run)
            except RequestError as error:
                self.found.append(str(error))

    def processor(self, input_ids: Any, scores: torch.Tensor) -> torch.Tensor:
        self(input_ids[0])
        return scores

    def criterion(self, input_ids: Any, scores: Any) -> torch.Tensor:
        self(input_ids[0])
        return torch.zeros(len(input_ids), dtype=torch.bool)

    def prefix(self, row: int, input_ids: Any) -> list[int]:
        self(input_ids)
        return [*range(320)]

    def options(self, kind: str) -> dict[str, Any]:
        class Watching(es.Hook):
            def after_step(hook, step: Any) -> Any:
                self(range(step.position))
                return None

        return {
            "processor": {"logits_processor": [self.processor]},
            "criterion": {"stopping_criteria": [self.criterion]},
            "prefix": {"prefix_allowed_tokens_fn": self.prefix},
            "hook": {"hooks": [Watching()]},
        }[kind]


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        *((change, "processor") for change in CHANGES),
        *(
            (change, kind)
            for change in ("next", "send")
            for kind in ("criterion", "prefix", "hook")
        ),
    ],
)
def test_a_change_asked_for_inside_a_step_is_refused(
    model: LanguageModel, change: str, kind: str
) -> None:
    inside = Inside(CHANGES[change])
    wanted = es.open(model, TOKENIZER, PROMPT, seed=3, **PLAIN).result()
    run = inside.run = es.open(model, TOKENIZER, PROMPT, seed=3, **PLAIN, **inside.options(kind))
    assert run.result() == wanted and run.given == ()
    assert inside.found[0] is None and "Call it between steps" in inside.found[1]
    audit(engine_of(run))


@pytest.mark.parametrize("kind", ["processor", "criterion", "prefix", "hook"])
@pytest.mark.parametrize("name", ["greedy", "several", "beams"])
def test_a_run_cancelled_inside_a_step_delivers_it_and_is_over(
    model: LanguageModel, name: str, kind: str
) -> None:
    inside = Inside(lambda run: run.cancel())
    run = inside.run = opened(model, name, **inside.options(kind))
    steps = list(run)
    assert inside.found == [None] and run.done
    assert steps[-1].finish == es.FinishReason("cancelled")
    assert engine_of(run).executor.audit() == {}
    result = run.result()
    first = result if isinstance(result, es.Generated) else result[0]
    assert first.tokens == run.tokens and first.finish_reason.kind == "cancelled"
    if name == "greedy":
        length = 3 if kind == "criterion" else 4
        assert run.tokens == opened(model, name).result().tokens[:length]
        assert [one for step in steps for one in step.tokens] == [*run.tokens]


def test_a_fork_is_not_changed_inside_a_step_of_the_other(model: LanguageModel) -> None:
    inside = Inside(lambda run: run.send([5]))
    run = opened(model, "greedy", **inside.options("processor"))
    take(run, 1)
    inside.run = twin = run.fork()
    wanted = opened(model, "greedy").result()
    assert run.result() == wanted and "between steps" in inside.found[1]
    inside.act, inside.found = (lambda run: run.cancel()), []
    inside.run = other = twin.fork()
    assert twin.result() == wanted
    assert inside.found == [None] and other.tokens == wanted.tokens[:1]
    assert [step.finish for step in other] == [es.FinishReason("cancelled")]
    run.cancel(), twin.cancel()
    assert engine_of(run).executor.audit() == {}


def test_an_explanation_and_more_of_a_search_are_steps_too(model: LanguageModel) -> None:
    inside = Inside(lambda run: run.send([5]))
    run = opened(model, "greedy", **inside.options("processor"))
    list(run)
    inside.run = run
    assert run.explain(3).chosen.token == run.tokens[3]
    assert "between steps" in inside.found[1] and run.given == ()
    inside.act, inside.found = (lambda run: run.cancel()), []
    assert run.explain(3).chosen.token == run.tokens[3]
    assert engine_of(run).executor.audit() == {}
    ends = {"eos_token_id": [*range(5, 320, 3)], "early_stopping": True}
    search = opened(model, "beams", **inside.options("processor"), **ends)
    before = search.result()
    inside.length, inside.found, inside.run = None, [], search
    with pytest.raises(RequestError, match="cancelled"):
        search.more(20)
    assert inside.found == [None] and search.result() == before
    assert engine_of(search).executor.audit() == {}


def test_other_threads_wait_for_the_step(model: LanguageModel) -> None:
    done: list[str] = []
    threads: list[threading.Thread] = []

    def send(run: es.Run) -> None:
        threads.append(threading.Thread(target=lambda: (run.send([5]), done.append("sent"))))
        threads[0].start()
        time.sleep(0.05)
        done.append("step")

    inside = Inside(send)
    run = inside.run = opened(model, "greedy", **inside.options("processor"))
    take(run, 4)
    threads[0].join()
    assert done == ["step", "sent"] and inside.found == [None]
    assert run.given == (4,) and run.tokens[4] == 5


def test_readers_in_several_threads_share_the_steps(model: LanguageModel) -> None:
    run, wanted = opened(model, "greedy"), len(opened(model, "greedy").result().tokens)
    found: list[int] = []
    readers = [threading.Thread(target=lambda: found.extend(s.number for s in run)) for _ in "abcd"]
    for one in readers:
        one.start()
    for one in readers:
        one.join()
    assert sorted(found) == [*range(wanted)]

    async def read() -> list[int]:
        run = opened(model, "greedy")

        async def own() -> list[int]:
            return [step.number async for step in run]

        return [number for one in await asyncio.gather(own(), own(), own()) for number in one]

    assert sorted(asyncio.run(read())) == [*range(wanted)]


def test_a_number_of_hypotheses_beyond_bounds_is_refused(model: LanguageModel) -> None:
    run = opened(model, "beams")
    for wrong in (10**7, 1001, 0, 1.5):
        with pytest.raises(RequestError, match="at most 1000") as error:
            run.more(wrong)
        assert str(wrong) in str(error.value)
    assert len(run.tokens) == 0
    with pytest.raises(RequestError, match="no such sequence"):
        run.explain(0, index=2)
    with pytest.raises(RequestError, match="rivals"):
        run.explain(0, rivals=-1)


# --- room -----------------------------------------------------------------------------------------


def test_ids_that_fill_the_context_are_refused_before_anything_changes(
    model: LanguageModel, tmp_path: Path
) -> None:
    """As a prompt of as many ids is."""
    prompt = len(TOKENIZER.encode(PROMPT))
    with pytest.raises(CapacityError, match="fills the model's context"):
        es.open(model, None, [5] * 256, **PLAIN)
    run = opened(model, "greedy")
    take(run, 4)
    fed = engine_of(run).counts.fed
    for wrong in (lambda: run.send([5] * 300), lambda: run.send([5] * (252 - prompt))):
        with pytest.raises(CapacityError, match="fills the model's context"):
            wrong()
    assert (len(run.tokens), run.given, engine_of(run).counts.fed) == (4, (), fed)
    assert run.result() == opened(model, "greedy").result()
    run.set(max_new_tokens=20)
    run.send([5] * (243 - prompt))
    assert prompt + len(run.tokens) == 255 and len(run.result().tokens) - len(run.given) == 20
    run.save(tmp_path / "long.run")  # it went beyond the context by itself, as was asked
    assert es.resume(tmp_path / "long.run", model, TOKENIZER).result() == run.result()
    with pytest.raises(CapacityError, match="fills the model's context"):
        run.edit(0, [7])
    with pytest.raises(CapacityError, match="fills the model's context"):
        run.send([7])


def test_a_run_without_a_length_ends_where_the_context_does(model: LanguageModel) -> None:
    run = es.open(model, None, [5, 6, 7], eos_token_id=None)
    take(run, 2)
    run.send([8] * 240)
    assert len(run.result().tokens) == 253 and run.result().finish_reason.kind == "length"


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_step_is_taken_again_where_it_was(model: LanguageModel, name: str) -> None:
    run = opened(model, name)
    assert run.alone == (name in SINGLE)
    first = next(run)
    run.result()
    before = run.tokens, audit(engine_of(run))
    again = run.step_at(0)
    assert first.logits is not None and again.logits is not None
    assert torch.allclose(again.logits[0], first.logits[0], rtol=1e-5, atol=1e-5)
    if run.alone and name in ("greedy", "sampled"):
        assert again.branches[0].tokens[:1] == run.tokens[:1]
        assert (again.drawn is None) == (name == "greedy")
    for wrong in (len(run.tokens) + 1, -len(run.tokens) - 1, "x"):
        with pytest.raises(RequestError, match="no such position"):
            run.step_at(wrong)  # type: ignore[arg-type]
    assert (run.tokens, audit(engine_of(run))) == before


def test_a_run_goes_on_without_a_processor(model: LanguageModel, tmp_path: Path) -> None:
    given: dict[str, Any] = {**PLAIN, "do_sample": True, "temperature": 0.7, "top_k": 3, "seed": 4}
    run = es.open(model, TOKENIZER, PROMPT, **given)
    take(run, 3)
    twin = run.without("TopKLogitsWarper")
    del given["top_k"]
    other = es.open(model, TOKENIZER, PROMPT, **{**given, "top_k": 0})
    other.send(run.tokens)
    assert twin.result().tokens == other.result().tokens[:12]
    assert [one.name for one in twin.step_at(3).changes] == ["TemperatureLogitsWarper"]
    assert [one.name for one in run.step_at(3).changes][-1] == "TopKLogitsWarper"
    for wrong in (lambda: run.without("TopK"), lambda: twin.save(tmp_path / "a.run")):
        with pytest.raises(RequestError, match=r"no processor|cannot be saved"):
            wrong()
    with pytest.raises(RequestError, match="one sequence"):
        opened(model, "beams").without("TopKLogitsWarper")
    audit(engine_of(run))
