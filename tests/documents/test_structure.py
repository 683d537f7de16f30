"""The shape of the code: who imports whom, and how long things get."""

import ast
import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "nnx_pipeline").rglob("*.py")) + sorted(
    (ROOT / "linen_compat").rglob("*.py")
)
LONGEST_FILE, LONGEST_FUNCTION = 300, 60  # lines of code

# From the ground up: a module may import from its own line and from those above it.
LAYERS = (
    ("lab",),  # measures programs, and knows no config, model, pipeline or training
    ("config", "sharding"),
    ("ops", "pipeline"),
    ("modules",),
    ("train",),
    ("experiments", "generate"),
)
# The same for the folders that have an order of their own, by their path in the repository.
FOLDERS = {
    "nnx_pipeline/lab": (
        ("_ending", "_lazy", "errors"),
        ("_files", "_tracing", "mesh"),
        ("_hlo",),
        ("attribution",),
        ("_timing",),
        ("compile",),
        ("_baseline", "comparison"),
        ("explain",),
        ("search",),
        ("api",),
        ("_report",),
        ("_page",),
        ("lint",),
        ("_cli",),
        ("pytest_plugin",),
    ),
    "nnx_pipeline/pipeline": (
        ("_stack", "schedule"),
        ("_exchange", "_timetable"),
        ("_entry", "metrics"),
        ("stage",),
        ("_zero1", "contract", "gather", "layers"),
        ("options", "visit"),
        ("_stacked", "circular", "one_f_one_b"),
        ("_runner",),
        ("module",),
        ("__init__", "create"),
        ("_cli",),
    ),
    "linen_compat": (
        ("maxtext",),
        ("formats",),
        ("checkpoints", "modules"),
        ("bridge",),
        ("overhead", "_overhead"),
        ("_cli",),
    ),
}
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> Iterator[str]:
    """Dotted names that a file imports, each imported name with its module."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def attribute_chains(path: Path) -> Iterator[str]:
    """Dotted attribute accesses such as `jax.lax.scan`."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def test_the_packages_were_found() -> None:
    names = {str(path.relative_to(ROOT)) for path in FILES}
    assert {"nnx_pipeline/pipeline/circular/run.py", "linen_compat/__init__.py"} <= names


def test_imports_go_one_way() -> None:
    wrong = [
        (str(path), name)
        for path in FILES
        if path.is_relative_to(ROOT / "nnx_pipeline")
        for name in imports(path)
        if name.startswith(("linen_compat", "flax.linen"))
    ]
    assert wrong == [], "nnx_pipeline knows neither linen_compat nor Linen"


def test_lower_layers_do_not_know_higher_ones() -> None:
    wrong = []
    for path in FILES:
        package, own, *_ = path.relative_to(ROOT).with_suffix("").parts
        if package != "nnx_pipeline" or own in ("__init__", "__main__"):
            continue
        assert own in LEVEL, f"give {own} its place in LAYERS"
        for name in imports(path):
            if name.startswith("nnx_pipeline."):
                # A name of the package itself is imported from the module that defines it.
                other = LEVEL.get(name.split(".")[1], len(LAYERS))
                wrong += [(str(path), name)] * (other > LEVEL[own])
            # What the package itself offers is for its users; inside, it would hide a circle.
            wrong += [(str(path), name)] * (name == "nnx_pipeline")
    assert wrong == [], "a module imports what stands above it"


@pytest.mark.parametrize("folder", FOLDERS)
def test_order_within_a_folder(folder: str) -> None:
    level = {name: at for at, names in enumerate(FOLDERS[folder]) for name in names}
    here, wrong = folder.replace("/", "."), []
    for path in sorted((ROOT / folder).rglob("*.py")):
        own = path.relative_to(ROOT / folder).with_suffix("").parts[0]
        if own == "__init__":
            continue
        assert own in level, f"give {own} its place in FOLDERS[{folder!r}]"
        for name in imports(path):
            if name.startswith(f"{here}."):
                other = level.get(name.removeprefix(f"{here}.").split(".")[0], len(level))
                wrong += [(str(path), name)] * (other > level[own])
    assert wrong == [], "a module imports what stands above it"


# Tests that need the lab alone and take little time, with the files beside them that they use.
OF_THE_LAB = (
    "lab/test_attribution_view.py",
    "lab/test_budgets.py",
    "lab/test_buffer_text.py",
    "lab/test_hlo.py",
    "lab/test_hlo_text.py",
    "lab/test_mesh_slices.py",
)
BESIDE_THEM = ("conftest.py", "hlo_texts.py")


@pytest.fixture(scope="module")
def lifted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the lab in a package of another name, and with tests of it."""
    folder = tmp_path_factory.mktemp("lifted")
    shutil.copytree(ROOT / "nnx_pipeline" / "lab", folder / "engine" / "lab")
    (folder / "engine" / "__init__.py").touch()
    shutil.copytree(ROOT / "tests" / "data" / "hlo", folder / "tests" / "data" / "hlo")
    (folder / "tests" / "lab").mkdir()
    for name in (*OF_THE_LAB, *BESIDE_THEM):
        shutil.copy(ROOT / "tests" / name, folder / "tests" / name)
    for path in folder.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace("nnx_pipeline", "engine"), encoding="utf-8")
    return folder


def run_there(lifted: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=lifted,
        env={**os.environ, "PYTHONPATH": str(lifted)},
    )


def test_the_lab_can_be_lifted_out(lifted: Path) -> None:
    """The lab in a package of another name and without the rest measures."""
    script = """
import importlib, pkgutil, sys
import jax, engine
from engine import lab
for found in pkgutil.walk_packages(engine.__path__, "engine."):
    importlib.import_module(found.name)
