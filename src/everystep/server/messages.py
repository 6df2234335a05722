"""Messages between the front and the engine: typed, of bounded size, and nothing but data.

A message is a frame: its length in four bytes, and msgpack. What cannot be read as one of these
types ends the connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from everystep.errors import FormatError
from everystep.records import RecordWriter

MOST_BYTES = 1 << 27
"""Bytes of a frame at most."""
WINDOW = 256
"""Events of an ask that may have been sent and not been taken by its reader."""
_HEAD = 4


class Pixels(msgspec.Struct, frozen=True, array_like=True):
    """A picture in the size in which a model reads it: red, green and blue, line by line."""

    height: int
    width: int
    data: bytes


class RecordTo(msgspec.Struct, frozen=True):
    """A file that the steps of an ask are written to, and what is left out of it: texts if it is
    `redacted`, and what each processor did if it is without `stages`."""

    path: str
    redacted: bool
    stages: bool

    def writer(self) -> RecordWriter:
        """Return what writes it."""
        return RecordWriter(self.path, redacted=self.redacted, stages=self.stages)


class Ask(msgspec.Struct, tag=True, frozen=True):
    """A prompt for a model: its ids, the keywords of `generate` beside it, and whether it was a
    conversation. `streams`: whether its tokens are told as they come. `pools`: how its hidden
    states become the vector that is wanted in place of an answer. `pictures`: those that stand
    among the ids, in their order. `record`: where its steps are written. `owner`: whose it is, by
    a digest of the key; None where there are no keys. `rivals`: how many the explanation of each
    token has, None where none is wanted."""

    id: int
    model: str
    prompt: list[int]
    keywords: dict[str, Any]
    in_chat: bool = False
    streams: bool = False
    seconds: float | None = None
    pools: str | None = None
    pictures: list[Pixels] = []
    record: RecordTo | None = None
    owner: str | None = None
    rivals: int | None = None


class ScoreAsk(msgspec.Struct, tag=True, frozen=True):
    """Rows of ids that are to be scored, after the same ids or after none. `steer`: packed, as
    among the keywords of an ask."""

    id: int
    model: str
    rows: list[list[int]]
    after: list[int] | None
    best: int
    adapter: str | None = None
    steer: dict[str, bytes] | str | None = None


class HearAsk(msgspec.Struct, tag=True, frozen=True):
    """A sound that is to be written down: float32 samples with the least byte first, the keywords
    of `es.transcribe`, and ids that are taken as said before. `timestamps`: whether it is told when
    what was said."""

    id: int
    model: str
    samples: bytes
    keywords: dict[str, Any]
    prompt: list[int] = []
    timestamps: bool = False


class RunAsk(msgspec.Struct, tag=True, frozen=True):
    """Something that is to be done to a run, by its name in `everystep.Run`, with what it is given.

    `run`: the name of the run; `data`: the bytes of a saved one; `model`: whose run it is.
    `record`: of one that begins here. `owner`: as of a prompt.
    """

    id: int
    run: str
    verb: str
    given: dict[str, Any] = {}
    data: bytes = b""
    model: str = ""
    record: RecordTo | None = None
    owner: str | None = None


class Leave(msgspec.Struct, tag=True, frozen=True):
    """Nobody waits for this ask any more."""

    id: int


class Taken(msgspec.Struct, tag=True, frozen=True):
    """The reader of an ask has taken so many further events."""

    id: int
    count: int


class PutAway(msgspec.Struct, tag=True, frozen=True):
    """Nobody asks for this model: the engine is to let go of it, unless a run of it is open."""

    model: str


class Bring(msgspec.Struct, tag=True, frozen=True):
    """Somebody asks for a model that was put away: the engine is to load it again."""

    model: str


class Quit(msgspec.Struct, tag=True, frozen=True):
    """The engine is to end."""


class ModelFacts(msgspec.Struct, frozen=True):
    """The facts of a model that the front needs: its name, adapters, ids that end a text, context,
    vocabulary and executor. `sees`: it reads pictures. `sampling_rate`: of the sounds that
    it writes down, None for a model that does not listen. `layers`, `width`: after which, and with
    how many numbers, it can be steered, zeros for a model that cannot; `steering`: the names of
    vectors that the operator gave it."""

    name: str
    adapters: list[str]
    ends: list[int]
    context: int | None
    vocabulary: int
    executor: str
    sees: bool = False
    sampling_rate: int | None = None
    layers: int = 0
    width: int = 0
    steering: list[str] = []


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The engine has loaded its models and takes asks: rows at once, and positions, None for any
    number."""

    models: list[ModelFacts]
    rows: int
    process: int
    positions: int | None = None


class Stands(msgspec.Struct, tag=True, frozen=True):
    """A model is loaded, with these facts, or it is not, and `error` says why it could not be."""

    model: str
    facts: ModelFacts | None = None
    error: str | None = None


class ReplicaState(msgspec.Struct, frozen=True):
    """The state of a replica, by its own account: where it is and since when, the executor of each
    of its models, and its work. `prompt_tokens`: of prompts that it answered, and `cached_tokens`:
    those of them whose rows it held. `engine_restarts`: of the engine in it. `silent_seconds`: for
    which it had said nothing when this was told."""

    node: str
    process: int
    age_seconds: float
    models: dict[str, str]
    running: int
    waiting: int
    rows: int
    generated_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    engine_restarts: int = 0
    silent_seconds: float = 0.0


class ReplicaRoom(msgspec.Struct, tag=True, frozen=True):
    """There are so many rows from now on, in so many replicas. `deaths`: of replicas until now;
    `states`: of those that have said how they are."""

    rows: int
    replicas: int
    deaths: int = 0
    states: list[ReplicaState] = []


