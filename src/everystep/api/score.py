"""`score`: how likely a model finds a text that is there already."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor, nn

from everystep.adapters import Mix
from everystep.api.model import LanguageModel, paired
from everystep.config.kinds import is_integer, require
from everystep.draws import SeededDraws
from everystep.drivers.complete import encoder_states
from everystep.drivers.driver import Driver, finished
from everystep.drivers.synced import synced
from everystep.engine import Continuous, Engine
from everystep.engine.logprobs import prompt_logprobs
from everystep.errors import RequestError, shown
from everystep.nn.modes import inference_mode
from everystep.outputs import TokenLogprobs
from everystep.requests.arrays import as_numbers, require_known
from everystep.requests.door import Arguments, Objects
from everystep.requests.options import Options, Prefix, adapters_of
from everystep.requests.prefixes import after_prefix
from everystep.requests.prompts import PromptLike, TokenizerLike, is_messages, listed, read_prompt
from everystep.requests.reading import read_count, read_options
from everystep.requests.rectangles import read_inputs
from everystep.shown import progress_bar, table
from everystep.stops.ends import MaxLength
from everystep.strategies import Greedy
from everystep.types import Prompt, Request, ResolvedAdapter, Wants
from everystep.types.sources import EncoderSource

_WINDOW = 2048
"""Positions of a window where the model knows no context."""
_AT_ONCE = 32
"""Windows that are in the engine at once."""
_LOGITS = 1 << 25
"""Logits that a step reads out at most: 128 MB."""


@dataclass(frozen=True, slots=True, eq=False)
class Score:
    """The likelihood of a text to a model, token by token.

    `tokens`: (n,) the ids that were scored. `logprobs`: (n,) float32, the natural logarithm of each
    one's probability after all that stands before it, differentiable where that was asked for.
    `top_tokens`, `top_logprobs`: (n, k) the k best of each place, best first. `nbytes`: the length
    of the text in UTF-8, None for ids. `tokenizer`: what the table spells ids with, if there is
    one.
    """

    tokens: Tensor
    logprobs: Tensor
    top_tokens: Tensor
    top_logprobs: Tensor
    nbytes: int | None = None
    tokenizer: TokenizerLike | None = None

    def __repr__(self) -> str:
        beside = "" if self.nbytes is None else f", {self.nbytes} bytes"
        return f"Score({len(self.tokens)} tokens{beside}, perplexity {self.perplexity:.4g})"

    def _repr_html_(self) -> str:
        width = self.top_tokens.shape[1] if self.top_tokens.dim() > 1 else 0
        ids = zip(self.tokens.tolist(), self.logprobs.tolist(), strict=True)
        tops = zip(self.top_tokens[:, :1].tolist(), self.top_logprobs[:, :1].tolist(), strict=True)
        best = ("best id", "its text", "its log-probability") if width else ()
        rows = (
            (place, token, self._spell(token), known, *self._best(*top))
            for place, ((token, known), top) in enumerate(zip(ids, tops, strict=True))
        )
        return table(("place", "id", "text", "log-probability", *best), rows, repr(self))

    def _best(self, tokens: list[int], known: list[float]) -> tuple[object, ...]:
        """Return the cells about the best token of a place, none where no best ones were kept."""
        return (tokens[0], self._spell(tokens[0]), known[0]) if tokens else ()

    def _spell(self, token: int) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.decode([token])

    @property
    def total(self) -> float:
        """The logarithm of the probability of all tokens."""
        return float(self.logprobs.detach().sum(dtype=torch.float64))

    @property
    def perplexity(self) -> float:
        """The exponential of the mean surprise of a token; 1 for a text that had to come."""
        surprise = -self.total / len(self.tokens)
        return math.exp(surprise) if surprise < 700 else math.inf  # where no float is as large

    @property
    def bits_per_byte(self) -> float | None:
        """The surprise of all tokens in bits, for each byte of the text; None for ids."""
        return None if not self.nbytes else -self.total / (math.log(2) * self.nbytes)


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    """A text and what stands before it: ids of which those from `first` on are scored, and what an
    encoder reads."""

    ids: np.ndarray
    first: int
    source: EncoderSource | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Window:
    """A part of row `row`; it is scored from its position `first` on."""

    row: int
    prompt: Prompt
    first: int


@overload
def score(  # type: ignore[overload-overlap]  # a text is a series of texts
    model: LanguageModel | nn.Module,
    tokenizer: TokenizerLike | None,
    texts: str | Sequence[int],
    *,
    after: PromptLike | Sequence[PromptLike] | None = None,
    prefix: Prefix | None = None,
    best: int = 0,
    window: int | None = None,
    stride: int | None = None,
    adapter_names: str | None = None,
    steer: Mapping[int, Tensor] | None = None,
    requires_grad: bool = False,
    progress: bool = False,
) -> Score: ...


@overload
def score(
    model: LanguageModel | nn.Module,
    tokenizer: TokenizerLike | None,
    texts: Iterable[str | Sequence[int]],
    *,
    after: PromptLike | Sequence[PromptLike] | None = None,
    prefix: Prefix | None = None,
    best: int = 0,
    window: int | None = None,
    stride: int | None = None,
    adapter_names: str | None = None,
    steer: Mapping[int, Tensor] | None = None,
    requires_grad: bool = False,
    progress: bool = False,
) -> list[Score]: ...


def score(
    model: LanguageModel | nn.Module,
    tokenizer: TokenizerLike | None,
    texts: str | Sequence[int] | Iterable[str | Sequence[int]],
    *,
    after: PromptLike | Sequence[PromptLike] | None = None,
    prefix: Prefix | None = None,
    best: int = 0,
    window: int | None = None,
    stride: int | None = None,
    adapter_names: str | None = None,
    steer: Mapping[int, Tensor] | None = None,
    requires_grad: bool = False,
    progress: bool = False,
) -> Any:
    """Return how likely each text is: a `Score` for one, a list of them for several.

    `texts`: texts, or lists of ids. `after`: what the model reads before each of them, which is not
    scored: one prompt for all, or a list of one per text; a text, ids, or messages, which the
    beginning of an answer follows. A text after it is turned into ids by itself, without special
    tokens. Without it the first id of a row is not scored, since nothing stands before it. A model
    with an encoder reads `after` there, or has read it already: `prefix`, which `es.prefill` made,
    stands in its place. `best`: how many of the most likely tokens are kept for
    each place. A row longer than `window` ids, which is the model's context unless given, is read
    in windows that begin `stride` ids after each other (three quarters of a window unless given);
    each scores what the one before it did not reach. `adapter_names`: the adapter it runs with.
    `steer`: vectors that are added after layers, as for `es.generate`.
    `requires_grad`: whether `logprobs` is differentiable in what learns, the weights or that
    adapter; each window is a forward then. `progress`: whether a bar shows how far it is.
    RequestError for what cannot be scored, and where gradients are asked for and nothing learns.

    Example:

        >>> score = es.score(model, tokenizer, "Paris is the capital of France.")
        >>> score.perplexity > 1
        True
    """
    model = paired(model, tokenizer)
    model = model if requires_grad else model.gathered(to_step=True)
    many, single = listed(texts)
    rows = list(many)
    before = _each_after(after, len(rows))
    window, stride = _sizes(model, window, stride)
    read_count("best", best, model.vocab_size)
    _require_gradients(requires_grad, best, prefix)
    asked = Arguments(
        objects=Objects(
            adapter_names=adapter_names, steer=None if steer is None else [steer], prefix=prefix
        )
    )
    options = read_options(model, asked, tokenizer)
    (adapters,) = adapters_of(options.adapters, 1)
    with synced(model, (), False if requires_grad else None):
        read = [_read(model, tokenizer, *pair, options) for pair in zip(rows, before, strict=True)]
        found: list[list[tuple[Tensor, ...]]] = [[] for _ in rows]
        spans = [span for row in read for span in _spans(row, window, stride)]
        if requires_grad:
            changed = {"adapter_names": adapter_names, "steer": steer}
            each = _differentiable(model, read, (window, stride), changed)
        else:
            windows = _windows(model, read, window, stride)
            each = _run(model, windows, best, adapters, options.resolved_of(adapters))
        mode = nullcontext() if requires_grad else inference_mode()
        with mode, progress_bar(progress, spans, "windows") as advance:
            for number, known in each:
                found[number].append(known)
                advance()
    sizes = [len(one.encode("utf-8", "replace")) if isinstance(one, str) else None for one in rows]
    scores = [_joined(parts, size, tokenizer) for parts, size in zip(found, sizes, strict=True)]
    return scores[0] if single else scores


def _each_after(after: object, count: int) -> Sequence[PromptLike | None]:
    """Return the prompt before each of the texts, None for nothing."""
    if after is None:
        return [None] * count
    prompts, single = listed(after)
    given = list(prompts)
    if single:
        return given * count
    if len(given) != count:
        do = "Pass one prompt for all, or a list with one for each text"
        raise RequestError("after does not fit the texts", wanted=count, got=len(given), do=do)
    return given


def _sizes(model: LanguageModel, window: int | None, stride: int | None) -> tuple[int, int]:
    """Return the ids of a window, and how far apart windows begin."""
    most = model.reach
    if window is None:
        window = _WINDOW if most is None else most
    if not is_integer(window) or window < 2 or (most is not None and window > most):
        wanted = "2 ids or more" if most is None else f"2 to {most} ids, the model's context"
        raise RequestError("window is impossible", wanted=wanted, got=shown(window)[:80])
    if stride is None:
        stride = max(1, window * 3 // 4)
    if not is_integer(stride) or not 1 <= stride < window:
        wanted = f"1 to {window - 1} ids"
        raise RequestError("stride is impossible", wanted=wanted, got=shown(stride)[:80])
    return int(window), int(stride)


def _read(
    model: LanguageModel,
    tokenizer: TokenizerLike | None,
    text: object,
    after: PromptLike | None,
    options: Options,
) -> _Row:
    """Return the row that the model reads for a text; RequestError for what cannot be scored."""
    prefix = options.prefix
    if is_messages(text) or isinstance(text, Mapping):
        do = "Pass what stands before the text as after=, and the text itself"
        raise RequestError("what is scored is a text or ids", got=type(text).__name__, do=do)
    if prefix is not None:
        after = _after_prefix(model, prefix, after)
    if after is not None:
        given = read_prompt(model, tokenizer, after, starts_answer=True, prefix=prefix)
        inputs = read_inputs(model, given, options.ends, prefix)
        if prefix is not None:
            inputs = after_prefix(prefix, model, inputs, options)
        (own,) = inputs.prompts
        if own.ids is None or own.brings:
            do = "Give what stands before a text as a text, messages or ids"
            raise RequestError("a text is scored after ids alone", got="other inputs", do=do)
        before = own.ids.tolist()
        row = _Row(_ids(model, tokenizer, text, before), len(before), inputs.source)
    elif model.is_encoder_decoder:
        raise RequestError(
            "a model with an encoder scores a text after what its encoder reads",
            wanted="after=...",
            got="none",
            do="Pass the source as after",
        )
    else:
        row = _Row(_ids(model, tokenizer, text, None), 1)
    if len(row.ids) <= row.first:
        do = "Pass a text of at least two tokens, or what stands before it as after"
        raise RequestError("there is nothing to score", got=f"{len(row.ids)} tokens", do=do)
    return row


def _after_prefix(model: LanguageModel, prefix: Prefix, after: PromptLike | None) -> PromptLike:
    """Return what the decoder reads between a prefix and a text; RequestError where no encoder has
    read before it."""
    if not model.is_encoder_decoder:
        raise RequestError(
            "a decoder alone gives no likelihoods after a prefix, which hides those of its end",
            wanted="after=..., or a model with an encoder",
            got="a prefix",
            do="Pass what the prefix was made of as after",
        )
    return {} if after is None else after


def _ids(
    model: LanguageModel, tokenizer: TokenizerLike | None, text: object, before: list[int] | None
) -> np.ndarray:
    """Return the ids of a row: those before the text, if there are any, and its own."""
    if isinstance(text, str):
        if tokenizer is None:
            do = "Pass the tokenizer that es.load returned, or ids"
            raise RequestError("text needs a tokenizer", got="no tokenizer", do=do)
        text = tokenizer.encode(text, add_special_tokens=before is None)
    ids = as_numbers("a text", text, "a text or a list of ids")
    ids = ids if ids.numel() else ids.long()  # an empty list says nothing of its type
    if ids.dim() != 1 or ids.is_floating_point() or ids.dtype == torch.bool:
        got = f"shape {tuple(ids.shape)} of {ids.dtype}"
        raise RequestError("a text is no row of ids", wanted="a text or a list of ids", got=got)
    row = np.concatenate([before or [], ids.cpu().numpy()]).astype(np.int64)
    require_known(row, model.vocab_size, "a text")
    return row


def _spans(row: _Row, size: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, first scored, end) of every window of a row.

    row     0 1 2 3 4 5 6 7 8 9     size 6, stride 4, first 1
    window  0 * * * * *             * is scored
    window          4 5 * * * *
    """
    start, first, length = 0, row.first, len(row.ids)
    while first < length:
        if first >= start + size:  # what stands before the text fills the whole window
            start = first + stride - size
        end = min(start + size, length)
        yield start, first, end
        start, first = start + stride, end


