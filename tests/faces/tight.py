"""Random cells where a feature is tight: one answer is allowed, one token, one row of window.

A cell asks a model, through one face, for a strategy with one feature or two. What is tight often
says by itself what has to come out, so a cell is also held to that, whatever the first face says.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor

import everystep as es
from everystep.api.model import LanguageModel
from everystep.errors import UnsupportedError
from tests.faces.table import EXECUTORS, FACES, TEXT, TOKENIZER, TYPED
from tests.matrix.rows import ROWS, Row
from tests.models.tiny import ours, reference_decoder, reference_mamba, reference_pair, sounds

SIZE = 320
END = 2
SHAPE: dict[str, Any] = {"vocab_size": SIZE, "max_position_embeddings": 256}
MESSAGES = [{"role": "user", "content": "Is it?"}]


# --- models ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """`make`: the model of transformers, with all its layers or with fewer. `wrapped`: it runs
    itself. `reads`: what a prompt is."""

    make: Callable[[bool], Any]
    wrapped: bool = False
    reads: str = "ids"

    @property
    def executors(self) -> tuple[str, ...]:
        return ("auto",) if self.wrapped else EXECUTORS

    @property
    def prompts(self) -> tuple[str, ...]:
        if self.reads == "sounds":
            return ("sounds",)
        own = ("ids", "text", "messages", "holes", "one seen")
        return own if self.reads == "source" else (*own, "embeds", "embeds and ids")


def _decoder(kind: str, **changes: Any) -> Callable[[bool], Any]:
    def make(whole: bool) -> Any:
        layers = {"num_hidden_layers": 2 if whole else 1}
        return reference_decoder(kind, torch.float32, **SHAPE, **layers, **changes)

    return make


def _mamba(whole: bool) -> Any:
    return reference_mamba(torch.float32, vocab_size=SIZE, num_hidden_layers=2 if whole else 1)


def _pair(kind: str, layers: str, **changes: Any) -> Callable[[bool], Any]:
    def make(whole: bool) -> Any:
        sizes = {"vocab_size": SIZE, layers: 2 if whole else 1, **changes}
        return reference_pair(kind, torch.float32, **sizes)

    return make


_T5 = _pair("t5", "num_decoder_layers")
_WHISPER = _pair("whisper", "decoder_layers", max_target_positions=64)
SUBJECTS: Mapping[str, Subject] = {
    "decoder": Subject(_decoder("llama")),
    "window of one": Subject(_decoder("mistral", sliding_window=1)),
    "recurrent": Subject(_mamba),
    "encoder-decoder": Subject(_T5, reads="source"),
    "listener": Subject(_WHISPER, reads="sounds"),
    "wrapped decoder": Subject(_decoder("llama"), wrapped=True),
    "wrapped recurrent": Subject(_mamba, wrapped=True),
    "wrapped encoder-decoder": Subject(_T5, wrapped=True, reads="source"),
    "wrapped listener": Subject(_WHISPER, wrapped=True, reads="sounds"),
}


@cache
def reference_of(name: str, whole: bool) -> Any:
    """The model of transformers, whose weights depend on the name alone."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = SUBJECTS[name].make(whole)
    model.generation_config = transformers.GenerationConfig(decoder_start_token_id=3)
    return model


@cache
def model_of(name: str, executor: Any, whole: bool = True) -> LanguageModel:
    """The model that a cell asks, or the smaller one that drafts for it."""
    reference = reference_of(name, whole)
    if SUBJECTS[name].wrapped:
        return es.wrap(reference)
    settings = es.GenerationConfig(decoder_start_token_id=3)
    return LanguageModel(ours(reference), settings, executor=executor)


@cache
def heard() -> Tensor:
    """(1, channels, frames) a sound."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return sounds(1)


# --- what is tight --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Feature:
    """`given`: its keywords, from the ids that a plain greedy run says and the length of what the
    decoder has read. `claim`: what each answer is, of its tokens and its text. `decides`: where an
    answer ends or what is in it, so that no other one of these may stand beside it. `draws`: it is
    for strategies that draw."""

    given: Callable[[list[int], int], dict[str, Any]]
    claim: Callable[[list[int], str], bool] = lambda tokens, text: True
    decides: bool = False
    draws: bool = False


def only(token: int) -> Callable[[Tensor, Tensor], Tensor]:
    """A caller's processor that leaves one token."""

    def processor(ids: Tensor, scores: Tensor) -> Tensor:
        left = torch.full_like(scores, -torch.inf)
        left[:, token] = scores[:, token]
        return left

    return processor


