"""Features that change what is chosen, or say more about it: each check is a column of the matrix.

A check asks for a strategy with the feature and compares with the textbook loop, or with the same
call without the feature. It passes only if the feature was seen to do something.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import everystep as es
from everystep.executors.native import NativeExecutor
from everystep.executors.torch_executor import TorchExecutor
from everystep.nn.network import State, Window
from tests.matrix.book import book, prefix_of, require_equal, require_same
from tests.matrix.rows import REFUSED, Row
from tests.matrix.subjects import PLAIN, RECURRENT, SEED, SINGLE, WINDOWED, plain


@dataclass
class Forbid:
    """A caller's own processor: one token is never chosen."""

    token: int
    calls: int = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores.index_fill(1, torch.tensor([self.token]), -torch.inf)


EXPRESSION = r"([\x00-\x60][\x00-\x40\x60-\x7f])+[\x00-\x60]?"
"""Texts that no plain run comes to. The word that constrained beams have to say may stand anywhere
in them, and at every place there is a token that DoLa leaves."""


def grammar(row: Row, folder: Path) -> None:
    """Every sequence is a text of the grammar, and the book finds the same ones; where a grammar
    or a set has one text or two, it is one of these."""
    more = {"regex": EXPRESSION, "num_return_sequences": row.most}
    found = PLAIN.say(row, **more)
    require_same(found, book(PLAIN, row, **more))
    for one in (*found, *plain(row)):
        assert bool(re.fullmatch(EXPRESSION, one.text)) == (one in found)
    _tight(row)


def _tight(row: Row) -> None:
    """Where a grammar has two texts, or a set two sequences, these are what is found."""
    several = row.most if (row.name, "num_return_sequences") not in REFUSED else 1
    for texts in (["yes it is"], ["ab", "no"]):
        asked = {"max_new_tokens": 16, "num_return_sequences": several, "pad_token_id": 0}
        found = PLAIN.say(row, choices=texts, **asked)
        assert found and {one.text for one in found} <= {*texts}
        assert all(one.finish_reason.kind == "stop" for one in found)
        found = PLAIN.say(row, allowed_sequences=texts, **asked)
        assert found and {one.text for one in found} <= {*texts}


def processors(row: Row, folder: Path) -> None:
    """The caller's own beside the library's."""
    banned = plain(row)[0].tokens[1]
    own, more = Forbid(banned), {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}
    found = PLAIN.say(row, logits_processor=[own], **more)
    assert own.calls and all(banned not in one.tokens for one in found)
    require_same(found, book(PLAIN, row, logits_processor=[Forbid(banned)], **more))


def log_probabilities(row: Row, folder: Path) -> None:
    """Those of a forward over everything, before any processor."""
    found = PLAIN.say(row, logprobs=3)
    require_equal(found, plain(row))
    prefix = prefix_of(PLAIN, PLAIN.request(row))
    for one in found:
        known = one.logprobs
        assert known is not None and len(known) == len(one.tokens) > 0
        for place, token in enumerate(one.tokens):
            wanted = prefix.logits(one.tokens[:place]).log_softmax(-1)
            assert abs(float(known.logprobs[place]) - float(wanted[token])) < 1e-5
            assert known.top_tokens[place].tolist() == wanted.topk(3).indices.tolist()


def stop_strings(row: Row, folder: Path) -> None:
    """A text that the plain run comes to ends it there."""
    tokens = plain(row)[0].tokens
    spelled = [PLAIN.tokenizer.decode([token], skip_special_tokens=True) for token in tokens]
    several = {"num_return_sequences": row.most}
    for text in [one for one in spelled[:-1] if one and one.isascii()][::-1]:
        found = PLAIN.say(row, stop_strings=[text], **several)
        require_same(found, book(PLAIN, row, stop_strings=[text], **several))
        if text in [one.finish_reason.matched for one in found]:
            return
    raise AssertionError("no stop string was met")


def streaming(row: Row, folder: Path) -> None:
    """The events spell the result, token by token and text by text."""
    options = {**PLAIN.options(row), "seed": [SEED]}
    with es.stream(PLAIN.model, PLAIN.tokenizer, [list(PLAIN.ids)], **options) as stream:
        events, first_while_live = [], None
        for event in stream:
            events.append(event)
            if first_while_live is None:
                first_while_live = bool(stream.groups[0].live)
        (found,) = stream.results()
    require_equal(found, plain(row))
    spelled = [event.token for event in events if event.token >= 0]
    assert tuple(spelled) == plain(row)[0].tokens and len(spelled) > 2
    assert "".join(event.text or "" for event in events) == plain(row)[0].text
    assert first_while_live or not stream.groups[0].request.strategy.streams


QUANTISED = {"nbits": 4, "q_group_size": 4, "residual_length": 2}


