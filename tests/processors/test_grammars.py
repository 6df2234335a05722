"""Masks of grammars against the definition: what may follow is what some text of the grammar goes
on with, found by trying all texts."""

from __future__ import annotations

import json
import random
import re
import sys
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from everystep.engine.apply import copied, rewind_memory
from everystep.errors import RequestError, UnsupportedError
from everystep.processors.base import bare_rows
from everystep.processors.grammars.grammar import (
    Grammar,
    GrammarPlace,
    compiled,
    has,
    tokens_in,
)
from everystep.processors.grammars.mask import GrammarMask
from everystep.processors.grammars.source import LONGEST, Kind, read_source
from everystep.processors.grammars.vocabulary import vocabulary_of
from everystep.processors.pipeline import allowed_tokens
from everystep.testing.tokenizer import tiny_tokenizer
from everystep.text import Settings, Tokenizer
from everystep.types import Rows, Scores, TokenTable
from tests.processors.making import a_sequence

LETTERS, LONGEST_TEXT = "abc", 8
MERGES = [("a", "b"), ("ab", "c"), ("b", "c"), ("a", "a"), ("c", "c"), ("aa", "ab")]
TOKENS = ["<end>", "<stop>", *LETTERS, *map("".join, MERGES)]
ENDS = (0, 1)
SIZE = len(TOKENS) + 3  # logits are wider than the vocabulary
EXPRESSIONS = [
    *("a*b?c{0,2}", "(ab|abc)+", "a(b|c)a?", "[abc]{2,4}", "(aab|cc)(a|bc)*", "abcab", "(a|aa)+b"),
    *("c?", "(abc){1,2}|b", "[^a]b+", "aaab?", "(?:a|b(?:c|a))*c", "((a|b)c?){2}"),
]


def letters_tokenizer() -> Tokenizer:
    vocabulary = {token: id for id, token in enumerate(TOKENS)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(one, special=True) for one in ("<end>", "<stop>")])
    return Tokenizer(backend, Settings(special={"eos_token": "<end>"}))


tokenizer = cache(letters_tokenizer)


def grammar_of(own: Any, size: int, kind: Kind, value: Any) -> Grammar:
    return compiled(read_source(kind, value), vocabulary_of(own, size))


def mask_of(kind: Kind, value: Any) -> GrammarMask:
    return GrammarMask(grammar_of(tokenizer(), SIZE, kind, value), ENDS)


@cache
def every_text() -> list[str]:
    return ["".join(one) for n in range(LONGEST_TEXT + 1) for one in product(LETTERS, repeat=n)]


def going_on(texts: list[str], before: str) -> set[int]:
    """The ids after which `before` is still the beginning of one of the texts, or is one."""
    found = {id for id in ENDS if before in texts}
    for id, token in enumerate(TOKENS):
        if id not in ENDS and any(text.startswith(before + token) for text in texts):
            found.add(id)
    return found


def settled(texts: list[str], before: str) -> str:
    """What has to follow `before`, letter by letter, because nothing else can."""
    forced = before
    while forced not in texts:
        following = {t[len(forced)] for t in texts if len(t) > len(forced) and t.startswith(forced)}
        if len(following) != 1:
            break
        forced += following.pop()
    return forced[len(before) :]


def allowed(mask: GrammarMask, ids: list[int]) -> set[int]:
    words = GrammarPlace(mask.grammar, 0, mask.ends).mask(np.array([*ids, 0]), len(ids))
    return set() if words is None else {*tokens_in(words, SIZE).tolist()}  # type: ignore[union-attr]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_masks_are_what_texts_go_on_with(expression: str) -> None:
    """Where letters are forced, only their own spelling is allowed, one of those that would do."""
    texts = [one for one in every_text() if re.fullmatch(expression, one)]
    mask, pick = mask_of("regex", expression), random.Random(expression)
    narrower = 0
    for _ in range(25):
        ids: list[int] = []
        before = ""
        while len(before) <= LONGEST_TEXT - 6:
            found, wanted = allowed(mask, ids), going_on(texts, before)
            if settled(texts, before):
                narrower += found < wanted
                assert found and found <= wanted
            else:
                assert found == wanted
            free = sorted(found - {*ENDS})
            if not free:
                break
            ids.append(pick.choice(free))
            before += TOKENS[ids[-1]]
    assert expression != "abcab" or narrower


