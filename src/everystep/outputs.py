"""What `generate()` and a call of a model return: transformers' output classes, and more.

Keys, length, iteration, integer and slice access show exactly what transformers' objects show:
its fields, in its order, without those that are None. What transformers does not know (`text`,
`finish_reasons`, ...) are attributes only, so that code that unpacks a tuple keeps working. This
file knows nothing of how the values come about.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from everystep.errors import RequestError, shown
from everystep.types import FinishReason, took
from everystep.types.given_tensors import require_tensor

Layers = tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class TokenLogprobs:
    """The likelihood of T tokens where they stood, in natural logarithms of the raw distribution.

    `tokens`, `logprobs`: (T,) int64 and float32. `top_tokens`, `top_logprobs`: (T, k), the k most
    likely ids of each position, best first.
    """

    tokens: Tensor
    logprobs: Tensor
    top_tokens: Tensor
    top_logprobs: Tensor

    def __len__(self) -> int:
        """Return T."""
        return len(self.tokens)

    def __repr__(self) -> str:
        return f"TokenLogprobs({len(self)} tokens, {self.top_tokens.shape[-1]} best of each)"


@dataclass(eq=False, repr=False)
class OutputFields(Mapping[str, Any]):
    """Fields that are attributes, and keys and indices too, without those that are None."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def _names(self) -> list[str]:
        names = (one.name for one in fields(self) if not one.kw_only)
        return [name for name in names if getattr(self, name) is not None]

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return self.to_tuple()[key]
        if key in self._names():
            return getattr(self, key)
        raise KeyError(key)

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in {one.name for one in fields(self)}:
            what = f"{type(self).__name__} has no field {key!r}"
            raise RequestError(what, do="Keep further values beside it")
        setattr(self, key, value)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    def __repr__(self) -> str:
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        shown = (f"{name}={_brief(value)}" for name, value in values.items() if value is not None)
        return f"{type(self).__name__}({', '.join(shown)})"

    def to_tuple(self) -> tuple[Any, ...]:
        """Return transformers' fields that are not None, in order."""
        return tuple(getattr(self, name) for name in self._names())


@dataclass(eq=False, kw_only=True, repr=False)
class Output(OutputFields):
    """The fields of every output of `generate()` beyond those of transformers.

    `text`: one per sequence, prompt excluded, if there is a tokenizer. `new_tokens`: per sequence
    the generated ids, the end token included, padding excluded. `prompt_length`: how many columns
    of `sequences` are prompt. `cached_tokens`: per prompt, how many of its positions came from a
    cache or a prefix and were not fed. `finish_reasons`: one per sequence. `logprobs`: one per
    sequence, of its new tokens, if `logprobs=k` asked for them. `prompt_logprobs`: one per prompt,
    of its tokens after the first, if `prompt_logprobs=k` asked for them. `effective_config`: the
    values that held, with their sources. `timings`: seconds by name. `speculation`: tokens drafted
    and accepted, and how many seconds that gained by an estimate, where drafts were made.
    """

    text: list[str] | None = None
    new_tokens: list[list[int]] | None = None
    prompt_length: int | None = None
    cached_tokens: list[int] | None = None
    finish_reasons: list[FinishReason] | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    effective_config: Mapping[str, Any] | None = None
    timings: Mapping[str, float] | None = None
    speculation: Mapping[str, Any] | None = None


@dataclass(eq=False, repr=False)
class EncoderOutput(OutputFields):
    """`last_hidden_state`: (B, S, E) the states that an encoder made, as loops expect them."""

    last_hidden_state: Tensor


