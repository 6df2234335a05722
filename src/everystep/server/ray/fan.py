"""The engine's side of a connection to a front, where replicas are the engine.

The front sees one engine with the rows of all replicas. An ask goes to a replica that is likely to
hold its beginning; if that one dies, another is asked, and what was told already is left out.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import socket
from abc import abstractmethod
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

import msgspec

from everystep.errors import EverystepError
from everystep.server.host import BEAT
from everystep.server.link import AnyAsk, Asking
from everystep.server.messages import (
    WINDOW,
    Alive,
    Ask,
    Bring,
    Failed,
    FrontMessage,
    HearAsk,
    HeardText,
    Leave,
    Over,
    PutAway,
    Ready,
    ReplicaRoom,
    ReplicaState,
    RunAsk,
    ScoreAsk,
    ScoredTexts,
    Taken,
    ToFront,
    Tokens,
    frame,
    front_messages,
)
from everystep.server.ray.board import ReplicaBoard
from everystep.server.ray.parts import Part, read_part

log = logging.getLogger("everystep.server")

_ENDS = (Over, ScoredTexts, HeardText, Failed)
_TRIES = 8
"""Replicas in a row that may be lost before an ask has begun."""
_ASKED_A_SECOND = 10
"""Replicas that are asked how they are."""
_NO_RUNS = "runs in hands belong to one engine, and this server has replicas. Start it without them"


class ReplicaGone(EverystepError, RuntimeError):
    """A replica has died, or has been ended, while it worked on an ask."""


class Replicas(Protocol):
    """Engines that are the same, as many as there happen to be."""

    @abstractmethod
    async def facts(self) -> Ready:
        """Return what one of them says of itself."""

    @abstractmethod
    def follow(self, asked: bytes, session: str | None) -> AsyncGenerator[bytes, None]:
        """Yield what becomes of an ask, in parts; ReplicaGone where its replica dies.

        Asks of one session go to one replica. Leaving the iterator ends the ask.
        """

    @abstractmethod
    async def count(self) -> int:
        """Return how many there are now."""

    @abstractmethod
    async def state(self, session: str) -> ReplicaState:
        """Return how the replica is that asks of this session go to."""


def session_of(ask: AnyAsk, first: int) -> str | None:
    """Return the name that asks have in common whose rows can be shared: those of one model, mix of
    adapters, steering and salt that begin with the same ids. None where nothing is shared,
    or `first` is 0."""
    if isinstance(ask, Ask) and first:
        names = ("adapter_names", "adapters", "steer", "cache_salt")
        known = (ask.model, *map(ask.keywords.get, names), ask.prompt[:first])
        return hashlib.blake2b(msgspec.msgpack.encode(known), digest_size=16).hexdigest()
    return None


class _Followed:
    """An ask under way; `room`: whether its reader may be sent more events."""

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.room = asyncio.Event()
        self.room.set()
        self._ahead = 0

    def moves(self, count: int) -> None:
        """Count events that were sent, or taken: those are negative."""
        self._ahead += count
        (self.room.set if self._ahead < WINDOW else self.room.clear)()


class ReplicaFan:
    """The server of one connection to a front, until it closes.

    `first`: how many ids of a prompt say which replica is looked for. `beat`: the seconds after
    which the front is told again that there is a fan, and how many replicas there are. `pause`: the
    seconds before another replica is asked what several could not begin, doubled each time.
    `look`: the seconds after which each replica is asked again how it is; many are asked less
    often.
    """

    def __init__(
        self,
        replicas: Replicas,
        first: int,
        beat: float = BEAT,
        pause: float = 0.1,
        look: float = 2.0,
    ) -> None:
        self._replicas, self._first, self._beat, self._pause = replicas, first, beat, pause
        self._board, self._look = ReplicaBoard(replicas.state), look
        self._under: dict[int, _Followed] = {}
        self._deaths = self._count = 0

    async def serve(self, connection: socket.socket) -> None:
        """Hand asks on until the front says so, or is gone; no replica works for it then."""
        reader, self._writer = await asyncio.open_connection(sock=connection)
        facts = await self._replicas.facts()
        self._rows = facts.rows
        self._count = await self._replicas.count()
        rows = facts.rows * max(1, self._count)
        self._send(ReplicaRoom(rows, self._count))  # first, so that who is ready knows that
        self._send(Ready(facts.models, rows, os.getpid(), facts.positions))
        telling, looking = (asyncio.create_task(one) for one in (self._tell(), self._watch()))
        telling.add_done_callback(lambda _: self._writer.close())  # a defect ends the connection
        try:
            async with aclosing(front_messages(reader)) as messages:
                async for message in messages:
                    self._take(message)
        finally:
            telling.cancel()
            looking.cancel()
            tasks = [one.task for one in self._under.values() if one.task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._writer.close()

    def _take(self, message: FrontMessage) -> None:
        if isinstance(message, PutAway | Bring):  # no front of replicas says so
            return
        if isinstance(message, Leave | Taken):
            if (one := self._under.get(message.id)) is None:
                return
            if isinstance(message, Taken):
                one.moves(-message.count)
            elif one.task is not None:
                one.task.cancel()
        elif isinstance(message, RunAsk):
            self._send(Failed(message.id, 400, _NO_RUNS))
        else:
            one = self._under[message.id] = _Followed()
            one.task = asyncio.create_task(self._answer(message, one))
            one.task.add_done_callback(lambda _: self._under.pop(message.id, None))

    async def _answer(self, ask: Ask | ScoreAsk | HearAsk, one: _Followed) -> None:
        """Ask replicas until one has told the end."""
        asking = Asking(ask, waiting=isinstance(ask, Ask))  # which alone says when it has begun
        session = session_of(ask, self._first)
        asked, tries = msgspec.msgpack.encode(ask), 0
        while True:
            try:
                async with aclosing(self._replicas.follow(asked, session)) as parts:
                    async for part in parts:
                        if self._hand_on(asking, one, read_part(part)):
                            return
                        await self._writer.drain()
                        await one.room.wait()
                why = "it ended without an end of the answer"
            except ReplicaGone as error:
                why = str(error)
            except Exception as error:  # or the front would wait for ever
                log.exception("following an ask failed")
                why = type(error).__name__
            self._deaths += 1
            tries = tries + 1 if asking.waiting else 0
            if asking.is_lost() or tries == _TRIES:
                self._send(Failed(ask.id, 503, "the replica died while it worked on this"))
                return
            log.warning("a replica is gone; another is asked: %s", why[:200])
            await asyncio.sleep(min(self._pause * 2**tries, 5.0) if tries else 0)

    def _hand_on(self, asking: Asking, one: _Followed, part: Part) -> bool:
        """Tell the front what it does not know yet; return True with the end of the answer."""
        id = asking.ask.id
        rows = [
            msgspec.structs.replace(row, id=id)
            for message in part
            if isinstance(message, Tokens)
            for row in message.rows
            if asking.is_new(row)
        ]
        others = [one for one in part if not isinstance(one, Tokens)]
        for message in others:
            if not isinstance(message, _ENDS) and asking.is_new(message):
                self._send(msgspec.structs.replace(message, id=id))
        if rows:
            self._send(Tokens(rows))
            one.moves(len(rows))
        for message in others:
            if isinstance(message, _ENDS):
                self._send(msgspec.structs.replace(message, id=id))
                return True
        return False

    async def _tell(self) -> None:
        """Say again and again that there is a fan, and how many rows there are, where that
        changes."""
        known: ReplicaRoom | None = None
        while True:
            self._count = count = await self._replicas.count()
            rows = self._rows * max(1, count)
            room = ReplicaRoom(rows, count, self._deaths, self._board.states)
            if room != known:
                self._send(room)
                known = room
            self._send(Alive([]))
            await asyncio.sleep(self._beat)

    async def _watch(self) -> None:
        """Ask replicas again and again how they are, a few a second at most."""
        while True:
            await self._board.look(self._count)
            await asyncio.sleep(max(self._look, self._count / _ASKED_A_SECOND))

    def _send(self, message: ToFront) -> None:
        self._writer.write(frame(message))
