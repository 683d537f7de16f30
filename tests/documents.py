"""README.md and the pages of docs/: their texts, and what in them is run."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
# Where the `main` of each script is.
MODULES = {
    "nnx-pipeline": "nnx_pipeline.lab._cli.main",
    "linen-compat": "linen_compat._cli.main",
}
PAGES = {
    str(path.relative_to(ROOT)): path.read_text("utf-8")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}
TEXT = "\n\n".join(PAGES.values())
WORDS = " ".join(TEXT.split())  # for sentences, whose lines may break anywhere
BLOCK = re.compile(r"(?:`(\w+\.py)`:\n\n)?```(\w+)\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)


class Block(NamedTuple):
    """Code or commands of a page.

    - `page`: its path in the repository.
    - `language`: `python`, `sh` or `text`.
    - `text`: what is in it.
    - `file`: the name of the file that the text before it gives it; empty for none.
    - `shown`: the output right below it; empty for none.
    """

    page: str
    language: str
    text: str
    file: str = ""
    shown: str = ""

    @property
    def lines(self) -> list[str]:
        """Its lines, of commands one each."""
        return self.text.splitlines()


def blocks_of(page: str, text: str) -> list[Block]:
    """The blocks of a page in their order."""
    found = (match.groups("") for match in BLOCK.finditer(text))
    return [Block(page, language, code, file, shown) for file, language, code, shown in found]


BLOCKS = [block for page, text in PAGES.items() for block in blocks_of(page, text)]


def table(below: str, text: str = TEXT) -> list[list[str]]:
    """The cells of the first table below some words, without its head."""
    body = text.split(below, 1)[1].split("|---", 1)[1].split("\n\n", 1)[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in body.splitlines()[1:]]