class EngineTally(msgspec.Struct, frozen=True, array_like=True):
    """The counts of a model's engine: groups that lost their rows to others, ids that were drafted
    and those of them that were accepted. `usage`: the part of the rows that is in use, or of the
    positions, where these are bounded."""

    preemptions: int = 0
    drafted: int = 0
    accepted: int = 0
    usage: float = 0.0


class Alive(msgspec.Struct, tag=True, frozen=True):
    """The engine's process runs. `steps`: of each thread that steps, the number of the step that it
    takes now, -1 between two. `tallies`: what was counted of each model."""

    steps: list[int]
    tallies: dict[str, EngineTally] = {}


class Likelihoods(msgspec.Struct, frozen=True):
    """The likelihood of tokens where they stood: ids, log-probabilities, the best of each place.

    `first`: the place of the first one in its row.
    """

    tokens: list[int]
    logprobs: list[float]
    top_tokens: list[list[int]]
    top_logprobs: list[list[float]]
    first: int = 0


class RowNews(msgspec.Struct, frozen=True, array_like=True):
    """A token of a sequence as it is settled; -1 for none. `kind`, `matched`: how the sequence
    ends, where it does."""

    id: int
    index: int
    token: int
    logprob: float | None = None
    top: list[tuple[int, float]] | None = None
    kind: str | None = None
    matched: str | int | None = None

    @property
    def fails(self) -> bool:
        """True if no reader gets it, as `Failed` says it next."""
        return self.kind in ("error", "cancelled")


class Tokens(msgspec.Struct, tag=True, frozen=True):
    """All that the last steps settled."""

    rows: list[RowNews]


class Begun(msgspec.Struct, tag=True, frozen=True):
    """An ask has left the line. `strings`: those that its texts lose where they end. `notices`:
    what was asked for without effect."""

    id: int
    strings: list[str]
    notices: list[str] = []


class Ended(msgspec.Struct, frozen=True):
    """One continuation of an ask, or its vector, float32 with the least byte first.
    `known_prompt`: of the prompt that all continuations share, in the first one alone.
    `explanations`: of each token, where they are wanted."""

    tokens: list[int]
    kind: str
    matched: str | int | None
    score: float
    prompt_tokens: int
    cached_tokens: int
    known: Likelihoods | None = None
    known_prompt: Likelihoods | None = None
    vector: bytes | None = None
    explanations: list[dict[str, Any]] | None = None


class Over(msgspec.Struct, tag=True, frozen=True):
    """An ask has ended with these continuations. `opened`: the seconds from its beginning until it
    had its first token; `seconds`: until its end."""

    id: int
    results: list[Ended]
    opened: float = 0.0
    seconds: float = 0.0


class ScoredTexts(msgspec.Struct, tag=True, frozen=True):
    """Rows have been scored."""

    id: int
    rows: list[Likelihoods]


class HeardPart(msgspec.Struct, frozen=True):
    """A stretch of a sound, in seconds, and what is said in it."""

    text: str
    start: float
    end: float
    tokens: list[int]


class HeardText(msgspec.Struct, tag=True, frozen=True):
    """A sound has been written down."""

    id: int
    text: str
    language: str | None
    parts: list[HeardPart]


class RunNews(msgspec.Struct, tag=True, frozen=True):
    """A step of a run, when it is taken."""

    id: int
    step: dict[str, Any]


class RunOver(msgspec.Struct, tag=True, frozen=True):
    """The end of what was asked of a run. `data`: the bytes of a saved one. `made`: the tokens that
    its steps came to."""

    id: int
    body: dict[str, Any]
    data: bytes = b""
    made: int = 0


class Failed(msgspec.Struct, tag=True, frozen=True):
    """An ask has failed: the status of HTTP that says so, and the text of the error."""

    id: int
    status: int
    text: str


AskMessage = Ask | ScoreAsk | HearAsk | RunAsk | Leave | Taken
"""A message about an ask."""
FrontMessage = AskMessage | PutAway | Bring
"""All that a front says before its last message."""
ToEngine = FrontMessage | Quit
ToFront = (
    Ready
    | Stands
    | ReplicaRoom
    | Alive
    | Begun
    | Tokens
    | Over
    | ScoredTexts
    | HeardText
    | RunNews
    | RunOver
    | Failed
)

_encoder = msgspec.msgpack.Encoder()
OF_FRONT: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
OF_ENGINE: msgspec.msgpack.Decoder[ToFront] = msgspec.msgpack.Decoder(ToFront)


def frame(message: ToEngine | ToFront) -> bytes:
    """Return the bytes of a message; FormatError if they are too many."""
    body = _encoder.encode(message)
    if len(body) > MOST_BYTES:
        raise FormatError("a message is too long", wanted=f"at most {MOST_BYTES}", got=len(body))
    return len(body).to_bytes(_HEAD, "big") + body


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """Return the bytes of the next message, None at the end; FormatError for one that is too
    long."""
    try:
        size = int.from_bytes(await reader.readexactly(_HEAD), "big")
        if size > MOST_BYTES:
            raise FormatError("a message is too long", wanted=f"at most {MOST_BYTES}", got=size)
        return await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


async def front_messages(reader: asyncio.StreamReader) -> AsyncGenerator[FrontMessage, None]:
    """Yield what a front says until it says that this is the end, is gone, or cannot be read;
    FormatError for a message that is too long."""
    while (body := await read_frame(reader)) is not None:
        try:
            message = OF_FRONT.decode(body)
        except msgspec.DecodeError:
            return
        if isinstance(message, Quit):
            return
        yield message
