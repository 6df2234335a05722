"""One of several processes over which modules lie in parts: `python -m tests.bridge.ranks`.

Each finds as many tokens as its rank says, so that one has long ended when the other goes on.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import everystep as es
from everystep.executors.synced import is_in_parts
from tests.matrix.rows import ROWS
from tests.models.tiny import reference_decoder, reference_pair

LENGTHS = (1, 50)
IDS = torch.tensor([[5, 9, 17]])
GREEDY: dict[str, Any] = {"do_sample": False}
CALLS: dict[str, dict[str, Any]] = {
    **{one.name: {**one.options, "seed": 4} for one in ROWS},
    "sampled from a draft model": {"do_sample": True, "assistant_model": "second", "seed": 5},
    "an amateur": {**GREEDY, "amateur_model": "second"},
    "several rows": {**GREEDY, "rows": 3},
}
"""Calls of every strategy."""
CALLS["assisted"]["assistant_model"] = "second"
CASES = [name for name in CALLS if name != "early_exit"]
"""Those that go with modules of other libraries."""


def counted(module: nn.Module) -> list[int]:
    """A list that grows by one with each forward of the module."""
    calls: list[int] = []
    module.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


def in_parts(module: Any, layers: nn.ModuleList) -> Any:
    """A copy of the module, whose weights lie in parts."""
    made = copy.deepcopy(module)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    inside = dict(made.named_modules())
    for name, one in module.named_modules():
        if any(one is layer for layer in layers):
            fully_shard(inside[name], mesh=mesh)
    return fully_shard(made, mesh=mesh)


def called(model: es.LanguageModel, second: es.LanguageModel, case: str, length: int) -> Any:
    given = {name: second if one == "second" else one for name, one in CALLS[case].items()}
    rows = given.pop("rows", 1)
    ids = torch.tensor([[5, 9, 17, 8 + length + row] for row in range(rows)])
    return model.generate(ids, min_new_tokens=length, max_new_tokens=length, **given).tolist()


def tried(call: Callable[[], object]) -> str:
    """The name and text of the error that a call ends by."""
    try:
        return str(call())
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def broken(rank: int, error: type[BaseException]) -> Callable[[Tensor, Tensor], Tensor]:
    """A processor that raises on rank 0, in the third step."""
    steps: list[int] = []

    def processor(ids: Tensor, scores: Tensor) -> Tensor:
        steps.append(1)
        if rank == 0 and len(steps) == 3:
            raise error("of one process alone")
        return scores

    return processor


def refusals(rank: int) -> dict[str, Callable[[es.LanguageModel], object]]:
    """Calls whose prompt has an id on rank 0 that the model does not know."""
    ids = [5, 9, 17] if rank else [5, 999_999, 17]
    return {
        "a refused rectangle": lambda one: one.generate(torch.tensor([ids]), max_new_tokens=4),
        "a refused prompt": lambda one: es.generate(one, None, ids, max_new_tokens=4),
        "a refused text": lambda one: es.score(one, None, ids).logprobs.tolist(),
        "a refused prefix": lambda one: es.prefill(one, None, ids).prompt.ids.tolist(),
    }


def known_in_parts(sharded: nn.Module, whole: nn.Module) -> list[bool]:
    """Of which modules it is known by themselves: FSDP2's, ZeRO-3's, FSDP's, and a whole one."""
    zero = copy.deepcopy(whole)
    next(zero.parameters()).ds_id = 0  # type: ignore[attr-defined]
    around = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(around)
    return [is_in_parts(one) for one in (sharded, zero, nn.Sequential(around), whole)]


def decoders(rank: int) -> dict[str, Any]:
    torch.manual_seed(3)  # all begin with the same weights
    whole = [reference_decoder("llama", torch.float32) for _ in range(2)]
    parts = [in_parts(one, one.model.layers) for one in whole]
    models, alone = ([es.wrap(one) for one in each] for each in (parts, whole))
    found = {
        "known": known_in_parts(parts[0], whole[0]),
        **compared(rank, models, alone, [counted(one) for one in parts]),
    }
    forwards = counted(whole[0])
    asked = alone[0].generate(IDS, max_new_tokens=LENGTHS[rank], synced_gpus=True).tolist()
    counts = [len(forwards)]
    plain = alone[0].generate(IDS, max_new_tokens=LENGTHS[rank]).tolist()
    return {**found, "asked": (asked, plain, counts)}


def compared(
    rank: int,
    models: Sequence[es.LanguageModel],
    alone: Sequence[es.LanguageModel],
    forwards: Sequence[list[int]],
    cases: Iterable[str] = CASES,
) -> dict[str, Any]:
    """What a process finds with two models in parts, and alone with whole ones, and the number of
    forwards so far."""
    length, found = LENGTHS[rank], dict[str, Any]()
    for case in cases:
        own = called(*models, case, length)
        found[case] = own, called(*alone, case, length), list(map(len, forwards))
    prompts = [[4 + one, 5, 6] for one in range(1 + 4 * rank)]
    for name, call in {
        "es.generate": lambda one: [*es.generate(one, None, prompts, max_new_tokens=length)],
        "es.score": lambda one: [
            each.logprobs.tolist() for each in es.score(one, None, [[5, 6, 7, 8, 9][: 3 + rank]])
        ],
    }.items():
        found[name] = call(models[0]), call(alone[0]), list(map(len, forwards))
    for name, call in refusals(rank).items():
        own = tried(partial(call, models[0]))
        found[name] = own, tried(partial(call, alone[0])), list(map(len, forwards))
    for error in (ValueError, KeyboardInterrupt):
        broke = broken(rank, error)
        ended = tried(partial(models[0].generate, IDS, max_new_tokens=9, logits_processor=[broke]))
        unbroken = tried(partial(alone[0].generate, IDS, max_new_tokens=9))
        found[error.__name__] = ended, unbroken, list(map(len, forwards))
    after = called(*models, "greedy", length), called(*alone, "greedy", length)
    found["after"] = (*after, list(map(len, forwards)))
    found["stream"] = tried(lambda: es.stream(models[0], None, [5, 6, 7]))
    return found


def with_encoder(rank: int) -> dict[str, Any]:
    torch.manual_seed(4)
    whole = reference_pair("t5", torch.float32)
    parts = in_parts(whole, nn.ModuleList([*whole.encoder.block, *whole.decoder.block]))
    model, forwards = es.wrap(parts), [counted(parts.encoder), counted(parts.decoder)]
    ids = torch.tensor([[5, 9, 17, 8]])[:, : 2 + rank]
    calls = [
        one.generate(
            ids, max_new_tokens=LENGTHS[rank], num_beams=2, decoder_start_token_id=0
        ).tolist()
        for one in (model, es.wrap(whole))
    ]
    return {"an encoder": (*calls, list(map(len, forwards)))}


def main(find: Callable[[int], dict[str, Any]], folder: str, rank: int, count: int) -> None:
    """Meet the other processes, and save what this one finds."""
    torch.set_num_threads(1)
    init = f"file://{Path(folder, 'meeting')}"
    patience = timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=init, timeout=patience, rank=rank, world_size=count)
    torch.save(find(rank), Path(folder, f"{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(
        lambda rank: {**decoders(rank), **with_encoder(rank)},
        sys.argv[1],
        int(sys.argv[2]),
        int(sys.argv[3]),
    )
