"""A program beside what it was at a revision, with other packages, or in a saved result."""

import dataclasses
import json
import random
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from helpers import Run
from hypothesis import given
from hypothesis import strategies as st
from page_examples import attribution, measurement

from nnx_pipeline.lab import measure
from nnx_pipeline.lab._baseline.arm import Arm, at_revision
from nnx_pipeline.lab._baseline.child import MovedImports
from nnx_pipeline.lab._baseline.lines import changes_of, in_present_lines
from nnx_pipeline.lab._baseline.repository import Repository
from nnx_pipeline.lab._baseline.saved import measurements_of, saved_measurements
from nnx_pipeline.lab._cli.bisected import Search
from nnx_pipeline.lab.comparison.limit import Limit, parse_limit
from nnx_pipeline.lab.errors import InputError

OLD = """import jax.numpy as jnp


def step(x):
    return jnp.sum(x @ x.T)
"""
NEW = OLD.replace("import jax", "# More.\n\nimport jax").replace("x @ x.T", "(x @ x.T) @ (x.T @ x)")
ARGUMENT = ("--arg", "float32[64,64]", "--platform", "cpu")


class Folder:
    """A git repository of a test, which is the current folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.git("init", "-q", "-b", "main", ".")
        (path / ".git/info/exclude").write_text("__pycache__\n")
        self.git("config", "user.email", "a@b.c")
        self.git("config", "user.name", "A")

    def git(self, *words: str) -> str:
        command = ["git", "-c", "commit.gpgsign=false", *words]
        return subprocess.run(
            command, cwd=self.path, check=True, capture_output=True, text=True
        ).stdout

    def commit(self, subject: str, **files: str) -> str:
        for name, content in files.items():
            (self.path / f"{name}.py").write_text(content)
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", subject)
        return self.git("rev-parse", "HEAD").strip()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    (tmp_path / "a repository").mkdir()
    monkeypatch.chdir(tmp_path / "a repository")
    return Folder(tmp_path / "a repository")


def test_a_line_is_found_where_it_is_now(folder: Folder) -> None:
    """In files of lines that are all different, after many random edits and a new name."""
    chosen = random.Random(0)
    for number in range(12):
        old = [f"-- line {n} of {number}" for n in range(30)]
        folder.commit("Old", m="\n".join([*old, ""]))
        new = list(old)
        for _ in range(chosen.randint(1, 6)):
            at, count = chosen.randrange(len(new)), chosen.randint(0, 3)
            new[at : at + count] = [f"++ {chosen.random()}" for _ in range(chosen.randint(0, 3))]
        name = "m.py" if number % 2 else "renamed.py"
        folder.git("mv", "m.py", name) if name != "m.py" else None
        (folder.path / name).write_text("\n".join([*new, ""]))
        repository = Repository.here()
        changes = repository.changes(repository.commit("HEAD"))
        kept = {line: new.index(line) + 1 for line in old if line in new}
        assert kept
        for line, at in kept.items():
            assert changes.moved("m.py", old.index(line) + 1) == (name, at), line
        changed = {at for part in changes.lines().get(name, []) for at in part}
        assert changed == {at for at, line in enumerate(new, 1) if line not in old}
        folder.git("rm", "-qf", "--cached", name)
        (folder.path / name).unlink()


def test_a_replaced_line_is_at_its_successor() -> None:
    changes = changes_of("--- a/m.py\n+++ b/m.py\n@@ -3,2 +3 @@\n-a\n-b\n+c\n@@ -9 +7,0 @@\n-d\n")
    assert [changes.moved("m.py", line)[1] for line in (2, 3, 4, 5, 9, 10)] == [2, 3, 3, 4, 7, 8]


def test_lines_and_callers_of_all_rows_are_moved(tmp_path: Path) -> None:
    files, root = tmp_path / "then", tmp_path / "now"
    found = measurement(attribution(1.0))
    assert found.attribution
    first = dataclasses.replace(
        found.attribution.buffers[0], source=f"{files}/m.py:5", caller=f"{files}/n.py:2"
    )
    moved = dataclasses.replace(found.attribution, buffers=(first,))
    changes = changes_of("--- a/m.py\n+++ b/m.py\n@@ -0,0 +1,2 @@\n+a\n+b\n")
    there = dataclasses.replace(found, attribution=moved)
    shown = in_present_lines(there, files, root, changes).attribution
    assert shown
    assert (shown.buffers[0].source, shown.buffers[0].caller) == (
        f"{root}/m.py:7",
        f"{root}/n.py:2",
    )


def test_a_result_is_read_again() -> None:
    x = jax.ShapeDtypeStruct((64, 64), "float32")
    found = measure(lambda x: x @ x, x, platform="cpu")
    assert found.attribution
    document = {**found.to_json(), "buffers": found.attribution.to_json()}
    (again,) = measurements_of(json.loads(json.dumps(document)), "it")
    assert again.memory == found.memory
    assert again.attribution == found.attribution
    assert again.fingerprint == found.fingerprint
    assert json.dumps(again.to_json()["time"]) == json.dumps(found.to_json()["time"])


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema": 2}', '{"schema": 1, "experiments": []}', "\0", "{" * 99999]
)
def test_what_is_no_result_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "a.json"
    file.write_text(text)
    with pytest.raises(InputError, match=r"a\.json .*write one by nnx-pipeline memory"):
        saved_measurements(str(file))


def test_modules_come_from_the_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, files = tmp_path / "now", tmp_path / "then"
    for place, word in ((root, "now"), (files, "then")):
        for name in ("inside", "inside/part", "spread"):
            (place / "src" / name).mkdir(parents=True)
        (place / "src" / "inside" / "__init__.py").write_text(f"it = {word!r}")
        (place / "src" / "inside" / "part" / "__init__.py").write_text(f"it = {word!r}")
        (place / "src" / "spread" / "leaf.py").write_text(f"it = {word!r}")
    (root / "src" / "later.py").write_text("")
    installed = root / ".venv" / "site-packages"
    installed.mkdir(parents=True)
    (installed / "beside.py").write_text("it = 'installed'")
    monkeypatch.setattr(sys, "path", [str(root / "src"), str(installed), *sys.path])
    monkeypatch.setattr(sys, "meta_path", [MovedImports(root, files), *sys.meta_path])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    import beside  # type: ignore[import-not-found]
    import inside.part  # type: ignore[import-not-found]
    import spread.leaf  # type: ignore[import-not-found]

    assert (inside.it, inside.part.it, spread.leaf.it) == ("then", "then", "then")
    assert beside.it == "installed"
    with pytest.raises(ModuleNotFoundError, match="No module named 'later' in that revision"):
        import later  # type: ignore[import-not-found]  # noqa: F401


@given(st.integers(1, 40), st.data())
def test_the_search_ends_at_the_first(count: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, count - 1))
    broken = data.draw(st.sets(st.integers(0, count - 1))) - {count - 1}
    low, high = measurement(attribution(1.0)), measurement(attribution(2.0))
    limit = Limit("heap", (low.memory.heap_bytes + high.memory.heap_bytes) / 2)  # type: ignore[operator]
    search = Search(
        lambda state: "it breaks" if state in broken else (high if state >= first else low),
        lambda text: None,
    )
    found = search.first_beyond(range(count), limit)
    assert first in found
    assert all(state in broken for state in found[:-1])
    if not broken:
        assert found == [first]
        assert len(search.found) <= count.bit_length()


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("5%", Limit("account", 0.0, 0.05)),
        ("heap=24MB", Limit("heap", 24e6)),
        ("peak=1.5 GiB", Limit("peak", 1.5 * 2**30)),
        ("20ms", Limit("step", 0.02)),
        ("step=10%", Limit("step", 0.0, 0.1)),
    ],
)
def test_limits(text: str, limit: Limit) -> None:
    assert parse_limit("--limit", text) == limit


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no limit"),
        ("5", "is no limit"),
        ("5 apples", "is no limit"),
        ("size=5%", "there is no figure 'size'"),
        ("heap=5ms", "heap is in bytes; write heap=24MB"),
        ("step=5MB", "step is in seconds; write step=20ms"),
        ("1e999MB", "is no limit"),
    ],
)
def test_limits_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_limit("--limit", text)


def test_a_revision_as_the_baseline(run: Run, folder: Folder) -> None:
    """What is committed beside what is now; lines are those of now, and nothing stays behind."""
    folder.commit("First", model=OLD)
    (folder.path / "model.py").write_text(NEW)
    (folder.path / "bench.py").write_text("from model import step")
    before = folder.git("status", "--porcelain"), folder.git("worktree", "list")
    ended = run("compare", "--baseline", "main", "bench.py:step", *ARGUMENT, "--json", "-")
    assert ended.code == 0, ended.err
    (outcome,) = ended.json["experiments"]
    a, b = outcome["arms"]["a"], outcome["arms"]["b"]
    assert a["label"].startswith("main (")
    assert a["flops"] == 2 * 64**3
    assert b["flops"] == 3 * 2 * 64**3
    assert a["memory"]["heap_bytes"] < b["memory"]["heap_bytes"]
    assert "bench.py is not in main" in outcome["note"]
    sources = {row["source"] for row in outcome["buffers"]} - {None}
    assert sources == {f"{folder.path.resolve()}/model.py:7"}
    assert before == (folder.git("status", "--porcelain"), folder.git("worktree", "list"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--baseline", "nope"), "'nope' is no revision of"),
        (("--baseline", "main", "--xla-a", "a=1"), "--baseline cannot be combined with --xla-a"),
        (("--baseline", "main", "b.py:f"), "with --baseline one program is compared"),
        (("--baseline", "a.json", "--with", "x==1"), "a.json is a result; leave one of them out"),
        (("--with", "jax"), "--with jax is no package at a version"),
        (("--with", "jax==0.4.30"), "this project needs jax>=0.10.2"),
    ],
)
def test_wrong_baselines(run: Run, folder: Folder, words: tuple[str, ...], message: str) -> None:
    folder.commit("First", model=OLD)
    ended = run("compare", "model.py:step", *words, *ARGUMENT)
    assert (ended.code, message in ended.err) == (2, True), ended.err


def test_no_repository(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    ended = run("compare", "model.py:step", "--baseline", "main", *ARGUMENT)
    assert ended.code == 2
    assert "a revision needs a git repository" in ended.err


SLOW = """import pathlib
import time


