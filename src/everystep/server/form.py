"""Forms with a file: multipart bodies, read in pieces, with few and short fields."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass

from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from everystep.errors import RequestError
from everystep.server.exchange import Exchange, HttpError

_MOST_FIELDS = 24


@dataclass(frozen=True, slots=True)
class SentForm:
    """A form that was sent: its file, and its other fields in their order."""

    file: UploadFile
    texts: tuple[tuple[str, str], ...]
    whole: FormData

    async def close(self) -> None:
        """Let go of the file."""
        await self.whole.close()


async def read_form(exchange: Exchange, most: int, wanted: str) -> SentForm:
    """Return the form in the body, of at most so many bytes; `wanted`: what its file is.

    HttpError 415 for another kind of body, RequestError for a form without a file, or with several.
    """
    headers = exchange.request.headers
    if not headers.get("content-type", "").startswith("multipart/form-data"):
        raise HttpError(415, "The body is not multipart/form-data.")
    async with aclosing(exchange.pieces(most)) as pieces:
        try:
            parser = MultiPartParser(headers, pieces, max_files=1, max_fields=_MOST_FIELDS)
            form = await parser.parse()
        except (MultiPartException, KeyError) as error:
            got = str(getattr(error, "message", error))[:120]
            raise RequestError("the form cannot be read", got=got) from error
    upload = form.get("file")
    if not isinstance(upload, UploadFile):
        await form.close()
        raise RequestError("file is missing", wanted=wanted)
    texts = tuple((name, one) for name, one in form.multi_items() if isinstance(one, str))
    return SentForm(upload, texts, form)
