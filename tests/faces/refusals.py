"""Each refused cell with its own reason: the argument, the words of the error, the guide's page.

A cell is refused if something stands here for it, and then its error has the words of one of these;
a page of the guide has the words beside what was asked for, in one row of a table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from everystep.errors import EverystepError
from tests.reading import ROOT
from tests.switching.arguments import ASKED

FIELDS = (
    *("use_mtp", "speculation_type", "low_memory", "compile_config", "is_assistant"),
    "continuous_batching_config",
)
"""Fields that a configuration may hold and that no call reads."""
DRAFTS = (
    *("prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_model", "num_drafts"),
    *("assistant_tokenizer", "draft_corpus", "num_assistant_tokens", "draft_verification"),
    *("num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_lookbehind"),
    *("target_lookbehind", "assistant_ensemble_weight"),
)
STEPS = ("output_scores", "output_logits")
LAYERS = ("output_hidden_states", "output_attentions")
TEXTS = ("regex", "choices", "schema", "grammar")
OF_EVENTS = ("es.stream", "AsyncEngine")
AMATEUR = ("amateur_model", "contrast_alpha", "contrast_beta")
EMBEDS = ("embeds", "embeds and ids")


@dataclass(frozen=True)
class Reason:
    """`words`: what the guide says that the error says. `asked`: what the guide says was asked for.
    `page`: in docs/guide. `needs`: an ability in the list of what the executor lacks."""

    words: str
    asked: str
    page: str = "models.md"
    needs: str = ""

    def fits(self, error: EverystepError) -> bool:
        """Whether the error gives this reason, and a way out."""
        text = str(error)
        if self.needs:
            lacks = re.search(r"cannot do what the request needs; wanted ([^;]*);", text)
            return lacks is not None and self.needs in lacks[1].split(", ")
        named = re.match(r"`(\w+)", self.asked)
        return self.words in text and (named is None or named[1] in text)

    @property
    def told(self) -> bool:
        """Whether a row of the page has the words beside what was asked for."""
        return any(self.words in row and self.asked in row for row in _rows(self.page))


@cache
def _rows(page: str) -> list[str]:
    text = (ROOT / "docs/guide" / page).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line.startswith("| ")]


@cache
def _field(name: str) -> Reason:
    (row,) = [row for row in _rows("switching.md") if row.startswith(f"| `{name}` | ")]
    return Reason(row.split(" | ")[1], f"`{name}`", "switching.md")


def _need(need: str, asked: str, words: str = "") -> Reason:
    return Reason(words or f"wanted {need}", asked, needs=need)


def reasons(face: str, argument: str | None, prompt: str, subject: str = "") -> Iterator[Reason]:
    """Yield why a cell is refused; none where it is answered. `subject`: the kind of model, empty
    for a decoder by its own layers that has an adapter named formal."""
    wrapped, recurrent = subject.startswith("wrapped"), "recurrent" in subject
    encoder = "encoder" in subject or "listener" in subject
    rectangle = face == "model.generate"
    if argument in FIELDS:
        yield _field(argument)
    if argument in ("adapters", "adapter_names") and subject:
        yield Reason("has one that the model does not have", "an adapter")
    if not rectangle:
        yield from _of_calls(face, argument, subject)
    if argument in ("cache_implementation", "cache_config"):
        yield from _of_caches(face, subject)
    if argument == "steer" and subject not in ("", "decoder", "window of one"):
        yield Reason("steer adds to the layers of a decoder of this library", "`steer`")
    yield from _of_layers(argument, wrapped, recurrent, encoder)
    if argument in DRAFTS and wrapped and recurrent:
        yield _need("truncate", "drafts")
    if argument == "prefix" and encoder:
        yield Reason("prefix knows what the encoder has read", "`prefix`")
    if argument == "prefix" and wrapped and recurrent:
        yield _need("past", "`prefix`")
    if argument == "hooks" and wrapped and encoder:
        yield _need("embeds", "hooks that give embeddings")
    if argument == "prefix" and prompt == "messages" and not rectangle:
        yield Reason("is not the beginning of these messages", "`prefix`")
    yield from _of_prompts(argument, prompt, recurrent, encoder)
    transcribes = rectangle and prompt == "sounds" and not wrapped
    if transcribes and argument is not None and _draws(argument):
        yield Reason("sounds are sampled at a temperature", "`do_sample`")


def _draws(argument: str) -> bool:
    """Whether the argument is asked for with draws, and without a temperature."""
    value, beside = ASKED[argument]
    given = {argument: value, **beside}
    return given.get("do_sample") is True and "temperature" not in given


def _of_calls(face: str, argument: str | None, subject: str) -> Iterator[Reason]:
    if argument == "max_cache_len":
        yield Reason("max_cache_len chooses the cache that model.generate returns", f"`{argument}`")
    if argument == "use_cache":
        yield Reason(
            "use_cache turns off a cache that many prompts are scheduled by", "`use_cache=False`"
        )
    if argument == "prefill_chunk_size":
        yield Reason("prefill_chunk_size is chosen by the scheduler", f"`{argument}`")
    if argument in STEPS and face != "es.open":
        yield Reason(
            "is part of the output object of model.generate, and not of a text or an event",
            f"`{argument}`",
        )
    if argument in TEXTS and face == "the command line" and subject:  # which names no end token
        yield Reason("needs a token that ends a text", f"`{argument}`")
    if argument in LAYERS and face in OF_EVENTS:
        words = (
            "is part of the output object of model.generate and es.generate, and not of an event"
        )
        yield Reason(words, f"`{argument}`")


def _of_caches(face: str, subject: str) -> Iterator[Reason]:
    asked = 'cache_implementation="quantized"'
    if "recurrent" in subject:
        yield Reason("hold states, not keys and values", asked)
    elif subject.startswith("wrapped"):
        yield Reason("rows of a wrapped model lie in cache objects of its own library", asked)
    elif subject == "window of one":
        yield Reason("a quantised cache is for models without sliding windows", asked)
    if face == "AsyncEngine":
        yield Reason(
            "cache_implementation and cache_config differ from those of the engine",
            "cache_implementation",
        )


def _of_layers(
    argument: str | None, wrapped: bool, recurrent: bool, encoder: bool
) -> Iterator[Reason]:
    if argument == "assistant_early_exit" and wrapped:
        yield Reason(
            "the layers of a wrapped model run as its own library runs them", f"`{argument}`"
        )
    elif argument == "assistant_early_exit" and recurrent:
        yield Reason("no layers of this family of models can be left early", f"`{argument}`")
    if argument == "dola_layers" and wrapped and (encoder or recurrent):
        yield _need("early", "`dola_layers`")
    if argument == "penalty_alpha" and wrapped and recurrent:
        yield _need("hidden", "contrastive search")
    if argument == "output_attentions" and (wrapped or recurrent):
        yield _need("attentions", f"`{argument}`")
    if argument == "output_hidden_states" and wrapped and recurrent:
        yield _need("layers", f"`{argument}`")


def _of_prompts(
    argument: str | None, prompt: str, recurrent: bool, encoder: bool
) -> Iterator[Reason]:
    if prompt == "holes" and recurrent:
        yield _need("mask", "a mask with holes", "wanted mask, positions")
    if argument == "output_attentions" and prompt == "holes" and encoder:
        words = "attentions over a prompt with holes in its mask have no place in the rectangle"
        yield Reason(words, f"`{argument}`", "switching.md")
    if argument in AMATEUR and not encoder and prompt in (*EMBEDS, "holes"):
        yield Reason("the amateur model reads ids alone", "`amateur_model`")
    if argument == "guidance_scale" and prompt == "embeds":
        yield Reason("guidance_scale needs something to guide away from", "guidance")
    if argument == "token_healing" and (encoder or prompt in (*EMBEDS, "holes")):
        yield Reason("token_healing does not go with", "`token_healing`")
