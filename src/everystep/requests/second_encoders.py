"""What the encoders of second models read: of a model that drafts, and of an amateur.

Each reads the source that the model's own encoder reads. Where a call brings encoder states in the
place of a source, those of a draft model can be brought too.
"""

from __future__ import annotations

from typing import Any

from everystep.bridge.core import ForeignModel
from everystep.errors import RequestError
from everystep.models import Model
from everystep.requests.inputs import EncoderSource
from everystep.requests.options import Options
from everystep.requests.subject import Subject

_DRAFTER, _AMATEUR = "assistant_model", "amateur_model"
_STATES = "assistant_encoder_outputs"


def refuse_second_encoders(
    subject: Subject, options: Options, source: EncoderSource | None
) -> None:
    """Raise RequestError where an encoder of a second model cannot read what the call brings."""
    assistant, amateur = options.drafting.assistant, options.choosing.amateur
    given = source is not None and bool(source.assistant)
    if given and (assistant is None or not assistant.core.network.encodes):
        raise RequestError(
            f"{_STATES} has no effect",
            wanted=f"an {_DRAFTER} with an encoder beside it",
            got="none" if assistant is None else "a decoder",
            do=f"Leave {_STATES} out",
        )
    if assistant is not None:
        _require_readable(_DRAFTER, subject, assistant.core, source, given=given)
    if amateur is not None:
        _require_readable(_AMATEUR, subject, amateur.core, source, given=False)


def _require_readable(
    name: str,
    subject: Subject,
    core: Model | ForeignModel,
    source: EncoderSource | None,
    *,
    given: bool,
) -> None:
    """Raise RequestError where the encoder of the second model that was passed by this name cannot
    read the source; `given`: whether its states are."""
    if not core.network.encodes:
        return
    if source is None:
        raise RequestError(
            f"{name} has an encoder, and nothing is brought for one to read",
            wanted="a decoder, as the model is one",
            got=f"{name} with an encoder",
            do=f"Choose a decoder as {name}",
        )
    wanted, got = core.network.spec.width, 0
    if given:
        got = source.assistant[0].shape[-1]
        _require_same(f"{_STATES} are not of {name}", f"states of width {wanted}", wanted, got)
    elif source.states:
        raise RequestError(
            f"the encoder of {name} has nothing to read",
            wanted="the prompt itself" + (f", or {_STATES}" if name == _DRAFTER else ""),
            got="encoder_outputs, which are those of the model",
            do="Pass the prompt in place of encoder_outputs"
            + (f", or {_STATES} beside them" if name == _DRAFTER else ""),
        )
    else:
        _require_content(name, subject, core, source)


def _require_content(
    name: str, subject: Subject, core: Model | ForeignModel, source: EncoderSource
) -> None:
    """Raise RequestError where the prompts are of another kind or size than the encoder reads."""
    own, what = subject.core, f"the encoder of {name} cannot read this prompt"
    _require_same(what, _read(core.source), core.source, own.source, _read(own.source))
    if core.source is not None:
        for row in source.prompts:
            core.sources({one: value[None] for one, value in row.whole.items()})
        return
    for prompt in source.prompts:
        if prompt.embeds is not None:
            wanted, got = core.network.spec.width, prompt.embeds.shape[-1]
            _require_same(what, f"embeddings of width {wanted}", wanted, got)
        elif prompt.ids is not None and int(prompt.ids.max()) >= core.vocab_size:
            got = int(prompt.ids.max())
            raise RequestError(what, wanted=f"ids below {core.vocab_size}", got=got)
        most = core.network.most_source_positions
        if most is not None and prompt.length > most:
            raise RequestError(what, wanted=f"at most {most} positions", got=prompt.length)


def _read(name: str | None) -> str:
    return "ids or embeddings" if name is None else name


def _require_same(what: str, told: str, wanted: Any, got: Any, found: object = None) -> None:
    if wanted != got:
        raise RequestError(
            what,
            wanted=told,
            got=found or got,
            do="Choose a smaller model of the same family, or leave it out",
        )
