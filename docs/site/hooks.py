"""What mkdocs is told beside mkdocs.yml: pages that are made while the site is built, and links.

The front page and the release notes come from README.md and CHANGELOG.md, the references of the
command line and of the options from the program. Pages link to files as they lie in the
repository; on the site a link into docs/ leads to its page, a picture comes along, and of a link to
any other file the text stays. Search answers with what users read before what developers read.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path

from links import rewritten
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from reference import command_line, options

ROOT = Path(__file__).resolve().parent.parent.parent
FRONT_ENDS = "\n## Models\n"  # the front page is the README up to here
FROM_FILES = {"index.md": "README.md", "release-notes.md": "CHANGELOG.md"}
# What search multiplies its scores with; by the first of these beginnings that a page has.
BOOSTS = {"guide/walkthrough": 1.0, "guide/": 4.0, "reference/": 2.0, "index.md": 2.0, "": 0.1}
PICTURE = re.compile(r"!\[[^\]]*\]\((\.\./[^)\s]+\.(?:svg|png))\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are made, and the pictures that lie outside docs/."""
    front = (ROOT / "README.md").read_text(encoding="utf-8").partition(FRONT_ENDS)[0]
    made = {
        "index.md": f"---\ntitle: everystep\nhide: [navigation]\n---\n\n{front}",
        "release-notes.md": (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
        "reference/command-line.md": command_line(),
        "reference/options.md": options(),
    }
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    for path in sorted(_pictures(files)):
        source = str(ROOT / path)
        files.append(File.generated(config, f"images/{Path(path).name}", abs_src_path=source))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page with links that lead to pages of the site, and its rank in a search."""
    uri = page.file.src_uri
    boost = next(boost for beginning, boost in BOOSTS.items() if uri.startswith(beginning))
    page.meta.setdefault("search", {"boost": boost})
    source = FROM_FILES.get(uri, f"docs/{uri}")

    def place(target: str) -> str | None:
        path, _, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        found = _page_of(path)
        if found is None or files.get_file_from_path(found) is None:
            return None
        place = posixpath.relpath(found, posixpath.dirname(uri) or ".")
        return f"{place}#{anchor}" if anchor else place

    return rewritten(markdown, place)


def _page_of(path: str) -> str | None:
    """The file of the site that a path of the repository stands for, or None."""
    for uri, source in FROM_FILES.items():
        if path == source:
            return uri
    if (ROOT / path).is_dir():
        path = f"{path}/README.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"images/{Path(path).name}" if path.endswith((".svg", ".png")) else None


def _pictures(files: Files) -> set[str]:
    """Pictures outside docs/ that a page of docs/ shows, as paths of the repository."""
    found = set()
    for file in files.documentation_pages():
        if file.abs_src_path is None:
            continue
        folder = os.path.dirname(f"docs/{file.src_uri}")
        found |= {
            posixpath.normpath(posixpath.join(folder, path))
            for path in PICTURE.findall(file.content_string)
        }
    return {path for path in found if not path.startswith("docs/")}
