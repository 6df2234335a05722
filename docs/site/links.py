"""Links of a page, outside code."""

from __future__ import annotations

import re
from collections.abc import Callable

ELSEWHERE = ("http://", "https://", "mailto:", "#")
# Code first, so that what looks like a link in it is passed over.
_CODE_OR_LINK = re.compile(
    r"^(?P<fence>```+).*?^(?P=fence)$"
    r"|`+[^`\n]*`+(?!\]\()"
    r"|(?P<picture>!?)\[(?P<text>(?:`[^`\n]*`|[^\]`])*)\]\((?P<target>[^)\s]+)\)",
    re.M | re.S,
)


def rewritten(markdown: str, place: Callable[[str], str | None]) -> str:
    """The page with the target of each link into the repository replaced by `place(target)`.

    Where that is None, the text of the link stays.
    """

    def replaced(match: re.Match[str]) -> str:
        target = match["target"]
        if target is None or target.startswith(ELSEWHERE):
            return match[0]
        found = place(target)
        if found is None:
            return match["text"]
        return f"{match['picture']}[{match['text']}]({found})"

    return _CODE_OR_LINK.sub(replaced, markdown)
