"""Files and batches over HTTP, as OpenAI's clients ask for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from starlette.responses import FileResponse
from starlette.routing import Route

from everystep.errors import RequestError
from everystep.server.application import Front, Responder
from everystep.server.batch_desk import BatchDesk, BatchState
from everystep.server.exchange import Exchange, HttpError
from everystep.server.fields import Json
from everystep.server.file_store import StoredFile, copied
from everystep.server.form import read_form
from everystep.server.routes import BATCHES

_OFF = "Batch files are off. Start the server with --files DIR."
_MOST_SHOWN = 1000
Answer = Callable[[Exchange], Awaitable[None]]


class BatchRoutes:
    """The routes of files and batches; without a desk each says that they are off."""

    def __init__(self, front: Front, desk: BatchDesk | None) -> None:
        self._front, self._desk = front, desk

    def routes(self) -> list[Route]:
        """Return what the application serves."""
        served: Sequence[tuple[str, str, Answer]] = (
            ("POST", "/v1/files", self._upload),
            ("GET", "/v1/files", self._files),
            ("GET", "/v1/files/{id}", self._file),
            ("GET", "/v1/files/{id}/content", self._content),
            ("DELETE", "/v1/files/{id}", self._delete),
            ("POST", "/v1/batches", self._create),
            ("GET", "/v1/batches", self._batches),
            ("GET", "/v1/batches/{id}", self._batch),
            ("POST", "/v1/batches/{id}/cancel", self._cancel),
        )
        return [
            Route(path, Responder(self._front, answer), methods=[method])
            for method, path, answer in served
        ]

    @property
    def desk(self) -> BatchDesk:
        """The batches of the server."""
        if self._desk is None:
            raise HttpError(404, _OFF, code="batches_off")
        return self._desk

    # --- files ------------------------------------------------------------------------------------

    async def _upload(self, exchange: Exchange) -> None:
        owner, store, purpose = exchange.caller.key, self.desk.files, ""
        store.require_room(owner)
        form = await read_form(exchange, store.limits.file_bytes, "a file of lines of JSON")
        try:
            for name, value in form.texts:
                if name != "purpose":
                    do = "Leave it out: a file is kept until it is deleted"
                    raise RequestError(f"there is no field {name[:80]!r}", do=do)
                purpose = value
            if purpose != "batch":
                raise RequestError("purpose is impossible", wanted="'batch'", got=purpose[:80])
            upload = form.file
            name, write = upload.filename or "file.jsonl", copied(upload.file)
            file = await asyncio.to_thread(store.add, owner, name, purpose, write)
        finally:
            await form.close()
        await exchange.answer(file.shown())

    async def _files(self, exchange: Exchange) -> None:
        purpose = exchange.request.query_params.get("purpose")
        found = self.desk.files.listed(exchange.caller.key)
        if exchange.request.query_params.get("order", "desc") == "desc":
            found = found[::-1]
        await exchange.answer(_page(exchange, [f for f in found if purpose in (None, f.purpose)]))

    def _known(self, exchange: Exchange) -> StoredFile:
        return self.desk.files.find(exchange.caller.key, exchange.request.path_params["id"])

    async def _file(self, exchange: Exchange) -> None:
        await exchange.answer(self._known(exchange).shown())

    async def _content(self, exchange: Exchange) -> None:
        path = self.desk.files.path(self._known(exchange))
        headers = {"x-content-type-options": "nosniff"}
        await exchange.send(FileResponse(path, 200, headers, "application/octet-stream"))

    async def _delete(self, exchange: Exchange) -> None:
        file = self._known(exchange)
        if self.desk.is_read(file.id):
            raise HttpError(409, "A batch that is not over reads this file. Cancel it first.")
        self.desk.files.remove(file)
        await exchange.answer({"id": file.id, "object": "file", "deleted": True})

    # --- batches ----------------------------------------------------------------------------------

    async def _create(self, exchange: Exchange) -> None:
        given = await exchange.fields(BATCHES)
        if given["endpoint"] not in self.desk.urls:
            wanted = ", ".join(self.desk.urls)
            raise RequestError("endpoint is impossible", wanted=wanted, got=given["endpoint"][:80])
        metadata = given.get("metadata")
        if any(not isinstance(value, str) for value in (metadata or {}).values()):
            raise RequestError("metadata is impossible", wanted="texts by name")
        owner, file = exchange.caller.key, given["input_file_id"]
        await exchange.answer(self.desk.create(owner, file, given["endpoint"], metadata).shown())

    async def _batches(self, exchange: Exchange) -> None:
        await exchange.answer(_page(exchange, self.desk.listed(exchange.caller.key)))

    def _asked(self, exchange: Exchange) -> BatchState:
        return self.desk.find(exchange.caller.key, exchange.request.path_params["id"])

    async def _batch(self, exchange: Exchange) -> None:
        await exchange.answer(self._asked(exchange).shown())

    async def _cancel(self, exchange: Exchange) -> None:
        await exchange.answer(self.desk.cancel(self._asked(exchange)).shown())


def _page(exchange: Exchange, found: Sequence[StoredFile | BatchState]) -> dict[str, Json]:
    """Return a part of a list, as `limit` and `after` say."""
    asked = exchange.request.query_params
    limit = asked.get("limit", "20")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= _MOST_SHOWN):
        raise RequestError("limit is impossible", wanted=f"1 to {_MOST_SHOWN}", got=limit[:20])
    if (after := asked.get("after")) is not None:
        places = [place for place, one in enumerate(found, 1) if one.id == after]
        if not places:
            raise RequestError("after is impossible", wanted="an id of the list", got=after[:80])
        found = found[places[0] :]
    shown = [one.shown() for one in found[: int(limit)]]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {}
    more = len(found) > len(shown)
    return {"object": "list", "data": shown, "has_more": more, **ends}
