"""What an encoder makes of the prompts that it reads."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from everystep.api.inputs import EncoderSource
from everystep.bridge.core import ForeignModel
from everystep.executors.choice import encoder_of
from everystep.nn.network import Heard

if TYPE_CHECKING:
    from everystep.api.model import LanguageModel


def encoder_states(
    model: LanguageModel, source: EncoderSource, heard: Sequence[Heard] = ()
) -> tuple[Tensor, ...]:
    """(B,) states (S, E): the caller's, or made of the prompts; `heard`, if any, (B,) gets what the
    encoder's layers show."""
    core = model.core
    encode = core.encode
    if not isinstance(core, ForeignModel):
        encode = partial(core.encode, by=encoder_of(core, model.executor_name))
    shown = heard or (None,) * len(source.prompts)
    return source.states or tuple(map(encode, source.prompts, shown))
