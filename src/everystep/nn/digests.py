"""Tensors in digests, every bit of them."""

from __future__ import annotations

import hashlib
from typing import Protocol

import torch
from torch import Tensor


class Digest(Protocol):
    """A digest that `hashlib` makes."""

    def update(self, data: bytes | memoryview, /) -> None:
        """Add these bytes."""


def digest_of(tensor: Tensor) -> str:
    """Return a text that is equal for tensors of one type and shape that are equal in every bit."""
    digest = hashlib.blake2b(digest_size=16)
    add_tensor(digest, "", tensor)
    return digest.hexdigest()


def add_tensor(digest: Digest, name: str, tensor: Tensor) -> None:
    """Add the name, type, shape and every bit of a tensor; of one without bits, the rest."""
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
    if tensor.device.type == "meta":
        return
    dense = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    plain = dense.int_repr() if dense.is_quantized else dense
    held = plain.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    digest.update(held.view(torch.uint8).numpy().data)
