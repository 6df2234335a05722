"""A corpus finds the longest ends that it holds, and how they went on."""

from __future__ import annotations

import numpy as np
import pytest

import everystep as es
from everystep.engine.corpus import CorpusLookup, suffix_order
from everystep.engine.lookup import PromptLookup
from everystep.errors import RequestError
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer


@pytest.mark.parametrize("length", [0, 1, 2, 7, 60])
def test_suffixes_are_in_order(length: int) -> None:
    ids = np.random.default_rng(length).integers(0, 3, length)
    ordered = [ids[i:].tolist() for i in suffix_order(ids).tolist()]
    assert ordered == sorted(ids[i:].tolist() for i in range(length))


@pytest.mark.parametrize("seed", range(8))
def test_the_longest_end_and_the_likeliest_way_on_are_found(seed: int) -> None:
    chance = np.random.default_rng(seed)
    texts = [chance.integers(0, 4, 12).tolist() for _ in range(4)]
    corpus = es.Corpus(texts)
    tail = chance.integers(0, 5, 9)
    size, guess = corpus.follow(tail, 5, 3)
    held = {tuple(one[i:j]) for one in texts for i in range(12) for j in range(i + 1, 13)}
    lengths = [n for n in range(1, 6) if tuple(tail[-n:].tolist()) in held]
    assert size == max(lengths, default=0)
    if size:
        end = tail[-size:].tolist()
        after = [
            one[i + size] for one in texts for i in range(12 - size) if one[i : i + size] == end
        ]
        often = max((after.count(token) for token in after), default=0)
        assert (len(guess) == 0) == (not after)
        if after:
            assert after.count(int(guess[0])) == often


def test_drafts_end_with_texts_and_at_ends() -> None:
    corpus = es.Corpus([[1, 2, 3, 4, 9, 5], [6, 7, 3]])
    lookup = CorpusLookup(corpus, stop_ids=(9,))
    assert lookup.draft(np.array([0, 1, 2]), 8).tolist() == [3, 4]
    assert lookup.draft(np.array([0, 6, 7]), 8).tolist() == [3]
    assert lookup.draft(np.array([0, 0, 7]), 8).tolist() == []  # one id alone is too few
    both = CorpusLookup(corpus, prompt=PromptLookup(4))
    assert both.draft(np.array([7, 8, 0, 0, 7]), 2).tolist() == [8, 0]
    assert both.draft(np.array([8, 8, 3, 1, 2, 3, 4]), 1).tolist() == [9]


def test_a_longer_end_in_the_corpus_goes_before_the_prompt() -> None:
    lookup = CorpusLookup(es.Corpus([[7, 1, 2, 3]]), prompt=PromptLookup(2, max_ngram=2))
    for before, found in (([5], [8, 5]), ([7], [3])):
        # The prompt goes on with 8 after the last two ids, the corpus with 3.
        ids = np.array([1, 2, 8, *before, 1, 2])
        assert lookup.draft(ids, 2).tolist() == found


def test_further_drafts_begin_with_what_was_seen_less_often() -> None:
    corpus = es.Corpus([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6, 7], [1, 2, 8], [1, 2]])
    lookup = CorpusLookup(corpus, alternatives=3)
    found = [lookup.draft(np.array([1, 2]), 2, rank).tolist() for rank in range(4)]
    assert found[0][0] == 3 and sorted(found[1:]) == [[], [6, 7], [8]] and found[3] == []


def test_a_prompt_is_looked_up_place_by_place() -> None:
    ids = np.array([1, 2, 3, 9, 1, 2, 4, 1, 2, 3, 2, 5, 1, 2])
    lookup = PromptLookup(2, alternatives=3)
    found = [lookup.draft(ids, 2, rank).tolist() for rank in range(4)]
    # 1 2 stood before 3, 4 and 3 again; 2 alone before 5 too.
    assert found == [[3, 9], [4, 1], [5, 1], []]
    assert PromptLookup(2, stop_ids=(9,)).draft(ids, 2, 0).tolist() == [3]


def test_what_was_written_before_is_drafted() -> None:
    tokenizer = tiny_tokenizer(320)
    model = tiny_llama(seed=3, vocab_size=320)
    options = {"max_new_tokens": 30, "eos_token_id": None, "return_dict_in_generate": True}
    prompts = tokenizer(["the tool was", " in it"], padding=True, return_tensors="pt")
    plain = model.generate(**prompts, **options)
    texts = [*tokenizer(["the tool was", " in it"]).input_ids]
    corpus = es.Corpus([a + b for a, b in zip(texts, plain.new_tokens, strict=True)])
    assert len(corpus) == sum(map(len, texts)) + 62
    drafting = {"draft_corpus": corpus, "num_assistant_tokens_schedule": "constant"}
    drafted = model.generate(**prompts, **options, **drafting)
    assert drafted.sequences.tolist() == plain.sequences.tolist()
    assert drafted.speculation["accepted"] > 40
    short = {"max_new_tokens": 4, "draft_corpus": corpus}
    assert es.generate(model, tokenizer, "the tool was", **short) is not None


def test_texts_are_read_by_the_tokenizer() -> None:
    tokenizer = tiny_tokenizer(320)
    corpus = es.Corpus(["in the ring", ""], tokenizer)
    assert corpus.ids.tolist() == [*tokenizer.encode("in the ring"), -1, -1]
    for wrong in (["text"], [[1.5]], [[-3]]):
        with pytest.raises(RequestError):
            es.Corpus(wrong)
    with pytest.raises(RequestError, match=r"draft_corpus.*everystep.Corpus"):
        tiny_llama().generate(draft_corpus=["text"], max_new_tokens=1)
