"""Runs in the engine's process: generations that clients take step by step.

One thread does what is asked of all of them, a step at a time in turn, so that nobody's long run
keeps another's waiting. Each run has an engine of its own, which it shares with its forks. The
grammars that an ask brings are compiled by other threads before.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch

from everystep.api.model import LanguageModel
from everystep.drivers.engine_thread import FairReaders
from everystep.drivers.generated import Generated
from everystep.engine.explained import Explanation
from everystep.errors import FormatError, RequestError
from everystep.outputs import TokenLogprobs
from everystep.processors.grammars.source import KINDS
from everystep.processors.grammars.trials import GrammarTrials, on_trial
from everystep.requests.grammars import compile_asked
from everystep.runs.hands import Asked
from everystep.runs.run import Run
from everystep.runs.saved import RunState, read_run
from everystep.runs.steps import Step
from everystep.server.fields import GENERATE, Json
from everystep.server.messages import Ask, RunAsk, RunNews, RunOver
from everystep.server.wire_keywords import Vectors, as_keywords, require_bounded
from everystep.text import Tokenizer
from everystep.types import FinishReason

Part = RunNews | RunOver | None
"""The news after a part of the work; None where there is nothing to tell yet."""
P = TypeVar("P")
_BESIDE = ("trim_stop_strings", "adapter_names", "seed")
"""Keywords of a saved run that have other names on the wire."""


class HostedRuns:
    """The runs of one front, by name. `models`: those that may be asked, with their tokenizers.
    `trials`: where grammars are compiled first. `steering`: of each model, vectors by name."""

    def __init__(
        self,
        models: Mapping[str, tuple[LanguageModel, Tokenizer]],
        trials: GrammarTrials,
        steering: Mapping[str, Mapping[str, Vectors]],
    ) -> None:
        self._models, self._steering, self._trials = {**models}, {**steering}, trials
        self._runs: dict[str, Run] = {}
        self._of_model: dict[str, str] = {}  # the names of runs and of their models
        self._compiling = FairReaders(2, "everystep compiles grammars of runs")
        self._thread = ThreadPoolExecutor(1, "everystep runs")
        self._part, self._working = 0, False  # of which the thread alone writes
        self._verbs: Mapping[str, Callable[[RunAsk], Iterator[Part]]] = {
            "open": self._open,
            "resume": self._resume,
            "step": self._step,
            "result": self._result,
            "more": self._more,
            "send": self._change,
            "edit": self._change,
            "rewind": self._change,
            "set": self._change,
            "fork": self._fork,
            "explain": self._explain,
            "save": self._save,
            "look": self._look,
            "cancel": self._cancel,
        }

    def know(
        self, name: str, model: tuple[LanguageModel, Tokenizer], steering: Mapping[str, Vectors]
    ) -> None:
        """Take runs of a model from now on."""
        self._models[name], self._steering[name] = model, steering

    def forget(self, model: str) -> bool:
        """Let go of a model; return False where a run of it is open."""
        if model in self._of_model.values():
            return False
        self._models.pop(model, None)
        self._steering.pop(model, None)
        return True

    async def carry_out(self, ask: RunAsk) -> AsyncGenerator[RunNews | RunOver, None]:
        """Yield what becomes of an ask, `RunOver` last."""
        loop, parts = asyncio.get_running_loop(), self._verbs[ask.verb](ask)
        if _brings_grammars(ask):
            await asyncio.wrap_future(self._compiling.submit(ask.owner, self._compile, ask))
        while True:
            part = await loop.run_in_executor(self._thread, self._next, parts)
            if part is not None:
                yield part
            if isinstance(part, RunOver):
                return

    async def explanations(
        self, ask: Ask, told: Sequence[list[int]]
    ) -> list[list[dict[str, Json]]]:
        """Return the reasons for each token of an ask's answers, which were these.

        They are a run's, which is opened for that and taken to its end.
        """
        loop, parts = asyncio.get_running_loop(), self._explain_all(ask, told)
        while (part := await loop.run_in_executor(self._thread, self._next, parts)) is None:
            pass
        return part

    def _explain_all(
        self, ask: Ask, told: Sequence[list[int]]
    ) -> Iterator[list[list[dict[str, Json]]] | None]:
        model, tokenizer = self._models[ask.model]
        keywords = as_keywords(ask.keywords, self._steering[ask.model])
        seed: Any = keywords.pop("seed")
        keywords.pop("timeout", None)  # which has not passed, and is none of a run's
        chat = model.chat_defaults if ask.in_chat else None
        run = Run.begun(model, tokenizer, ask.prompt, Asked(keywords, seed, chat))
        try:
            for _ in run:
                yield None
            result = run.result()
            results = result if isinstance(result, list) else [result]
            if [[*one.tokens] for one in results] != [*told]:
                what = (
                    "explain needs an answer that is the same each time, and a clock ends this one"
                )
                raise RequestError(what, do="Leave max_time out")
            found: list[list[dict[str, Json]]] = []
            for index, tokens in enumerate(told):
                found.append([])
                for position in range(len(tokens)):
                    yield None
                    why = run.explain(position, ask.rivals or 0, index)
                    found[-1].append(shown_explanation(why))
            yield found
        finally:
            run.cancel()

    @property
    def step_under_way(self) -> int | None:
        """The number of the part that is done now, None between two."""
        return self._part if self._working else None

    def _compile(self, ask: RunAsk) -> None:
        """Compile the grammars that an ask brings, so that the thread that steps finds them."""
        name = ask.given.get("model") or self._of_model.get(ask.run)
        if name is None:
            return  # there is no such run, which is said in its turn
        model, tokenizer = self._models[name]
        asked = [ask.given.get("keywords") or ask.given.get("changes") or ask.given]
        if ask.verb == "resume":
            asked = [dict(one.options) for one in self._saved(ask).asked]
        with on_trial(self._trials):
            for keywords in asked:
                compile_asked(keywords, tokenizer, model.vocab_size)

    def _next(self, parts: Iterator[P]) -> P:
        self._part += 1
        self._working = True
        try:
            with on_trial(self._trials):
                return next(parts)
        finally:
            self._working = False

    def close(self) -> None:
        """End all runs; return when nothing steps any more."""
        self._compiling.shutdown(cancel=True)
        self._thread.shutdown(cancel_futures=True)
        for run in self._runs.values():
            run.cancel()
        self._runs.clear()

    def _of(self, ask: RunAsk) -> Run:
        if (run := self._runs.get(ask.run)) is None:
            raise RequestError("the run is not there any more", do="Open it again")
        return run

    # --- beginning --------------------------------------------------------------------------------

    def _open(self, ask: RunAsk) -> Iterator[Part]:
        given = ask.given
        model, tokenizer = self._models[given["model"]]
        keywords = as_keywords(given["keywords"], self._steering[given["model"]])
        seed: Any = keywords.pop("seed")
        if ask.record is not None:
            keywords["record"] = ask.record.writer()
        chat = model.chat_defaults if given["in_chat"] else None
        run = Run.begun(model, tokenizer, given["prompt"], Asked(keywords, seed, chat))
        self._keep(ask.run, run, given["model"])
        yield RunOver(ask.id, state(run))

    def _keep(self, name: str, run: Run, model: str) -> None:
        self._runs[name], self._of_model[name] = run, model

    def _resume(self, ask: RunAsk) -> Iterator[Part]:
        model, tokenizer = self._models[ask.given["model"]]
        read = self._saved(ask)
        if ask.record is not None:
            read = read.recorded(ask.record.writer())
        with _told_of_the_run():
            run = Run.restored(model, tokenizer, read)
        self._keep(ask.run, run, ask.given["model"])
        yield RunOver(ask.id, state(run))

    def _saved(self, ask: RunAsk) -> RunState:
        """Return the run that an ask brings; RequestError for one that no request could make."""
        model, tokenizer = self._models[ask.given["model"]]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run"
            path.write_bytes(ask.data)
            with _told_of_the_run(str(path)):
                read = read_run(path, model, tokenizer, {})
                require_askable(read)
        return read

    def _fork(self, ask: RunAsk) -> Iterator[Part]:
        twin = self._of(ask).fork(**ask.given["changes"])
        self._keep(ask.given["name"], twin, self._of_model[ask.run])
        yield RunOver(ask.id, state(twin))

    # --- stepping ---------------------------------------------------------------------------------

    def _step(self, ask: RunAsk) -> Iterator[Part]:
        run, best = self._of(ask), ask.given.get("best")
        taken = 0
        for _ in range(ask.given["steps"]):
            step = next(run, None)
            if step is None:
                break
            taken += 1
            yield RunNews(ask.id, shown_step(step, best))
        yield RunOver(ask.id, state(run), made=taken)

    def _result(self, ask: RunAsk) -> Iterator[Part]:
        run, taken = self._of(ask), 0
        for taken, _ in enumerate(run, 1):  # noqa: B007  # the last one counts
            yield None
        found = run.result()
        results = found if isinstance(found, list) else [found]
        told = {"results": shown_results(results), "run": state(run)}
        yield RunOver(ask.id, told, made=taken)

    def _more(self, ask: RunAsk) -> Iterator[Part]:
        run, taken = self._of(ask), 0
        for taken, _ in enumerate(run, 1):  # noqa: B007  # the last one counts
            yield None
        found = run.more(**ask.given)
        told = {"results": shown_results(found), "run": state(run)}
        yield RunOver(ask.id, told, made=taken)

    # --- changing, looking ------------------------------------------------------------------------

    def _change(self, ask: RunAsk) -> Iterator[Part]:
        run = self._of(ask)
        getattr(run, ask.verb)(**ask.given)
        yield RunOver(ask.id, state(run))

    def _explain(self, ask: RunAsk) -> Iterator[Part]:
        yield RunOver(ask.id, shown_explanation(self._of(ask).explain(**ask.given)))

    def _save(self, ask: RunAsk) -> Iterator[Part]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run"
            self._of(ask).save(path)
            yield RunOver(ask.id, {}, path.read_bytes())

    def _look(self, ask: RunAsk) -> Iterator[Part]:
        yield RunOver(ask.id, state(self._of(ask)))

    def _cancel(self, ask: RunAsk) -> Iterator[Part]:
        run = self._of(ask)
        del self._runs[ask.run], self._of_model[ask.run]
        run.cancel()
        yield RunOver(ask.id, state(run))


@contextmanager
def _told_of_the_run(path: str = "") -> Iterator[None]:
    """Say of an error inside that it is one of a saved run, without the path that it had here."""
    try:
        yield
    except (FormatError, RequestError) as error:
        text = str(error).replace(path, "the saved run") if path else str(error)
        raise RequestError(text, do="Send what `save` gave") from error


def _brings_grammars(ask: RunAsk) -> bool:
    """Return whether an ask brings a grammar, or a saved run, which may have one."""
    given = ask.given
    asked = given.get("keywords") or given.get("changes") or given
    return ask.verb == "resume" or any(asked.get(kind) is not None for kind in KINDS)


def require_askable(read: RunState) -> None:
    """Raise RequestError unless a saved run asks only for what a request could ask for."""
    known = {one.name: one for one in GENERATE}
    for asked in read.asked:
        for name, value in asked.options.items():
            if name in _BESIDE or value is None:
                continue
            if name not in known:
                raise RequestError(f"the saved run has {name}, which no request can have")
            if name == "steer":
                require_bounded(value)
            field = known[name]
            if name in ("logits_processor", "hooks") and isinstance(value, list | tuple):
                field.read([*value])
            if isinstance(value, int | float | str):  # the bounds that requests have
                field.read(value)


# --- what is told ---------------------------------------------------------------------------------


def state(run: Run) -> dict[str, Json]:
    """Return how a run stands."""
    tokens = list(run.tokens)
    text = None
    if isinstance(run.tokenizer, Tokenizer):
        text = run.tokenizer.decode(tokens, skip_special_tokens=True)
    return {"tokens": tokens, "text": text, "given": list(run.given), "done": run.done}


def shown_step(step: Step, best: int | None) -> dict[str, Json]:
    """Return a step; `best`: of so many tokens the logit and the score."""
    events = [
        {
            "index": one.index,
            "position": one.position,
            "token": one.token,
            "text": one.text,
            "logprob": one.logprob,
            "top_logprobs": one.top_logprobs,
            "finish": shown_finish(one.finish),
        }
        for one in step.events
    ]
    branches = [
        {**asdict(one), "finish": shown_finish(one.finish), "score": float(one.score)}
        for one in step.branches
    ]
    found = {
        "number": step.number,
        "tokens": list(step.tokens),
        "text": step.text,
        "finish": shown_finish(step.finish),
        "events": events,
        "beams": [{**asdict(one), "score": float(one.score)} for one in step.beams],
        "branches": branches,
    }
    return found if best is None else {**found, "best": _best(step, best)}


def _best(step: Step, most: int) -> list[list[dict[str, Json]]]:
    """Return the best tokens of each row by their scores, as they were chosen from."""
    if step.scores is None or step.logits is None:
        return []
    rows = []
    for logits, scores in zip(step.logits, step.scores, strict=True):
        ids = torch.topk(scores, min(most, len(scores))).indices.tolist()
        kept = [id for id in ids if not torch.isneginf(scores[id])]
        rows.append(
            [{"id": id, "logit": float(logits[id]), "score": float(scores[id])} for id in kept]
        )
    return rows


def shown_finish(reason: FinishReason | None) -> dict[str, Json] | None:
    """Return why a sequence ended; what matched where that is data."""
    if reason is None:
        return None
    matched: Any = reason.matched
    plain = matched if isinstance(matched, str | int) else None
    return {"kind": reason.kind, "matched": str(matched) if reason.kind == "error" else plain}


def shown_results(results: Iterable[Generated]) -> list[dict[str, Json]]:
    """Return continuations."""
    return [
        {
            "text": one.text,
            "tokens": list(one.tokens),
            "finish": shown_finish(one.finish_reason),
            "score": float(one.score),
            "prompt_tokens": one.prompt_tokens,
            "logprobs": _likelihoods(one.logprobs),
            "prompt_logprobs": _likelihoods(one.prompt_logprobs),
        }
        for one in results
    ]


def _likelihoods(found: TokenLogprobs | None) -> Json:
    """Return a table of likelihoods; those of given ids are not numbers, which is null."""
    if found is None:
        return None
    return {
        "tokens": found.tokens.tolist(),
        "logprobs": found.logprobs.tolist(),
        "top_tokens": found.top_tokens.tolist(),
        "top_logprobs": found.top_logprobs.tolist(),
    }


def shown_explanation(why: Explanation) -> dict[str, Json]:
    """Return the reasons for a token."""
    return {
        "position": why.position,
        "given": why.given,
        "chosen": why.chosen._asdict(),
        "effects": [one._asdict() for one in why.effects],
        "draw": None if why.draw is None else why.draw._asdict(),
        "rivals": [one._asdict() for one in why.rivals],
    }
