"""Counts a greedy call while it runs: `python -m tests.structure.traced` prints it as JSON.

The call is `model.generate` on a tiny random Llama in float32, which the native executor runs, with
one prompt; another call has filled what is cached once per process. Only named functions of
everystep count: lambdas and comprehensions, which Python releases treat differently, do not.

- `before`, `all`: the functions that are entered before the first `Engine.submit`, and in the
  whole call.
- `length`, `processor`, `hook`: the functions that are entered with an argument that carries the
  `max_new_tokens`, a logits processor or a hook of the caller. An argument carries an object if it
  is that object, or leads to it in at most three steps. A step goes from a mapping to a value, from
  a list, tuple or set to an element, from an object of everystep to an attribute, or from a method
  to its object.
- `types`: the classes of everystep of which the call makes an object by a function in Python:
  `__init__` or `__new__`, that of a named tuple included.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FrameType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

import everystep
from everystep.engine import Engine
from everystep.executors.native import status
from everystep.testing.models import tiny_llama

ROOT = f"{Path(everystep.__file__).parent}/"
STEPS = 3
LEAVES = (str, bytes, int, float, type(None), type, Tensor, nn.Module)

Watch = Callable[[FrameType], None]


def watched(call: Callable[[], object], watch: Watch) -> None:
    """Run a call; `watch` sees the frame of each function in Python when it is entered."""

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            sys.setprofile(None)  # what watches is not watched
            watch(frame)
            sys.setprofile(profile)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def name_of(frame: FrameType) -> str | None:
    """Return file, line and name of a function of everystep; None for any other."""
    code = frame.f_code
    if not code.co_filename.startswith(ROOT) or code.co_name.startswith("<"):
        return None
    return f"{code.co_filename.removeprefix(ROOT)}:{code.co_firstlineno} {code.co_qualname}"


def functions_of(call: Callable[[], object]) -> tuple[set[str], set[str]]:
    """Return the functions of a call before its first `Engine.submit`, and all of them."""
    before: set[str] = set()
    entered: set[str] = set()
    submitted = False

    def watch(frame: FrameType) -> None:
        nonlocal submitted
        submitted = submitted or frame.f_code is Engine.submit.__code__
        if (name := name_of(frame)) is not None:
            entered.add(name)
            if not submitted:
                before.add(name)

    watched(call, watch)
    return before, entered


def carriers_of(call: Callable[[], object], what: object) -> set[str]:
    """Return the functions of a call that are entered with an argument that carries an object."""
    found: set[str] = set()

    def watch(frame: FrameType) -> None:
        name = name_of(frame)
        if name is None or name in found:
            return
        if any(carries(one, what) for one in _arguments(frame)):
            found.add(name)

    watched(call, watch)
    return found


def carries(value: object, what: object, steps: int = STEPS) -> bool:
    """Return whether a value is an object, or leads to it in so many steps."""
    if value is what:
        return True
    if steps == 0 or isinstance(value, LEAVES):
        return False
    return any(carries(part, what, steps - 1) for part in _parts(value))


def _parts(value: object) -> Iterable[object]:
    """Return what one step leads to."""
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if isinstance(value, MethodType):
        return [value.__self__]
    if not type(value).__module__.startswith("everystep"):
        return []
    slots = [slot for kind in type(value).__mro__ for slot in getattr(kind, "__slots__", ())]
    attributes = [getattr(value, slot) for slot in slots if hasattr(value, slot)]
    return [*getattr(value, "__dict__", {}).values(), *attributes]


def _arguments(frame: FrameType) -> list[object]:
    """Return the arguments that a function was entered with, packed ones included."""
    code = frame.f_code
    packed = bool(code.co_flags & 4) + bool(code.co_flags & 8)  # *args, **kwargs
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + packed]
    return [frame.f_locals[name] for name in names if name in frame.f_locals]


def types_of(call: Callable[[], object]) -> set[str]:
    """Return the classes of everystep that a call makes objects of."""
    found: set[str] = set()

    def watch(frame: FrameType) -> None:
        code = frame.f_code
        first = code.co_varnames[0] if code.co_argcount else ""
        if code.co_name in ("__init__", "__new__") or first == "_cls":  # that of a named tuple
            made = frame.f_locals.get(first)
            kind = made if isinstance(made, type) else type(made)
            if kind.__module__.split(".")[0] == "everystep":
                found.add(f"{kind.__module__}.{kind.__qualname__}")

    watched(call, watch)
    return found


class _Unchanged:
    """A logits processor that changes nothing."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores


class _Silent(everystep.Hook):
    """A hook that adds nothing."""


def counted() -> dict[str, list[str]]:
    """Return what each count of this file's head found."""
    # A context in which a length has room that is an object of its own, unlike small integers.
    model = tiny_llama(dtype=torch.float32, max_position_embeddings=4096)
    prompt = torch.tensor([[5, 6, 7]])
    first = int(model.generate(prompt, max_new_tokens=1)[0, -1])
    length, processor, hook = int("1234"), _Unchanged(), _Silent()

    def carried(what: object, **options: Any) -> set[str]:
        """The carriers in a call that ends with its first token."""
        options |= {"max_new_tokens": length, "eos_token_id": first}
        return carriers_of(lambda: model.generate(prompt, **options), what)

    def plain() -> Tensor:
        return model.generate(prompt, max_new_tokens=4)

    plain()
    before, entered = functions_of(plain)
    sets = {
        "before": before,
        "all": entered,
        "length": carried(length),
        "processor": carried(processor, logits_processor=[processor]),
        "hook": carried(hook, hooks=[hook]),
        "types": types_of(plain),
    }
    return {name: sorted(found) for name, found in sets.items()}


if __name__ == "__main__":
    kernels = status()
    if kernels.instructions is None:
        sys.exit(f"structure: the counted call needs the compiled kernels: {kernels.reason}")
    print(json.dumps(counted()))