@pytest.mark.parametrize(
    ("kind", "value", "texts"),
    [
        ("choices", ("ab", "abc", "c", "aab"), {"ab", "abc", "c", "aab"}),
        ("grammar", 'start: "a" start "b" | "c"', {"c", "acb", "aacbb", "aaacbbb"}),
        ("grammar", "start: (A | B)+\nA: /a/\nB: /bc?/", {"a", "b", "bc", "ab", "abc", "bcbc"}),
    ],
)
def test_choices_and_grammars_have_their_texts(kind: Kind, value: Any, texts: set[str]) -> None:
    mask = mask_of(kind, value)
    found = set()
    for text in every_text():
        ids = tokenizer().encode(text)
        place, line = GrammarPlace(mask.grammar, 0, mask.ends), np.array([*ids, 0])
        words = place.mask(line, 0)
        for n, id in enumerate(ids):
            words = place.mask(line, n + 1) if words is not None and has(words, id) else None
        if words is not None and has(words, 0):
            found.add(text)
    assert found & texts == texts
    assert kind != "choices" or found == texts


def test_any_text_may_be_a_choice() -> None:
    own, odd = tiny_tokenizer(), ['a "b"', "c\\d", "e\nf", "ü 😀", "/g/", "{", " the", "%json {}"]
    grammar = grammar_of(own, len(own), "choices", odd)
    for text in (*odd, "a", "", "c\\", "e", "The"):
        ids, matcher = own.encode(text), grammar.matcher.deep_copy()
        whole = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
        assert whole is (text in odd)


# --- a memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_what_is_remembered_is_what_stands(seed: int) -> None:
    """A text that grows, is guessed beyond, forked and cut back stands where its ids stand."""
    pick, table = random.Random(seed), TokenTable()
    mask = mask_of("regex", EXPRESSIONS[seed % len(EXPRESSIONS)])
    lines = [a_sequence(table, [2, 3], pad=pad, prompt=2) for pad in (0, 2)]
    for _ in range(120):
        sequence = pick.choice(lines)
        move = pick.random()
        if move < 0.6:
            line = table.data[sequence.line, : sequence.visible]
            words = mask.place(sequence).mask(line, sequence.visible)
            some = None if words is None else tokens_in(words, SIZE)
            wild = some is None or pick.random() < 0.2
            token = pick.randrange(SIZE) if wild or some is None else pick.choice(some.tolist())
            table.write(sequence.line, sequence.visible, [token])
            sequence.length += 1
        elif move < 0.75 and len(lines) < 6:
            twin = a_sequence(table, [2, 3], pad=sequence.request.pad_prefix, prompt=2)
            table.write(twin.line, 0, table.data[sequence.line, : sequence.visible].tolist())
            twin.length, twin.memo = sequence.length, copied(sequence.memo)
            lines.append(twin)
        elif sequence.length > 2:
            sequence.length -= pick.randint(1, sequence.length - 2)
            rewind_memory(sequence, sequence.visible)
        for one in lines:
            line = table.data[one.line]
            anew = GrammarPlace(mask.grammar, one.request.prompt_visible, ENDS)
            found, wanted = mask.place(one).mask(line, one.visible), anew.mask(line, one.visible)
            assert (found is None) == (wanted is None)
            assert found is None or wanted is None or (found == wanted).all()


