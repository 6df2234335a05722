"""From a page, its picture and its recognised lines, to the prompt of a document model.

The order and the wording are those of DocLayLLM's demonstration: the patches of the page, then each
line with its box, then the question, inside the chat template of the model's tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from everystep.errors import RequestError, UnsupportedError, shown
from everystep.files.picture_files import PictureLike, read_picture
from everystep.models.layout.embedders import PatchEncoder
from everystep.models.layout.pages import LinesLike, pixels_of, read_page
from everystep.models.layout.spec import LayoutSpec
from everystep.requests.prompts import TokenizerLike
from everystep.text.literal import pattern_of

if TYPE_CHECKING:
    from everystep.api.model import LanguageModel

SYSTEM = "You are a helpful assistant."
_PATCHES = "Giving the document image patches,"
_LINES = ', and text content and its location in form of "text, [left, top, right, bottom]":\n'
_REASONING = (
    "Think step by step about what the document says and where it stands. Write the steps first, "
    'then the answer on a line of its own that begins with "Answer:".'
)
_PLACE = "\ue000"
"""Stands for the document while a template is rendered: a letter of no alphabet."""


def layout_prompt(
    model: LanguageModel,
    tokenizer: TokenizerLike,
    question: str,
    *,
    lines: LinesLike,
    image: PictureLike,
    page_size: Sequence[float] | None = None,
    system: str | None = SYSTEM,
    reasoning: bool = False,
) -> dict[str, Tensor]:
    """Return the prompt of a question about a page, for `model.generate` and `es.generate`.

    `input_ids` and `attention_mask` (1, T), `pixel_values` (1, 3, side, side) and, where there are
    lines, `bbox` (1, n, 4). `lines`: the path of a JSON file, or pairs of a text and a box [left,
    top, right, bottom]; `image`: the path of the page's picture, or an `Image` of Pillow.
    `page_size`: width and height in the unit of the boxes, those that the file says or those of
    the picture without it. `system`: the first message, None for none. `reasoning`: the model is
    asked to think before it answers. Special tokens in lines and questions are ordinary text.
    Raises UnsupportedError for a model that reads no pages, FileError for broken files, and
    RequestError for lines and boxes that cannot be.

    Example:

        >>> prompt = es.layout_prompt(
        ...     model, tokenizer, "Who signed it?", lines=lines, image=picture
        ... )
        >>> out = model.generate(**prompt, max_new_tokens=4)
    """
    spec = layout_of(model)
    if not isinstance(question, str) or not question.strip():
        raise RequestError("there is no question", wanted="a text", got=shown(question)[:80])
    page, picture = read_page(lines, page_size), read_picture(image)
    boxes = page.boxes(picture.size)
    asked = f"\n{question}\n{_REASONING}" if reasoning else f"\n{question}"
    before, after = _around(tokenizer, system)
    texts = _plain_ids(tokenizer, [*(one.text for one in page.lines), asked])
    start, middle, end, close = _ids(tokenizer, [before + _PATCHES, _LINES, "\n", after])
    ids = [*start, *[spec.patch_id] * spec.patches, *middle]
    for text in texts[:-1]:
        ids += [*text, spec.box_id, *end]
    ids += [*texts[-1], *close]
    prompt = {
        "input_ids": torch.tensor([ids]),
        "attention_mask": torch.ones(1, len(ids), dtype=torch.int64),
        "pixel_values": pixels_of(picture, spec)[None],
    }
    return {**prompt, "bbox": boxes[None]} if len(boxes) else prompt


def layout_of(model: LanguageModel) -> LayoutSpec:
    """Return the layout in which the model reads pages; UnsupportedError where it reads none."""
    for one in model.core.encoders:
        if isinstance(one, PatchEncoder):
            return one.spec
    raise UnsupportedError(
        "this model reads no pages",
        wanted="a document model, such as DocLayLLM",
        got=f"model_type {getattr(model.config, 'model_type', None)!r}",
    )


def _around(tokenizer: TokenizerLike, system: str | None) -> tuple[str, str]:
    """Return the text before and after a user's message: without a template the first token."""
    if getattr(tokenizer, "chat_template", None) is None:
        if system not in (None, SYSTEM):
            do = "Leave the system message out, or put it into the question"
            raise RequestError("a system message needs a chat template", got="none", do=do)
        return tokenizer.bos_token or "", ""
    first = [] if system is None else [{"role": "system", "content": system}]
    rendered = tokenizer.apply_chat_template(
        [*first, {"role": "user", "content": _PLACE}], tokenize=False, add_generation_prompt=True
    )
    before, place, after = rendered.partition(_PLACE)
    if not place or _PLACE in after:
        wanted = "a template that writes a user's message once"
        raise RequestError("the chat template has no place for a page", wanted=wanted)
    return before, after


def _ids(tokenizer: TokenizerLike, texts: Sequence[str]) -> list[list[int]]:
    """Return the ids of each text, none for an empty one."""
    full = [text for text in texts if text]
    found = iter(tokenizer(full, add_special_tokens=False)["input_ids"] if full else ())
    return [list(next(found)) if text else [] for text in texts]


def _plain_ids(tokenizer: TokenizerLike, texts: Sequence[str]) -> list[list[int]]:
    """Return the ids of texts of strangers, where the spelling of a special token is cut in two."""
    pattern = pattern_of(tokenizer.all_special_tokens)
    pieces = [_cut(text, pattern) for text in texts]
    counts = [len(each) for each in pieces]
    ids = iter(_ids(tokenizer, [piece for each in pieces for piece in each]))
    found = [[token for _ in range(count) for token in next(ids)] for count in counts]
    marks = {*tokenizer.all_special_ids} - {tokenizer.unk_token_id}
    for text, row in zip(texts, found, strict=True):
        if not marks.isdisjoint(row):
            do = "Take it out of the text"
            raise RequestError("a text holds a special token", got=shown(text)[:80], do=do)
    return found


def _cut(text: str, pattern: re.Pattern[str]) -> list[str]:
    """Return the pieces of a text, cut after the first letter of each match."""
    cuts = [0, *(match.start() + 1 for match in pattern.finditer(text)), len(text)]
    return [text[first:last] for first, last in pairwise(cuts)]
