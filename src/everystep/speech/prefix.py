"""The ids that a transcript begins with: start, language, task, and whether it has timestamps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from everystep.errors import FormatError, RequestError, UnsupportedError, nearest, shown
from everystep.text.languages import LANGUAGES

TASKS = ("transcribe", "translate")
Said = Callable[[str], Any]
"""What a call, its configuration or the checkpoint says of a name, None for nothing."""


@dataclass(frozen=True)
class SpeechTokens:
    """The special ids of a speech model, as its generation config names them.

    `languages`: id by token such as "<|en|>", `tasks`: id by name; None where a file has none.
    `no_timestamps`: the id before the first timestamp. `old`: ids that a transcript begins with
    after the start, in files that were written before languages and tasks had names; None in place
    of a language that is to be found out.
    """

    start: int
    languages: Mapping[str, int] | None
    tasks: Mapping[str, int] | None
    no_timestamps: int | None
    old: tuple[int | None, ...] = ()

    def language(self, name: str) -> int:
        """Return the id of a language by its name, code or token; RequestError if it has none."""
        if self.languages is None:
            raise _outdated("language", "lang_to_id")
        given = str(name).lower()
        token = given if given in self.languages else f"<|{LANGUAGES.get(given, given)}|>"
        if token not in self.languages:
            close = nearest(given, [*LANGUAGES, *LANGUAGES.values()])
            raise RequestError(
                "this model does not know the language",
                wanted="an English name, a code, or one of generation_config.lang_to_id",
                got=shown(name),
                do=f"Perhaps you meant {close!r}" if close else None,
            )
        return self.languages[token]


def read_tokens(said: Said) -> SpeechTokens:
    """Return the special ids that a model's configuration says."""
    start = said("decoder_start_token_id")
    if type(start) is not int:
        raise FormatError(
            "the model says no id that a transcript begins with",
            wanted="decoder_start_token_id",
            got=shown(start),
            do="Set decoder_start_token_id",
        )
    pairs = [tuple(one) for one in said("forced_decoder_ids") or ()]
    old = tuple(token for _, token in pairs) if pairs and pairs[0][0] == 1 else ()
    if old and [place for place, _ in pairs] != list(range(1, len(pairs) + 1)):
        raise FormatError(
            "forced_decoder_ids leaves places out",
            wanted="a pair for each place from 1 on",
            got=pairs,
        )
    known = said("lang_to_id"), said("task_to_id"), said("no_timestamps_token_id")
    return SpeechTokens(start, *known, old)


def first_tokens(
    tokens: SpeechTokens,
    language: str | Sequence[str] | None,
    task: str | None,
    rows: int,
    *,
    stamps: bool,
    detect: Callable[[], Sequence[int]],
) -> list[list[int]]:
    """Return (rows,) the ids that each transcript begins with; `detect` finds out the languages.

    RequestError for languages and tasks that the model does not have. Source: Radford et al. 2022;
    transformers' `WhisperGenerationMixin`.
    """
    old = tokens.old if language is None and task is None else ()
    found: Sequence[int | None] = [None] * rows
    if language is not None:
        names = [language] * rows if isinstance(language, str) else list(language)
        if len(names) != rows or not all(isinstance(name, str) for name in names):
            raise RequestError(
                "language does not fit the sounds",
                wanted=f"a name, or {rows} of them",
                got=language,
            )
        found = [tokens.language(name) for name in names]
    elif tokens.languages is not None and (not old or old[0] is None):
        found = detect()
    named = _task(tokens, task, language, old)
    return [_row(tokens, old, own, named, stamps=stamps) for own in found]


def _task(
    tokens: SpeechTokens, task: str | None, language: object, old: Sequence[int | None]
) -> int | None:
    """Return the id of the task; beside a language alone that of writing down what is said."""
    if task is None:
        return None if language is None or tokens.tasks is None else tokens.tasks["transcribe"]
    if tokens.tasks is None:
        raise _outdated("task", "task_to_id")
    if task not in TASKS:
        raise RequestError("there is no such task", wanted=" or ".join(TASKS), got=shown(task))
    return tokens.tasks[task]


def _row(
    tokens: SpeechTokens,
    old: Sequence[int | None],
    language: int | None,
    task: int | None,
    *,
    stamps: bool,
) -> list[int]:
    ids: list[int | None] = [tokens.start, *old]
    if language is not None:
        ids[1:2] = [language]
    if task is not None:
        ids.append(task)
    unstamped = tokens.no_timestamps
    if stamps and ids[-1] == unstamped:
        ids.pop()
    elif not stamps and ids[-1] != unstamped:
        ids.append(unstamped)
    return [token for token in ids if token is not None]


def _outdated(name: str, field: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name} needs ids that the model's generation config does not name",
        wanted=f"generation_config.{field}",
        got="none",
        do=f"Leave {name} out, or load the model with its newest generation_config.json",
    )
