"""What a call asks for beside its prompt: every keyword sorted, read, judged and kept once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from everystep.api.absent import (
    ARGUMENTS_LATER,
    ARGUMENTS_NEVER,
    refuse_argument,
    refuse_fields,
)
from everystep.api.allowing import read_allowed
from everystep.api.answers import read_best_of, read_n_best
from everystep.api.drafts import Assistant, read_assistant, read_corpus, with_draft_notices
from everystep.api.grammars import read_grammar
from everystep.api.objects import read_adapters, read_functions, read_hooks, read_text, require
from everystep.api.pictures import prompt_names
from everystep.api.prefixes import Prefix, read_prefix
from everystep.api.readouts import read_contrast
from everystep.api.strategies import read_strategy, refuse_beside
from everystep.config import FIELDS, META, Effective, merge_configs
from everystep.config.fields import ELSEWHERE
from everystep.draws import SeededDraws, SharedDraws, seed_of
from everystep.engine import Contrast, Corpus
from everystep.errors import RequestError, UnknownArgumentError, nearest, shown
from everystep.processors.allowed import AllowedSequences
from everystep.processors.grammars.mask import GrammarMask
from everystep.processors.grammars.source import KINDS
from everystep.stops.criteria import MaxLengthCriteria
from everystep.strategies import BestOf
from everystep.types import FinishReason
from everystep.types.protocols import Draws, Hook, Strategy

if TYPE_CHECKING:
    from everystep.api.model import LanguageModel


MODEL_INPUTS = (
    "input_ids",
    "attention_mask",
    "inputs_embeds",
    "position_ids",
    "decoder_input_ids",
    "decoder_attention_mask",
    "encoder_outputs",
    "past_key_values",
)
CONFIG_FIELDS = tuple(name for name in FIELDS if name not in META)
OBJECTS = (
    "generation_config",
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "allowed_sequences",
    "seed",
    "logprobs",
    "prompt_logprobs",
    "prefix",
    "hooks",
    "adapter_names",
    *KINDS,
    "n_best",
    "best_of",
    "majority",
    "scorer",
    "amateur_model",
    "contrast_alpha",
    "contrast_beta",
    "assistant_model",
    "assistant_tokenizer",
    "draft_corpus",
    "strategy",
    "strategy_options",
)
"""Keywords of every call that are neither configuration nor model input."""
OF_RECTANGLES = (
    "tokenizer",
    "streamer",
    "custom_generate",
    "negative_prompt_ids",
    "negative_prompt_attention_mask",
    "return_legacy_cache",
)
"""Further keywords of `model.generate`."""
KEYWORDS = (*MODEL_INPUTS, *CONFIG_FIELDS, *OBJECTS, *OF_RECTANGLES, "inputs", "text", "messages")
"""Names that mean something in every call or prompt, whatever the model."""
_READ_IDS = ("repetition_penalty", "no_repeat_ngram_size")


@dataclass(frozen=True, slots=True, eq=False)
class Options:
    """All that a call asks for beside its prompt, each thing in one place.

    `effective`: every field of the configuration. `eos`, `pad`, `starts`: the special ids; `pad` is
    None only where nothing ends a sequence; `starts`: a decoder's first id, one for all rows or one
    each. `allowed`: the sets of `allowed_sequences`, one for all rows or one each. `seed`: one
    integer, from which each row gets its own, or one for each row. `starts_answer`: whether a chat
    template begins the answer to the messages; `trims`: whether texts lose the stop string that
    ended them. `legacy_cache`: whether the cache is returned as tuples. `prefix`: what comes before
    every prompt; `salt`: prompts of another one share no rows with these. `contrast`: with which
    model, and how. `n_best`: how many hypotheses of a search are returned; `best_of`: the strategy
    that chooses among samples. `adapter_names`: one for all rows or one each, None for what is
    active. `grammar`: what the texts have to follow. `assistant`: a second model, which drafts;
    `corpus`: texts to copy drafts from. `strategy`: one that is not the library's own, in place of
    what the fields say. The rest are the caller's own objects.
    """

    effective: Effective
    eos: tuple[int, ...]
    pad: int | None
    starts: tuple[int, ...]
    processors: tuple[Any, ...] = ()
    criteria: Any = None
    prefix_allowed_tokens: Any = None
    allowed: tuple[AllowedSequences, ...] = ()
    tokenizer: Any = None
    seed: int | Sequence[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    hooks: tuple[Hook, ...] = ()
    adapter_names: str | Sequence[str | None] | None = None
    starts_answer: bool = True
    trims: bool = False
    legacy_cache: bool = False
    prefix: Prefix | None = None
    contrast: Contrast | None = None
    n_best: int | None = None
    best_of: BestOf | None = None
    salt: str | None = None
    grammar: GrammarMask | None = None
    assistant: Assistant | None = None
    corpus: Corpus | None = None
    strategy: Strategy | None = None

    @property
    def fill(self) -> int:
        """The id that stands where a row has nothing to say."""
        return 0 if self.pad is None else self.pad

    def returns(self, *fields: str) -> bool:
        """Whether what any of these fields asks for is part of the result."""
        e = self.effective
        return bool(e.return_dict_in_generate) and any(e[name] for name in fields)

    @property
    def captures(self) -> bool:
        """Whether hidden states or attentions are part of the result."""
        return self.returns("output_hidden_states", "output_attentions")

    def draws(self, first: int, rows: int) -> tuple[Draws, ...]:
        """(rows,) where the randomness of each row comes from, of which `first` is the number of
        the first one; torch's global generator without a seed."""
        if self.seed is None:
            return (SharedDraws(),) * rows
        seeds = read_seeds(self.seed, rows)
        if isinstance(self.seed, int):
            seeds = tuple(seed_of(self.seed, first + row) for row in range(rows))
        return tuple(map(SeededDraws, seeds))

    def adapters(self, rows: int) -> tuple[tuple[tuple[str, float], ...], ...]:
        """(rows,) what each row asks for, as in a request; RequestError where that is unclear."""
        given = self.adapter_names
        names = [given] * rows if given is None or isinstance(given, str) else given
        listed = isinstance(names, list | tuple)
        if (
            not listed
            or len(names) != rows
            or not all(isinstance(one, str | None) for one in names)
        ):
            raise RequestError(
                "adapter_names does not fit the call",
                wanted=f"a name, or {rows} of them",
                got=shown(given),
                do="Pass one name per row of the prompt",
            )
        return tuple(((one, 1.0),) if one is not None else () for one in names)


