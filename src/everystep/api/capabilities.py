"""What a model can do, by which call: each question is the call itself, up to its first compute.

So the answer is that of the call, with the reason that its error gives.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import torch

from everystep.config.kinds import one_of
from everystep.drivers.custom import Loop, refuse_unseen
from everystep.drivers.rectangle import call_inputs, delivery_of
from everystep.drivers.session import Session
from everystep.engine import Engine, Lockstep
from everystep.errors import EverystepError, RequestError
from everystep.requests.arrays import require
from everystep.requests.door import PromptValues, sort
from everystep.requests.prepare import Call, Runs, prepare
from everystep.requests.prompts import PromptLike, TokenizerLike, messages_of, read_prompt
from everystep.requests.reading import read_options
from everystep.requests.subject import Subject
from everystep.runs.hands import Asked
from everystep.speech.transcription_options import read_speech
from everystep.stops.ends import moment

CallName = Literal["model.generate", "es.generate", "es.stream", "es.open", "AsyncEngine"]
_BEAMS: Mapping[str, object] = {"num_beams": 2}
_OBJECT: Mapping[str, object] = {"return_dict_in_generate": True}
FEATURES: Mapping[str, Mapping[str, object]] = {
    "greedy decoding": {"do_sample": False},
    "sampling": {"do_sample": True},
    "several samples": {"do_sample": True, "num_return_sequences": 2},
    "beam search": _BEAMS,
    "groups of beams": {"num_beams": 2, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "n best": {**_BEAMS, "n_best": 2},
    "best of several": {"do_sample": True, "best_of": 2},
    "contrastive search": {"penalty_alpha": 0.6, "top_k": 2},
    "contrasted layers": {"dola_layers": "low"},
    "guidance": {"guidance_scale": 2.0},
    "drafts from the prompt": {"prompt_lookup_num_tokens": 2},
    "drafts by early layers": {"assistant_early_exit": 1},
    "log-probabilities": {**_OBJECT, "logprobs": 1},
    "log-probabilities of the prompt": {**_OBJECT, "prompt_logprobs": 1},
    "scores": {**_OBJECT, "output_scores": True},
    "hidden states": {**_OBJECT, "output_hidden_states": True},
    "attentions": {**_OBJECT, "output_attentions": True},
    "quantised cache": {"cache_implementation": "quantized"},
    "static cache": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
}
"""What `model.capabilities()` asks for, by name."""


@dataclass(frozen=True, slots=True)
class Capability:
    """An answer, true where the call works: `reason` is what its error would say, empty for yes."""

    call: str
    reason: str = ""

    def __bool__(self) -> bool:
        return not self.reason

    def __str__(self) -> str:
        return self.reason or "yes"


def can(
    model: Any,
    subject: Subject,
    call: CallName,
    given: Mapping[str, object],
    prompt: PromptLike | None,
    tokenizer: TokenizerLike | None,
) -> Capability:
    """Return whether a call of the model takes these keywords, for this prompt or any short one.

    Nothing is computed. RequestError for another name of a call, or where the model's own code
    reads the prompt and none is given.
    """
    one_of(*get_args(CallName)).checked(call, "call")
    prompt = _any_prompt(subject) if prompt is None else prompt
    rectangle = call == "model.generate"
    ask = partial(_of_rectangle, model) if rectangle else partial(_of_prompts, call)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ask(subject, dict(given), prompt, tokenizer)
        except EverystepError as error:
            return Capability(call, str(error))
    return Capability(call)


def capabilities(ask: Callable[..., Capability]) -> dict[str, dict[str, Capability]]:
    """Return for each of `FEATURES` what every call answers, of which `ask` asks one."""
    return {
        feature: {call: ask(call, **keywords) for call in get_args(CallName)}
        for feature, keywords in FEATURES.items()
    }


def _any_prompt(subject: Subject) -> PromptLike:
    """Return a prompt of two positions that the model reads, or a window of silence."""
    core: Any = subject.core
    source = core.source
    if source is None:
        return [0, 0]
    if not subject.listens:
        raise RequestError(
            f"the model's encoder reads {source}",
            wanted="a prompt with it",
            got="none",
            do=f"Pass prompt={{{source!r}: ...}}",
        )
    return {source: torch.zeros(core.network.source_shape)}


def _of_rectangle(
    model: Any,
    subject: Subject,
    given: dict[str, object],
    prompt: PromptLike,
    tokenizer: TokenizerLike | None,
) -> None:
    """Plan a call of `model.generate`; an error says why it is refused."""
    of_loop: tuple[str, ...] = ()
    if given.get("custom_generate") is not None:
        given["custom_generate"] = own = Loop.of(given["custom_generate"], model)
        of_loop = own.names
    given.setdefault("tokenizer", tokenizer)
    arguments = sort("rectangle", subject, given, of_loop)
    row = read_prompt(subject, tokenizer, prompt, starts_answer=True).passed()
    source = subject.core.source
    if source is not None:
        whole: Any = row[source]
        row[source] = torch.stack(list(whole))
    values = PromptValues.of({**row, **arguments.prompt.passed()})
    arguments = replace(arguments, prompt=values)
    if arguments.speech is not None:
        read_speech(subject, arguments)
        return
    options = read_options(subject, arguments, arguments.beside.tokenizer)
    loop, streamer = arguments.beside.custom_generate, arguments.beside.streamer
    if streamer is not None:
        require("streamer", streamer, "put", "end")
    runs: Runs = "loop" if isinstance(loop, Loop) else "lockstep"
    made = prepare(subject, options, *call_inputs(subject, arguments, options), runs)
    if isinstance(loop, Loop):
        refuse_unseen(made, loop)
    if streamer is not None:
        delivery_of(made, streamer)
    _require_executor(subject, made)


def _of_prompts(
    call: str,
    subject: Subject,
    given: dict[str, object],
    prompt: PromptLike,
    tokenizer: TokenizerLike | None,
) -> None:
    """Plan a call about prompts; an error says why it is refused."""
    if call == "AsyncEngine":
        # An engine is opened before any call, so that a call has to fit an engine without options.
        session = Session(subject, tokenizer, (), None, 0, {}, gives_events=True)
        options = session.asked(prompt, given, moment())
        _require_executor(subject, session.own_call(prompt, options))
        return
    seed: Any = given.pop("seed", 0)
    if call == "es.open":
        chat = None if messages_of(prompt) is None else subject.chat_defaults
        session = Asked(given, seed, chat).session(subject, tokenizer)
    else:
        texts = call == "es.generate"
        asked = subject, tokenizer, [prompt], None, seed, given
        session = Session(*asked, gives_layers=texts, gives_events=not texts)
    _require_executor(subject, session.planned(session.read(prompt, 0), 0))


def _require_executor(subject: Subject, call: Call) -> None:
    """Refuse a call whose requests no engine of the model takes."""
    if call.runs == "loop":
        return
    needs = frozenset().union(*(request.needs for request in call.requests))
    engine = Engine(subject.executor(needs, call.quantization), Lockstep())
    for request in call.requests:
        engine.submit(request)
