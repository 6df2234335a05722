"""What a call asks for beside its prompt, each thing once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from everystep.adapters import Mix
from everystep.bridge.core import ForeignModel
from everystep.config import Effective
from everystep.dialogue.asked import Dialogue
from everystep.draws import SeededDraws, SharedDraws, seed_of
from everystep.engine import Contrast, Corpus
from everystep.errors import RequestError, shown
from everystep.executors.base import Executor
from everystep.models import Model
from everystep.processors.allowed import AllowedSequences
from everystep.processors.grammars.mask import GrammarMask
from everystep.processors.thoughts import ThoughtBudget
from everystep.records import RecordWriter
from everystep.strategies import BestOf
from everystep.types import Past, Prompt, ResolvedAdapter
from everystep.types.draw_places import Draws
from everystep.types.hooks import Hook
from everystep.types.request import Strategy
from everystep.types.sources import EncoderSource


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
    def core(self) -> Model | ForeignModel:
        """The weights of the model."""
        return cast("Model | ForeignModel", getattr(self.model, "core", self.model))

    @property
    def executor_name(self) -> str:
        """The executor that it was loaded with; a wrapped model has its own."""
        return str(getattr(self.model, "executor_name", "torch"))

    @property
    def most_positions(self) -> int | None:
        """The number of positions that it has embeddings for; None where any number will do."""
        return self.core.network.most_positions

    def __call__(self) -> Executor:
        """Return a fresh executor whose rows can be cut back."""
        if isinstance(self.model, ForeignModel):
            return self.model.executor()
        executor: Executor = self.model.executor(frozenset({"truncate"}), layers=self.layers)
        return executor


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Prefix:
    """The state of a model after some positions; nothing changes it, so calls may share it in any
    order and from several threads.

    `prompt`: what was read, by the decoder where there is an encoder; `past`: what a row holds of
    it; `core`: the weights that it was fed to; `adapters`, `resolved`: what was asked for beside
    them, as in a request. `changes`: how often the weights had been changed in place. `source`:
    what an encoder has read, with its states, None where there is none. Beside one a call may go on
    from the last id itself, so that rows hold all but that one, and the past of a start token alone
    is None.
    """

    prompt: Prompt
    past: Past | None
    core: Model | ForeignModel
    adapters: tuple[tuple[str, float], ...] = ()
    resolved: tuple[ResolvedAdapter, ...] = ()
    changes: int = 0
    source: EncoderSource | None = None

    def __len__(self) -> int:
        """Return the number of its positions, those of the decoder where there is an encoder."""
        return self.prompt.length

    def __repr__(self) -> str:
        read = "" if self.source is None else f" after a source of {len(self.source.states[0])}"
        return f"Prefix({len(self)} positions{read}, {self.nbytes} bytes)"

    @property
    def ids(self) -> tuple[int, ...] | None:
        """The ids of its positions; None where it was given as embeddings."""
        ids = self.prompt.ids
        return None if ids is None or self.prompt.before else tuple(ids.tolist())

    @property
    def nbytes(self) -> int:
        """The bytes of its keys, values and states, those of an encoder among them."""
        layers = () if self.past is None else self.past.layers
        parts = [part for layer in layers for part in layer]
        parts += [] if self.source is None else self.source.states
        return sum(part.numel() * part.element_size() for part in parts)


@dataclass(frozen=True, slots=True)
class Ends:
    """The special ids of a call.

    `eos`: those that end a sequence. `pad`: the one that fills rows up, None only where nothing
    ends a sequence. `starts`: the first of a decoder beside an encoder, one for all rows or one
    each. `begin`: the one that stands for an empty prompt, if there is one.
    """

    eos: tuple[int, ...] = ()
    pad: int | None = None
    starts: tuple[int, ...] = ()
    begin: int | None = None

    @property
    def fill(self) -> int:
        """The id that stands where a row has nothing to say."""
        return 0 if self.pad is None else self.pad


@dataclass(frozen=True, slots=True, eq=False)
class Steering:
    """Objects that change or watch the choice of tokens, those of the caller among them.

    `allowed`: the sets of `allowed_sequences`, one for all rows or one each. `grammar`: what the
    texts have to follow; `thoughts`: how long they may think.
    """

    processors: tuple[Callable[..., Any], ...] = ()
    criteria: Any = None
    prefix_allowed_tokens: Callable[..., Any] | None = None
    allowed: tuple[AllowedSequences, ...] = ()
    grammar: GrammarMask | None = None
    thoughts: ThoughtBudget | None = None
    hooks: tuple[Hook, ...] = ()

    @property
    def watches(self) -> bool:
        """True where code of the caller's looks at every step."""
        return bool(self.processors or self.criteria)


