"""Transcripts on the wire: a form with a sound comes in, and what is said in it goes out.

The front reads the sound, in a thread, and judges its length before it is decoded; the engine's
process hears it between the steps of others, and stops where nobody waits any more.
"""

from __future__ import annotations

import asyncio
import secrets
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from everystep.errors import FormatError, OversizeError, RequestError, UnsupportedError
from everystep.server.answering import Usage
from everystep.server.application import Front, Responder
from everystep.server.asking import Addressee, addressee
from everystep.server.exchange import Exchange, HttpError
from everystep.server.fields import Json
from everystep.server.form import read_form
from everystep.server.line import LinePlace
from everystep.server.messages import Failed, HearAsk, HeardPart, HeardText
from everystep.server.routes import TRANSCRIPTIONS
from everystep.sounds.sound_files import read_sound_bytes
from everystep.text.languages import LANGUAGES

_NAMES: Mapping[str, str] = {code: name for name, code in [*LANGUAGES.items()][::-1]}
MOST_SECONDS = 1800.0
"""Of a sound, unless the operator says otherwise; its samples take 115 MB."""
_TIMED = ("verbose_json", "srt", "vtt")


@dataclass(frozen=True, slots=True)
class Sound:
    """A sound that was sent: its samples, and how many seconds it lasts."""

    samples: np.ndarray
    seconds: float


class TranscriptionRoutes:
    """The route of transcripts, over a front. `most_seconds`: of a sound at most."""

    def __init__(self, front: Front, most_seconds: float) -> None:
        self._front, self._most = front, most_seconds

    def routes(self) -> list[Route]:
        """Return the routes, for the application."""
        responder = Responder(self._front, self._transcribe)
        return [Route(TRANSCRIPTIONS.path, responder, methods=["POST"])]

    async def _transcribe(self, exchange: Exchange) -> None:
        front = self._front
        form = await read_form(exchange, front.settings.body_bytes, "the file of a sound")
        try:
            given = TRANSCRIPTIONS.read(_typed(form.texts))
            to = self._addressee(given.get("model"))
            _require_known(given)
            front.require_room(0, 1)
            async with front.seeing:
                data = await form.file.read()
                sound = await asyncio.to_thread(_sound, data, to, self._most)
        finally:
            await form.close()
        exchange.listen()
        with front.holding(sound.samples.nbytes):
            ask = await asyncio.to_thread(_ask, given, to, sound, front.link.next_number())
            heard = await self._heard(ask, front.place(len(ask.prompt), "hear"))
        front.count(exchange, to, Usage(0, sum(len(one.tokens) for one in heard.parts)))
        await _answer(exchange, given, heard, sound.seconds)

    def _addressee(self, name: str | None) -> Addressee:
        """Return the model that is meant; the first that listens where none is named."""
        front = self._front
        if not front.link.models:
            raise HttpError(503, "the engine is being started", code="engine_starting", retry=2)
        if name is None:
            found = (one.name for one in front.link.models.values() if one.sampling_rate)
            name = next(found, None)
        to = addressee(name, front.link.models, front.models)
        if to.facts.sampling_rate is None:
            raise UnsupportedError(
                f"the model {to.name} does not listen", do="Ask one that does, such as a Whisper"
            )
        return to

    async def _heard(self, ask: HearAsk, place: LinePlace) -> HeardText:
        front = self._front
        limit = front.within(None, "the end of the sound")
        async with limit, aclosing(front.link.follow(ask, place)) as news:
            async for message in news:
                if isinstance(message, Failed):
                    raise front.failure(message, None)
                if isinstance(message, HeardText):
                    return message
        raise HttpError(503, "the engine has gone", retry=2)


# --- in -------------------------------------------------------------------------------------------


def _typed(texts: Sequence[tuple[str, str]]) -> dict[str, Json]:
    """Return the fields of a form as JSON has them; RequestError for one that is said twice."""
    found: dict[str, Json] = {}
    for name, text in texts:
        if name.endswith("[]") and name[:-2] in _LISTED:
            found.setdefault(name[:-2], []).append(text)
        elif name in found:
            raise RequestError(f"{name[:80]} is there twice", do="Send it once")
        else:
            found[name] = _TYPES.get(name, str)(text)
    return found


def _number(text: str) -> Json:
    """Return the number in a text, or the text where there is none, which is refused by its name
    then."""
    try:
        return float(text) if any(one in text for one in ".eEn") else int(text)
    except ValueError:
        return text


def _flag(text: str) -> Json:
    return {"true": True, "false": False}.get(text.lower(), text)


_LISTED = ("timestamp_granularities", "include")
_TYPES: Mapping[str, Callable[[str], Json]] = {
    "temperature": _number,
    "seed": _number,
    "stream": _flag,
}


