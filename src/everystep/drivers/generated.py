"""`Generated`: what became of one prompt, and how a group is turned into it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import overload

import numpy as np
from torch import Tensor

from everystep.dialogue.asked import Message
from everystep.engine.collect import Captures, kept_rows, owned_layers
from everystep.engine.decided import results_of
from everystep.engine.explained import Account, Again, Explanation
from everystep.engine.logprobs import choice_logprobs, prompt_logprobs
from everystep.errors import RequestError, shown
from everystep.outputs import TokenLogprobs, timings_of
from everystep.requests.options import Options
from everystep.requests.prompts import TokenizerLike
from everystep.requests.reading import cut_by_default
from everystep.shown import cut, table
from everystep.stops.ends import moment
from everystep.stops.strings import StopStrings
from everystep.strategies.beams import NOTHING
from everystep.streamers import Wording
from everystep.text import Trimmer, follow
from everystep.types import Finished, FinishReason, Group, Request

Shown = tuple[tuple[Tensor, ...], ...]
"""A tensor per layer, for each token."""
_HEAD = ("text", "tokens", "ended by", "score", "prompt tokens", "cached")


@dataclass(frozen=True, slots=True)
class Generated:
    """One continuation: its text without special tokens, its ids, why it ended, its score.

    `cached_tokens` of the `prompt_tokens` were not fed for it: they came from a `Prefix`, or from a
    row of another prompt that begins alike. `logprobs` of its tokens and `prompt_logprobs` of its
    prompt's where they were asked for. So are `hidden_states` and `attentions`: for each token, by
    layer, (T, E) and (H, T, S) of the positions that were fed before it, the whole prompt for the
    first; of the decoder where an encoder reads the prompt. `message`: the answer's parts, where
    tools or thoughts were asked for; its text then keeps the marks of both. Where the reason is an
    error, the text and the ids are as far as they came. `timings`: `prompt_seconds` until the first
    token was there, `decode_seconds` from there on, `total_seconds`, and `tokens_per_second` of the
    tokens after the first; what ran beside it, and between the steps of a run, counts too.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    score: float
    prompt_tokens: int
    cached_tokens: int = 0
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    message: Message | None = None
    hidden_states: Shown | None = field(default=None, repr=False, compare=False)
    attentions: Shown | None = field(default=None, repr=False, compare=False)
    timings: Mapping[str, float] | None = field(default=None, repr=False, compare=False)
    again: Again | None = field(default=None, repr=False, compare=False)

    @overload
    def explain(self) -> Account: ...
    @overload
    def explain(self, position: int, rivals: int = 5) -> Explanation: ...
    def explain(self, position: int | None = None, rivals: int = 5) -> Account | Explanation:
        """Tell why it ended and what each stage did, or explain the token at a position.

        It is worked out now: the prompt is answered once more, as a run, whose every step can be
        looked at. RequestError where that gives other tokens, as with objects that are used up.
        """
        if self.again is None:
            what = "this holds nothing that it could be explained from"
            do = "Explain what a call gave, in the process that called"
            raise RequestError(what, wanted="a result of es.generate, a stream or a run", do=do)
        return self.again.explain(self.tokens, self.finish_reason, position, rivals)

    def __repr__(self) -> str:
        scored = f"score={self.score:.4g}, " if self.score else ""  # only some strategies give one
        return (
            f"Generated({cut(self.text)!r}, {len(self.tokens)} tokens, {self._ended}, {scored}"
            f"{self.cached_tokens} of {self.prompt_tokens} prompt tokens cached)"
        )

    def _repr_html_(self) -> str:
        return table(_HEAD, [self._cells])

    @property
    def _cells(self) -> tuple[object, ...]:
        known = len(self.tokens), self._ended, float(self.score) if self.score else None
        return (self.text, *known, self.prompt_tokens, self.cached_tokens)

    @property
    def _ended(self) -> str:
        matched = self.finish_reason.matched
        beside = "" if matched is None else f" ({cut(shown(matched), 60)})"
        return f"{self.finish_reason.kind}{beside}"


class Results(list[object]):
    """A list of what several prompts became, which a notebook shows as a table."""

    def _repr_html_(self) -> str:
        rows = list(self._rows())
        wide = any(len(cells) > 2 for cells in rows)
        return table(("prompt", *(_HEAD if wide else _HEAD[:1])), rows)

    def _rows(self) -> Iterator[tuple[object, ...]]:
        """Yield the number of its prompt and its cells, for each continuation."""
        for number, one in enumerate(self):
            for result in one if isinstance(one, list) else (one,):
                cells = result._cells if isinstance(result, Generated) else (result,)
                yield (number, *cells)


