"""What readers come for is one link away from the README, on a page with a heading for it."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest

from tests.docs.test_documents import FENCE
from tests.reading import ROOT
from tests.test_notation import table


class Task(NamedTuple):
    """How the README names it, the page, and its heading there."""

    wanted: str
    page: str
    heading: str


TASKS = [
    Task("load my folder", "models", "Models"),
    Task("serve a model over HTTP", "serving", "Serving"),
    Task("answer a file of requests", "batch-files", "Batch files"),
    Task("stream answers in a web", "web", "A web handler"),
    Task("JSON", "structured_output", "JSON schema"),
    Task("let a model call my functions", "tools", "Tools and thoughts"),
    Task("compare two strategies", "compare", "Compare two strategies"),
    Task("slow", "slow", "Why is it slow?"),
    Task("why a text came out", "inspect", "Look at the steps"),
    Task("save a generation and resume", "run", "Saving"),
    Task("choose a model", "models", "Choosing a model"),
    Task("lm-eval", "with-other-programs", "With other programs"),
    Task("LoRA", "adapters", "Adapters"),
    Task("train a model", "training", "Training"),
    Task("container", "install", "In a container"),
    Task("my model of transformers", "bridge", "Models of transformers and PEFT"),
    Task("write a processor", "processors", "Your own"),
    Task("without a network", "offline", "Offline machines"),
    Task("understand an error", "troubleshooting", "Troubleshooting"),
]
ROWS = table("README.md", "I want to | page")


def test_every_row_is_a_task() -> None:
    assert len(ROWS) == len(TASKS)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.page)
def test_a_task_is_one_link_away(task: Task) -> None:
    [cell] = [row[1] for row in ROWS if task.wanted in row[0]]
    [(path, anchor)] = re.findall(r"\]\((docs/guide/[\w-]+\.md)#?([\w-]*)\)", cell)
    assert path == f"docs/guide/{task.page}.md"
    text = FENCE.sub("", (ROOT / path).read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    assert task.heading in headings
    assert anchor in ("", task.heading.lower().replace(" ", "-"))
    assert anchor or task.heading == headings[0], "the link leads to the top of the page"
