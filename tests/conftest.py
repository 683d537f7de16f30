"""Settings that must hold before JAX starts, the same for every test.

The suite runs on eight virtual CPU devices, which really run the collectives. Python values and
arrays of different dtypes never mix silently (strict promotion), and the shapes in the signatures
of `nnx_pipeline.ops` are checked at every call.
"""

import os
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
# libtpu: no metadata server, no warnings about a host that is not there, several users at once.
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["TPU_WORKER_HOSTNAMES"] = "localhost"
os.environ["TPU_ACCELERATOR_TYPE"] = "v5p-16"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
# The tests compile much and compute little. The first setting is about machine code alone. The
# second leaves the CPU compiler the simpler way to make it of fusions, in a third of the time; what
# is fused, and so the CPU's figures, differs a little, and newer versions do not know it.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_backend_optimization_level=0",
        "--xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else "",
    ]
)

import hypothesis
import jax
import jaxtyping
import pytest

# The entry point of this package says the same where it is installed in its present state.
pytest_plugins = ["nnx_pipeline.pytest_plugin"]

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
    parser.addoption(
        "--fast",
        action="store_true",
        help="Leave out the tests marked slow, and all but the first and last case of a table.",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--fast"):
        return
    tables: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not item.get_closest_marker("slow"):
            tables.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = {id(item) for cases in tables.values() for item in (cases[0], cases[-1])}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = [item for item in items if id(item) in kept]


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
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `nnx-pipeline`."""
    from nnx_pipeline import cli

    return command(cli.main, "nnx-pipeline", monkeypatch, capsys)


@pytest.fixture
def bridge(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `linen-compat`."""
    from linen_compat import cli

    return command(cli.main, "linen-compat", monkeypatch, capsys)