def read_options(
    model: LanguageModel, given: Mapping[str, Any], beside: Iterable[str], tokenizer: Any
) -> Options:
    """The options of a call with these keywords: fields of the configuration, `OBJECTS`, and names
    `beside` them, which are for others to read.

    UnknownArgumentError, which proposes the nearest name, for other names; RequestError for what is
    impossible, contradicts something else, or cannot be done.
    """
    named = (*model.inputs, *prompt_names(model))
    _refuse_unknown(given, {*OBJECTS, *named, *beside})
    given, own = read_strategy(given)
    config = {name: value for name, value in given.items() if name in CONFIG_FIELDS}
    effective = merge_configs(config, given.get("generation_config"), model.generation_config)
    refuse_fields(effective)
    if own is not None:
        refuse_beside(effective, own)
    effective = _with_pad_notice(effective, model.vocab_size)
    assistant, corpus = read_assistant(given), read_corpus(given)
    effective = with_draft_notices(effective, assistant, corpus)
    for name in ("logprobs", "prompt_logprobs"):
        if given.get(name) is not None:
            require_count(name, given[name], model.vocab_size)
    prefix = given.get("prefix_allowed_tokens_fn")
    special = _special_ids(effective, model.vocab_size)
    return Options(
        effective,
        *special,
        processors=read_functions("logits_processor", given.get("logits_processor")),
        criteria=given.get("stopping_criteria"),
        prefix_allowed_tokens=require("prefix_allowed_tokens_fn", prefix, "__call__"),
        allowed=read_allowed(given.get("allowed_sequences"), tokenizer),
        tokenizer=require("tokenizer", tokenizer, "decode"),
        seed=given.get("seed"),
        logprobs=given.get("logprobs"),
        prompt_logprobs=given.get("prompt_logprobs"),
        legacy_cache=bool(given.get("return_legacy_cache")),
        prefix=read_prefix(given.get("prefix")),
        salt=read_text("cache_salt", given.get("cache_salt")),
        hooks=read_hooks(given.get("hooks")),
        contrast=read_contrast(model, given),
        n_best=read_n_best(given, effective),
        best_of=read_best_of(given, effective, tokenizer),
        adapter_names=read_adapters(given.get("adapter_names"), model.adapters),
        grammar=read_grammar(given, tokenizer, special[0], model.vocab_size),
        assistant=assistant,
        corpus=corpus,
        strategy=own,
    )


def require_output_object(options: Options) -> None:
    """Log-probabilities and tuples have their place in the output object, so there must be one."""
    e = options.effective
    if options.legacy_cache and not (e.return_dict_in_generate and e.use_cache is not False):
        raise RequestError(
            "return_legacy_cache is about the cache of the output object",
            wanted="return_dict_in_generate=True with it, and use_cache",
            do="Set it, or leave return_legacy_cache out",
        )
    asked = options.logprobs is not None or options.prompt_logprobs is not None
    if asked and not options.effective.return_dict_in_generate:
        raise RequestError(
            "logprobs and prompt_logprobs are part of the output object",
            wanted="return_dict_in_generate=True with them",
            do="Set it, or leave them out",
        )


