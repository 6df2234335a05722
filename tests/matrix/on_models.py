"""Features on every kind of model, where one answer is left: each check is a column of the page.

A model can say nothing but that answer, whatever the feature does, so no other judge is needed.
Each check but those of drafts and of preemption sees the feature do something, such as come to
another answer of two, or change how likely the answer is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import everystep as es
from everystep.drivers.session import Session
from everystep.engine import Continuous, Engine, audit
from everystep.errors import EverystepError, RequestError
from everystep.nn.modes import inference_mode
from everystep.types import Request
from tests.faces.table import TOKENIZER
from tests.faces.tight import FEATURES, SUBJECTS, TightCell
from tests.judges.drive import result
from tests.matrix.models import ON_MODELS
from tests.matrix.rows import APART, REFUSED, ROWS, Refusal, Row

ANSWER, FEATURE = "it is", "one choice"
OTHER, LONG = "no", " ".join([ANSWER] * 4)


@dataclass(frozen=True)
class OneAnswer:
    """A strategy on a model, which is asked for the one answer."""

    row: Row
    subject: str
    executor: str
    prompt: str = ""

    @property
    def cell(self) -> TightCell:
        prompt = self.prompt or SUBJECTS[self.subject].prompts[0]
        return TightCell("", self.subject, self.executor, prompt, self.row, (FEATURE,))

    def options(self, **more: Any) -> dict[str, Any]:
        """The keywords of a call about prompts."""
        negative = {"negative_prompt": [70, 80]} if self.row.name == "guided" else {}
        beside = negative if "embeds" in self.prompt else {}
        return {**self.cell.given(), **beside, "return_dict_in_generate": True, **more}

    def say(self, answer: str = ANSWER, **more: Any) -> list[es.Generated]:
        """The answers, of which each is the one."""
        asked = [self.cell.content()]
        (found,) = es.generate(self.cell.model, TOKENIZER, asked, **self.options(**more))
        each = found if isinstance(found, list) else [found]
        return answers(each, answer)

    def open(self, **more: Any) -> es.Run:
        """A run of the same."""
        return es.open(self.cell.model, TOKENIZER, self.cell.content(), **self.options(**more))

    def request(self, name: str) -> Request:
        """The same, as engines get it."""
        options = self.options()
        seed = options.pop("seed")
        session = Session(self.cell.model, TOKENIZER, [""], None, seed, options, gives_events=True)
        made = session.prepared(session.read(self.cell.content(), 0), 0).requests
        return replace(made[0], request_id=name)


def answers(found: list[es.Generated], answer: str = ANSWER) -> list[es.Generated]:
    """The hypotheses that there are, each the one answer."""
    said = [one for one in found if one.tokens]
    assert said and {one.text for one in said} == {answer}
    return said


def listed(run: es.Run) -> list[es.Generated]:
    """The result of a run."""
    found = run.result()
    return found if isinstance(found, list) else [found]


@dataclass(frozen=True)
class Without:
    """A caller's own processor, which rules out a token."""

    token: int

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        token = torch.tensor([self.token], device=scores.device)
        return scores.index_fill(1, token, -torch.inf)


def processors(asked: OneAnswer, folder: Path) -> None:
    """The caller's own beside a penalty of the library's: of two answers it rules out one. DoLa
    keeps but one of them where that is ten times as likely, and without it there is none."""
    model, content = asked.cell.model, [asked.cell.content()]
    lost = 0
    for left, out in ((ANSWER, OTHER), (OTHER, ANSWER)):
        own = Without(TOKENIZER.encode(out, add_special_tokens=False)[0])
        both = {"choices": [ANSWER, OTHER], "logits_processor": [own], "repetition_penalty": 1.5}
        try:
            (found,) = es.generate(model, TOKENIZER, content, **asked.options(**both))
        except RequestError as error:
            assert asked.row.name == "dola" and "no token is left" in str(error)
            lost += 1
            continue
        said = [one for one in (found if isinstance(found, list) else [found]) if one.tokens]
        assert said and {one.text for one in said} == {left}
    assert lost < 2


def likely(found: list[es.Generated]) -> list[float]:
    """How likely the tokens of the answer were."""
    assert found[0].logprobs is not None
    return [float(one) for one in found[0].logprobs.logprobs]


def log_probabilities(asked: OneAnswer, folder: Path) -> None:
    """A number for each token of the answer."""
    for one in asked.say(logprobs=2):
        assert one.logprobs is not None and len(one.logprobs) == len(one.tokens)
        assert all(-1e4 < float(number) <= 0 for number in one.logprobs.logprobs)


