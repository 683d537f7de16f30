"""The shape of the code: who imports whom, and how long things get."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "nnx_pipeline").rglob("*.py")) + sorted(
    (ROOT / "linen_compat").rglob("*.py")
)
LONGEST_FILE, LONGEST_FUNCTION = 350, 70

# From the ground up: a module may import from its own line and from those above it.
LAYERS = (
    ("ending", "equations", "errors", "files", "nnx_copies", "nnx_state", "remat", "tracing"),
    ("budgets",),
    ("mesh", "pipeline_config"),
    ("config",),
    ("presets", "overrides"),
    ("sharding",),
    ("ops",),
    ("pipeline",),
    ("modules",),
    ("decoder",),
    ("train",),
    ("lab",),
    ("lint",),
    ("budget_fixture", "pytest_plugin"),
    (
        "cli_support",
        "cli_options",
        "cli_functions",
        "cli_memory",
        "cli_report",
        "cli_sweep",
        "cli_ab",
        "cli",
        "console",
    ),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))


def imports(path: Path) -> Iterator[str]:
    """Dotted names that a file imports, each imported name with its module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def attribute_chains(path: Path) -> Iterator[str]:
    """Dotted attribute accesses such as `jax.lax.scan`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def test_the_packages_were_found() -> None:
    names = {str(path.relative_to(ROOT)) for path in FILES}
    assert {"nnx_pipeline/pipeline/loop.py", "linen_compat/__init__.py"} <= names


@each_file
def test_imports_go_one_way(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    for name in imports(path):
        if package == "nnx_pipeline":
            assert not name.startswith("linen_compat"), f"{name}: never the reverse"
            assert not name.startswith("flax.linen"), f"{name}: Linen lives in linen_compat"


@each_file
def test_lower_layers_do_not_know_higher_ones(path: Path) -> None:
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] != "nnx_pipeline" or parts[1] in ("__init__", "__main__"):
        return
    own = parts[1]
    assert own in LEVEL, f"give {own} its place in LAYERS"
    for name in imports(path):
        if name.startswith("nnx_pipeline."):
            other = name.split(".")[1]
            if other not in LEVEL:  # a name of the package itself
                pytest.fail(f"{name}: import from the module that defines it")
            assert LEVEL[other] <= LEVEL[own], f"{own} imports {name}, which stands above it"


@each_file
def test_no_private_parts_of_libraries(path: Path) -> None:
    for name in (*imports(path), *attribute_chains(path)):
        root, *rest = name.split(".")
        if root in ("jax", "jaxlib", "flax", "optax", "orbax", "numpy"):
            private = [part for part in rest if part.startswith("_") and not part.endswith("__")]
            assert not private, f"{name} is private"


@each_file
def test_length_of_files_and_functions(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LONGEST_FILE
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1
            assert length <= LONGEST_FUNCTION, f"{node.name} has {length} lines"


@each_file
def test_no_asserts_without_words(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Assert):
            assert node.msg is not None, f"line {node.lineno}"
