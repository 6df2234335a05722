"""One of several processes over which models of this library lie in parts:
`python -m tests.executors.ranks`. Each finds as many tokens as its rank says."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import everystep as es
from everystep.models import LayerModule
from everystep.testing.models import tiny_llama
from tests.bridge.ranks import CALLS, IDS, LENGTHS, compared, counted, main


class Mixing(es.Hook):
    """Feeds mixtures of embeddings, which it looks up at every step."""

    gives = ("embeds",)

    def before_step(self, step: Any) -> dict[str, Tensor]:
        found = step.embed(torch.tensor(step.ids))
        return {"embeds": 0.7 * found + 0.3 * step.embed(torch.tensor([7]))}


GIVEN: dict[str, dict[str, Any]] = {
    "a hook": {"hooks": [Mixing()]},
    "steering": {"steer": [{0: torch.linspace(-3, 3, 32)}]},
    "hidden states": {"output_hidden_states": True, "return_dict_in_generate": True},
    "a quantised cache": {"cache_implementation": "quantized", "cache_config": {"nbits": 4}},
}
"""Calls that read weights outside of the layers, or more than logits."""


def loaded() -> list[es.LanguageModel]:
    """Two models with the weights that every process begins with."""
    torch.manual_seed(3)
    return [tiny_llama(vocab_size=97) for _ in range(2)]


def in_parts(model: es.LanguageModel) -> nn.Module:
    """The module of the model, whose weights lie in parts from now on."""
    module = model.as_module()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for one in [one for one in module.modules() if isinstance(one, LayerModule)]:
        fully_shard(one, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def shown(output: Any) -> Any:
    """Rows of ids, and hidden states where there are such."""
    if isinstance(output, Tensor):
        return output.tolist()
    states = [[layer.tolist() for layer in step] for step in output.hidden_states]
    return [output.sequences.tolist(), states]


def bytes_held(module: nn.Module) -> int:
    return sum(one.to_local().nbytes for one in module.parameters())  # type: ignore[attr-defined]


def losses(module: nn.Module, between: Callable[[], object]) -> list[float]:
    """The losses of three steps of training, on the same ids everywhere; `between` is called when
    gradients are there and no step has been taken by them."""
    optimizer, found = torch.optim.SGD(module.parameters(), lr=0.1), []
    for step in range(3):
        ids = torch.arange(4, 12)[None] + step
        loss: Tensor = module(ids, labels=ids, output_logits=False).loss
        loss.backward()
        between()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def own(rank: int) -> dict[str, Any]:
    models, alone = loaded(), loaded()
    modules = [in_parts(one) for one in models]
    layers = [[*one.get_submodule("model.layers").children()] for one in modules]
    forwards = [counted(one) for each in (modules, *layers) for one in each]
    found = compared(rank, models, alone, forwards, CALLS)
    both = models[0], alone[0]
    for name, given in GIVEN.items():
        given = {**given, "max_new_tokens": LENGTHS[rank]}
        each = [shown(one.generate(IDS, **given)) for one in both]
        found[name] = (*each, list(map(len, forwards)))
    whole = sum(one.nbytes for one in alone[0].state_dict().values())
    found["held"] = bytes_held(modules[0]), whole
    found["losses"] = [
        losses(one.as_module(), partial(one.generate, IDS, max_new_tokens=2)) for one in both
    ]
    trained = [
        one.generate(IDS, max_new_tokens=LENGTHS[rank]).tolist() for one in (models[0], alone[0])
    ]
    found["after training"] = (*trained, list(map(len, forwards)))
    gathered = models[0].gathered()
    found["gathered"] = gathered.generate(IDS, max_new_tokens=9).tolist(), list(map(len, forwards))
    return found


if __name__ == "__main__":
    main(own, sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
