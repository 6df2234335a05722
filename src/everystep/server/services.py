"""The routes that generate, each with how its body is read and its answer is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from everystep.server.answering import Head, Streamed, StreamedAnswer, Whole, WholeAnswer
from everystep.server.anthropic_wire import (
    ANTHROPIC_FORM,
    StreamedMessage,
    WholeMessage,
    read_message_body,
)
from everystep.server.asking import Addressee, Caller, Wanted, read_chat, read_completion
from everystep.server.embeddings import WholeEmbeddings, read_embeddings
from everystep.server.exchange import OPENAI_FORM, WireForm
from everystep.server.fields import Json
from everystep.server.responses_wire import (
    RESPONSES_FORM,
    KeptResponses,
    StreamedResponse,
    WholeResponse,
    read_response_body,
)
from everystep.server.routes import CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, RESPONSES, RouteTable


@dataclass(frozen=True, slots=True)
class GeneratingRoute:
    """A route that generates. `prefix`: what ids of its answers begin with."""

    route: RouteTable
    form: WireForm
    prefix: str
    read: Callable[[Mapping[str, Json], Addressee, Caller], Wanted]
    whole: Callable[[Wanted, Head], Whole]
    streamed: Callable[[Wanted, Head], Streamed] | None = None


def generating_routes(kept: KeptResponses) -> tuple[GeneratingRoute, ...]:
    """Return the routes that generate; `kept`: where responses are kept."""
    return (
        GeneratingRoute(
            COMPLETIONS, OPENAI_FORM, "cmpl-", read_completion, WholeAnswer, StreamedAnswer
        ),
        GeneratingRoute(CHAT, OPENAI_FORM, "chatcmpl-", read_chat, WholeAnswer, StreamedAnswer),
        GeneratingRoute(
            MESSAGES, ANTHROPIC_FORM, "msg_", read_message_body, WholeMessage, StreamedMessage
        ),
        GeneratingRoute(
            RESPONSES,
            RESPONSES_FORM,
            "resp_",
            partial(read_response_body, kept=kept),
            partial(WholeResponse, kept=kept),
            partial(StreamedResponse, kept=kept),
        ),
        GeneratingRoute(EMBEDDINGS, OPENAI_FORM, "embd-", read_embeddings, WholeEmbeddings),
    )