def _texts(**given: Any) -> Callable[[list[int], int], dict[str, Any]]:
    return lambda plain, length: {"eos_token_id": END, "max_new_tokens": 16, **given}


def _always(**given: Any) -> Callable[[list[int], int], dict[str, Any]]:
    return lambda plain, length: given


def _says(wanted: str) -> Callable[[list[int], str], bool]:
    return lambda tokens, text: text == wanted


def _long(count: int) -> Callable[[list[int], str], bool]:
    return lambda tokens, text: len(tokens) == count


def _just(token: int) -> Callable[[list[int], str], bool]:
    return lambda tokens, text: {*tokens} == {token}


def _stop_text(plain: list[int], length: int) -> dict[str, Any]:
    spelled = [TOKENIZER.decode([token], skip_special_tokens=True) for token in plain]
    return {"stop_strings": [next((one for one in spelled if one.isascii() and one), "a")]}


FEATURES: Mapping[str, Feature] = {
    "one choice": Feature(_texts(choices=["it is"]), _says("it is"), True),
    "one sequence": Feature(_texts(allowed_sequences=["it is"]), _says("it is"), True),
    "an expression of one text": Feature(_texts(regex="ab"), _says("ab"), True),
    "a schema of one value": Feature(_texts(schema={"const": "x"}), _says('"x"'), True),
    "a grammar of one text": Feature(_texts(grammar='start: "no"'), _says("no"), True),
    "one allowed token": Feature(
        _always(prefix_allowed_tokens_fn=lambda batch, ids: [7]), _just(7), True
    ),
    "one finite score": Feature(lambda *_: {"logits_processor": [only(8)]}, _just(8), True),
    "one token is left": Feature(
        _always(suppress_tokens=[one for one in range(SIZE) if one != 9]), _just(9), True
    ),
    "one token": Feature(_always(max_new_tokens=1), _long(1), True),
    "one position beyond the prompt": Feature(
        lambda plain, length: {"max_new_tokens": None, "max_length": length + 1}, _long(1), True
    ),
    "ends where it begins": Feature(lambda plain, length: {"eos_token_id": plain[0]}, decides=True),
    "everything ends it": Feature(_always(eos_token_id=[*range(SIZE)]), _long(1), True),
    "a text ends it": Feature(_stop_text, decides=True),
    "as many at least as at most": Feature(
        lambda plain, length: {"min_new_tokens": 4, "max_new_tokens": 4, "eos_token_id": plain},
        _long(4),
        True,
    ),
    "it has to end": Feature(
        lambda *_: {"max_new_tokens": 1, "forced_eos_token_id": 6}, _just(6), True
    ),
    "a bias that decides": Feature(_always(sequence_bias={(9,): 1e4}), _just(9), True),
    "no time": Feature(_always(max_time=0.0), decides=True),
    "a set of one": Feature(_always(top_k=1), draws=True),
    "a share of nearly nothing": Feature(_always(top_p=1e-6), draws=True),
    "no token twice": Feature(
        _always(no_repeat_ngram_size=1), lambda tokens, text: len({*tokens}) == len(tokens)
    ),
    "keys and values of four bits": Feature(
        _always(
            cache_implementation="quantized",
            cache_config={"nbits": 4, "q_group_size": 4, "residual_length": 1},
        )
    ),
    "a prompt in pieces of one": Feature(_always(prefill_chunk_size=1)),
    "no cache": Feature(_always(use_cache=False)),
    "its probabilities": Feature(_always(logprobs=1)),
    "healing": Feature(_always(token_healing=True)),
    "nothing": Feature(_always()),
}