@dataclass(frozen=True, slots=True)
class Reply:
    """The form in which a prompt is answered: by the options it was asked with, as text where there
    is a tokenizer. `captures`: what layers showed, where that is kept. `again`: how what becomes of
    the prompt is taken once more."""

    options: Options
    tokenizer: TokenizerLike | None
    captures: Captures | None = None
    again: Again | None = None

    def generated(self, group: Group) -> list[Generated]:
        """Return the results of a group that has ended.

        Where a search came to fewer than it was asked for, return those: one at least.
        """
        if (error := group.error) is not None:
            done = next(one for one in group.done if one.reason.kind == "error")
            made = self.failed(error, done.tokens, group.request.prompt.length)
            took = timings_of(group.times, moment(), len(made.tokens))
            return [replace(made, timings=took, again=self.again)]
        found = results_of(group)
        return self.of(group, [one for one in found if one is not NOTHING] or found[:1])

    def of(self, group: Group, finished: Iterable[Finished]) -> list[Generated]:
        """Return these hypotheses of a group."""
        length, wants = group.request.prompt.length, group.request.wants
        of_prompt = None if wants.prompt_logprobs is None else prompt_logprobs(group)
        trim = self.trim(group.request)
        strategy, name = group.request.strategy, group.request.request_id
        kept = {} if self.captures is None else self.captures.taken(name)
        in_rows = kept_rows(strategy) == strategy.width
        results = []
        for number, done in enumerate(finished):
            ids = done.tokens.tolist()
            text = self.text(ids)
            if trim is not None:
                text = Trimmer(*trim).finish(text, done.reason.matched)
            asked = self.options.recording.logprobs
            known = None if asked is None else choice_logprobs(done.memo, len(ids))
            counts = length, group.cached_tokens
            found = done.reason, done.score, *counts, known, of_prompt
            answers = kept.get(done.index if in_rows else number, [])[: len(ids)]
            layers = owned_layers([one.layers for one in answers]) if wants.layers else None
            attended = [one.attentions for one in answers]
            weights = owned_layers(attended) if wants.attentions else None
            parts = self._message(text, group, number)
            took = timings_of(group.times, moment(), len(ids))
            beside = parts, layers, weights, took, self.again
            results.append(Generated(text, tuple(ids), *found, *beside))
        return results

    def _message(self, text: str, group: Group, number: int) -> Message | None:
        """Return the parts of an answer, where the call asked for them. The ids of its calls follow
        from the seed, the answer's number, and how long the prompt is."""
        dialogue, request = self.options.dialogue, group.request
        if dialogue is None:
            return None
        seed = getattr(request.draws, "seed", 0)
        key = f"{seed}/{number}/{request.prompt.length}"
        return dialogue.message(text, end_of_prompt(self.tokenizer, request.prompt.ids), key)

    @property
    def kept(self) -> frozenset[int]:
        """The special ids that texts show."""
        dialogue = self.options.dialogue
        return frozenset() if dialogue is None else dialogue.kept

    def failed(self, error: Exception, tokens: Iterable[int] = (), prompt: int = 0) -> Generated:
        """Return what stands in the place of a prompt that failed after these tokens."""
        ids = tuple(int(token) for token in tokens)
        return Generated(self.text(ids), ids, FinishReason("error", error), 0.0, prompt)

    def shaped(self, group: Group) -> object:
        """Return what `generate` gives for a group that has ended."""
        results = self.generated(group)
        values: list[object] = [*results]
        if group.error is None and not self.options.effective.return_dict_in_generate:
            plain = self.tokenizer is None
            values = [list(one.tokens) if plain else one.text for one in results]
        alone = group.error is not None or group.request.strategy.returns == 1
        return values[0] if alone and values else values

    def trim(self, request: Request) -> tuple[tuple[str, ...], str] | None:
        """Return the stop strings that the texts of a request lose and the end of its prompt, if
        that was asked for."""
        if not self.options.trims:
            return None
        stops = (stop for stop in request.stops if isinstance(stop, StopStrings))
        strings = tuple(string for stop in stops for string in stop.strings)
        ids = request.prompt.ids
        longest = max((len(string.encode()) for string in strings), default=0)
        before = [] if ids is None or not longest else ids[-longest:].tolist()
        return strings, self.text(before)

    def spell(self, wording: Wording, request: Request) -> None:
        """Tell what spells a request's events which marks they keep, and which strings they
        lose."""
        wording.keep(request.request_id, self.kept)
        if (trim := self.trim(request)) is not None:
            wording.trim(request.request_id, *trim)

    def cut(self, group: Group) -> tuple[str, ...]:
        """Return what to tell a caller who set no length and shall not take a cut text for a whole
        one."""
        options, reasons = self.options, (done.reason for done in group.done)
        return cut_by_default(options.effective, options.steering.criteria, reasons)

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of these ids, empty without a tokenizer."""
        if self.tokenizer is None:
            return ""
        if kept := self.kept:
            follower = follow(self.tokenizer, kept=kept)
            return follower.push(ids) + follower.finish()
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


_END = 64


def end_of_prompt(tokenizer: TokenizerLike | None, ids: object) -> str:
    """Return the text of a prompt's last ids, marks and all; none where it has no ids."""
    if tokenizer is None or ids is None:
        return ""
    last = np.asarray(ids).reshape(-1)[-_END:].tolist()
    return str(tokenizer.decode(last, skip_special_tokens=False))