def step(x):
    time.sleep(30)
    pathlib.Path({path!r}).touch()
    return x
"""


def test_what_one_side_cannot_do_ends_the_other(run: Run, folder: Folder, tmp_path: Path) -> None:
    late = tmp_path / "late"
    folder.commit("Slow", model=SLOW.format(path=str(late)))
    (folder.path / "model.py").write_text("x = 1")
    ended = run("compare", "--baseline", "main", "model.py:step", *ARGUMENT)
    assert ended.code == 2
    assert ended.err.count("now: 'model.py:step': there is no 'step'") == 1
    assert not late.exists()


def test_a_function_that_a_revision_has_not(folder: Folder) -> None:
    folder.commit("First", model="x = 1")
    (folder.path / "model.py").write_text(OLD)
    repository = Repository.here()
    words = ("model:step", *ARGUMENT)
    with (
        at_revision(repository, repository.commit("main"), "main", words) as arm,
        pytest.raises(InputError, match="main: 'model:step': there is no 'step'"),
    ):
        arm.measured(lambda line: None)
    assert not isinstance(Arm(label="now", words=words).measured(lambda line: None), str)


def test_bisect_goes_into_the_branch_of_a_merge(run: Run, folder: Folder) -> None:
    folder.commit("First", model=OLD)
    folder.git("tag", "good")
    folder.git("checkout", "-qb", "side")
    folder.commit("Rename")
    wanted = folder.commit("Slower", model=NEW)
    folder.git("checkout", "-q", "main")
    folder.commit("Beside", other="")
    folder.git("merge", "-q", "--no-ff", "-m", "Merge side", "side")
    ended = run("bisect", "good", "main", "model.py:step", *ARGUMENT, "--json", "-")
    assert ended.code == 0, ended.err
    assert [one["commit"] for one in ended.json["first"]] == [wanted]
    assert ended.json["limit"]["figure"] == "account"


@pytest.mark.parametrize(
    ("ends", "code", "message"),
    [
        (("main", "main"), 2, "there is no commit after"),
        (("main", "jax==1"), 2, "give two revisions, or two versions of a package"),
        (("jax==0.12", "jax==0.12"), 2, "give two versions of one package"),
        (("main", "old"), 2, "is no ancestor of"),
        (("old", "main"), 2, "there is no 'step'"),
    ],
)
def test_wrong_ends(
    run: Run, folder: Folder, ends: tuple[str, str], code: int, message: str
) -> None:
    folder.commit("First", model="x = 1")
    folder.git("tag", "old")
    folder.commit("Second", model=OLD)
    ended = run("bisect", *ends, "model.py:step", *ARGUMENT)
    assert (ended.code, message in ended.err) == (code, True), ended.err