@pytest.mark.parametrize("kept", [2, 64])
def test_a_place_may_be_asked_for_lengths_in_any_order(
    kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everystep.processors.grammars.grammar._KEPT", kept)
    mask, pick = mask_of("regex", "(ab|c)+"), random.Random(kept)
    line = np.array(tokenizer().encode("ababcabcc"))
    place = GrammarPlace(mask.grammar, 0, ENDS)
    for _ in range(60):
        length = pick.randint(0, len(line))
        found = place.mask(line, length)
        wanted = GrammarPlace(mask.grammar, 0, ENDS).mask(line, length)
        assert found is not None and wanted is not None and (found == wanted).all()


def test_a_copy_is_made_only_where_there_are_two() -> None:
    mask, table = mask_of("regex", "a+b"), TokenTable()
    sequence = a_sequence(table, [2, 2])
    place = mask.place(sequence)
    assert mask.place(sequence) is place and place.copy() is not place
    place.mask(table.data[sequence.line], 2)
    twin = place.copy()
    twin.rewind(1)
    assert place.length == 2 and twin.length == 1


# --- the forms of scores --------------------------------------------------------------------------


@pytest.mark.parametrize("expression", ["the|that| was", "[a-z]*", "x?"])
def test_lists_and_whole_rows_lose_the_same(expression: str) -> None:
    """A row of a wide vocabulary becomes a list where little is allowed, and a list stays one."""
    own = tiny_tokenizer(5_000)
    mask = GrammarMask(grammar_of(own, 5_000, "regex", expression), (2,))
    ids = torch.tensor([own.encode("t")] if expression != "x?" else [[]], dtype=torch.int64)
    scores = torch.randn(1, 5_000, generator=torch.Generator().manual_seed(1))
    rows = bare_rows(ids)
    whole = mask.process(rows, scores)
    listed = mask.few(rows, Scores.of(scores))
    assert listed is not None and listed.listed
    assert torch.equal(listed.whole().values, whole)
    again = mask.few(rows, Scores(scores, torch.arange(5_000)[None], 5_000))
    assert again is not None and torch.equal(again.whole().values, whole)
    cooled = mask.few(rows, Scores.of(scores), 2.0)
    assert cooled is not None and torch.equal(cooled.whole().values, mask.process(rows, scores / 2))


def test_a_list_of_the_best_is_read_where_it_lacks_what_may_follow() -> None:
    own = tiny_tokenizer(5_000)
    mask = GrammarMask(grammar_of(own, 5_000, "regex", "the|that| was"), (2,))
    rows = bare_rows(torch.tensor([own.encode("t")] * 3))
    scores = torch.randn(3, 5_000, generator=torch.Generator().manual_seed(1))
    first, *_ = torch.nonzero(mask.may_follow(rows, 5_000)[0])[:, 0].tolist()
    scores[1, first] = 9.0  # the list of this row has it
    best = torch.topk(scores, 8)
    lists = Scores(best.values, best.indices, 5_000, best.values[:, -1:], read=lambda r: scores[r])
    found = mask.few(rows, lists)
    assert found is not None
    whole = mask.process(rows, scores)
    assert torch.equal(found.values.amax(dim=1), whole.amax(dim=1))
    at = found.values.argmax(dim=1, keepdim=True)
    assert torch.equal(found.tokens.gather(1, at)[:, 0], whole.argmax(dim=1))
    assert torch.equal(found.whole().values, whole)


def test_what_grammars_of_several_rows_let_follow() -> None:
    mask, table = mask_of("regex", "a*b?c{0,2}"), TokenTable()
    own = [a_sequence(table, [3, *after], one) for after, one in (([2], (mask,)), ([2], ()))]
    own.append(a_sequence(table, [3, 3], (mask,)))
    rows, scores = Rows(table, own, np.array([2, 2, 2])), torch.zeros(3, SIZE)
    found = allowed_tokens(rows, scores)
    assert found is not None and found.shape == scores.shape
    assert found[1].all()  # no grammar
    for r, ids in ((0, [2]), (2, [3])):
        assert {*found[r].nonzero()[:, 0].tolist()} == allowed(mask, ids)
    assert allowed_tokens(rows.select(np.array([1])), scores[1:2]) is None


def test_a_row_where_much_is_allowed_stays_whole() -> None:
    pieces = ["<end>", *map("".join, product("abcdefghijklmnopq", repeat=3))]
    backend = tokenizers.Tokenizer(models.BPE({one: i for i, one in enumerate(pieces)}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    own = Tokenizer(backend, Settings())
    mask = GrammarMask(grammar_of(own, len(pieces), "regex", "[a-p]*"), (0,))
    rows, scores = bare_rows(torch.tensor([[70]])), torch.zeros(1, len(pieces))
    assert mask.few(rows, Scores.of(scores)) is None
    assert int((mask(rows, scores) == 0).sum()) == 16**3 + 1


# --- vocabularies ---------------------------------------------------------------------------------


def fallback_tokenizer() -> Tokenizer:
    """With byte tokens and a mark for spaces, as Llama 2 has them."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={one: i for i, one in enumerate(pieces)},
            merges=[("▁", "a")],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    steps = (decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse())
    backend.decoder = decoders.Sequence(list(steps))
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend, Settings(special={"eos_token": "</s>"}))


def test_tokens_are_read_as_bytes() -> None:
    own = fallback_tokenizer()
    names = own.convert_ids_to_tokens(list(range(len(own))))
    place = GrammarPlace(grammar_of(own, len(own), "regex", "(ü| a|b)+"), 0, (2,))
    words = place.mask(np.array([0xC3 + 3]), 0)
    assert words is not None
    listed = tokens_in(words, 300)
    assert listed is not None
    assert {names[i] for i in listed} == {"<0xC3>", "<0x20>", "<0x62>", "▁", "▁a"}
    after = tokens_in(place.mask(np.array([0xC3 + 3]), 1), 300)  # type: ignore[arg-type]
    assert after is not None and [names[i] for i in after] == ["<0xBC>"]


def test_a_tokenizer_of_the_reference_will_do() -> None:
    own = tiny_tokenizer()
    foreign = transformers.PreTrainedTokenizerFast(tokenizer_object=own.backend, eos_token="<eos>")
    both = [
        GrammarPlace(grammar_of(one, 320, "regex", "(the|a)+"), 0, (2,)).mask(np.zeros(1), 0)
        for one in (own, foreign)
    ]
    assert both[0] is not None and both[1] is not None and (both[0] == both[1]).all()


@pytest.mark.parametrize(
    ("kind", "value", "before"),
    [
        ("grammar", "start: /.*/", ""),
        ("regex", ".*", ""),
        ("schema", {"type": "string"}, '"'),
        ("choices", ["<|im_start|>a"], ""),
    ],
)
def test_special_tokens_are_allowed_by_name_alone(kind: Kind, value: Any, before: str) -> None:
    own = tiny_tokenizer()
    marks, begun = own.encode("<|im_start|>"), own.encode(before)
    free = grammar_of(own, 320, kind, value).matcher.deep_copy()
    assert free.try_consume_tokens(begun) == len(begun)
    assert len(marks) == 1 and free.try_consume_tokens(marks) == 0
    named = grammar_of(own, 320, "grammar", 'start: <|im_start|> "a"')
    assert named.matcher.deep_copy().try_consume_tokens([*marks, *own.encode("a")]) == 2


def test_a_vocabulary_is_read_once() -> None:
    own = tiny_tokenizer()
    assert vocabulary_of(own, 320) is vocabulary_of(own, 320)
    assert vocabulary_of(own, 321) is not vocabulary_of(own, 320)


def test_a_tokenizer_that_puts_spaces_between_words_is_refused() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    with pytest.raises(UnsupportedError, match="spaces between tokens"):
        vocabulary_of(Tokenizer(backend, Settings()), 2)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "value", "told"),
    [
        ("regex", "a(b", "unclosed group"),
        ("regex", "a(?=b)", "look-around"),
        ("regex", r"(a)\1", "backreferences"),
        ("regex", "", "regex is no text"),
        ("regex", 7, "got int"),
        ("grammar", "start: b", 'unknown name: "b"'),
        ("grammar", 'start: "a"\nrest "b"', "2("),
        ("grammar", "begin: A\nA: /a/", "start"),
        ("choices", [], "not a list of texts"),
        ("choices", "ab", "not a list of texts"),
        ("choices", ["a", ""], "none of them empty"),
        ("choices", ["a", 1], "not a list of texts"),
        ("regex", "a" * (LONGEST["regex"] + 1), "too long"),
        ("choices", ["a" * LONGEST["choices"]], "too long"),
        ("regex", "d", "no text that this tokenizer can spell"),
    ],
)
def test_what_is_no_grammar_is_refused_with_its_place(kind: Kind, value: Any, told: str) -> None:
    with pytest.raises(RequestError, match=re.escape(told)):
        grammar_of(tokenizer(), SIZE, kind, value)


def chained(count: int) -> dict[str, Any]:
    """Definitions of which each refers to the next."""
    names = [f"#/$defs/a{i}" for i in range(count)]
    defined: dict[str, Any] = {
        f"a{i}": {"type": "object", "properties": {"x": {"$ref": names[(i + 1) % count]}}}
        for i in range(count)
    }
    return {"$ref": names[0], "$defs": defined}


HOSTILE: dict[str, tuple[Kind, Any]] = {
    "deep": ("schema", '{"items":' * 5_000 + "{}" + "}" * 5_000),
    "chained": ("schema", chained(2_000)),
    "many properties": ("schema", {"properties": {f"p{i}": {} for i in range(5_000)}}),
    "many patterns": ("schema", {"allOf": [{"pattern": f"a{i}"} for i in range(40)]}),
    "long": ("schema", {"enum": ["a" * 1_000 + str(i) for i in range(400)]}),
    "repeated": ("regex", "((((a{1,1000}){1,1000}){1,1000}){1,1000}){1,1000}"),
    "counted": ("regex", "a{1000000}"),
    "wide": ("regex", "|".join(f"[a-z]{{{n}}}x.*y" for n in range(1, 1_000))),
    "many rules": ("grammar", "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(1_500))),
    "endless": ("grammar", "start: start"),
    "ambiguous": ("grammar", 'start: s\ns: s s | "a" |'),
    "brackets": ("grammar", "start: " + "(" * 9_000 + '"a"' + ")" * 9_000),
}
BOUNDED = ("repeated", "wide", "ambiguous", "counted")
"""Those that are followed, as long as each step stays within its limits."""


@pytest.mark.parametrize("kind", ["regex", "grammar"])
def test_a_text_may_be_as_long_as_is_said(kind: Kind) -> None:
    assert read_source(kind, "a" * LONGEST[kind]).text == "a" * LONGEST[kind]
    with pytest.raises(RequestError, match=f"at most {LONGEST[kind]} characters"):
        read_source(kind, "a" * (LONGEST[kind] + 1))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_ends_in_an_error_or_works(name: str) -> None:
    own = tiny_tokenizer()
    kind, value = HOSTILE[name]
    try:
        grammar = grammar_of(own, len(own), kind, value)
        place, line = GrammarPlace(grammar, 0, (2,)), np.zeros(64, np.int64)
        for length in range(40):
            words = place.mask(line, length)
            some = None if words is None else tokens_in(words, 1_000)
            if some is None or not len(some):
                break
            line[length] = some[-1]
    except RequestError as error:
        assert len(str(error)) < 1_000
    else:
        assert name in BOUNDED


def test_without_the_library_an_error_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'everystep\[grammar\]'"):
        vocabulary_of(letters_tokenizer(), SIZE)


def test_json_is_spaced_by_a_blank_or_a_line() -> None:
    own = tiny_tokenizer()
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    grammar = grammar_of(own, len(own), "schema", schema)
    for value, whole in (
        (json.dumps({"a": 1}), True),
        (json.dumps({"a": 1}, indent=4), True),
        (json.dumps({"a": 1}, separators=(",", ":")), True),
        ('{  "a": 1}', False),
        ('{\n\n"a": 1}', False),
    ):
        ids, matcher = own.encode(value), grammar.matcher.deep_copy()
        assert (matcher.try_consume_tokens(ids) == len(ids)) is whole
