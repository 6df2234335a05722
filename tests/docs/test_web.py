"""The applications of docs/guide/web.md: streams, clients that leave, wrong requests."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

import everystep as es
from everystep.api.model import LanguageModel
from everystep.testing.models import tiny_llama
from tests.api.asking import LONG, TOKENIZER, Message, require_nothing_left, runs
from tests.docs.test_documents import blocks
from tests.reading import ROOT

PAGE = (ROOT / "docs" / "guide" / "web.md").read_text(encoding="utf-8")
DEFINED = [block.text for block in blocks(PAGE, "python") if "asyncio.run(" not in block.text]
MODEL: LanguageModel = tiny_llama(vocab_size=320, max_position_embeddings=512)


def defined(*more: str) -> dict[str, Any]:
    """The names that the blocks of the page define, and these after them."""
    names: dict[str, Any] = {"__name__": "page"}
    for text in (*DEFINED, *more):
        exec(compile(text, "web.md", "exec"), names)
    return names


def application(engine: es.AsyncEngine, **options: Any) -> Any:
    return defined()["application"](engine, **options)


@pytest.fixture
def framework(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The module that is written for FastAPI, with our model: its `app` and its `engine`."""
    monkeypatch.setattr(es, "load", lambda path: (MODEL, TOKENIZER))
    (module,) = blocks(PAGE, "text")
    return defined(module.text)


async def visit(
    app: Any, body: bytes, leave_after: int | None = None, **scope: Any
) -> list[Message]:
    """What a client is sent, which disconnects after so many messages."""
    inbox: asyncio.Queue[Message] = asyncio.Queue()
    middle = len(body) // 2
    inbox.put_nowait({"type": "http.request", "body": body[:middle], "more_body": True})
    inbox.put_nowait({"type": "http.request", "body": body[middle:], "more_body": False})
    sent: list[Message] = []

    async def send(message: Message) -> None:
        if len(sent) == leave_after and scope.get("asgi", {}).get("spec_version") == "2.4":
            raise OSError("the client has gone")
        sent.append(message)
        if len(sent) == leave_after:
            inbox.put_nowait({"type": "http.disconnect"})
        await asyncio.sleep(0)

    scope = {"type": "http", "method": "POST", "path": "/", **scope}
    with contextlib.suppress(OSError, ClientDisconnect):
        await asyncio.wait_for(app(scope, inbox.get, send), 60)
    return sent


def text_of(sent: list[Message]) -> str:
    return b"".join(message["body"] for message in sent[1:]).decode()


def test_two_clients_at_once_get_their_answers_in_pieces() -> None:
    async def main() -> None:
        async with es.AsyncEngine(MODEL, TOKENIZER) as engine:
            app = application(engine, **LONG)
            found = await asyncio.gather(visit(app, b"question 1"), visit(app, b"question 2"))
            wanted = es.generate(MODEL, TOKENIZER, ["question 1", "question 2"], **LONG)
            assert [text_of(sent) for sent in found] == wanted
            for sent in found:
                assert sent[0]["status"] == 200 and len(sent) > 5, "it came in one piece"
                assert not sent[-1].get("more_body")
            await require_nothing_left(engine)

    runs(main())


def test_a_client_that_leaves_frees_its_rows_and_no_others() -> None:
    async def main() -> None:
        async with es.AsyncEngine(MODEL, TOKENIZER) as engine:
            app = application(engine, max_new_tokens=400, eos_token_id=None)
            left, whole = await asyncio.gather(
                visit(app, b"goes away", leave_after=3), visit(app, b"stays")
            )
            assert left[-1].get("more_body"), "nothing ended that answer"
            wanted = es.generate(MODEL, TOKENIZER, "stays", max_new_tokens=400, eos_token_id=None)
            assert text_of(whole) == wanted
            await require_nothing_left(engine)

    runs(main())


def test_a_wrong_request_is_400_with_the_librarys_text() -> None:
    async def main() -> None:
        async with es.AsyncEngine(MODEL, TOKENIZER) as engine:
            sent = await visit(application(engine, max_new_token=3), b"hello")
            assert sent[0]["status"] == 400 and "max_new_tokens" in text_of(sent)
            empty = await visit(application(engine, **LONG), b"")
            assert empty[0]["status"] == 400 and "empty" in text_of(empty)
            unreadable = await visit(application(engine, **LONG), b"\xff\xfe")
            assert unreadable[0]["status"] == 400
            await require_nothing_left(engine)

    runs(main())


def test_a_full_engine_is_503() -> None:
    async def main() -> None:
        async with es.AsyncEngine(MODEL, TOKENIZER, max_rows=1, max_waiting=1) as engine:
            app = application(engine, **LONG)
            found = await asyncio.gather(*(visit(app, b"wait") for _ in range(8)))
            statuses = {sent[0]["status"] for sent in found}
            assert statuses == {200, 503}
            await require_nothing_left(engine)

    runs(main())


def test_a_prompt_that_never_fits_is_413_and_not_worth_another_try() -> None:
    async def main() -> None:
        async with es.AsyncEngine(MODEL, TOKENIZER, max_rows=2) as engine:
            long = b"a question " * 400
            sent = await visit(application(engine, **LONG), long)
            assert sent[0]["status"] == 413 and "fills the model's context" in text_of(sent)
            wide = await visit(application(engine, num_beams=3, max_new_tokens=2), b"wide")
            assert wide[0]["status"] == 413 and "more rows than there are" in text_of(wide)
            await require_nothing_left(engine)

    runs(main())


@pytest.mark.parametrize("version", ["2.3", "2.4"])
def test_with_fastapi_answers_stream_and_a_client_that_leaves_frees_its_rows(
    framework: dict[str, Any], version: str
) -> None:
    """By either version of ASGI, which report that a client has gone in different ways."""
    scope = {"path": "/generate", "query_string": b"", "headers": [], "root_path": ""}
    scope |= {"asgi": {"version": "3.0", "spec_version": version}, "http_version": "1.1"}

    async def main() -> None:
        async with framework["engine"] as engine:
            app = framework["app"]
            sent, left, unreadable, empty = await asyncio.gather(
                visit(app, b"question 1", **scope),
                visit(app, b"goes away", leave_after=2, **scope),
                visit(app, b"\xff\xfe", **scope),
                visit(app, b"", **scope),
            )
            assert sent[0]["status"] == 200 and len(sent) > 5, "it came in one piece"
            wanted = es.generate(MODEL, TOKENIZER, "question 1", max_new_tokens=200)
            assert text_of(sent) == wanted
            assert left[-1].get("more_body"), "nothing ended that answer"
            assert unreadable[0]["status"] == 400 and "utf-8" in text_of(unreadable)
            assert empty[0]["status"] == 400 and "empty" in text_of(empty)
            await require_nothing_left(engine)

    runs(main())