def cut_by_default(options: Options, reasons: Iterable[FinishReason]) -> tuple[str, ...]:
    """What to tell a caller, none of whose settings says how long an answer may be, where one of
    these ends was that length."""
    e, criteria = options.effective, options.criteria or ()
    named = e.max_new_tokens is not None or e.source("max_length") != "default"
    named = named or any(isinstance(one, MaxLengthCriteria) for one in criteria)
    if named or all(reason.kind != "length" for reason in reasons):
        return ()
    return (
        "what was generated is cut at the default length, as nothing says how long it may be. Set "
        "max_new_tokens.",
    )


def unseen_prompt(effective: Effective) -> tuple[str, ...]:
    """What to tell a caller whose settings look at ids, where the prompt has none."""
    asked = [name for name in _READ_IDS if name in effective.caller]
    blind = [name for name in asked if effective[name] != FIELDS[name].default]
    if not blind:
        return ()
    return (
        f"{', '.join(blind)}: a prompt given as embeddings has no ids, so only generated ones "
        "count. Pass input_ids beside inputs_embeds to have those of the prompt counted too.",
    )


def _refuse_unknown(given: Mapping[str, Any], known: set[str]) -> None:
    """Raises for keywords that are neither known nor fields of the configuration."""
    unknown = [name for name in given if name not in known and name not in CONFIG_FIELDS]
    for name in [one for one in unknown if one in ARGUMENTS_LATER or one in ARGUMENTS_NEVER]:
        refuse_argument(name, given[name])
        unknown.remove(name)
    if unknown:
        names = (*CONFIG_FIELDS, *known)
        guesses = [(name, ELSEWHERE.get(name) or nearest(name, names)) for name in unknown]
        hints = [f"{near} instead of {name}" for name, near in guesses if near]
        do = f"Perhaps you meant {', '.join(hints)}" if hints else "See help(model.generate)"
        noun = "argument" if len(unknown) == 1 else "arguments"
        listed = ", ".join(map(repr, unknown))
        raise UnknownArgumentError(f"generate() knows no {noun} {listed}", do=do)


def read_seeds(seed: Any, rows: int) -> tuple[int, ...]:
    """(rows,) what was given, where it is one integer or as many as there are rows."""
    several = isinstance(seed, Sequence) and not isinstance(seed, str)
    seeds = tuple(seed) if several else (seed,) * rows
    if len(seeds) == rows and all(type(one) is int for one in seeds):
        return seeds
    raise RequestError(
        "seed does not fit the call",
        wanted=f"an integer, or {rows} of them",
        got=shown(seed),
        do="Pass one seed, or one per row of the prompt or prompt of the list",
    )


def require_count(name: str, value: object, vocabulary: int) -> None:
    """RequestError unless `value` is a number of tokens of the vocabulary."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= vocabulary:
        raise RequestError(
            f"{name} is impossible",
            wanted=f"how many of the best tokens to keep, from 0 to {vocabulary}",
            got=shown(value),
            do=f"Pass {name}=5, say",
        )


def _special_ids(
    effective: Effective, vocabulary: int
) -> tuple[tuple[int, ...], int | None, tuple[int, ...]]:
    """End ids, the pad id (the first end id where there is none), first ids of a decoder.

    What is no token ends nothing, and so is no end id. RequestError if the caller set an end or a
    start beyond the vocabulary; a pad id is never read, so that it may be any.
    """
    for name in ("eos_token_id", "decoder_start_token_id"):
        outside = [token for token in _listed(effective[name]) if token >= vocabulary]
        if outside and name in effective.caller:
            raise RequestError(
                f"{name} is outside the vocabulary",
                wanted=f"0 to {vocabulary - 1}",
                got=outside[0],
                do="Check that tokenizer and model belong together",
            )
    ends, pad = _listed(effective.eos_token_id), effective.pad_token_id
    start = effective.decoder_start_token_id
    starts = _listed(effective.bos_token_id if start is None else start)
    fill = ends[0] if pad is None and ends else pad
    return tuple(token for token in ends if 0 <= token < vocabulary), fill, starts


def _with_pad_notice(effective: Effective, vocabulary: int) -> Effective:
    """With a notice to a caller whose pad id is beyond the vocabulary."""
    pad = effective.pad_token_id
    if pad is None or pad < vocabulary or "pad_token_id" not in effective.caller:
        return effective
    notice = (
        f"pad_token_id={pad} is beyond the vocabulary of {vocabulary}: it fills up what is "
        "returned, and no prompt can hold it. Set it to an id of the vocabulary."
    )
    return replace(effective, notices=(*effective.notices, notice))


def _listed(value: Any) -> tuple[int, ...]:
    """One id, several or none, as a tuple."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (int(value),)