x = jax.ShapeDtypeStruct((8, 16), "float32")
print(lab.measure(lambda x: x @ x.T, x).flops)
assert not [name for name in sys.modules if name.startswith("nnx_pipeline")]
"""
    done = run_there(lifted, "-c", script)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 2 * 8 * 16 * 8


def test_tests_of_the_lab_run_where_it_was_lifted_to(lifted: Path) -> None:
    """The plugin that is installed has the options of the copy's, and is left out."""
    without = ("-p", "no:nnx_pipeline.lab.pytest_plugin", "-p", "no:cacheprovider")
    done = run_there(lifted, "-m", "pytest", "-q", *without, "tests")
    assert done.returncode == 0, done.stdout[-2000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) > 300


def test_the_lab_imports_nothing_of_the_rest() -> None:
    wrong = [
        (str(path), name)
        for path in FILES
        if path.is_relative_to(ROOT / "nnx_pipeline" / "lab")
        for name in imports(path)
        if name.startswith(("nnx_pipeline", "linen_compat"))
        and not name.startswith("nnx_pipeline.lab")
    ]
    assert wrong == []


def test_no_private_parts_of_libraries() -> None:
    wrong = []
    for path in FILES:
        for name in (*imports(path), *attribute_chains(path)):
            root, *rest = name.split(".")
            if root in ("jax", "jaxlib", "flax", "optax", "orbax", "numpy"):
                private = [part for part in rest if part[0] == "_" and not part.endswith("__")]
                wrong += [(str(path), name)] * bool(private)
    assert wrong == []


def test_texts_are_shown_in_two_files_alone() -> None:
    """So that every name in them passes `printable`; the plugin writes what pytest escapes."""
    outlets = ("lab/_files/__init__.py", "lab/_report/output.py")
    calls = re.compile(r"\b(print|click\.echo|click\.secho|Console)\(|std(out|err)\.write\(")
    wrong = [
        (str(path), line)
        for path in FILES
        if not str(path).endswith(outlets)
        for line in path.read_text(encoding="utf-8").splitlines()
        if calls.search(line)
    ]
    assert wrong == []


def code_lines(node: ast.AST, text: str) -> int:
    """Lines of a file or function but for empty ones, comments and docstrings."""
    strings: set[int] = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in inner.body:  # a docstring may stand under a field too
                if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                    strings |= set(range(statement.lineno, statement.end_lineno + 1))
    first, last = getattr(node, "lineno", 1), getattr(node, "end_lineno", len(text.splitlines()))
    lines = enumerate(text.splitlines()[first - 1 : last], first)
    return sum(
        number not in strings and bool(line.strip()) and not line.strip().startswith("#")
        for number, line in lines
    )


def test_length_of_files_and_functions() -> None:
    wrong = []
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        tree = tree_of(path)
        lengths = {"the file": (code_lines(tree, text), LONGEST_FILE)} | {
            node.name: (code_lines(node, text), LONGEST_FUNCTION)
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        wrong += [(str(path), name, n) for name, (n, longest) in lengths.items() if n > longest]
    assert wrong == []


sys.path.insert(0, str(ROOT / "benchmarks"))
import shape  # noqa: E402  (a script, not installed)

TREES = shape.modules(ROOT)


def test_rooms_and_floors() -> None:
    """No folder has more files and folders than one can look through, and no circle of imports."""
    for folder in sorted({name.rpartition(".")[0] for name in TREES}):
        arrows = shape.arrows_in(folder, TREES)
        floors = shape.floors(arrows)
        assert len(arrows) <= 20, f"{folder} has {len(arrows)} rooms"
        assert isinstance(floors, int), f"{folder} has {floors}"
        assert floors <= 10, f"{folder} has {floors} floors"


def test_parameters_and_tunnels() -> None:
    counts = [len(shape.parameters(function)) for _, function in shape.functions(TREES)]
    assert sum(count > 6 for count in counts) <= 7
    assert max(counts) <= 8
    argument, *through = shape.longest_tunnel(TREES)
    assert len(through) <= 3, f"{argument} goes unread through {through}"


def test_no_asserts_without_words() -> None:
    wrong = [
        (str(path), node.lineno)
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Assert) and node.msg is None
    ]
    assert wrong == []


# Python, the click group, the NNX base class and notebooks call these by their names.
CALLED_BY_OTHERS = re.compile(
    r"__\w+__|pytest_\w+|list_commands|format_commands|set_view|_repr_html_|find_spec"
)


def test_every_name_is_used() -> None:
    """By the code, a benchmark or a document: what tests alone use is dead.

    What has a decorator is used by it.
    """
    defined, used = {}, set()
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            match node:
                case ast.FunctionDef(name=name, decorator_list=[]) | ast.ClassDef(name=name):
                    defined[name] = f"{path}:{node.lineno}"
                case ast.Assign(targets=[ast.Name(name)]) | ast.AnnAssign(target=ast.Name(name)):
                    defined[name] = f"{path}:{node.lineno}"
                case ast.Name(name, ast.Load()) | ast.Attribute(attr=name) | ast.alias(name=name):
                    used.add(name.rpartition(".")[2])
                case ast.keyword(arg=str(name)):
                    used.add(name)
                case ast.Constant(str(text)) if "\n" not in text:
                    used |= set(re.findall(r"\w+", text))
    for pattern in ("pyproject.toml", "*.md", "docs/*.md", "benchmarks/*.py", "examples/*.py"):
        for path in ROOT.glob(pattern):
            used |= set(re.findall(r"\w+", path.read_text("utf-8")))
    unused = [
        f"{place} {name}"
        for name, place in defined.items()
        if name not in used and not CALLED_BY_OTHERS.fullmatch(name)
    ]
    assert unused == []
