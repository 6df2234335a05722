"""One of several processes that train a model together: `python -m tests.api.processes`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

import everystep as es
from everystep.errors import RequestError
from everystep.testing.models import tiny_llama

STEPS, ROWS = 3, 4
PROMPT = torch.tensor([[5, 9, 17, 8]])


def model_of_now() -> es.LanguageModel:
    """A model with the weights that every process begins with."""
    torch.manual_seed(3)
    return tiny_llama(vocab_size=97)


def batch(step: int) -> Tensor:
    """The ids of all processes together."""
    return torch.randint(4, 97, (ROWS, 9), generator=torch.Generator().manual_seed(step))


def trained(module: nn.Module, rank: int, count: int) -> list[float]:
    """The losses of a few steps, the mean over the processes, each with its rows."""
    optimizer, losses = torch.optim.AdamW(module.parameters(), lr=1e-2), []
    for step in range(STEPS):
        own = batch(step).chunk(count)[rank]
        loss = module(own, labels=own, output_logits=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    found = torch.stack(losses)
    if count > 1:
        dist.all_reduce(found)
    return (found / count).tolist()


def answer(model: es.LanguageModel) -> list[int]:
    return model.generate(PROMPT, max_new_tokens=6, do_sample=False)[0].tolist()


def alone(model: es.LanguageModel) -> object:
    """What a process asks for that does not ask for the others."""
    return model.generate(PROMPT, max_new_tokens=6, synced_gpus=False)


def asked_by(rank: int, model: es.LanguageModel) -> list[object]:
    """What each asks for by itself, in calls that all make together: some find more than others."""
    more = {"max_new_tokens": 2 + 5 * rank, "do_sample": True, "seed": 3 + rank}
    prompts = [[4 + one, 5, 6] for one in range(1 + 2 * rank)]
    [score] = es.score(model, None, [[5, 6, 7, 8, 9][: 3 + rank]])
    return [
        model.generate(PROMPT, **more, synced_gpus=True).tolist(),
        [*es.generate(model, None, prompts, max_new_tokens=3)],
        score.logprobs.tolist(),
    ]


def refused(call: Callable[[], object]) -> str:
    """The error of a call that needs whole weights."""
    try:
        call()
    except RequestError as error:
        return str(error)
    return ""


def replicated(rank: int, count: int) -> dict[str, object]:
    model = model_of_now()
    losses = trained(DistributedDataParallel(model.as_module()), rank, count)
    return {"losses": losses, "weights": model.state_dict(), "answer": answer(model)}


def sharded(rank: int, count: int) -> dict[str, object]:
    model = model_of_now()
    module = model.as_module()
    before = answer(model)
    fully_shard(module, mesh=init_device_mesh("cpu", (count,)))
    errors = [refused(lambda: alone(model)), refused(model.state_dict)]
    errors.append(refused(lambda: es.stream(model, None, [5, 6, 7])))
    gathered = [answer(model)]
    losses = trained(module, rank, count)
    errors.append(refused(lambda: alone(model)))
    gathered.append(answer(model))
    asked = asked_by(rank, model)
    whole = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True))
    assert isinstance(module, FSDPModule)
    module.unshard()
    found = {"losses": losses, "weights": whole, "before": before, "answer": answer(model)}
    found |= {"gathered": gathered, "asked": asked, "asked alone": asked_by(rank, model)}
    module.reshard()
    errors.append(refused(lambda: alone(model)))
    return {**found, "errors": errors, "shown": repr(model)}


def layer_by_layer(rank: int, count: int) -> dict[str, object]:
    model = model_of_now()
    module = model.as_module()
    mesh = init_device_mesh("cpu", (count,))
    layers = list(module.get_submodule("model.layers").children())
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    errors = [refused(lambda: alone(model)), refused(lambda: model(PROMPT))]
    losses = trained(module, rank, count)
    whole = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True))
    gathered = answer(model)
    for one in [module, *layers]:
        assert isinstance(one, FSDPModule)
        one.unshard()
    assert gathered == answer(model)
    return {"losses": losses, "weights": whole, "answer": gathered, "errors": errors}


def main(folder: str, rank: int, count: int) -> None:
    torch.set_num_threads(1)
    init = f"file://{Path(folder, 'meeting')}"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=count)
    found = {
        "replicated": replicated(rank, count),
        "sharded": sharded(rank, count),
        "layer by layer": layer_by_layer(rank, count),
    }
    torch.save(found, Path(folder, f"{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