@dataclass(eq=False, repr=False)
class CausalLMOutput(OutputFields):
    """`loss`: () where labels were given. `logits`: (B, T, V). `past_key_values`: the cache with
    these positions, or None. `hidden_states`: (B, T, E) before the first layer and after each, the
    last one normalised. `attentions`: (B, H, T, S) of each layer. `logprobs`, an attribute alone:
    (B, T) the logarithm of each label's probability, 0 for none."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: Any = None
    hidden_states: Layers | None = None
    attentions: Layers | None = None
    logprobs: Tensor | None = field(default=None, kw_only=True)


@dataclass(eq=False, repr=False)
class Seq2SeqLMOutput(OutputFields):
    """As `CausalLMOutput`, of a decoder beside an encoder. `cross_attentions`: (B, H, T, S) of each
    layer. `encoder_last_hidden_state`: (B, S, E), None where a cache stands for it; what the
    encoder's layers show, (B, S, E) and (B, H, S, S) each."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: Any = None
    decoder_hidden_states: Layers | None = None
    decoder_attentions: Layers | None = None
    cross_attentions: Layers | None = None
    encoder_last_hidden_state: Tensor | None = None
    encoder_hidden_states: Layers | None = None
    encoder_attentions: Layers | None = None
    logprobs: Tensor | None = field(default=None, kw_only=True)


def _fields_of(output: OutputFields) -> tuple[list[Any], None]:
    return [getattr(output, one.name) for one in fields(output)], None


def _made_again(kind: type[OutputFields], values: Iterable[Any], _: None) -> OutputFields:
    return kind(**dict(zip((one.name for one in fields(kind)), values, strict=True)))


# What wraps a module looks for the tensors in its output, as `fully_shard` does.
for _kind in (CausalLMOutput, Seq2SeqLMOutput):
    _pytree.register_pytree_node(_kind, _fields_of, partial(_made_again, _kind))


def encoder_states(outputs: Any, name: str = "encoder_outputs") -> Tensor:
    """Return (B, S, E) of what an encoder returned, which was passed by this name."""
    states = getattr(outputs, "last_hidden_state", None)
    if states is None and isinstance(outputs, tuple | list) and outputs:
        states = outputs[0]
    if isinstance(states, Tensor) and states.dim() == 3 and states.is_floating_point():
        return states
    raise RequestError(
        f"{name} holds no encoder states",
        wanted="an object with last_hidden_state, a (batch, length, hidden) tensor",
        got=type(outputs).__name__,
        do="Pass what the encoder returned",
    )


def timings_of(times: Mapping[str, float], now: float, tokens: int) -> dict[str, float] | None:
    """Return the seconds of one sequence with so many tokens by name, and how many tokens after the
    first came in one; None where nobody timed it."""
    if not times:
        return None
    first, total = took(times, now)
    speed = (tokens - 1) / (total - first) if tokens > 1 and total > first else 0.0
    seconds = {"prompt_seconds": first, "decode_seconds": total - first, "total_seconds": total}
    return {**seconds, "tokens_per_second": speed}


def _brief(value: Any) -> str:
    """Show tensors by their shapes, tuples of steps by their number."""
    if isinstance(value, Tensor):
        return f"<{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}>"
    if isinstance(value, tuple) and value and isinstance(value[0], Tensor | tuple):
        return f"<{len(value)} of {_brief(value[0])}>"
    text = repr(value)
    return text if len(text) <= 400 else f"{text[:400]}..."


@dataclass(eq=False, repr=False)
class GenerateDecoderOnlyOutput(Output):
    """Greedy, sampled or assisted output of a decoder.

    `sequences`: (B, T) int64. `scores`, `logits`: per step (B, V), processed and raw. `attentions`:
    per step per layer (B, H, t, T). `hidden_states`: per step per layer (B, t, E).
    """

    sequences: Tensor
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None
    attentions: tuple[Layers, ...] | None = None
    hidden_states: tuple[Layers, ...] | None = None
    past_key_values: Any = None


@dataclass(eq=False, repr=False)
class GenerateEncoderDecoderOutput(Output):
    """Greedy, sampled or assisted output of an encoder and decoder.

    As `GenerateDecoderOnlyOutput`; the encoder's attentions (B, H, S, S) and hidden states
    (B, S, E) are per layer, `cross_attentions` per step per layer (B, H, t, S).
    """

    sequences: Tensor
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None
    encoder_attentions: Layers | None = None
    encoder_hidden_states: Layers | None = None
    decoder_attentions: tuple[Layers, ...] | None = None
    cross_attentions: tuple[Layers, ...] | None = None
    decoder_hidden_states: tuple[Layers, ...] | None = None
    past_key_values: Any = None


