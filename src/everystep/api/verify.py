"""`verify`: proof on somebody's own model that logits and tokens are those of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from html import escape
from os import PathLike
from typing import Unpack

import numpy as np
import torch
from torch import Tensor

from everystep.api.load import LoadOptions, Source, load, load_model
from everystep.api.model import LanguageModel
from everystep.bridge.reference import Reference
from everystep.config.kinds import is_integer
from everystep.drivers.complete import encoder_states
from everystep.errors import RequestError, UnsupportedError, shown
from everystep.files.opening import as_path
from everystep.files.sources import DEFAULT_MODEL, resolve_source
from everystep.nn.modes import inference_mode
from everystep.shown import cut, table
from everystep.text import Tokenizer
from everystep.types import Extra, Prompt, Verb, Work
from everystep.types.sources import EncoderSource

TEXT = (
    "The lighthouse keeper counted the ships that passed before dawn: seven, and one more with a "
    "broken mast. He wrote their names down, as he had done every morning for thirty-one years, "
    "and went to look after the lamp. In the village they said that he knew more about the sea "
    "than any captain, although he had never sailed on it. When the storm came at last, it was "
    "he who saw the signal first, ran down 214 steps, and rang the bell until his hands hurt."
)
"""What is read where the caller gives no text."""
_ADAPTER = "adapter"
_CHUNK = 64
"""Positions whose logits are read out at once."""
_EQUAL = 1e-4
"""Of the largest logit: how far apart equal sums in another order end up in float32, at most."""


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """One way to compute a model, beside transformers in float32.

    `form`: which way. `differences`: (T,) the largest difference of a logit at each position.
    `divergence`: (T,) nats. `agrees`: (T,) bool, whether the likeliest token is the same.
    `margins`: (T,) how far apart the two best of transformers are. `tokens`, `wanted`: greedy ones,
    ours and theirs. `largest`: the largest logit. `rounded`: whether weights or activations are.
    """

    form: str
    differences: Tensor
    divergence: Tensor
    agrees: Tensor
    margins: Tensor
    tokens: tuple[int, ...]
    wanted: tuple[int, ...]
    largest: float
    rounded: bool

    @property
    def equal_tokens(self) -> int:
        """The number of tokens that are the same before the first that is not."""
        pairs = zip(self.tokens, self.wanted, strict=True)
        return next((n for n, (one, other) in enumerate(pairs) if one != other), len(self.tokens))

    @property
    def verdict(self) -> str:
        """ "equal", up to the order of sums; "rounded", where that is what differs; "different"."""
        if self.rounded:
            return "rounded"
        near = float(self.differences.max()) <= _EQUAL * self.largest
        # Two logits closer than that may change places.
        sure = self.margins > 2 * _EQUAL * self.largest
        return "equal" if near and bool(self.agrees[sure].all()) else "different"

    def summary(self) -> dict[str, object]:
        """Return the comparison in seven figures, by their names."""
        return {
            "form": self.form,
            "verdict": self.verdict,
            "largest difference": float(self.differences.max()),
            "largest logit": self.largest,
            "mean divergence": float(self.divergence.mean()),
            "same best token": f"{int(self.agrees.sum())} of {len(self.agrees)}",
            "same greedy tokens": f"{self.equal_tokens} of {len(self.tokens)}",
        }

    def __repr__(self) -> str:
        figures = [f"{x:.2e}" if isinstance(x, float) else x for x in self.summary().values()]
        form, verdict, apart, largest, divergence, best, greedy = figures
        return (
            f"Comparison({form}: {verdict}, differences up to {apart} of {largest}, "
            f"mean divergence {divergence}, same best token {best}, same greedy tokens {greedy})"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Verification:
    """The comparisons of a model as it runs and, where that rounds, in float32 too."""

    name: str
    transformers: str
    comparisons: tuple[Comparison, ...]

    @property
    def holds(self) -> bool:
        """True where what is not rounded equals transformers."""
        return all(one.verdict != "different" for one in self.comparisons)

    def __repr__(self) -> str:
        found = ", ".join(f"{one.form} {one.verdict}" for one in self.comparisons)
        return f"Verification({cut(self.name)!r}, beside transformers {self.transformers}: {found})"

    def _repr_html_(self) -> str:
        rows = [one.summary() for one in self.comparisons]
        return table([*rows[0]], [[*row.values()] for row in rows], repr(self))

    def picture(self) -> str:
        """Return an SVG of the differences: a dot per comparison and position, by powers of ten."""
        return _picture(self)


def verify(
    path: Source = DEFAULT_MODEL,
    *,
    text: str | None = None,
    tokens: int = 32,
    adapter: str | PathLike[str] | None = None,
    offline: bool = False,
    **choices: Unpack[LoadOptions],
) -> Verification:
    """Return how far a checkpoint's model is from transformers' reading of the same files.

    Logits are compared after every token of `text`, and `tokens` greedy ones after its first half.
    `adapter`: a folder of an adapter, with which both compute, transformers by PEFT.
    `offline`: whether nothing may be fetched. Needs `everystep[transformers]`. Raises
    UnsupportedError without it, FormatError where transformers cannot read the checkpoint, and
    what `es.load` raises.

    Options:

        dtype: The type of the weights; without it a folder's own.
        quantize: "auto" keeps a file's codes; "int8" and "int4" round weights; None undoes codes.
        cache_dtype: The type of keys and values: "float32", "float16" or "int8".
        device: Where the weights lie.
        executor: What runs the steps: "auto", "native" or "torch".
        without: The parts that are left out, such as ("vision",).
        parallel: The number of processes that hold the weights in parts.
        parallel_timeout: The seconds after which one that does not answer is taken for lost.

    Example:

        >>> found = es.verify(folder / "model", tokens=8)
        >>> found.holds
        True
    """
    if not is_integer(tokens) or not 1 <= tokens <= 1024:
        raise RequestError("tokens is impossible", wanted="1 to 1024", got=shown(tokens)[:80])
    local = resolve_source(path, offline=offline)
    model, tokenizer = load(local, **choices)
    if model.core.source is not None:
        do = "Compare transcripts instead"
        raise UnsupportedError("a model that listens reads no text to compare", do=do)
    ids = _ids(model, tokenizer, TEXT if text is None else text)
    if adapter is not None:
        model.load_adapter(adapter, _ADAPTER)
    theirs = Reference(local, pair=model.is_encoder_decoder)
    if adapter is not None:
        theirs.adapt(as_path(adapter))
    rounded = _is_rounded(model)
    found = [_compared(model, theirs, ids, tokens, "as it runs", rounded)]
    if rounded:
        floats: LoadOptions = {**choices, "dtype": torch.float32, "quantize": None}
        exact = load_model(local, **floats)
        if adapter is not None:
            exact.load_adapter(adapter, _ADAPTER)
        found.append(_compared(exact, theirs, ids, tokens, "in float32", rounded=False))
    return Verification(model.name_or_path, theirs.version, tuple(found))


def _ids(model: LanguageModel, tokenizer: Tokenizer, text: str) -> Tensor:
    """Return (T,) the ids of the text, as many as the model has positions for."""
    found, most = tokenizer.encode(text), min(model.context or 512, 512)
    if len(found) < 2:
        raise RequestError("the text is too short", wanted="two tokens or more", got=len(found))
    return torch.tensor(found[:most])


def _is_rounded(model: LanguageModel) -> bool:
    """Return whether weights, keys or values are codes, or numbers of 16 bits."""
    coded = any(name not in ("float32", "float64") for name in model.weight_bytes)
    return coded or model.cache_dtype != "float32"


def _compared(
    model: LanguageModel, theirs: Reference, ids: Tensor, count: int, form: str, rounded: bool
) -> Comparison:
    """Return one comparison."""
    source, state, read = None, None, ids
    if model.is_encoder_decoder:
        first = model.generation_config.decoder_start_token_id or 0
        source, read = ids, torch.cat([torch.tensor([first]), ids[:-1]])
        with inference_mode():
            (state,) = encoder_states(model, EncoderSource((Prompt(ids=ids.numpy()),)))
    wanted = theirs.logits(read, source)
    columns: list[tuple[Tensor, ...]] = []
    for start, own in _logits(model, read, state):
        other = wanted[start : start + len(own)].float()
        ours, reference = own.log_softmax(-1), other.log_softmax(-1)
        best = other.topk(2).values
        columns.append(
            (
                (own - other).abs().amax(-1),
                (reference.exp() * (reference - ours)).sum(-1),
                own.argmax(-1) == other.argmax(-1),
                best[:, 0] - best[:, 1],
            )
        )
    prompt = ids[: max(1, len(ids) // 2)]
    said = model.generate(
        prompt[None],
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        num_beams=1,
        adapter_names=_ADAPTER if model.adapters else None,
    )
    differences, divergence, agrees, margins = map(torch.cat, zip(*columns, strict=True))
    return Comparison(
        form,
        differences,
        divergence,
        agrees,
        margins,
        tuple(said[0, -count:].tolist()),
        tuple(theirs.greedy(prompt, count)),
        float(wanted.abs().max()),
        rounded,
    )


def _logits(
    model: LanguageModel, ids: Tensor, state: Tensor | None
) -> Iterator[tuple[int, Tensor]]:
    """Yield (start, (n, V) float32 logits) of one row after another part of its ids, from the
    executor that generates."""
    needs = {"encoder"} if state is not None else set()
    extras = {}
    if model.adapters:
        resolved = tuple(model.resolved([_ADAPTER]).values())
        needs.update(*(one.needs for one in resolved))
        extras = {0: Extra(adapters=((_ADAPTER, 1.0),), resolved=resolved)}
    executor = model.executor(frozenset(needs))
    row, verbs = np.zeros(1, np.int64), [Verb("allocate", 0)]
    for start in range(0, len(ids), _CHUNK):
        part = ids[start : start + _CHUNK].numpy()
        count = np.array([len(part)])
        work = Work(tuple(verbs), row, np.array([start]), count, count, part, extras=extras)
        if state is not None and start == 0:
            work = replace(work, encoders={0: state})
        with inference_mode():
            found = executor.run(work).logits.float().cpu()
        yield start, found
        verbs = []


_WIDTH, _HEIGHT, _LEFT, _TOP = 720, 240, 64, 40
_COLOURS = ("#2f6f9f", "#b5563c")
_LOW, _HIGH = -9, 1  # powers of ten


def _picture(found: Verification) -> str:
    """Return an SVG of dots over a grid of powers of ten."""

    def y(value: float) -> float:
        power = min(max(np.log10(max(value, 1e-30)), _LOW), _HIGH)
        return _TOP + _HEIGHT * (_HIGH - float(power)) / (_HIGH - _LOW)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH + _LEFT + 16} '
        f'{_HEIGHT + _TOP + 64}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="14">Largest difference of a logit from transformers '
        f"{escape(found.transformers, False)}, {escape(found.name, False)}</text>",
    ]
    for power in range(_LOW, _HIGH + 1, 2):
        at = y(10.0**power)
        line = f'x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{at:.1f}" y2="{at:.1f}"'
        parts.append(f'<line {line} stroke="#dddddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">1e{power}</text>')
    bottom = _TOP + _HEIGHT
    for number, one in enumerate(found.comparisons):
        colour, step = _COLOURS[number % 2], _WIDTH / len(one.differences)
        for place, value in enumerate(one.differences.tolist()):
            x = _LEFT + (place + 0.5) * step
            parts.append(f'<circle cx="{x:.1f}" cy="{y(value):.1f}" r="2" fill="{colour}"/>')
        label = f"{one.form}: {one.verdict}, at most {float(one.differences.max()):.1e}"
        x = _LEFT + 300 * number
        parts.append(
            f'<text x="{x}" y="{bottom + 44}" fill="{colour}">{escape(label, False)}</text>'
        )
    parts.append(f'<text x="{_LEFT}" y="{bottom + 22}">position of the text</text></svg>')
    return "\n".join(parts)
