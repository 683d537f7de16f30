"""The site of the documents is built, and its API reference has every public name."""

import ast
import importlib
import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest
from documents import PAGES, ROOT

PACKAGES = (
    "nnx_pipeline",
    *(f"nnx_pipeline.{name}" for name in ("modules", "pipeline", "train", "generate")),
    *(f"nnx_pipeline.{name}" for name in ("lab", "lab.explain", "lab.lint", "experiments")),
    "linen_compat",
)
LISTED = [  # page, name, file
    (page, *found)
    for page, text in PAGES.items()
    for found in re.findall(r"^- \[`([\w.]+)`\]\(\.\./([\w./]+)\)$", text, re.MULTILINE)
]


def docstrings(file: str) -> dict[str, str]:
    """The docstring of each class, function and constant of a file that has one."""
    body = ast.parse((ROOT / file).read_text("utf-8")).body
    found = {}
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            found[node.name] = text
        elif isinstance(node, ast.Assign) and isinstance(after, ast.Expr):
            (target,) = node.targets
            found[ast.unparse(target)] = ast.literal_eval(after.value)
    return found


def test_every_public_name_is_listed_once() -> None:
    names = [name for _, name, _ in LISTED]
    assert len(names) == len(set(names)) > 90
    listed = [object_of(name) for name in names]
    for package in map(importlib.import_module, PACKAGES):
        public = {name: getattr(package, name) for name in package.__all__}
        missing = [
            name for name, value in public.items() if not any(value is one for one in listed)
        ]
        assert missing == [], package.__name__


def object_of(name: str) -> object:
    """What a dotted name stands for."""
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


def test_each_link_leads_to_the_docstring() -> None:
    """On GitHub that is where it is read."""
    wrong = [
        (name, file) for _, name, file in LISTED if name.rpartition(".")[2] not in docstrings(file)
    ]
    assert wrong == []


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocstrings", reason="the extra docs is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    no_network = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **no_network}
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


@pytest.mark.slow
def test_the_site_has_each_page_and_each_docstring(site: Path) -> None:
    pages = {path.relative_to(site).as_posix(): path.read_text("utf-8") for path in pages_of(site)}
    home = pages["index.html"]
    for page in {*PAGES, "migration_guide.md", "CONTRIBUTING.md", "CHANGELOG.md"} - {"README.md"}:
        written = page.replace(".md", ".html")
        assert written in pages
        assert f'href="{written}"' in home, "it is not in the navigation"
    for page, name, file in LISTED:
        rest = pages[page.replace(".md", ".html")].partition(f'<h3 id="{name}"')[2]
        shown = unescape(re.sub("<[^>]+>", "", rest.partition("<h3 ")[0]))
        first, *_ = docstrings(file)[name.rpartition(".")[2]].split("\n\n")
        assert words(first) in words(shown), name


@pytest.mark.slow
def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    loaded = re.compile(
        r"""<(?:link|script|img|iframe)\b[^>]*?\b(?:src|href)=["']?(?:https?:)?//"""
    )
    assert [path.name for path in pages_of(site) if loaded.search(path.read_text("utf-8"))] == []
    styles = [path for path in site.rglob("*.css") if re.search("//", addresses(path))]
    assert styles == []


def words(text: str) -> str:
    """A text without the marks of Markdown, in one line."""
    return " ".join(re.sub(r"[`*_]", "", text).split())


def pages_of(site: Path) -> list[Path]:
    return sorted(site.rglob("*.html"))


def addresses(path: Path) -> str:
    """The addresses that a stylesheet loads."""
    return " ".join(re.findall(r"url\([^)]*\)|@import[^;]*", path.read_text("utf-8")))
