"""The relative position bias of T5: one learned number per head and bucket of distances.

Source: Raffel et al. 2020; the reference's `T5Attention._relative_position_bucket`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class RelativeBias:
    """`table`: (buckets, H). Half of the buckets are exact distances, the rest grow as logarithms.

    `both_ways`: keys after the query have buckets of their own (encoder).
    """

    table: Tensor
    max_distance: int
    both_ways: bool

    def __call__(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Query positions (..., T), key positions (..., S) -> (..., H, T, S)."""
        distance = keys[..., None, :] - queries[..., :, None]
        bias = torch.nn.functional.embedding(self.bucket(distance), self.table)
        return bias.movedim(-1, -3)

    def bucket(self, distance: Tensor) -> Tensor:
        """Key minus query position -> bucket, of the same shape."""
        buckets = self.table.shape[0]
        offset = torch.zeros_like(distance)
        if self.both_ways:
            buckets //= 2
            offset = (distance > 0) * buckets
            away = distance.abs()
        else:
            away = -distance.clamp(max=0)
        return offset + self._bucket_of(away, buckets)

    def _bucket_of(self, away: Tensor, buckets: int) -> Tensor:
        exact = buckets // 2
        growth = torch.log(away.float() / exact) / math.log(self.max_distance / exact)
        # Distance 0 has the logarithm minus infinity, which no integer is; it is exact anyway.
        far = exact + (growth.clamp(min=0) * (buckets - exact)).long()
        return torch.where(away < exact, away, far.clamp(max=buckets - 1))
