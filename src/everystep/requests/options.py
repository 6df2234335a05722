"""What a call asks for beside its prompt, each thing once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from everystep.bridge.core import ForeignModel
from everystep.config import FIELDS, META, Effective
from everystep.draws import SeededDraws, SharedDraws, seed_of
from everystep.engine import (
    Contrast,
    Corpus,
)
from everystep.errors import RequestError, shown
from everystep.executors.base import Executor
from everystep.models import Model
from everystep.processors.allowed import AllowedSequences
from everystep.processors.grammars.mask import GrammarMask
from everystep.processors.grammars.source import KINDS
from everystep.strategies import BestOf
from everystep.types import Past, Prompt
from everystep.types.hooks import Hook
from everystep.types.places import Draws
from everystep.types.request import Strategy


@dataclass(frozen=True)
class Assistant:
    """A model that drafts; equal ones are opened once per engine.

    `settings`: its own generation configuration. `layers`: how many of its first layers draft, None
    for all. `tokenizer`: its own, None where it is not known.
    """

    model: Any
    settings: Any = field(default=None, compare=False)
    layers: int | None = None
    tokenizer: Any = field(default=None, compare=False)

    @property
    def most_positions(self) -> int | None:
        """How many positions it has embeddings for; None where any number will do."""
        core = self.model if isinstance(self.model, ForeignModel) else self.model.core
        return cast(int | None, core.network.most_positions)

    def __call__(self) -> Executor:
        """A fresh executor whose rows can be cut back."""
        if isinstance(self.model, ForeignModel):
            return self.model.executor()
        executor: Executor = self.model.executor(frozenset({"truncate"}), layers=self.layers)
        return executor


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Prefix:
    """What a model holds of some positions; nothing changes it, so calls may share it in any order
    and from several threads.

    `prompt`: what was read; `past`: what a row holds of it; `core`: the weights that it was fed to;
    `adapters`: what was asked for beside them, as in a request.
    """

    prompt: Prompt
    past: Past
    core: Model | ForeignModel
    adapters: tuple[tuple[str, float], ...] = ()

    def __len__(self) -> int:
        """How many positions it holds."""
        return self.past.length

    def __repr__(self) -> str:
        return f"Prefix({len(self)} positions, {self.nbytes} bytes)"

    @property
    def ids(self) -> tuple[int, ...] | None:
        """The ids of its positions; None where it was given as embeddings."""
        ids = self.prompt.ids
        return None if ids is None or self.prompt.before else tuple(ids.tolist())

    @property
    def nbytes(self) -> int:
        """What its keys, values and states take."""
        parts = [part for layer in self.past.layers for part in layer]
        return sum(part.numel() * part.element_size() for part in parts)


MODEL_INPUTS = (
    "input_ids",
    "attention_mask",
    "inputs_embeds",
    "position_ids",
    "decoder_input_ids",
    "decoder_attention_mask",
    "encoder_outputs",
    "past_key_values",
)


CONFIG_FIELDS = tuple(name for name in FIELDS if name not in META)


OBJECTS = (
    "generation_config",
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "allowed_sequences",
    "seed",
    "logprobs",
    "prompt_logprobs",
    "prefix",
    "hooks",
    "adapter_names",
    *KINDS,
    "n_best",
    "best_of",
    "majority",
    "scorer",
    "amateur_model",
    "contrast_alpha",
    "contrast_beta",
    "assistant_model",
    "assistant_tokenizer",
    "draft_corpus",
    "strategy",
    "strategy_options",
)
"""Keywords of every call that are neither configuration nor model input."""


OF_RECTANGLES = (
    "tokenizer",
    "streamer",
    "custom_generate",
    "negative_prompt_ids",
    "negative_prompt_attention_mask",
    "return_legacy_cache",
)
"""Further keywords of `model.generate`."""


KEYWORDS = (*MODEL_INPUTS, *CONFIG_FIELDS, *OBJECTS, *OF_RECTANGLES, "inputs", "text", "messages")
"""Names that mean something in every call or prompt, whatever the model."""


@dataclass(frozen=True, slots=True, eq=False)
class Options:
    """All that a call asks for beside its prompt, each thing in one place.

    `effective`: every field of the configuration. `eos`, `pad`, `starts`: the special ids; `pad` is
    None only where nothing ends a sequence; `starts`: a decoder's first id, one for all rows or one
    each. `allowed`: the sets of `allowed_sequences`, one for all rows or one each. `seed`: one
    integer, from which each row gets its own, or one for each row. `starts_answer`: whether a chat
    template begins the answer to the messages; `trims`: whether texts lose the stop string that
    ended them. `legacy_cache`: whether the cache is returned as tuples. `prefix`: what comes before
    every prompt; `salt`: prompts of another one share no rows with these. `contrast`: with which
    model, and how. `n_best`: how many hypotheses of a search are returned; `best_of`: the strategy
    that chooses among samples. `adapter_names`: one for all rows or one each, None for what is
    active. `grammar`: what the texts have to follow. `assistant`: a second model, which drafts;
    `corpus`: texts to copy drafts from. `strategy`: one that is not the library's own, in place of
    what the fields say. The rest are the caller's own objects.
    """

    effective: Effective
    eos: tuple[int, ...]
    pad: int | None
    starts: tuple[int, ...]
    processors: tuple[Any, ...] = ()
    criteria: Any = None
    prefix_allowed_tokens: Any = None
    allowed: tuple[AllowedSequences, ...] = ()
    tokenizer: Any = None
    seed: int | Sequence[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    hooks: tuple[Hook, ...] = ()
    adapter_names: str | Sequence[str | None] | None = None
    starts_answer: bool = True
    trims: bool = False
    legacy_cache: bool = False
    prefix: Prefix | None = None
    contrast: Contrast | None = None
    n_best: int | None = None
    best_of: BestOf | None = None
    salt: str | None = None
    grammar: GrammarMask | None = None
    assistant: Assistant | None = None
    corpus: Corpus | None = None
    strategy: Strategy | None = None

    @property
    def fill(self) -> int:
        """The id that stands where a row has nothing to say."""
        return 0 if self.pad is None else self.pad

    def returns(self, *fields: str) -> bool:
        """Whether what any of these fields asks for is part of the result."""
        e = self.effective
        return bool(e.return_dict_in_generate) and any(e[name] for name in fields)

    @property
    def captures(self) -> bool:
        """Whether hidden states or attentions are part of the result."""
        return self.returns("output_hidden_states", "output_attentions")

    def draws(self, first: int, rows: int) -> tuple[Draws, ...]:
        """(rows,) where the randomness of each row comes from, of which `first` is the number of
        the first one; torch's global generator without a seed."""
        if self.seed is None:
            return (SharedDraws(),) * rows
        seeds = read_seeds(self.seed, rows)
        if isinstance(self.seed, int):
            seeds = tuple(seed_of(self.seed, first + row) for row in range(rows))
        return tuple(map(SeededDraws, seeds))

    def adapters(self, rows: int) -> tuple[tuple[tuple[str, float], ...], ...]:
        """(rows,) what each row asks for, as in a request; RequestError where that is unclear."""
        given = self.adapter_names
        names = [given] * rows if given is None or isinstance(given, str) else given
        listed = isinstance(names, list | tuple)
        if (
            not listed
            or len(names) != rows
            or not all(isinstance(one, str | None) for one in names)
        ):
            raise RequestError(
                "adapter_names does not fit the call",
                wanted=f"a name, or {rows} of them",
                got=shown(given),
                do="Pass one name per row of the prompt",
            )
        return tuple(((one, 1.0),) if one is not None else () for one in names)


def read_seeds(seed: Any, rows: int) -> tuple[int, ...]:
    """(rows,) what was given, where it is one integer or as many as there are rows."""
    several = isinstance(seed, Sequence) and not isinstance(seed, str)
    seeds = tuple(seed) if several else (seed,) * rows
    if len(seeds) == rows and all(type(one) is int for one in seeds):
        return seeds
    raise RequestError(
        "seed does not fit the call",
        wanted=f"an integer, or {rows} of them",
        got=shown(seed),
        do="Pass one seed, or one per row of the prompt or prompt of the list",
    )
