"""When sequences end, where a child of several tokens is cut, and which reason is given."""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from everystep.errors import RequestError
from everystep.stops.check import check
from everystep.stops.ends import EosToken, MaxLength, MaxTime, UserStop
from everystep.stops.strings import StopStrings
from everystep.types import FinishReason, Prompt, Request, Sequence, TokenTable
from everystep.types.request import Candidates, Stop

STOP, LENGTH = "stop", FinishReason("length")


def a_sequence(table: TokenTable, ids: Several[int], stops: tuple[Stop, ...] = ()) -> Sequence:
    prompt = Prompt(ids=np.array(ids[:1]))
    request = Request(request_id="r", prompt=prompt, strategy=None, draws=None, stops=stops)
    return Sequence(request, table.open(np.array(ids, dtype=np.int64)), len(ids))


def after(table: TokenTable, parent: Sequence, tokens: Several[int]) -> Sequence:
    """The sequence with further tokens in place of its provisional ones."""
    if not tokens:
        return parent
    settled = table.data[parent.line, : parent.visible - parent.provisional].tolist()
    length = parent.length - parent.provisional + len(tokens)
    return Sequence(parent.request, table.open(np.array([*settled, *tokens])), length)


def ask(
    stops: tuple[Stop, ...], prefix: Several[int], *children: Several[int], provisional: int = 0
) -> list[tuple[int, FinishReason | None]]:
    """What stands of each child of one sequence, and why it ends."""
    table = TokenTable()
    parent = a_sequence(table, prefix, stops)
    parent.provisional = provisional
    return ask_all(table, [parent] * len(children), children)


def ask_all(
    table: TokenTable, parents: list[Sequence], children: Several[Several[int]]
) -> list[tuple[int, FinishReason | None]]:
    """Every beginning of a child is a candidate; it stands up to the first that ends."""
    begun = [(c, n) for c, child in enumerate(children) for n in range(1, len(child) + 1)]
    grown = [after(table, parents[c], children[c][: n - 1]) for c, n in begun]
    reasons = check(Candidates(table, grown, np.array([children[c][n - 1] for c, n in begun])))
    found: dict[int, tuple[int, FinishReason | None]] = {}
    for (c, n), reason in zip(begun, reasons, strict=True):
        if c not in found or found[c][1] is None:
            found[c] = n, reason
    return [found[c] for c in range(len(children))]


def byte(id: int) -> bytes:
    """Ids are bytes."""
    return bytes([id])


# --- one stop ------------------------------------------------------------------------------------


def test_any_end_token_ends() -> None:
    answers = ask((EosToken((7, 2)),), [1, 7], [2], [3], [7])
    assert answers == [(1, FinishReason(STOP, 2)), (1, None), (1, FinishReason(STOP, 7))]


def test_many_end_tokens_are_found_too() -> None:
    answers = ask((EosToken(tuple(range(20, 40))),), [1], [39], [3])
    assert [reason is not None for _, reason in answers] == [True, False]


def test_the_limit_counts_what_is_visible() -> None:
    stops = (MaxLength(4),)
    assert ask(stops, [1, 2], [5]) == [(1, None)]
    assert ask(stops, [1, 2, 3], [5]) == [(1, LENGTH)]
    assert ask(stops, [1, 2, 3, 4, 5], [5]) == [(1, LENGTH)]


def test_pads_are_visible() -> None:
    table = TokenTable()
    prompt = Prompt(ids=np.array([5]))
    request = Request("r", prompt, None, None, stops=(MaxLength(4),), pad_prefix=2)
    parent = Sequence(request, table.open(np.array([0, 0, 5])), 1)
    assert ask_all(table, [parent], [[6]]) == [(1, LENGTH)]


def test_time_ends_what_its_deadline_has_passed() -> None:
    assert ask((MaxTime.after(0.0),), [1], [2])[0][1] == FinishReason("time")
    assert ask((MaxTime.after(1000.0),), [1], [2]) == [(1, None)]


def test_deadlines_of_different_requests_are_kept_apart() -> None:
    table = TokenTable()
    late, early = (MaxTime.after(-1.0),), (MaxTime.after(1000.0),)
    parents = [a_sequence(table, [1], stops) for stops in (late, early, late)]
    answers = ask_all(table, parents, [[2], [2], [2]])
    assert [reason is not None for _, reason in answers] == [True, False, True]


# --- the reason where several say yes ------------------------------------------------------------


@pytest.mark.parametrize("order", [1, -1])
def test_an_end_token_at_the_limit_is_a_stop(order: int) -> None:
    stops = (MaxLength(3), EosToken((9,)))[::order]
    assert ask(stops, [1, 2], [9], [8]) == [(1, FinishReason(STOP, 9)), (1, LENGTH)]


