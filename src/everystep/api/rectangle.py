"""From finished groups to what callers expect: a rectangle of ids, or an output object."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from everystep.api.call import Call
from everystep.engine.collect import Collector
from everystep.engine.logprobs import choice_logprobs, prompt_logprobs
from everystep.outputs import (
    GenerateBeamDecoderOnlyOutput,
    GenerateBeamEncoderDecoderOutput,
    GenerateDecoderOnlyOutput,
    GenerateEncoderDecoderOutput,
)
from everystep.strategies import Beam
from everystep.types import Finished, Group


def results(groups: list[Group]) -> list[Finished]:
    """The result of every group, one after another."""
    return [done for group in groups for done in group.request.strategy.finish(group)]


def sequences(call: Call, groups: list[Group], device: torch.device) -> Tensor:
    """(B * returns, length) int64: pads, prompt, new tokens, then pad ids up to the longest."""
    finished = results(groups)
    returns = call.strategy.returns
    longest = max(len(done.tokens) for done in finished)
    width = call.inputs.width
    table = np.full((len(finished), width + longest), call.tokens.fill, dtype=np.int64)
    for row, done in enumerate(finished):
        table[row, :width] = call.inputs.visible(row // returns, call.tokens.fill)
        table[row, width : width + len(done.tokens)] = done.tokens
    return torch.from_numpy(table).to(device)


def output(
    call: Call,
    groups: list[Group],
    collector: Collector,
    device: torch.device,
) -> Any:
    """The output object of the reference for this kind of model and strategy, with our extras."""
    finished = results(groups)
    effective = call.effective
    beams = isinstance(call.strategy, Beam)
    # Rows that have ended wait for the last one, and where drafts stand it may catch up on them.
    steps = slice(None if beams else max(len(done.tokens) for done in finished))
    pads = np.repeat(np.array(call.inputs.margins or call.inputs.pads), call.strategy.kept_rows)
    fields: dict[str, Any] = {
        "sequences": sequences(call, groups, device),
        "scores": collector.score_steps()[steps] if effective.output_scores else None,
        "logits": collector.logit_steps()[steps] if effective.output_logits else None,
    }
    layers = collector.layer_steps(pads)[steps] if effective.output_hidden_states else None
    attentions = _attentions(call, collector)[steps] if effective.output_attentions else None
    if beams:
        fields["beam_indices"] = beam_indices(finished).to(device)
        scores = torch.tensor([done.score for done in finished], dtype=torch.float32)
        fields["sequences_scores"] = scores.to(device) if effective.output_scores else None
    fields["finish_reasons"] = [done.reason for done in finished]
    fields["new_tokens"] = [done.tokens.tolist() for done in finished]
    if call.user.logprobs is not None:
        fields["logprobs"] = [choice_logprobs(done.memo, len(done.tokens)) for done in finished]
    if call.user.prompt_logprobs is not None:
        fields["prompt_logprobs"] = [prompt_logprobs(group) for group in groups]
    fields["prompt_length"] = call.inputs.prompt_width
    fields["effective_config"] = effective
    if call.encoder is None:
        fields |= {"hidden_states": layers, "attentions": attentions}
        plain = GenerateBeamDecoderOnlyOutput if beams else GenerateDecoderOnlyOutput
        return plain(**fields)
    fields |= {"decoder_hidden_states": layers, "decoder_attentions": attentions}
    fields["encoder_hidden_states"] = call.encoder.layers
    fields["encoder_attentions"] = call.encoder.attentions
    starts = np.repeat(np.array(call.encoder.starts), call.strategy.kept_rows)
    if attentions is not None:
        across = collector.cross_steps(starts, call.encoder.width)
        fields["cross_attentions"] = across[steps]
    kind = GenerateBeamEncoderDecoderOutput if beams else GenerateEncoderDecoderOutput
    return kind(**fields)


def _attentions(call: Call, collector: Collector) -> tuple[tuple[Tensor, ...], ...]:
    inputs = call.inputs
    empty = np.array([inputs.total_width - prompt.length for prompt in inputs.prompts])
    return collector.attention_steps(np.repeat(empty, call.strategy.kept_rows), inputs.behind)


def beam_indices(finished: list[Finished]) -> Tensor:
    """(sequences, longest) int32: the beam each token came from, -1 beyond the end."""
    paths = [_path(done.memo.get("beams")) for done in finished]
    longest = max(len(path) for path in paths)
    table = np.full((len(paths), longest), -1, dtype=np.int32)
    for row, path in enumerate(paths):
        table[row, : len(path)] = path
    return torch.from_numpy(table)


def _path(chain: Any) -> list[int]:
    path: list[int] = []
    while chain is not None:
        chain, beam = chain
        path.append(beam)
    return path[::-1]