def stop_strings(asked: OneAnswer, folder: Path) -> None:
    """A text in the answer ends it, and is cut off."""
    given = asked.options(stop_strings=[" "], trim_stop_strings=True)
    (found,) = es.generate(asked.cell.model, TOKENIZER, [asked.cell.content()], **given)
    said = [one for one in (found if isinstance(found, list) else [found]) if one.tokens]
    assert said and {one.text for one in said} == {"it"}
    assert {one.finish_reason.matched for one in said} == {" "}


def streaming(asked: OneAnswer, folder: Path) -> None:
    """The events spell the answer."""
    given = asked.options()
    with es.stream(asked.cell.model, TOKENIZER, [asked.cell.content()], **given) as stream:
        texts = [event.text or "" for event in stream if event.index == 0]
    assert "".join(texts) == ANSWER


def several_sequences(asked: OneAnswer, folder: Path) -> None:
    """Two are asked for: draws give two, searches no more than there are."""
    found = replace(asked, row=asked.row.drawn).say(num_return_sequences=2)
    assert len(found) == 2 or asked.row.most > 1


def embeddings(asked: OneAnswer, folder: Path) -> None:
    """A prompt of embeddings alone: the answer is as likely as after their ids."""
    found = likely(replace(asked, prompt="embeds").say(logprobs=0))
    assert found == pytest.approx(likely(asked.say(logprobs=0)), abs=1e-4)


def holes(asked: OneAnswer, folder: Path) -> None:
    """A prompt with masked positions between the others, which change how likely the answer is, but
    for a window of one, which sees none of them."""
    found = likely(replace(asked, prompt="holes").say(logprobs=0))
    changed = found != pytest.approx(likely(asked.say(logprobs=0)), abs=1e-4)
    assert changed == (asked.subject != "window of one")


@dataclass(frozen=True)
class Raised(es.Hook):
    """The embeddings of every step, with the same added to every number."""

    gives: tuple[str, ...] = ("embeds",)
    asked: list[int] = field(default_factory=list, compare=False)

    def before_step(self, step: es.BeforeStep) -> dict[str, Any]:
        self.asked.append(len(step.positions))
        return {"embeds": step.embeds + 0.5}


def hooks(asked: OneAnswer, folder: Path) -> None:
    """A hook that changes the embeddings of every step."""
    hook = Raised()
    asked.say(hooks=[hook])
    assert len(hook.asked) > 1


def quantised_cache(asked: OneAnswer, folder: Path) -> None:
    """Rows of four bits, which change how likely an answer of several groups is."""
    long: dict[str, Any] = {"choices": [LONG], "max_new_tokens": 32, "logprobs": 0}
    coded = FEATURES["keys and values of four bits"].given([], 0)
    found = likely(asked.say(LONG, **long, **coded))
    assert found != pytest.approx(likely(asked.say(LONG, **long)), abs=1e-6)


def save_and_resume(asked: OneAnswer, folder: Path) -> None:
    """A run that was kept in a file after its first step."""
    run = asked.open()
    assert len([*islice(run, 1)]) == 1
    run.save(folder / "a.run")
    given = asked.options()
    beside = {name: given[name] for name in ("assistant_model",) if name in given}
    answers(listed(es.resume(folder / "a.run", asked.cell.model, TOKENIZER, **beside)))
    answers(listed(run))


def fork(asked: OneAnswer, folder: Path) -> None:
    """Both halves of a run that was forked after its first step."""
    run = asked.open()
    assert len([*islice(run, 1)]) == 1
    twin = run.fork()
    answers(listed(twin))
    answers(listed(run))


def trace(asked: OneAnswer, folder: Path) -> None:
    """Each step can be looked at, and leads to the answer."""
    run, path = asked.open(), {0: ()}
    ended: set[tuple[int, ...]] = set()
    for step in run:
        assert step.logits is not None
        grown: dict[int, tuple[int, ...]] = {}
        for one in step.branches:
            so_far = (*path.get(one.parent, ()), *one.tokens)
            if one.finish is None:
                grown[one.index] = so_far
            else:
                ended.add(so_far)
        path = grown
    assert {one.tokens for one in answers(listed(run))} <= {*ended}


def _two(asked: OneAnswer, engine: Engine) -> tuple[Any, Any]:
    """The strategy's own group, beside the same request once more."""
    return engine.submit(asked.request("own")), engine.submit(asked.request("beside"))


def _told(group: Any) -> set[str]:
    found = [one for one in result(group) if one.tokens]
    return {TOKENIZER.decode(one.tokens, skip_special_tokens=True) for one in found}