def quantised_cache(row: Row, folder: Path) -> None:
    """Rows of four bits: what is chosen follows from the codes."""
    more = {"cache_implementation": "quantized", "cache_config": QUANTISED, "logprobs": 0}
    how = {"cache": lambda: es.QuantizedCache("everystep", PLAIN.model.config, **QUANTISED)}
    found = PLAIN.say(row, **more)
    require_same(found, book(PLAIN, row, how, **more))
    exact = PLAIN.say(row, logprobs=0)
    gaps = found[0].logprobs.logprobs[1] - exact[0].logprobs.logprobs[1]
    assert abs(float(gaps)) > 1e-4


def sliding_window(row: Row, folder: Path) -> None:
    """A model that looks back over fewer positions than there are."""
    found = plain(row, WINDOWED)
    require_same(found, book(WINDOWED, row))
    stores = [store for layer in WINDOWED.model.core.network.stores for store in layer]
    sizes = [store.size for store in stores if isinstance(store, Window)]
    assert sizes and max(sizes) < len(WINDOWED.ids) + len(found[0].tokens) - 1


def recurrent_model(row: Row, folder: Path) -> None:
    """A model that keeps states in the place of positions."""
    found = plain(row, RECURRENT)
    require_same(found, book(RECURRENT, row))
    stores = [store for layer in RECURRENT.model.core.network.stores for store in layer]
    assert stores and all(isinstance(store, State) for store in stores)


def per_row_seeds(row: Row, folder: Path) -> None:
    """Every row of a rectangle draws as it would alone."""
    seeds, row = [3, 4, 5], row.drawn
    ids = torch.tensor([PLAIN.ids] * len(seeds))
    out = PLAIN.model.generate(ids, seed=seeds, **PLAIN.options(row))
    alone = [PLAIN.say(row, seed=[seed])[0].tokens for seed in seeds]
    assert [tuple(tokens) for tokens in out.new_tokens] == alone
    assert len(set(alone)) > 1


def several_sequences(row: Row, folder: Path) -> None:
    """`num_return_sequences`: as many as asked for, each with draws or a rank of its own."""
    found = PLAIN.say(row.drawn, num_return_sequences=2)
    require_same(found, book(PLAIN, row.drawn, num_return_sequences=2))
    assert len({one.tokens for one in found}) == 2


def embeddings(row: Row, folder: Path) -> None:
    """A prompt of embeddings alone goes on as that of their ids."""
    ids = torch.tensor([PLAIN.ids])
    embeds = PLAIN.model.get_input_embeddings()(ids)
    options = {**PLAIN.options(row), **row.beside, "seed": [SEED]}
    found = PLAIN.model.generate(inputs_embeds=embeds, **options)
    wanted = PLAIN.model.generate(input_ids=ids, **options)
    assert found.new_tokens == wanted.new_tokens and len(found.new_tokens[0]) > 2
    assert found.sequences.shape[1] == wanted.sequences.shape[1] - ids.shape[1]


def holes(row: Row, folder: Path) -> None:
    """A prompt of which every other position is masked goes on as what is left of it, in float64
    and in float32; what draws does so nearly without chance, as draws depend on their places."""
    more = {"temperature": 0.01} if row.draws == {} else {}
    for subject, within in ((PLAIN, 1e-6), (SINGLE, 1e-4)):
        between = [id for own in subject.ids for id in (own, 70)]
        mask = [1, 0] * len(subject.ids)
        found = subject.say(row, prompt={"input_ids": between, "attention_mask": mask}, **more)
        require_equal(found, subject.say(row, **more), within=within)
        assert subject.say(row, prompt=between, **more)[0].tokens != found[0].tokens


@dataclass(frozen=True)
class Raise(es.Hook):
    """Adds the same to every number of every embedding."""

    size: float = 0.5
    gives: tuple[str, ...] = ("embeds",)
    asked: list[int] = field(default_factory=list, compare=False)

    def before_step(self, step: es.BeforeStep) -> dict[str, Any]:
        self.asked.append(len(step.positions))
        return {"embeds": step.embeds + self.size}


def hooks(row: Row, folder: Path) -> None:
    """What a hook adds to the embeddings of every step."""
    hook = Raise()
    found = PLAIN.say(row, hooks=[hook])
    require_same(found, book(PLAIN, row, {"shift": hook.size}))
    assert len(hook.asked) > 1 and found[0].tokens != plain(row)[0].tokens


def native_executor(row: Row, folder: Path) -> None:
    """The same on the native executor and by the book, in float32."""
    request = SINGLE.request(row)
    assert isinstance(SINGLE.model.executor(request.needs), NativeExecutor)
    assert isinstance(PLAIN.model.executor(request.needs), TorchExecutor)
    require_same(plain(row, SINGLE), book(SINGLE, row), within=1e-3)
