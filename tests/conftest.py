"""Settings that must hold before JAX starts, the same for every test.

The suite runs on eight virtual CPU devices, which really run the collectives. Python values and
arrays of different dtypes never mix silently (strict promotion), and the shapes in the signatures
of `nnx_pipeline.ops` are checked at every call, but in files marked `numbers`.
"""

import gc
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["NNX_PIPELINE_PLATFORM"] = "cpu"
# pytest-xdist sets it in its workers; what a command prints must not depend on how tests are run.
os.environ.pop("COLUMNS", None)
# libtpu: no metadata server, no warnings about a host that is not there, several users at once.
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["TPU_WORKER_HOSTNAMES"] = "localhost"
os.environ["TPU_ACCELERATOR_TYPE"] = "v5p-16"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
# The tests compile much and compute little. The first two settings are about machine code alone:
# none of it is worth optimizing, and cutting it into parts for many threads takes time. The third
# leaves the CPU compiler the simpler way to make it of fusions, in a third of the time; what is
# fused, and so the CPU's figures, differs a little, and newer versions do not know it.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_backend_optimization_level=0",
        "--xla_cpu_parallel_codegen_split_count=1",
        "--xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else "",
    ]
)

import hypothesis
import jax
import jaxtyping
import pytest

# Tracing makes millions of objects and almost no cycles: looking for these less often takes a
# twelfth less time.
gc.set_threshold(200_000, 50, 100)

# The entry point of this package says the same where it is installed in its present state.
pytest_plugins = ["nnx_pipeline.lab.pytest_plugin"]

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.devices()  # the number of devices is final from here on

# A property test draws the same examples in every run, and how long one takes decides nothing: a
# busy machine is not a fault of the code.
hypothesis.settings.register_profile("every test", deadline=None, derandomize=True)
hypothesis.settings.load_profile("every test")

jaxtyping.install_import_hook("nnx_pipeline.ops", "beartype.beartype")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test finds what a user, or another test, has measured before."""
    monkeypatch.setenv("NNX_PIPELINE_CACHE", str(tmp_path.with_name(f"{tmp_path.name}-cache")))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="Run the tests marked slow too.")
    parser.addoption("--fast", action="store_true", help="One case a table, four tests a file.")
    parser.addoption(
        "--draws",
        type=int,
        default=2,
        help="How many cases the tests draw that draw some, such as test_random_options.py.",
    )


MOST_KEPT = 2 * 10**9  # bytes of compiled programs


def pytest_configure(config: pytest.Config) -> None:
    """Keeps what JAX compiles for the tests of later runs, in pytest's own cache.

    JAX finds a program by its text, the versions and the flags, so that a change of the code
    compiles what it changes. The lab leaves this cache out where it measures a compile.
    """
    if not hasattr(config, "cache"):
        return  # -p no:cacheprovider
    folder = config.cache.mkdir("programs")
    if not hasattr(config, "workerinput"):
        newest = sorted(folder.iterdir(), key=lambda file: -file.stat().st_mtime)
        sizes = itertools.accumulate(file.stat().st_size for file in newest)
        for file, size_so_far in zip(newest, sizes, strict=True):
            if size_so_far > MOST_KEPT:
                file.unlink()
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


# By what they take: no worker is left with one of these when the others have ended.
LONGEST_FIRST = ("documents", "collectives", "option_pairs", "arms", "model", "linen_pipeline")


MOST_OF_A_FILE = 4  # tests, in the fast part


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what the options leave out; what is left of a table or file is spread over it."""
    order = {f"test_{name}": number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))
    chosen = items[:]
    if not config.getoption("--all"):
        tables = groups(items, table_of)
        chosen = [one for table in tables for one in spread(table, cases_of(table))]
    if config.getoption("--fast"):
        chosen = [table[0] for table in groups(chosen, table_of)]
        files = groups(chosen, lambda item: str(item.path))
        chosen = [one for file in files for one in spread(file, MOST_OF_A_FILE)]
    kept = set(chosen)
    left_out = [item for item in items if item not in kept]
    items[:] = chosen
    config.hook.pytest_deselected(items=left_out)


def table_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def cases_of(table: list[pytest.Item]) -> int:
    """How many cases of a test run without `--all`."""
    slow = table[0].get_closest_marker("slow")
    return len(table) if slow is None else slow.kwargs.get("but", 0)


def groups(items: list[pytest.Item], name: Callable[[pytest.Item], str]) -> list[list[pytest.Item]]:
    found: dict[str, list[pytest.Item]] = {}
    for item in items:
        found.setdefault(name(item), []).append(item)
    return list(found.values())


def spread(items: list[pytest.Item], most: int) -> list[pytest.Item]:
    """So many of the items, from the first on at equal distances."""
    return [item for at, item in enumerate(items) if at * most % len(items) < most]


LINES = jax.config.jax_traceback_in_locations_limit


@pytest.fixture(autouse=True, scope="module")
def leave_out_what_no_number_needs(request: pytest.FixtureRequest) -> None:
    """A file marked `numbers` is traced and compiled without what decides no number.

    Checking the shapes of each call takes a third of the time of tracing, and what says where each
    operation of a program comes from a tenth of the time of compiling.
    """
    numbers = request.node.get_closest_marker("numbers") is not None
    jaxtyping.config.update("jaxtyping_disable", numbers)
    jax.config.update("jax_traceback_in_locations_limit", 0 if numbers else LINES)


@pytest.fixture(autouse=True, scope="module")
def forget_programs() -> Iterator[None]:
    """Frees the programs of a file: a process may not map the memory of those of all files."""
    yield
    jax.clear_caches()


def command(main: Any, name: str, monkeypatch: Any, capsys: Any) -> Any:
    """A function that runs a command within this process."""

    def run(*arguments: object) -> Any:
        from helpers import Ended, optax_promotion

        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit, optax_promotion():
            main()
        return Ended(exit.value.code or 0, *capsys.readouterr())

    return run


@pytest.fixture
def as_nobody() -> Iterator[None]:
    """Takes the rights of root away from this process for a time."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `nnx-pipeline`."""
    from nnx_pipeline.lab._cli import main as cli

    return command(cli.main, "nnx-pipeline", monkeypatch, capsys)


@pytest.fixture
def bridge(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `linen-compat`."""
    from linen_compat._cli import main as cli

    return command(cli.main, "linen-compat", monkeypatch, capsys)
