"""The shape of the code: who imports whom, and how long things get."""

import ast
from collections.abc import Iterator
from pathlib import Path

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
    assert wrong == [], "a module imports what stands above it"


def test_no_private_parts_of_libraries() -> None:
    wrong = []
    for path in FILES:
        for name in (*imports(path), *attribute_chains(path)):
            root, *rest = name.split(".")
            if root in ("jax", "jaxlib", "flax", "optax", "orbax", "numpy"):
                private = [part for part in rest if part[0] == "_" and not part.endswith("__")]
                wrong += [(str(path), name)] * bool(private)
    assert wrong == []


def test_length_of_files_and_functions() -> None:
    wrong = []
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        lengths = {"the file": (len(text.splitlines()), LONGEST_FILE)} | {
            node.name: (node.end_lineno - node.lineno + 1, LONGEST_FUNCTION)
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        wrong += [(str(path), name, n) for name, (n, longest) in lengths.items() if n > longest]
    assert wrong == []


def test_no_asserts_without_words() -> None:
    wrong = [
        (str(path), node.lineno)
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assert) and node.msg is None
    ]
    assert wrong == []