@dataclass(frozen=True, slots=True, eq=False)
class Choosing:
    """A way of choosing that fields of the configuration do not name.

    `strategy`: one that is not the library's own, in place of what the fields say. `best_of`: the
    strategy that chooses among samples; `n_best`: how many hypotheses of a search are returned;
    `contrast`: how scores are contrasted with those of the model `amateur`.
    """

    strategy: Strategy | None = None
    best_of: BestOf | None = None
    n_best: int | None = None
    contrast: Contrast | None = None
    amateur: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class DraftSources:
    """Sources of drafts that no field of the configuration names: a second model, or texts that are
    copied from."""

    assistant: Assistant | None = None
    corpus: Corpus | None = None


@dataclass(frozen=True, slots=True)
class Recording:
    """Results that are kept where a call asks for them: log-probabilities of so many tokens, of the
    prompt's too, and the cache as tuples."""

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    legacy_cache: bool = False


NOTHING_ENDS, NO_STEERING, BY_FIELDS = Ends(), Steering(), Choosing()
NO_DRAFTING, NO_RECORDING = DraftSources(), Recording()


@dataclass(frozen=True, slots=True, eq=False)
class Options:
    """All that a call asks for beside its prompt, in groups by who reads them.

    `effective`: every field of the configuration. `seed`: one integer, from which each row gets its
    own, or one for each row. `prefix`: what comes before every prompt; `salt`: prompts of another
    one share no rows with these. `adapters`: a mix for all rows or a list of them, None for what is
    active; `resolved`: what their names stand for. `weight_changes`: as in a request. `deadline`:
    the moment from which on it takes no step. `starts_answer`: whether a chat template begins the
    answer to the messages; `trims`: whether texts lose the stop string that ended them.
    `negative_prompt`: what guidance leads away
    from, as a call about prompts passed it. `dialogue`: what a conversation asks of tools and
    thoughts. `record`: the file that steps are written to.
    """

    effective: Effective
    ends: Ends = NOTHING_ENDS
    steering: Steering = NO_STEERING
    choosing: Choosing = BY_FIELDS
    drafting: DraftSources = NO_DRAFTING
    recording: Recording = NO_RECORDING
    tokenizer: Any = None
    seed: object = None
    prefix: Prefix | None = None
    salt: str | None = None
    weight_changes: int = 0
    adapters: Mix | list[Mix] | None = None
    resolved: Mapping[str, ResolvedAdapter] = field(default_factory=dict)
    deadline: float | None = None
    starts_answer: bool = True
    trims: bool = False
    negative_prompt: object = None
    dialogue: Dialogue | None = None
    record: RecordWriter | None = None

    def resolved_of(self, mix: Mix) -> tuple[ResolvedAdapter, ...]:
        """Return what the names of a mix stand for, as in a request."""
        return tuple(self.resolved[name] for name, _ in mix if self.resolved)


def draws_of(seed: object, first: int, rows: int) -> tuple[Draws, ...]:
    """Return (rows,) where the randomness of each row comes from, of which `first` is the number of
    the first one; torch's global generator without a seed."""
    if seed is None:
        return (SharedDraws(),) * rows
    seeds = read_seeds(seed, rows)
    if isinstance(seed, int):
        seeds = tuple(seed_of(seed, first + row) for row in range(rows))
    return tuple(map(SeededDraws, seeds))


def adapters_of(asked: Mix | list[Mix] | None, rows: int) -> tuple[Mix, ...]:
    """Return (rows,) the adapters of each row, as in a request; RequestError where they are not as
    many as the rows."""
    if not isinstance(asked, list):
        return (asked or (),) * rows
    if len(asked) != rows:
        raise RequestError(
            "adapter_names does not fit the call",
            wanted=f"a name or a mix, or {rows} of them",
            got=f"{len(asked)} of them",
            do="Pass one per row of the prompt; with several prompts options=[{'adapters': ...}]",
        )
    return tuple(asked)


def read_seeds(seed: object, rows: int) -> tuple[int, ...]:
    """Return (rows,) what was given, where it is one integer or as many as there are rows."""
    seeds: tuple[Any, ...] = (seed,) * rows
    if isinstance(seed, Sequence) and not isinstance(seed, str):
        seeds = tuple(seed)
    if len(seeds) == rows and all(type(one) is int for one in seeds):
        return seeds
    raise RequestError(
        "seed does not fit the call",
        wanted=f"an integer, or {rows} of them",
        got=shown(seed),
        do="Pass one seed, or one per row of the prompt or prompt of the list",
    )
