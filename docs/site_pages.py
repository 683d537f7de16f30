"""The pages of the site of the documents, for MkDocs; `mkdocs.yml` names this file as a hook.

The site has the folders of the repository, so that a relative link leads to the same file in both.
Its pages are README.md, the documents beside it, those of docs/, and whatever they link to. A
linked file that is no document, such as a source file, becomes a page that shows it. An entry of a
list that is the name of a public object, with a link to its file, becomes its docstring.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from pygments.formatters import HtmlFormatter

ROOT = Path(__file__).resolve().parents[1]
START = ("README.md", "migration_guide.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md")
AS_THEY_ARE = (".css", ".png")
CODE = re.compile(r"`[^`\n]+`")
LINK = re.compile(r"\]\(([^)\s#]+)")
PUBLIC = re.compile(r"^- \[`((?:nnx_pipeline|linen_compat)[\w.]+)`\]\([\w./]+\)$", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replaces what MkDocs found in docs/ by the pages of the site; see `mkdocs.plugins`."""
    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
    for path in all_pages():
        files.append(file_of(path, config))
    files.append(File.generated(config, "docs/highlight.css", content=highlighting()))
    return files


def highlighting() -> str:
    """The colours of code, on a light and on a dark page."""
    light, dark = (
        HtmlFormatter(style=name).get_style_defs(".rst-content .highlight")
        for name in ("friendly", "github-dark")
    )
    return f"{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n"


def all_pages() -> list[Path]:
    """The documents, what they link to, what that links to, and so on; each file once."""
    waiting = [path for pattern in START for path in sorted(ROOT.glob(pattern))]
    waiting += sorted((ROOT / "docs").glob("*.css"))
    found: dict[Path, None] = {}
    while waiting:
        path = waiting.pop()
        if path not in found:
            found[path] = None
            waiting += linked_from(path)
    return list(found)


def linked_from(path: Path) -> Iterator[Path]:
    """The files of the repository that a document links to; none for other files."""
    if path.suffix == ".md":
        targets = ((path.parent / link).resolve() for link in LINK.findall(path.read_text("utf-8")))
        yield from (one for one in targets if one.is_file() and one.is_relative_to(ROOT))


def file_of(path: Path, config: MkDocsConfig) -> File:
    """A file of the site; only documents have a place in its navigation."""
    name = path.relative_to(ROOT).as_posix()
    if path.suffix in AS_THEY_ARE:
        return File.generated(config, name, abs_src_path=str(path))
    if path.suffix == ".md" and name.split("/")[0] != "benchmarks":
        return File.generated(config, name, content=text_of(path))
    content = text_of(path) if path.suffix == ".md" else shown(path, name)
    return File.generated(
        config, page_name(path, name), content=content, inclusion=InclusionLevel.NOT_IN_NAV
    )


def page_name(path: Path, name: str) -> str:
    """The document in the place of a file: it itself, or the page that shows it."""
    return name if path.suffix in (".md", *AS_THEY_ARE) else f"{name}.md"


def text_of(path: Path) -> str:
    """The text of a document, with docstrings, and with links to the pages that show files."""
    text = PUBLIC.sub(r"::: \1", path.read_text("utf-8"))
    # GitHub wants bars in the code of a table escaped, and Python-Markdown shows the backslash.
    text = CODE.sub(lambda code: code[0].replace("\\|", "|"), text)

    def replaced(match: re.Match[str]) -> str:
        target = (path.parent / match[1]).resolve()
        if not target.is_file():
            return match[0]
        return f"]({page_name(target, match[1])}"

    return LINK.sub(replaced, text)


def shown(path: Path, name: str) -> str:
    """A page that shows a file."""
    language = {".py": "python", ".toml": "toml"}.get(path.suffix, "text")
    return f"# {name}\n\n````{language}\n{path.read_text('utf-8')}\n````\n"