def preemption(asked: OneAnswer, folder: Path) -> None:
    """In a continuous batch, in chunks; one answer is often over before its rows are lost, which is
    tried in the first table."""
    with inference_mode():
        executor = asked.cell.model.executor(asked.request("own").needs)
        engine = Engine(executor, Continuous(24, 24))
        groups = _two(asked, engine)
        for step in range(100):
            if not engine.pending:
                break
            engine.step()
            if groups[0].opened and groups[0].live and step % 2:
                engine.preempt(groups[0])
        audit(engine)
    assert [_told(group) for group in groups] == [{ANSWER}, {ANSWER}]


def cancellation(asked: OneAnswer, folder: Path) -> None:
    """It ends when it is told to, holds nothing, and the one beside it goes on."""
    with inference_mode():
        executor = asked.cell.model.executor(asked.request("own").needs)
        engine = Engine(executor, Continuous(64, 32))
        own, beside = _two(asked, engine)
        while not own.opened:
            engine.step()
        engine.cancel(own)
        audit(engine)
        while engine.pending:
            engine.step()
        audit(engine)
    assert not own.live and _told(beside) == {ANSWER}
    assert "cancelled" in {one.reason for one in result(own)} or _told(own) == {ANSWER}


def speculation(asked: OneAnswer, folder: Path) -> None:
    """Drafts from the prompt may be made; that some are accepted is tried in the first table."""
    constant = {"prompt_lookup_num_tokens": 3, "num_assistant_tokens_schedule": "constant"}
    asked.say(**constant)


TightCheck = Callable[[OneAnswer, Path], None]
FEATURES_ON_MODELS: Mapping[str, TightCheck] = {
    "processors": processors,
    "log-probabilities": log_probabilities,
    "stop strings": stop_strings,
    "streaming": streaming,
    "quantised cache": quantised_cache,
    "num_return_sequences": several_sequences,
    "embeddings": embeddings,
    "mask with holes": holes,
    "hooks": hooks,
    "save and resume": save_and_resume,
    "fork": fork,
    "trace": trace,
    "continuous batching with preemption": preemption,
    "cancellation": cancellation,
    "speculation": speculation,
}
_SOUNDS = Refusal("input_features", "its encoder reads sounds")
_STATES = Refusal("wanted mask, positions", "its states know no holes")
_CODES = Refusal("hold states, not keys and values", "it has states, not keys and values")
_FOREIGN = Refusal("cache objects of its own library", "its rows lie in caches of its own library")
_WINDOWS = Refusal("without sliding windows", "codes are for layers that keep every position")
_INPUTS = Refusal("wanted embeds", "its decoder is fed ids alone")
_NO_DRAFTS = Refusal("wanted truncate", "its states cannot forget a draft")
REFUSED_ON_MODELS: Mapping[tuple[str, str], Refusal] = {
    ("quantised cache", "window of one"): _WINDOWS,
    ("quantised cache", "recurrent"): _CODES,
    ("quantised cache", "wrapped recurrent"): _CODES,
    ("quantised cache", "wrapped decoder"): _FOREIGN,
    ("quantised cache", "wrapped encoder-decoder"): _FOREIGN,
    ("quantised cache", "wrapped listener"): _FOREIGN,
    ("mask with holes", "recurrent"): _STATES,
    ("mask with holes", "wrapped recurrent"): _STATES,
    ("mask with holes", "listener"): _SOUNDS,
    ("mask with holes", "wrapped listener"): _SOUNDS,
    ("embeddings", "listener"): _SOUNDS,
    ("embeddings", "wrapped listener"): _SOUNDS,
    ("hooks", "wrapped encoder-decoder"): _INPUTS,
    ("hooks", "wrapped listener"): _INPUTS,
    ("speculation", "wrapped recurrent"): _NO_DRAFTS,
}
"""(feature, model) -> how the two are refused, whatever the strategy."""


def strategies(feature: str, model: str) -> list[Row]:
    """The strategies that the model has, and that go with the feature."""
    out = {place for table in (REFUSED, APART) for place in table}
    own = [row for row in ROWS if (row.name, model) not in ON_MODELS]
    return [row for row in own if (row.name, feature) not in out]


def some(feature: str, model: str) -> list[Row]:
    """A quarter of these, another one in each cell."""
    first = [*FEATURES_ON_MODELS].index(feature) + [*SUBJECTS].index(model)
    return strategies(feature, model)[first % 4 :: 4]


def try_on(feature: str, model: str, rows: list[Row], folder: Path) -> None:
    """The strategies say the one answer with the feature on each executor, or each is refused."""
    refusal = REFUSED_ON_MODELS.get((feature, model))
    for row in rows:
        for executor in SUBJECTS[model].executors:
            asked = OneAnswer(row, model, executor)
            try:
                FEATURES_ON_MODELS[feature](asked, folder)
            except EverystepError as error:
                assert refusal is not None and refusal.words in str(error), f"{row.name}: {error}"
            else:
                assert refusal is None, row.name
