"""Runs begin: from a prompt, or from the file that another one was saved to."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any, Unpack

import torch
from torch import nn

from everystep.api.model import LanguageModel, paired
from everystep.drivers.session import PromptLike, Session, TokenizerLike
from everystep.errors import FormatError, RequestError, shown
from everystep.files.opening import as_path
from everystep.requests.keywords import TextOptions, lists_options
from everystep.runs.hands import Asked, Hands, Rules
from everystep.runs.run import Run
from everystep.runs.saved import prefix_digest, read_run, revived


@lists_options(TextOptions)
def open(
    model: LanguageModel | nn.Module,
    tokenizer: TokenizerLike | None = None,
    prompt: PromptLike | None = None,
    *,
    seed: int | None = None,
    **options: Unpack[TextOptions],
) -> Run:
    """A run of the prompt, which has not taken its first step.

    `prompt`, `options`, `seed`: as for `es.generate` with one prompt, everything about them is
    checked here, before any compute. Without a seed one is taken from torch's global generator.

    Example:

        >>> run = es.open(model, tokenizer, "Once", max_new_tokens=4)
        >>> step = next(run)
        >>> len(run.tokens)
        1
    """
    if prompt is None:
        raise RequestError("there is no prompt to open a run with", do="Pass a text or ids")
    model = paired(model, tokenizer)
    asked = Asked(options, int(torch.randint(2**62, ()).item()) if seed is None else seed)
    session = asked.session(model, tokenizer)
    passed = session.read(prompt, 0)
    call = session.prepared(passed, 0)
    rules, hands = Rules.of(asked, call), Hands(model, call)
    group = hands.submit(rules.request(model, 0, "0"))
    return Run(model, session, passed, [(0, rules)], hands, group)


@lists_options(TextOptions)
def resume(
    path: str | PathLike[str],
    model: LanguageModel | nn.Module,
    tokenizer: TokenizerLike | None = None,
    **again: Unpack[TextOptions],
) -> Run:
    """The run of a file that `run.save` or `everystep generate --save` wrote, ready for its next
    step; it ends as it would have without the interruption.

    `again`: keywords of `es.open` whose values cannot be written, such as `logits_processor`,
    `hooks` and `prefix`, under the same names. FormatError: the file is damaged, or of a newer
    version. RequestError: another model, tokenizer, prefix or version of everystep, or a keyword
    that is missing.

    Example:

        >>> run = es.open(model, tokenizer, "Once", max_new_tokens=4)
        >>> run.save(folder / "run.es")
        >>> es.resume(folder / "run.es", model, tokenizer).result() == run.result()
        True
    """
    model = paired(model, tokenizer)
    state, passed, absent = read_run(as_path(path), model, tokenizer)
    _check_again(absent, again)
    if "prefix" in again and prefix_digest(again["prefix"]) != state.get("prefix"):
        raise RequestError(
            "the saved run stood after another prefix",
            wanted="one that was made from the same prompt",
            got=shown(again["prefix"]),
            do="Make it again with everystep.prefill as it was made for es.open",
        )
    try:
        return _restored(state, passed, model, tokenizer, again)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise FormatError(f"{path} is damaged", got=f"{type(error).__name__}: {error}") from error


def _restored(
    state: Any,
    passed: Mapping[str, Any],
    model: LanguageModel,
    tokenizer: Any,
    again: Mapping[str, Any],
) -> Run:
    given: frozenset[int] = frozenset(state["given"])
    rules: list[tuple[int, Rules]] = []
    hands: Hands | None = None
    session: Session | None = None
    for start, (plain, missing, seed) in state["rules"]:
        options = {**revived(plain), **{name: again[name] for name in missing}}
        asked = Asked(options, seed)
        session = asked.session(model, tokenizer)
        call = session.prepared(passed, 0)
        hands = hands or Hands(model, call)
        rules.append((start, Rules.of(asked, call, rules[0][1].first if rules else None)))
    if hands is None or session is None:
        raise KeyError("rules")
    request = rules[-1][1].request(model, len(given), "0")
    group = hands.restore(request, state["group"].tobytes())
    run = Run(model, session, passed, rules, hands, group)
    run._given, run._memos, run._number = given, state["memos"], state["number"]
    run._shown = frozenset(state["shown"])
    return run


def _check_again(absent: list[str], again: Mapping[str, Any]) -> None:
    """RequestError if a keyword is missing that could not be written, or one is too many."""
    missing = [name for name in absent if name not in again]
    surplus = [name for name in again if name not in absent]
    if missing:
        raise RequestError(
            f"the saved run needs {', '.join(missing)}, which cannot be written to a file",
            do="Pass to es.resume what was passed to es.open",
        )
    if surplus:
        raise RequestError(
            f"the saved run has no use for {', '.join(surplus)}",
            wanted=", ".join(absent) or "no further keywords",
            do="Resume without it, then call run.set",
        )