def _windows(
    model: LanguageModel, rows: Sequence[_Row], size: int, stride: int
) -> Iterator[_Window]:
    """Yield the windows of every row; an encoder reads once what stands before a text."""
    for number, row in enumerate(rows):
        (state,) = (None,) if row.source is None else encoder_states(model, row.source)
        for start, first, end in _spans(row, size, stride):
            yield _Window(number, Prompt(ids=row.ids[start:end], encoder=state), first - start)


def _run(
    model: LanguageModel,
    windows: Iterator[_Window],
    best: int,
    adapters: Mix,
    resolved: tuple[ResolvedAdapter, ...],
) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """Yield the row of each window with the likelihoods of its tokens; several are read at once."""
    wants, driver = Wants(prompt_logprobs=best), None
    while taken := list(islice(windows, _AT_ONCE)):
        requests = [
            Request(
                *(f"{number}", one.prompt, Greedy(), SeededDraws(0)),
                stops=(MaxLength(0),),
                wants=wants,
                adapters=adapters,
                resolved=resolved,
            )
            for number, one in enumerate(taken)
        ]
        if driver is None:
            budget = max(_AT_ONCE, _LOGITS // model.vocab_size)
            executor = model.executor(requests[0].needs)
            driver = Driver(Engine(executor, Continuous(budget, _AT_ONCE)))
        for group, one in zip(finished(driver, requests), taken, strict=True):
            parts = _parts(prompt_logprobs(group))
            yield one.row, tuple(part[one.first - 1 :] for part in parts)


def _require_gradients(asked: object, best: int, prefix: object) -> None:
    """Refuse gradients where none are recorded, or beside what has none."""
    require(isinstance(asked, bool), "requires_grad", "True or False", asked)
    if asked and not torch.is_grad_enabled():
        do = "Call score outside of torch.no_grad() and torch.inference_mode()"
        raise RequestError("no gradients are recorded here", wanted="requires_grad=False", do=do)
    if asked and prefix is not None:
        do = "Pass after in place of the prefix"
        raise RequestError("what a prefix holds has no gradients", got="a prefix", do=do)
    if asked and best:
        do = "Leave best out, or call score once more without requires_grad"
        raise RequestError("the best tokens of a place have no gradients", got=best, do=do)


def _differentiable(
    model: LanguageModel,
    rows: Sequence[_Row],
    sizes: tuple[int, int],
    changed: Mapping[str, object],
) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """Yield the same as `_run`, window by window, with gradients."""
    forward = _of_module if model.module is not None else _of_labels
    for number, row in enumerate(rows):
        for start, first, end in _spans(row, *sizes):
            ids = torch.from_numpy(row.ids[start:end].copy()).to(model.device)
            logprobs = forward(model, ids, row.source, changed)[first - start - 1 :].float()
            if not logprobs.requires_grad:
                raise RequestError(
                    "nothing that this text is scored with learns, so that there are no gradients",
                    wanted="weights or an adapter that require gradients",
                    got="a frozen model",
                    do="Call model.requires_grad_(), or name an adapter that learns; the native "
                    "executor, which model.frozen() runs on, has no gradients",
                )
            none = logprobs.new_empty(len(logprobs), 0, requires_grad=False)
            yield number, (ids[first - start :].cpu(), logprobs, none.long().cpu(), none)


def _of_labels(
    model: LanguageModel, ids: Tensor, source: EncoderSource | None, changed: Mapping[str, object]
) -> Tensor:
    """Return (n - 1,) the log-probability of each of n ids but the first."""
    told = {**changed, "output_logits": False, "output_logprobs": True, "use_cache": False}
    if source is None:
        return model(ids[None], labels=ids[None], **told).logprobs[0, 1:]
    (prompt,) = source.prompts
    if prompt.ids is None:
        do = "Give what its encoder reads as a text or ids"
        raise RequestError("gradients are of what an encoder reads as ids", do=do)
    read = torch.from_numpy(prompt.ids.copy())[None].to(model.device)
    out = model(read, decoder_input_ids=ids[None, :-1], labels=ids[None, 1:], **told)
    return out.logprobs[0]


def _of_module(
    model: LanguageModel, ids: Tensor, source: EncoderSource | None, changed: Mapping[str, object]
) -> Tensor:
    """Return the same of a module of another library, which knows no labels of ours."""
    if any(one is not None for one in changed.values()) or source is not None:
        do = "Choose the active adapter in the module, and leave adapter_names out"
        raise RequestError("gradients of a wrapped model are those of its decoder", do=do)
    scores = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
    return scores.log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def _parts(known: TokenLogprobs) -> tuple[Tensor, ...]:
    """Return the tensors of a table of likelihoods, in the order of the fields of a `Score`."""
    return known.tokens, known.logprobs, known.top_tokens, known.top_logprobs


def _joined(
    parts: Sequence[tuple[Tensor, ...]], nbytes: int | None, tokenizer: TokenizerLike | None
) -> Score:
    """Return the score of a row, whose windows have these parts."""
    tokens, logprobs, top_tokens, top_logprobs = map(torch.cat, zip(*parts, strict=True))
    return Score(tokens, logprobs, top_tokens, top_logprobs, nbytes, tokenizer)
