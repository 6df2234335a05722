"""The post-processor that puts a token before and after every text (bos and eos)."""

from __future__ import annotations

from tokenizers.processors import TemplateProcessing


def surrounding(
    before: tuple[str, int] | None, after: tuple[str, int] | None
) -> TemplateProcessing:
    """A post-processor for tokens given as (text, id); of a pair, each text is surrounded.

    Source: `TokenizersBackend.update_post_processor` of the reference.
    """
    single = _surrounded("A", 0, before, after)
    pair = single + _surrounded("B", 1, before, after)
    tokens = {end for end in (before, after) if end is not None}
    return TemplateProcessing(single=single, pair=pair, special_tokens=sorted(tokens))


def _surrounded(
    name: str, type_id: int, before: tuple[str, int] | None, after: tuple[str, int] | None
) -> list[str]:
    parts = [before and before[0], f"${name}", after and after[0]]
    return [f"{part}:{type_id}" for part in parts if part]