def _require_known(given: Mapping[str, Json]) -> None:
    """Refuse what this route has fields for, and does not do."""
    if given.get("stream"):
        raise UnsupportedError("a transcript is not streamed", do="Leave stream out")
    if parts := given.get("timestamp_granularities"):
        if "word" in parts:
            raise UnsupportedError(
                "timestamp_granularities: words have no times here",
                wanted="segment",
                do="Leave word out",
            )
        if given.get("response_format") != "verbose_json":
            raise RequestError(
                "timestamp_granularities belong to verbose_json",
                wanted="response_format verbose_json with them",
                do="Leave them out, or ask for verbose_json",
            )


def _sound(data: bytes, to: Addressee, most: float) -> Sound:
    """Return the sound in a file that was sent."""
    rate = to.facts.sampling_rate or 1
    try:
        samples = read_sound_bytes(data, rate, most_seconds=most)
    except (FormatError, OversizeError) as error:
        raise RequestError(f"file is impossible: {error}") from error
    return Sound(samples, round(len(samples) / rate, 2))


def _ask(given: Mapping[str, Json], to: Addressee, sound: Sound, number: int) -> HearAsk:
    """Return what is asked of the engine."""
    keywords: dict[str, Json] = {"seed": given.get("seed")}
    if given.get("language") is not None:
        keywords["language"] = given["language"]
    if temperature := given.get("temperature"):
        keywords["temperature"] = temperature
    if keywords["seed"] is None:
        keywords["seed"] = secrets.randbits(62)
    if to.adapter is not None:
        keywords["adapter_names"] = to.adapter
    stamps = given.get("response_format") in _TIMED
    prompt = _prompt(given.get("prompt"), to)
    samples = sound.samples.astype("<f4").tobytes()
    return HearAsk(number, to.model, samples, keywords, prompt, stamps)


def _prompt(text: str | None, to: Addressee) -> list[int]:
    """Return the ids of what is said to stand before the transcript."""
    if text is None or not text.strip():
        return []
    tokenizer = to.front.tokenizer
    ids = list(tokenizer.encode(f" {text.strip()}", add_special_tokens=False))
    plain = tokenizer.decode(ids, skip_special_tokens=True)
    if plain != tokenizer.decode(ids, skip_special_tokens=False):
        raise RequestError("prompt has special tokens in it", wanted="a text without them")
    return ids


# --- out ------------------------------------------------------------------------------------------


async def _answer(
    exchange: Exchange, given: Mapping[str, Json], heard: HeardText, seconds: float
) -> None:
    """Send a transcript in the form that was asked for."""
    match given.get("response_format", "json"):
        case "text":
            await exchange.send(PlainTextResponse(f"{heard.text}\n"))
        case "srt":
            await exchange.send(PlainTextResponse(subrip(heard.parts), media_type=_SUBRIP))
        case "vtt":
            await exchange.send(PlainTextResponse(webvtt(heard.parts), media_type="text/vtt"))
        case "verbose_json":
            temperature = float(given.get("temperature") or 0)
            await exchange.answer(_verbose(heard, seconds, temperature))
        case _:
            usage = {"type": "duration", "seconds": seconds}
            await exchange.answer({"text": heard.text, "usage": usage})


_SUBRIP = "application/x-subrip"


def _verbose(heard: HeardText, seconds: float, temperature: float) -> dict[str, Json]:
    code = heard.language
    return {
        "task": "transcribe",
        "language": None if code is None else _NAMES.get(code, code),
        "duration": seconds,
        "text": heard.text,
        "segments": [
            {
                "id": number,
                "seek": 0,
                "start": one.start,
                "end": one.end,
                "text": one.text,
                "tokens": one.tokens,
                "temperature": temperature,
                "avg_logprob": None,
                "compression_ratio": _density(one.text),
                "no_speech_prob": None,
            }
            for number, one in enumerate(heard.parts)
        ],
        "usage": {"type": "duration", "seconds": seconds},
    }


def _density(text: str) -> float:
    """Return how many times a text is longer than its compressed form."""
    raw = text.encode()
    return round(len(raw) / len(zlib.compress(raw)), 4)


def subrip(parts: Sequence[HeardPart]) -> str:
    """Return parts as an SRT file."""
    lines = [
        f"{number}\n{_clock(one.start, ',')} --> {_clock(one.end, ',')}\n{_cue(one.text)}\n"
        for number, one in enumerate(parts, 1)
    ]
    return "\n".join(lines)


def webvtt(parts: Sequence[HeardPart]) -> str:
    """Return parts as a WebVTT file."""
    lines = [
        f"{_clock(one.start, '.')} --> {_clock(one.end, '.')}\n{_cue(one.text)}\n" for one in parts
    ]
    return "\n".join(["WEBVTT\n", *lines])


def _cue(text: str) -> str:
    """Return a text that can be no other part of a file of subtitles."""
    return " ".join(text.replace("-->", "->").split())


def _clock(seconds: float, point: str) -> str:
    whole = round(seconds * 1000)
    hours, rest = divmod(whole, 3_600_000)
    minutes, rest = divmod(rest, 60_000)
    return f"{hours:02}:{minutes:02}:{rest // 1000:02}{point}{rest % 1000:03}"