def test_a_string_goes_before_the_limit_and_the_limit_before_the_users_own() -> None:
    stops = (UserStop(lambda ids, scores: True), MaxLength(3), StopStrings(("b",), byte))
    answers = ask(stops, [1, 2], list(b"b"), list(b"a"))
    assert answers == [(1, FinishReason(STOP, "b")), (1, LENGTH)]


# --- several tokens at once ----------------------------------------------------------------------


def test_a_child_is_cut_after_its_first_end_token() -> None:
    answers = ask((EosToken((9,)),), [1], [3, 9, 4, 9], [3, 4], [9], [3, 4, 5, 9])
    assert [kept for kept, _ in answers] == [2, 2, 1, 4]
    assert [reason is not None for _, reason in answers] == [True, False, True, True]


def test_the_first_end_counts_whichever_stop_it_is() -> None:
    stops = (EosToken((9,)), MaxLength(3))
    answers = ask(stops, [1], [3, 4, 9], [3, 9, 4], [9, 3, 4])
    assert answers == [(2, LENGTH), (2, FinishReason(STOP, 9)), (1, FinishReason(STOP, 9))]


def test_children_of_different_lengths_are_kept_apart() -> None:
    table = TokenTable()
    parent = a_sequence(table, [1], (EosToken((0,)),))
    assert ask_all(table, [parent, parent], [[3], [4, 5, 6]]) == [(1, None), (3, None)]


def test_provisional_tokens_are_taken_back_first() -> None:
    answers = ask((MaxLength(3),), [1, 2, 5], [6], provisional=1)
    assert answers == [(1, LENGTH)]
    assert ask((MaxLength(4),), [1, 2, 5], [6], provisional=1) == [(1, None)]


def test_a_string_is_found_in_the_middle_of_a_child() -> None:
    (answer,) = ask((StopStrings(("END",), byte),), list(b"xE"), list(b"NDxx"))
    assert answer == (2, FinishReason(STOP, "END"))


# --- several requests ----------------------------------------------------------------------------


def test_each_request_has_its_own_stops() -> None:
    table = TokenTable()
    tuples = [(EosToken((9,)), MaxLength(5)), (MaxLength(3),), (), (EosToken((8,)), MaxLength(3))]
    parents = [a_sequence(table, [1, 2], stops) for stops in tuples]
    answers = ask_all(table, parents, [[9]] * 4)
    assert answers == [(1, FinishReason(STOP, 9)), (1, LENGTH), (1, None), (1, LENGTH)]


def test_mixed_requests_end_as_each_alone() -> None:
    generator = np.random.default_rng(0)
    choices: list[Stop] = [EosToken((3,)), EosToken((4, 5)), MaxLength(4), MaxLength(6)]
    choices += [UserStop(lambda ids, scores: ids[:, -1] == 6), StopStrings(("\x01\x02",), byte)]
    for _ in range(50):
        table = TokenTable()
        parents = [
            a_sequence(
                table,
                generator.integers(0, 8, generator.integers(1, 5)).tolist(),
                tuple(stop for stop in choices if generator.random() < 0.5),
            )
            for _ in range(6)
        ]
        children = [generator.integers(0, 8, generator.integers(1, 5)).tolist() for _ in range(6)]
        alone = [
            ask_all(table, [parent], [child])[0]
            for parent, child in zip(parents, children, strict=True)
        ]
        assert ask_all(table, parents, children) == alone


def a_stop_of_a_new_class(name: str) -> Stop:
    def ends(self: Stop, candidates: Candidates) -> np.ndarray:
        return np.ones(len(candidates), dtype=bool)

    def reason(self: Stop, candidates: Candidates, index: int) -> FinishReason:
        return FinishReason("criteria", name)

    kind: Any = type(name, (), {"__call__": ends, "reason": reason})
    return kind()  # type: ignore[no-any-return]


def test_stops_of_the_callers_own_give_reasons_in_their_order() -> None:
    table = TokenTable()
    for _ in range(8):  # an order by identity would be right by chance at times
        stops = tuple(a_stop_of_a_new_class(name) for name in "abcd")
        parents = [a_sequence(table, [1], stops), a_sequence(table, [1], (EosToken((7,)), *stops))]
        answers = ask_all(table, parents, [[3], [3]])
        assert [reason.matched for _, reason in answers if reason] == ["a", "a"]


def test_equal_stops_are_asked_once() -> None:
    table, asked = TokenTable(), []

    def own(input_ids: Tensor, scores: Any) -> bool:
        asked.append(len(input_ids))
        return False

    parents = [a_sequence(table, [1, 2], (UserStop(own),)) for _ in range(3)]
    ask_all(table, parents, [[5], [6], [7]])
    assert asked == [3]


def test_nothing_to_ask_nothing_ends() -> None:
    none = np.zeros(0, np.int64)
    assert check(Candidates(TokenTable(), [], np.zeros((0, 1), np.int64), none)) == []


# --- strings -------------------------------------------------------------------------------------