# --- cells ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TightCell:
    """What is asked of which model, how."""

    face: str
    subject: str
    executor: str
    prompt: str
    strategy: Row
    features: tuple[str, ...]

    def __str__(self) -> str:
        asked = f"{self.subject} on {self.executor}, {self.prompt}, {self.strategy.name}"
        return f"{self.face}: {asked}, {' and '.join(self.features)}"

    def frees(self, feature: str) -> bool:
        """Whether the cell may come to something else than the feature claims."""
        if feature == "no token twice":  # the one allowed token is, where nothing else may follow
            return "one allowed token" in self.features
        if feature == "one position beyond the prompt":  # whose last token is said anew
            return "healing" in self.features
        # What DoLa leaves out no bias brings back; contrastive search weighs more than scores.
        weighed = self.strategy.name in ("dola", "contrastive") or "no token twice" in self.features
        return feature == "a bias that decides" and weighed

    @property
    def model(self) -> LanguageModel:
        return model_of(self.subject, self.executor)

    def content(self) -> Any:
        """The prompt, as a call about prompts takes it."""
        ids = [*TOKENIZER.encode(TEXT), 40, 50, 60]
        if self.prompt == "text":
            return TEXT
        if self.prompt == "messages":
            return MESSAGES
        if self.prompt == "sounds":
            return {"input_features": heard()[0]}
        if self.prompt == "holes":
            return {"input_ids": ids, "attention_mask": [1, 0, 1, 1, 0, 1]}
        if self.prompt == "one seen":
            return {"input_ids": ids, "attention_mask": [1, 0, 0, 0, 0, 0]}
        if self.prompt == "ids":
            return ids
        embeds = self.model.get_input_embeddings()(torch.tensor(ids))
        return {"inputs_embeds": embeds} | ({"input_ids": ids} if "and" in self.prompt else {})

    def rows(self) -> dict[str, Tensor]:
        """The same for `model.generate`."""
        content = self.content()
        if content is MESSAGES:
            content = TOKENIZER.apply_chat_template(
                MESSAGES, tokenize=True, add_generation_prompt=True, return_dict=False
            )
        content = TOKENIZER.encode(content) if isinstance(content, str) else content
        content = content if isinstance(content, dict) else {"input_ids": content}
        return {name: torch.as_tensor(one)[None] for name, one in content.items()}

    def given(self) -> dict[str, Any]:
        """The keywords, anew for every call; a command line has one seed for all its rows."""
        given: dict[str, Any] = {"max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}
        given |= {**self.strategy.options, "seed": [3]}
        if self.face == "the command line":  # which refuses seeds where nothing is drawn
            given["seed"] = 3 if self.strategy.draws == {} or given.get("do_sample") else None
        if self.strategy.assisted:
            given["assistant_model"] = model_of(self.subject, self.executor, whole=False)
        plain, length = plain_of(self.subject, self.executor, self.prompt)
        for name in self.features:
            given |= FEATURES[name].given(plain, length)
        return given


@cache
def plain_of(subject: str, executor: str, prompt: str) -> tuple[list[int], int]:
    """What a greedy run says, and how long the decoder's prompt is."""
    cell = TightCell("", subject, executor, prompt, ROWS[0], ())
    options = {"max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}
    try:
        found = cell.model.generate(**cell.rows(), **options, return_dict_in_generate=True)
    except UnsupportedError:  # what the cell is about is refused as well
        return plain_of(subject, executor, "ids")
    (plain,) = found.new_tokens
    if prompt == "embeds":  # whose positions count, and are in no rectangle
        return [*plain], cell.rows()["inputs_embeds"].shape[1]
    return [*plain], found.sequences.shape[1] - len(plain)


def drawn(seed: int) -> TightCell:
    """The cell of this number."""
    draw = random.Random(f"tight {seed}")
    face, name = draw.choice([*FACES][1:]), draw.choice([*SUBJECTS])
    prompt, executor = (draw.choice(SUBJECTS[name].prompts), draw.choice(SUBJECTS[name].executors))
    features, strategies = [*FEATURES], [*ROWS]
    if SUBJECTS[name].reads == "sounds":  # whose transcription counts the answer alone
        features.remove("one position beyond the prompt")
    if face == "the command line":  # which takes texts, and what it has options for
        if SUBJECTS[name].reads == "sounds":
            name, executor = "decoder", "torch"
        prompt = "text"
        features = [one for one in FEATURES if {*FEATURES[one].given([5], 1)} <= TYPED]
        strategies = [row for row in ROWS if {*row.options} <= TYPED]
    first, second = draw.sample(features, 2)
    both = draw.random() < 0.5 and not (FEATURES[first].decides and FEATURES[second].decides)
    asked = (first, second) if both else (first,)
    if any(FEATURES[one].draws for one in asked):
        strategies = [row.drawn for row in strategies if row.draws is not None]
    return TightCell(face, name, executor, prompt, draw.choice(strategies), asked)
