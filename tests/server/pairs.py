"""Features of the wire, and what two of them ask for together.

A feature is fields of a body. For a pair of them the answer is what `es.generate` gives for the
same keywords, or the same refusal; what the server refuses by itself is in `OWN`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch

import everystep as es
from everystep.api.model import LanguageModel
from everystep.errors import EverystepError
from everystep.outputs import TokenLogprobs
from everystep.server.fields import GENERATE
from everystep.server.routes import COMPLETIONS
from everystep.testing.models import tiny_llama
from tests.server.serving import TOKENIZER, Served, chunks_of, joined
from tests.switching.arguments import ASKED

Body = dict[str, Any]
PROMPT = "hello the"
BASE: Body = {"max_new_tokens": 5, "seed": 3}
OTHER: Mapping[str, Body] = {
    "max_length": {"max_length": 12},
    "stop_strings": {"stop_strings": ["e", "\x1c"]},
    "min_length": {"min_length": 12, "eos_token_id": 90},
    "min_new_tokens": {"min_new_tokens": 4, "eos_token_id": 90},
    "eos_token_id": {"eos_token_id": 90},
    "bad_words_ids": {"bad_words_ids": [[90], [91, 92]]},
    "suppress_tokens": {"suppress_tokens": [90, 91]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [90]},
    "sequence_bias": {"sequence_bias": [[[90], 9.0]]},
    "watermarking_config": {"watermarking_config": {"bias": 9.0}},
    "logit_bias": {"logit_bias": {"90": 50.0}},
    "pad_token_id": {"pad_token_id": 7},
    "adapters": {"adapters": {"poet": 0.5}},
    "steer": {"steer": {"1": [4.0, -4.0] * 16}},
    "strategy": {"strategy": "beam"},
    "strategy_options": {"strategy_options": {"n": 3}, "strategy": "nth_best"},
    "logits_processor": {"logits_processor": [{"name": "favour", "options": {"by": 50.0}}]},
    "hooks": {"hooks": [{"name": "insert", "options": {"ids": [101, 102]}}]},
    "cache_salt": {"cache_salt": "a"},
    "negative_prompt": {"negative_prompt": "of the", "guidance_scale": 1.5},
    "max_time": {"max_time": 60.0},
    "timeout": {"timeout": 60.0},
    "assistant_early_exit": {"assistant_early_exit": 1},
    **{
        name: {name: value, "prompt_lookup_num_tokens": 3}
        for name, value in (("num_assistant_tokens", 5), ("num_drafts", 2))
    },
    **{
        name: {name: value, "prompt_lookup_num_tokens": 3}
        for name, value in (
            ("num_assistant_tokens_schedule", "heuristic"),
            ("assistant_confidence_threshold", 0.1),
            ("assistant_lookbehind", 5),
            ("target_lookbehind", 5),
            ("assistant_ensemble_weight", 0.5),
            ("draft_verification", "exact"),
        )
    },
}
"""Bodies of fields that the table of arguments has in another form, or not at all."""
WIRE: Mapping[str, Body] = {
    "n": {"n": 2, "do_sample": True},
    "stop": {"stop": ["e"]},
    "include_stop_str_in_output": {"stop": ["e"], "include_stop_str_in_output": True},
    "stop_token_ids": {"stop_token_ids": [90, 91]},
    "ignore_eos": {"ignore_eos": True},
    "priority": {"priority": -3},
    "echo": {"echo": True},
    "stream": {"stream": True},
    "stream_options": {"stream": True, "stream_options": {"include_usage": True}},
    "model": {"model": "poet"},
    "prompt": {"prompt": TOKENIZER.encode(PROMPT)},
    "return_token_ids": {"return_token_ids": True},
    "timings": {"timings": True},
    "skip_special_tokens": {"skip_special_tokens": False, "logit_bias": {"3": 20.0}},
    "explain": {"explain": 2},
}
_PLAIN = ("seed", "max_new_tokens", "add_generation_prompt", "tools", "tool_choice")
_TALK = (*_PLAIN, "parallel_tool_calls", "enable_thinking", "thinking_budget")
_NAMES = {"n": "num_return_sequences", "stop": "stop_strings"}
OWN = (
    "a stream has no log-probabilities of its prompt",
    "a stream has no explanations",
    "have the same meaning",
    "are the same. Leave",
)
"""Beginnings of what the server refuses by itself."""


@cache
def adapted() -> LanguageModel:
    """A model with an adapter, that a server has; nobody changes it."""
    model = tiny_llama(vocab_size=320, max_position_embeddings=4096)
    adapter = model.add_adapter("poet", es.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    with torch.no_grad():
        generator = torch.Generator().manual_seed(5)
        for one in adapter.parameters():
            one.copy_(torch.randn(one.shape, generator=generator) * 0.3)
    return model


def features() -> dict[str, Body]:
    """Return every field of /v1/completions by name, in a body that asks for something by it."""
    found: dict[str, Body] = {}
    for field in COMPLETIONS.fields.values():
        if field.name in _TALK or field.name == "max_tokens":
            continue
        if field.name in WIRE:
            found[field.name] = dict(WIRE[field.name])
        elif field.name in OTHER:
            found[field.name] = dict(OTHER[field.name])
        else:
            value, beside = ASKED.get(field.name, (3, {}))
            known = {name: one for name, one in beside.items() if name not in ("tokenizer", "seed")}
            kept = {name: one for name, one in known.items() if name in COMPLETIONS.fields}
            if kept.get("eos_token_id", 90) == "second":
                kept["eos_token_id"] = 90
            found[field.name] = {
                field.name: list(value) if isinstance(value, tuple) else value,
                **kept,
            }
    return found


def pairs() -> Iterator[tuple[str, str]]:
    """Yield each two fields that can be asked for at once, in order."""
    known = features()
    for one, two in itertools.combinations(known, 2):
        both = known[one].keys() & known[two].keys()
        if all(known[one][name] == known[two][name] for name in both):
            yield one, two


def body_of(one: str, two: str) -> Body:
    """Return the body that asks for both."""
    known = features()
    body: Body = {"prompt": PROMPT, **BASE, **known[one], **known[two]}
    if "max_length" in body:
        del body["max_new_tokens"]
    return body


def keywords_of(body: Body) -> Body:
    """Return the keywords of `generate` that a body stands for."""
    own = {one.name for one in GENERATE}
    found = {_NAMES.get(name, name): value for name, value in body.items()}
    found = {name: value for name, value in found.items() if name in own}
    if "stop_strings" in found and not body.get("include_stop_str_in_output"):
        found["trim_stop_strings"] = True
    if body.get("ignore_eos") or body.get("stop_token_ids"):
        usual = adapted().generation_config.eos_token_id
        kept = [] if body.get("ignore_eos") or usual is None else [usual]
        found["eos_token_id"] = [*kept, *body.get("stop_token_ids", ())] or None
    if body.get("model"):
        found["adapter_names"] = body["model"]
    if "logit_bias" in found:
        found["logit_bias"] = {int(id): bias for id, bias in found["logit_bias"].items()}
    if "steer" in found:
        found["steer"] = {int(layer): torch.tensor(one) for layer, one in found["steer"].items()}
    if body.get("echo") and "logprobs" in found:
        found["prompt_logprobs"] = found["logprobs"]
    return found


def in_process(body: Body) -> list[tuple[Any, ...]] | str:
    """Return what the library gives for a body: texts, ids, log-probabilities and those of the
    prompt, or its error."""
    asked = keywords_of(body)
    shaping = ("temperature", "top_k", "top_p", "min_p", "best_of")
    named = [name for name in shaping if name in asked]
    if named and not asked.get("penalty_alpha") and "strategy" not in asked:
        asked.setdefault("do_sample", True)  # as the page of the server says
    try:
        found = es.generate(
            adapted(), TOKENIZER, body["prompt"], return_dict_in_generate=True, **asked
        )
    except EverystepError as error:
        return str(error)
    said = PROMPT if body.get("echo") else ""
    results = found if isinstance(found, list) else [found]
    return [(said + _text(one, body), list(one.tokens), *_known(one, body)) for one in results]


def _text(one: Any, body: Body) -> str:
    """Return the text of a result, with special tokens where they are wanted."""
    if body.get("skip_special_tokens", True):
        return str(one.text)
    ids, matched = list(one.tokens), one.finish_reason.matched
    kept = body.get("include_stop_str_in_output")
    if isinstance(matched, int) and one.finish_reason.kind == "stop" and not kept:
        ids = ids[:-1]
    text = TOKENIZER.decode(ids, skip_special_tokens=False)
    return text[: text.rindex(matched)] if isinstance(matched, str) and not kept else text


def _known(one: Any, body: Body) -> tuple[list[float | None] | None, list[Any] | None]:
    """Return what is told of the tokens, after those of an echo, and what is of the prompt."""
    of_tokens: list[float | None] | None = None
    if "logprobs" in body:
        before = [None, *finite(one.prompt_logprobs)] if body.get("echo") else []
        of_tokens = [*before, *finite(one.logprobs)]
    return of_tokens, told_of_prompt(one.prompt_logprobs) if "prompt_logprobs" in body else None


def finite(found: TokenLogprobs) -> list[float]:
    """Return log-probabilities as JSON has them."""
    return [max(value, -9999.0) for value in found.logprobs.tolist()]


def told_of_prompt(found: TokenLogprobs) -> list[Any]:
    """Return what the wire tells of a prompt: of each id and the best, the log-probability and
    place."""
    told: list[Any] = [None]
    rows = zip(found.tokens.tolist(), finite(found), strict=True)
    for (id, value), ids, values in zip(
        rows, found.top_tokens.tolist(), found.top_logprobs.tolist(), strict=True
    ):
        ranks = {one: rank for rank, one in enumerate(ids, 1)}
        known = {id: value, **dict(zip(ids, (max(one, -9999.0) for one in values), strict=True))}
        told.append(
            {
                str(one): {
                    "logprob": known[one],
                    "rank": ranks.get(one),
                    "decoded_token": TOKENIZER.decode([one], skip_special_tokens=False),
                }
                for one in known
            }
        )
    return told


def over_http(server: Served, body: Body) -> list[tuple[Any, ...]] | str:
    """Return the same of the server's answer; a stream is joined."""
    answer = server.post("/v1/completions", **{**body, "return_token_ids": True})
    if answer.status_code != 200:
        assert answer.status_code in (400, 422), (answer.status_code, answer.text)
        return str(answer.json()["error"]["message"])
    if not body.get("stream"):
        return [_told(one, body) for one in answer.json()["choices"]]
    chunks = chunks_of(answer.text)
    choices = [one for chunk in chunks for one in chunk["choices"]]
    found = []
    for place in sorted({one["index"] for one in choices}):
        own = [one for one in choices if one["index"] == place]
        ids = [id for one in own for id in one.get("token_ids", ())]
        known = [one["logprobs"] for one in own if one.get("logprobs")]
        values = [value for one in known for value in one["token_logprobs"]]
        assert own[-1]["finish_reason"]
        if ids or place == 0:  # a search may find fewer than were asked for: then a place is empty
            found.append((joined(chunks, place), ids, values or None, None))
    return found


def _told(choice: Mapping[str, Any], body: Body) -> tuple[Any, ...]:
    known = choice["logprobs"]
    values = None if known is None else known["token_logprobs"]
    assert ("prompt_logprobs" in choice) == ("prompt_logprobs" in body)
    return choice["text"], choice["token_ids"], values, choice.get("prompt_logprobs")


def require_pair(server: Served, one: str, two: str) -> bool:
    """Require that both together are as in the library, or refused; return whether they work."""
    body = body_of(one, two)
    wanted, got = in_process(body), over_http(server, body)
    if isinstance(got, str):
        if any(text in got for text in OWN):
            return False
        assert isinstance(wanted, str), (one, two, got, wanted)
        for keyword, name in (("num_return_sequences", "n"), ("stop_strings", "stop")):
            if name in body:
                wanted = re.sub(rf"(?<![-\w]){keyword}(?![-\w])", name, wanted)
        assert got == wanted, (one, two)
        return False
    assert got == wanted, (one, two, body)
    return True