@dataclass(eq=False, repr=False)
class GenerateBeamDecoderOnlyOutput(Output):
    """Beam output of a decoder.

    As `GenerateDecoderOnlyOutput`, with W beams per prompt in a step's rows. `sequences_scores`:
    (B * returned,). `beam_indices`: (B * returned, steps), which row each token came from, -1
    after the end.
    """

    sequences: Tensor
    sequences_scores: Tensor | None = None
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None
    beam_indices: Tensor | None = None
    attentions: tuple[Layers, ...] | None = None
    hidden_states: tuple[Layers, ...] | None = None
    past_key_values: Any = None


@dataclass(eq=False, repr=False)
class GenerateBeamEncoderDecoderOutput(Output):
    """Beam output of an encoder and decoder; as the two classes it is named after."""

    sequences: Tensor
    sequences_scores: Tensor | None = None
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None
    beam_indices: Tensor | None = None
    encoder_attentions: Layers | None = None
    encoder_hidden_states: Layers | None = None
    decoder_attentions: tuple[Layers, ...] | None = None
    cross_attentions: tuple[Layers, ...] | None = None
    decoder_hidden_states: tuple[Layers, ...] | None = None
    past_key_values: Any = None


def compute_transition_scores(
    sequences: Tensor,
    scores: Sequence[Tensor] | None,
    beam_indices: Tensor | None = None,
    normalize_logits: bool = False,
) -> Tensor:
    """Return (B, T): the score of each generated token when it was chosen, 0 after its end.

    `sequences`: (B, length) ids. `scores`: per step (R, V). `beam_indices`: (B, steps), the row of
    `scores` that each token was chosen from, -1 after the end; without it row r is sequence r's.
    `normalize_logits`: log-probabilities instead of the scores themselves. Source: transformers'
    `GenerationMixin.compute_transition_scores`.
    """
    require_tensor(sequences, "sequences", "(batch, length) ids", dims=(2,), holds="integers")
    if not isinstance(scores, list | tuple) or not scores:
        raise RequestError(
            "there are no scores to read",
            wanted="a tuple with the scores of each step",
            got=shown(scores),
            do="Generate with output_scores=True and return_dict_in_generate=True",
        )
    for one in scores:
        require_tensor(
            one, "scores", "(rows, vocabulary) floats per step", dims=(2,), holds="floats"
        )
    if beam_indices is not None:
        form = "(batch, steps) integers"
        require_tensor(beam_indices, "beam_indices", form, dims=(2,), holds="integers")
    rows = _chosen_from(sequences, scores, beam_indices)
    used = rows >= 0
    length = int(used.sum(dim=-1).max())
    rows, used = rows[:, :length], used[:, :length]
    tokens = sequences[:, sequences.shape[1] - length :]
    stacked = torch.stack(tuple(scores[:length]))  # (T, R, V)
    over = stacked.amax(dim=-1).isneginf()  # (T, R): where a row had already ended
    if normalize_logits:
        stacked = torch.log_softmax(stacked, dim=-1)
    place = torch.arange(length, device=rows.device), rows.clamp(min=0)
    return stacked[(*place, tokens)].masked_fill(~used | over[place], 0.0)


def _chosen_from(
    sequences: Tensor, scores: Sequence[Tensor], beam_indices: Tensor | None
) -> Tensor:
    """Return (B, steps) the row of scores that every token was chosen from."""
    held = scores[0].shape[0]
    if beam_indices is None:
        own = torch.arange(held, device=sequences.device)
        beam_indices = own[:, None].expand(-1, len(scores))
    if len(beam_indices) != len(sequences):
        raise RequestError(
            "sequences do not fit the rows they were chosen from",
            wanted=f"{len(beam_indices)} sequences",
            got=len(sequences),
            do="Pass the beam_indices of the same output",
        )
    return beam_indices.long()
