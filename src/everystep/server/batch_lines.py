"""The lines of batch files, in the form of OpenAI's: what is asked, and what became of it."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import msgspec

from everystep.errors import FormatError, MissingFileError, RequestError
from everystep.files.strict_json import require_single_keys
from everystep.server.fields import Json
from everystep.server.inside import InnerReply
from everystep.server.raw_lines import LONGEST, raw_lines

_TOLD = 20
"""Faults of a file that are told at most."""


class BatchLine(msgspec.Struct, frozen=True):
    """A line of a batch file. `body`: as it stands there, for the route to read."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class FaultyLine(msgspec.Struct, frozen=True):
    """A fault of a line, as OpenAI's batches tell it; lines are counted from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class FaultyFileError(RequestError):
    """A batch file has lines that cannot be asked. `faults`: the first of them."""

    def __init__(self, path: str, faults: list[FaultyLine]) -> None:
        told = "; ".join(f"line {one.line}: {one.message}" for one in faults[:3])
        super().__init__(
            f"{path} is no batch file",
            wanted='lines such as {"custom_id": "1", "method": "POST", "url": ..., "body": {...}}',
            got=told,
            do="Nothing was asked; correct the lines and ask again",
        )
        self.faults = faults


_lines = msgspec.json.Decoder(BatchLine)


class _LineId(msgspec.Struct):
    """The part of a result that says which line it belongs to."""

    custom_id: str


_ids = msgspec.json.Decoder(_LineId)


def read_line(raw: bytes) -> BatchLine:
    """Return a line that was judged before."""
    return _lines.decode(raw)


def judged(
    path: Path, urls: Collection[str], *, most: int, name: str | None = None, stamp: bytes = b""
) -> int:
    """Return how many lines a batch file has; FaultyFileError unless each can be asked.

    Each needs a custom_id that no other has, POST, and one of these urls. The bodies are read by
    their routes, and a fault of a body is a row of the results. `name`: what to call the file.
    """
    faults: list[FaultyLine] = []
    seen: set[bytes] = set()
    count = 0
    try:
        file = path.open("rb")
    except FileNotFoundError as error:
        raise MissingFileError(f"there is no file {path}") from error
    with file:
        for count, raw in enumerate(raw_lines(file), 1):
            fault = _fault(raw, urls, seen)
            if fault is None and count > most:
                fault = "too_many_lines", f"there are more than {most} lines"
            if fault is not None:
                faults.append(FaultyLine(*fault, count))
            if len(faults) == _TOLD or count > most:
                break
    if not count:
        faults.append(FaultyLine("empty_file", "there is no line", 1))
    if faults:
        raise FaultyFileError(name or str(path), faults)
    return count


def _fault(raw: bytes, urls: Collection[str], seen: set[bytes]) -> tuple[str, str] | None:
    """Return the code and the text of what is wrong with a line, if something is."""
    if len(raw) > LONGEST:
        return "line_too_long", f"the line is longer than {LONGEST} bytes"
    try:
        line = _lines.decode(raw)
        require_single_keys(raw)
        body = bytes(line.body).lstrip()
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        return "invalid_json_line", f"this cannot be read: {str(error)[:120]}"
    if not 0 < len(line.custom_id) <= 512:
        return "invalid_custom_id", "a custom_id has 1 to 512 characters"
    digest = hashlib.blake2b(line.custom_id.encode(), digest_size=16).digest()
    if digest in seen:
        return "duplicate_custom_id", f"the custom_id {line.custom_id[:40]!r} is there twice"
    seen.add(digest)
    if line.method != "POST":
        return "invalid_method", f"the method is {line.method[:20]!r}, not POST"
    if line.url not in urls:
        wanted = ", ".join(urls)
        return "invalid_url", f"the url is {line.url[:80]!r}, wanted {wanted}"
    if not body.startswith(b"{"):
        return "invalid_body", "the body is no object"
    return None


# --- results --------------------------------------------------------------------------------------


def row_of(line: BatchLine, reply: InnerReply) -> bytes:
    """Return the row of an answer."""
    said = {"status_code": reply.status, "request_id": reply.id, "body": reply.body}
    return _row(line, reply.id, said, None)


def row_without_answer(line: BatchLine, code: str, text: str) -> bytes:
    """Return the row of a line that was not answered."""
    return _row(line, f"none-{line.custom_id}", None, {"code": code, "message": text})


def _row(line: BatchLine, id: str, response: Json, error: Json) -> bytes:
    row = {"id": f"batch_req_{id}", "custom_id": line.custom_id}
    return msgspec.json.encode({**row, "response": response, "error": error}) + b"\n"


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """The contents of a file of results: rows, how many of them failed, and whole bytes."""

    rows: int = 0
    failed: int = 0
    size: int = 0


class _Told(msgspec.Struct):
    status_code: int


class _ResultRow(msgspec.Struct):
    custom_id: str
    response: _Told | None


_rows = msgspec.json.Decoder(_ResultRow)


def is_answer(raw: bytes) -> bool:
    """Return whether a row of results is an answer with status 200."""
    response = _rows.decode(raw).response
    return response is not None and response.status_code == 200


def progress(source: Path, target: Path) -> BatchProgress:
    """Return how far a file of results has come; RequestError unless it begins as the results of
    this batch file do. A row that was cut off in the middle does not count."""
    if not target.exists():
        return BatchProgress()
    rows = failed = size = 0
    with source.open("rb") as asked, target.open("rb") as done:
        lines = raw_lines(asked)
        for raw in done:
            if not raw.endswith(b"\n"):
                break
            try:
                row, line = _rows.decode(raw), next(lines, None)
            except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
                got = f"row {rows + 1}: {str(error)[:120]}"
                raise FormatError(f"{target} holds no results", got=got) from error
            if line is None or _ids.decode(line).custom_id != row.custom_id:
                raise RequestError(
                    f"{target} holds results of another batch file",
                    wanted=f"no file, or the first results of {source}",
                    got=f"row {rows + 1} for {row.custom_id[:40]!r}",
                    do="Name another file for the results, or remove this one",
                )
            rows += 1
            failed += row.response is None or row.response.status_code != 200
            size += len(raw)
    return BatchProgress(rows, failed, size)
