"""What consumers see of a step: tokens as they are settled, and the end of each sequence."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from everystep.engine.decided import results_of
from everystep.engine.logprobs import Likelihood, last_choices
from everystep.strategies.base import DecidesLate
from everystep.types import Event, FinishReason, Group, TokenTable
from everystep.types.table import common_length


def token_events(
    request_id: str,
    index: int,
    tokens: list[int],
    first: int,
    finish: FinishReason | None,
    known: list[Likelihood] | None = None,
) -> list[Event]:
    """One event per token, the reason on the last; one without a token if there is none.

    `known`: how likely the tokens were; empty or None where that was not asked for.
    """
    if not tokens and finish is not None:
        return [Event(request_id, index, -1, position=first, finish=finish)]
    last = len(tokens) - 1
    events = [
        Event(request_id, index, token, position=first + i, finish=finish if i == last else None)
        for i, token in enumerate(tokens)
    ]
    return [_with_logprob(*pair) for pair in zip(events, known, strict=False)] if known else events


def _with_logprob(event: Event, known: Likelihood) -> Event:
    top = zip(known.top_tokens.tolist(), known.top_logprobs.tolist(), strict=True)
    return replace(event, logprob=known.logprob, top_logprobs=tuple(top))


def settled_events(after: Group, table: TokenTable) -> list[Event]:
    """Report the tokens that every hypothesis of the result will begin with and that were not
    reported yet.

    One event per token for each index of the result; the group remembers how many it has reported.
    The last token of a hypothesis that has ended waits for the end, as its event says the reason.
    """
    request = after.request
    strategy = cast(DecidesLate, request.strategy)  # it does not stream
    live, done = strategy.rivals(after)
    first = request.prompt_visible + after.reported
    tails = [table.data[s.line, first : s.visible - s.provisional] for s in live]
    tails += [hypothesis.tokens[after.reported : -1] for hypothesis in done]
    tokens = tails[0][: common_length(tails)].tolist() if tails else []
    if not tokens:
        return []
    known = last_choices((live[0] if live else done[0]).memo, len(tails[0]) + (not live))[
        : len(tokens)
    ]
    start = after.reported
    after.reported += len(tokens)
    return [
        event
        for index in range(strategy.returns)
        for event in token_events(request.request_id, index, tokens, start, None, known)
    ]


def last_events(after: Group) -> list[Event]:
    """The part of the result of a group that is over that was not reported yet."""
    request, shown = after.request, after.reported
    if request.strategy.streams:
        return []
    events: list[Event] = []
    for index, done in enumerate(results_of(after)):
        tokens = done.tokens.tolist()
        known = last_choices(done.memo, len(tokens))[shown:]
        events += token_events(request.request_id, index, tokens[shown:], shown, done.reason, known)
    return events
