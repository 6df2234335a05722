"""What a group that decides late can say early: the tokens that all its possible results share."""

from __future__ import annotations

from everystep.engine.apply import token_events
from everystep.engine.logprobs import last_choices
from everystep.engine.regroup import common_length
from everystep.types import Event, Group, TokenTable


def settled_events(group: Group, table: TokenTable) -> list[Event]:
    """Tokens that every hypothesis of the result will begin with and that were not told before.

    One event per token for each index of the result; the group remembers what it has told.
    """
    request = group.request
    told = group.told
    live, done = request.strategy.rivals(group)
    first = request.prompt_visible + told
    tails = [table.data[s.line, first : s.visible - s.provisional] for s in live]
    tails += [hypothesis.tokens[told:] for hypothesis in done]
    tokens = tails[0][: common_length(tails)].tolist() if tails else []
    if not tokens:
        return []
    group.told += len(tokens)
    known = last_choices([*live, *done][0].memo, len(tails[0]))[: len(tokens)]
    return [
        event
        for index in range(request.strategy.returns)
        for event in token_events(request.request_id, index, tokens, told, None, known)
    ]
