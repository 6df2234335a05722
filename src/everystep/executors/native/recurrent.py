"""A network of recurrent layers, as the library reads it."""

from __future__ import annotations

import torch

from everystep.executors.native.library import LayerWeights, RecurrenceWeights, StackWeights
from everystep.executors.native.packing import ACTIVATIONS, NORMS, Packing
from everystep.models.mamba import Mamba, MambaLayer


def recurrent_weights(packing: Packing, network: Mamba) -> StackWeights:
    """Pack all layers; a head tied to the embedding table shares its panels."""
    spec = network.spec
    layers = (LayerWeights * spec.count)(*(_layer(packing, layer) for layer in network.layers))
    table = packing.matrix(network.table)
    head = network.head
    return StackWeights(
        layers=spec.count,
        width=spec.width,
        inner=spec.inner,
        vocabulary=spec.vocab_size,
        kernel=spec.kernel,
        states=spec.state,
        rank=spec.rank,
        norm_kind=NORMS[spec.norm.kind],
        activation=ACTIVATIONS[spec.activation],
        eps=spec.norm.eps,
        layer=layers,
        norm=packing.norm(network.norm),
        embedding=table,
        head=packing.joined([table], head.bias) if spec.tied else packing.linear(head),
    )


def _layer(packing: Packing, layer: MambaLayer) -> LayerWeights:
    """Pack a layer with its channels side by side, as lanes of the kernels."""
    recurrence = RecurrenceWeights(
        inward=packing.linear(layer.inward),
        select=packing.linear(layer.select),
        step=packing.linear(layer.step, layer.step_bias),
        conv=packing.floats(layer.conv[:, 0].T),
        conv_bias=packing.floats(layer.conv_bias),
        decay=packing.floats(-torch.exp(layer.decay.float()).T),
        skip=packing.floats(layer.skip),
    )
    return LayerWeights(
        out=packing.linear(layer.outward),
        recurrence=recurrence,
        attention=packing.norm(layer.norm),
        rope=-1,
        factor=1.0,
    )
