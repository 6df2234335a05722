"""DocLayLLM: a Llama that reads the patches and boxes of a page inside its prompt.

The text model has the names and defaults of Llama, so that both executors run it as they run one.
`model_type: doclayllm`, `layout_config` and the names of the embedders' weights are ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from everystep.models.decoders.llama import FAMILIES as LLAMA
from everystep.models.encoders import EncoderPlan
from everystep.models.layout.embedders import plan_embedders
from everystep.models.layout.spec import read_layout


def _plan(config: Mapping[str, Any]) -> tuple[EncoderPlan, ...]:
    return plan_embedders(read_layout(config))


_TEXT = LLAMA["llama"]
FAMILIES = {
    "doclayllm": replace(
        _TEXT,
        defaults={**_TEXT.defaults, "spatial_position_id": 150000, "img_patch_id": 150001},
        leftovers=(*_TEXT.leftovers, "visual_embedder.cls_token"),
        plan_encoders=_plan,
    )
}