def ends_with(strings: tuple[str, ...], prefix: str, new: bytes) -> str | None:
    """The string that is found when `new` follows, byte by byte a token."""
    (answer,) = ask((StopStrings(strings, byte),), list(prefix.encode()), list(new))
    return answer[1].matched if answer[1] else None


@pytest.mark.parametrize(
    ("strings", "prefix", "new", "found"),
    [
        (("stop",), "please sto", b"p", "stop"),
        (("stop",), "please sto", b"q", None),
        (("stop",), "stop", b"x", None),
        (("stop",), "stop sto", b"p", "stop"),
        (("é",), "caf", "é".encode(), "é"),
        (("é",), "caf", "é".encode()[:1], None),
        (("日本",), "日", "本".encode(), "日本"),
        (("aa", "a"), "b", b"aa", "a"),
        (("\n\n",), "a\n", b"\n", "\n\n"),
        (("xyz" * 40,), "xyz" * 39 + "xy", b"z", "xyz" * 40),
    ],
)
def test_strings_are_found_across_tokens(
    strings: tuple[str, ...], prefix: str, new: bytes, found: str | None
) -> None:
    assert ends_with(strings, prefix, new) == found


def test_a_token_may_reach_beyond_the_string() -> None:
    words = ["st", "op", "oppers", "sto", "las", "topper", " ", "ped", "s"]
    stop = StopStrings(("stop",), lambda id: words[id].encode())
    answers = ask((stop,), [6, 0], [1], [2], [7])
    assert [reason is not None for _, reason in answers] == [True, True, False]
    assert ask((stop,), [4], [5])[0][1] == FinishReason(STOP, "stop")


def test_tokens_without_text_do_not_hide_a_string() -> None:
    stop = StopStrings(("ab",), lambda id: b"ab "[id : id + 1])
    (answer,) = ask((stop,), [2, 0] + [9] * 50, [1])
    assert answer[1] == FinishReason(STOP, "ab")


def test_a_string_of_the_prompt_does_not_end() -> None:
    assert ends_with(("Q:",), "Q: who? A:", b" me") is None


def test_the_length_of_the_text_costs_nothing() -> None:
    seen: list[int] = []

    def spy(id: int) -> bytes:
        seen.append(id)
        return byte(id)

    stop = StopStrings(("stop",), spy)
    ask((stop,), list(b"a" * 5000), list(b"b"))
    assert len(seen) == 1  # b ends no string, so nothing before it is looked at
    ask((stop,), list(b"a" * 5000), list(b"p"))
    assert len(seen) < 10
    del seen[:]
    ask((stop,), list(b"a" * 5000), list(b"b"))
    assert seen == []  # known by now


@pytest.mark.parametrize("strings", [(), ("a", "")])
def test_empty_strings_are_refused(strings: tuple[str, ...]) -> None:
    with pytest.raises(RequestError, match="stop_strings is not valid"):
        StopStrings(strings, byte)


def test_the_text_of_a_stop_is_what_it_was_given() -> None:
    assert (
        repr(StopStrings(("a", "日"), byte)) == f"StopStrings(strings=('a', '日'), spelling={byte})"
    )


# --- the caller's own ----------------------------------------------------------------------------


def test_the_users_criterion_gets_a_rectangle_where_lengths_agree() -> None:
    table, shapes = TokenTable(), []

    def own(input_ids: Tensor, scores: Any) -> Tensor:
        shapes.append(tuple(input_ids.shape))
        return input_ids[:, -1] == 5

    stops = (UserStop(own),)
    same = [a_sequence(table, [1, 2], stops) for _ in range(2)]
    answers = ask_all(table, same, [[5], [6]])
    assert [reason and reason.kind for _, reason in answers] == ["criteria", None]
    ask_all(table, [same[0], a_sequence(table, [1], stops)], [[5], [6]])
    assert shapes == [(2, 3), (1, 3), (1, 2)]


@pytest.mark.parametrize(
    "answer", [True, torch.tensor([True, True]), torch.tensor([[True], [True]]), [True, True]]
)
def test_the_users_criterion_may_answer_in_any_of_the_known_forms(answer: Any) -> None:
    answers = ask((UserStop(lambda ids, scores: answer),), [1], [2], [3])
    assert all(reason is not None for _, reason in answers)


@pytest.mark.parametrize("answer", [None, torch.tensor([True, False, True]), torch.tensor([1, 0])])
def test_other_answers_are_refused(answer: Any) -> None:
    with pytest.raises(RequestError, match="wanted 2 bools or one"):
        ask((UserStop(lambda ids, scores: answer),), [1], [2], [3])


def test_a_tail_is_the_end_of_all_ids() -> None:
    table = TokenTable()
    parent = a_sequence(table, [1, 2, 3, 4])
    parent.provisional = 1
    candidates = Candidates(table, [parent], np.array([5]))
    assert candidates.ids(0).tolist() == [1, 2, 3, 5]
    for count in range(1, 7):
        assert candidates.tail(0, count) == candidates.ids(0).tolist()[-count:]
