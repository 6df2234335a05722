"""`everystep chat`: a conversation, answer by answer, or the answer to one message.

Ctrl-C ends an answer and leaves the chat; what was said until then stays in the conversation. A
line that starts with a slash is a command, with two slashes a message that starts with one.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from everystep.cli import command_options as o
from everystep.cli import lines
from everystep.cli.adapters import (
    AdapterOption,
    SteerOption,
    asked_adapters,
    asked_steering,
    with_adapters,
)
from everystep.cli.chat_settings import SETTINGS
from everystep.cli.conversation import USUAL_LENGTH, Conversation
from everystep.cli.loading import load
from everystep.cli.questions import require_template
from everystep.cli.slash import obey
from everystep.cli.terminal import is_terminal, note
from everystep.cli.user_input import Interrupts, read_prompt
from everystep.errors import EverystepError
from everystep.files.sources import DEFAULT_MODEL, SourceSettings


@o.takes(*SETTINGS, max_new_tokens=USUAL_LENGTH)
def chat(
    context: typer.Context,
    message: Annotated[
        str | None,
        typer.Argument(
            metavar="[MESSAGE]", help="Answer this message and exit; - reads standard input."
        ),
    ] = None,
    system: o.System = None,
    *,
    model: o.Model = DEFAULT_MODEL,
    dtype: o.DtypeOption = None,
    quantize: o.Quantize = None,
    cache_dtype: o.CacheDtypeOption = None,
    device: o.Device = "cpu",
    offline: o.Offline = False,
    adapter: AdapterOption = None,
    steer_file: SteerOption = None,
    **said: Any,
) -> None:
    """Talk to a model; /help shows what can be said beside messages. With MESSAGE, answer it.

    Ctrl-C stops an answer, Ctrl-D or /exit ends the chat. From a pipe, each line is a message;
    beside MESSAGE, text from a pipe or a file follows it after a blank line.
    """
    decoding, seed = o.decoding(said), said.pop("seed")
    adapters, steering = asked_adapters(adapter), asked_steering(steer_file)
    text = None if message is None else read_prompt(message, None)
    offline = offline or context.obj
    loaded, tokenizer = load(model, dtype, quantize, cache_dtype, device, offline)
    require_template(tokenizer, "a chat")
    o.note_seed(loaded, decoding, seed, in_chat=True)
    system = loaded.chat_defaults.system if system is None else system
    mix, keywords = {**with_adapters(loaded, adapters), **steering}, o.keywords(said)
    conversation = Conversation(loaded, tokenizer, keywords, seed, system, adapters=mix)
    if text is not None:
        conversation.ask(text)
    elif is_terminal(sys.stdin) and is_terminal(sys.stdout):
        _talk(conversation)
    else:
        _recite(conversation)


def _talk(conversation: Conversation) -> None:
    """Hold the dialogue with a person, which goes on whatever becomes of a turn."""
    note("/help shows the commands, Ctrl-C stops an answer, Ctrl-D ends the chat")
    kept = SourceSettings.from_environment().cache / "chat_history"
    with lines.history(kept), Interrupts() as interrupts:
        for said in lines.typed(interrupts):
            try:
                _turn(conversation, said, interrupts)
            except (EverystepError, OSError) as error:
                note(str(error))
            if conversation.ended:
                return


def _recite(conversation: Conversation) -> None:
    """Answer the messages of a pipe; the first failure ends it, as in any script."""
    for said in lines.piped():
        _turn(conversation, said, None)
        if conversation.ended:
            return


def _turn(conversation: Conversation, said: lines.Said, interrupts: Interrupts | None) -> None:
    """Obey what was said if it is a command, and answer it if it says something."""
    text = said.text
    if text.startswith("/") and not said.quoted:
        if not text.startswith("//"):
            for line in obey(conversation, text.rstrip(), interrupts):
                note(line)
            return
        text = text.removeprefix("/")
    if text.strip():
        conversation.ask(text, interrupts)
