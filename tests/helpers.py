"""What several test files share: small configs, meshes, and comparing trees of arrays."""

import atexit
import contextlib
import dataclasses
import functools
import importlib.util
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from nnx_pipeline import Config, MeshConfig, Mixtral, ModelConfig, make_mesh
from nnx_pipeline import PipelineConfig as Pipelined
from nnx_pipeline import TrainConfig as Training
from nnx_pipeline.lab.compile.measure import Measurement
from nnx_pipeline.train import Batch, TrainState, abstract_state

ROOT = Path(__file__).parents[1]


def mesh_of(text: str, sharding: str = "explicit") -> Mesh:
    """The mesh of a text such as `stage=4,fsdp=2` over virtual CPU devices."""
    return make_mesh(MeshConfig.parse(text), jax.devices("cpu"), sharding=sharding)


def small_config(
    *, model: dict | None = None, pipeline: dict | None = None, train: dict | None = None
) -> Config:
    """A Mixtral so small that compiling it is all it costs, with some fields replaced."""
    sizes = {
        "vocab_size": 32,
        "embed_dim": 16,
        "mlp_dim": 16,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 4,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "dtype": "float32",
    }
    steps = {"global_batch": 8, "sequence_length": 8, "loss_chunks": 2}
    return Config(
        model=ModelConfig(**{**sizes, **(model or {})}),
        pipeline=Pipelined(**(pipeline or {})),
        train=Training(**{**steps, **(train or {})}),
    )


def replace(config: Config, section: str, **changes: Any) -> Config:
    """The config with some fields of one section replaced."""
    new = dataclasses.replace(getattr(config, section), **changes)
    return dataclasses.replace(config, **{section: new})


def packed_batch(config: Config, *, seed: int = 0) -> Batch:
    """Numpy arrays: two documents and some padding per row, cut at a different place in each."""
    generator = np.random.default_rng(seed)
    shape = (config.train.global_batch, config.train.sequence_length)
    ids = generator.integers(config.model.vocab_size, size=(2, *shape), dtype=np.int32)
    segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for row in range(shape[0]):
        first, second = sorted(generator.choice(np.arange(1, shape[1]), size=2, replace=False))
        segments[row, :first], segments[row, first:second] = 1, 2
        positions[row, :first] = np.arange(first)
        positions[row, first:second] = np.arange(second - first)
    return Batch(
        tokens=ids[0],
        targets=ids[1],
        weights=(segments > 0).astype(np.float32),
        positions=positions,
        segment_ids=segments,
    )


@functools.cache
def _created(config: Config, seed: int, mesh: Any) -> tuple[list[np.ndarray], Any]:
    del mesh  # the one that is set: what a model knows of its place depends on it
    model = jax.jit(lambda: Mixtral(config, rngs=nnx.Rngs(seed)))()
    leaves, treedef = jax.tree.flatten(model)
    return [np.asarray(leaf) for leaf in leaves], treedef


def new_model(config: Config, *, seed: int = 0) -> Mixtral:
    """A model on one device, without a mesh; its program is compiled once per process."""
    leaves, treedef = _created(config, seed, jax.sharding.get_abstract_mesh())
    return jax.tree.unflatten(treedef, map(jnp.array, leaves))


def fresh_model(config: Config, mesh: Mesh, *, seed: int = 0) -> Mixtral:
    """What a config creates on a mesh, from what is created once for all meshes and options."""
    return model_on_mesh(new_model(Config(model=config.model), seed=seed), config, mesh)


def fresh_state(config: Config, mesh: Mesh) -> TrainState:
    """What `make_state` makes, without compiling a program for it."""
    with jax.set_mesh(mesh):
        abstract = abstract_state(config, mesh)

    def zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding)

    return TrainState(
        step=zeros(abstract.step),
        model=fresh_model(config, mesh),
        optimizer=jax.tree.map(zeros, abstract.optimizer),
    )


def model_on_mesh(source: Mixtral, config: Config, mesh: Mesh) -> Mixtral:
    """The weights of a model without stages, in the shape and place they have on a mesh.

    The layers of the source are `[1, 1, layers, …]`, those of the result `[repeats, stages, layers
    per stage, …]`: the same in row-major order, as the model promises. Padding repeats the last.
    """
    with jax.set_mesh(mesh):
        abstract = jax.eval_shape(lambda: Mixtral(config, rngs=nnx.Rngs(0)))

        variables, treedef = jax.tree.flatten(abstract, is_leaf=is_variable)

        def put(variable: nnx.Variable, value: jax.Array) -> nnx.Variable:
            spec = abstract.layout.spec(*variable.get_metadata("logical_axes"))
            array, shape = np.asarray(value), variable.get_value().shape
            if array.size < math.prod(shape):
                layers = array.reshape(-1, *shape[3:])
                places = np.arange(math.prod(shape[:3]))
                array = layers[np.minimum(places, len(layers) - 1)]
            array = array.reshape(shape)
            return variable.replace(jax.device_put(array, NamedSharding(mesh, spec)))

        placed = [put(*pair) for pair in zip(variables, jax.tree.leaves(source), strict=True)]
        return jax.tree.unflatten(treedef, placed)


def is_variable(leaf: Any) -> bool:
    """Whether a tree traversal should stop here: at a variable rather than at its array."""
    return isinstance(leaf, nnx.Variable)


def arrays_by_path(tree: Any) -> dict[str, Any]:
    """The arrays of a tree under readable paths."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def assert_close(actual: Any, expected: Any, tolerance: float) -> None:
    """Every array of one tree within `tolerance` times the largest value of its counterpart.

    The shapes may differ by leading axes that were split, not in size.
    """
    actual, expected = arrays_by_path(actual), arrays_by_path(expected)
    assert list(actual) == list(expected)
    for path, reference in expected.items():
        a = np.asarray(actual[path]).astype(np.float64)
        b = np.asarray(reference).astype(np.float64).reshape(a.shape)
        assert np.all(np.isfinite(b)), f"the reference of {path} is not finite"
        assert np.all(np.isfinite(a)), f"{path} is not finite"
        largest, difference = np.max(np.abs(b), initial=0), np.max(np.abs(a - b), initial=0)
        assert difference <= tolerance * max(largest, 1e-12), (
            f"{path}: off by {difference:.3g} where the largest value is {largest:.3g}"
        )


def assert_same_placement(tree: Any, like: Any) -> None:
    """Every array of one tree laid out over the devices as its counterpart is."""
    tree, like = arrays_by_path(tree), arrays_by_path(like)
    assert list(tree) == list(like)
    wrong = [
        f"{path}: {leaf.sharding.spec} instead of {like[path].sharding.spec}"
        for path, leaf in tree.items()
        if not leaf.sharding.is_equivalent_to(like[path].sharding, leaf.ndim)
    ]
    assert not wrong, "; ".join(wrong)


def optax_promotion() -> Any:
    """A context for what runs the optimizer: optax mixes integers and floats on purpose."""
    return jax.numpy_dtype_promotion("standard")


def carries(scan: Any) -> list[Any]:
    """The variables that a scan carries, as it gives them: those that it does not stack."""
    inside = scan.params["jaxpr"].jaxpr.outvars
    pairs = zip(scan.outvars, inside, strict=True)
    return [given for given, of_a_step in pairs if given.aval.shape == of_a_step.aval.shape]


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a jaxpr and of all jaxprs inside it."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    yield from equations(inner)


def largest_array(jaxpr: Any) -> int:
    """The number of elements of the largest array that any equation makes."""
    return max(
        math.prod(variable.aval.shape)
        for equation in equations(jaxpr)
        for variable in equation.outvars
        if hasattr(variable.aval, "shape")
    )


def float_rows(*shape: int, seed: int = 0) -> jax.Array:
    """Normal float32 values."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Ended]  # the fixture `run`


def fusions_of_a_user() -> dict[str, bool]:
    """Options of `jax.jit` that undo the faster way of the CPU compiler that conftest.py chooses.

    What that way adds up first depends on the order in which a program was traced, and two programs
    of the same mathematics are then equal only nearly, not to the bit.
    """
    faster = "--xla_cpu_use_fusion_emitters=false" in os.environ["XLA_FLAGS"]
    return {"xla_cpu_use_fusion_emitters": True} if faster else {}


def assert_account_adds_up(result: Measurement) -> None:
    """Of the memory, of the rows, and of what the compiler's two reports say of the same bytes."""
    account, memory = result.account, result.memory
    parts = (memory.argument_bytes, memory.output_bytes, -memory.alias_bytes)
    assert memory.account_bytes == sum(parts) + memory.constant_bytes + memory.heap_bytes
    assert sum(account.rows().values()) == memory.account_bytes
    assert min(account.rows().values()) >= 0
    assert account.notes == ()
    assert 0 <= account.scratch_bytes <= account.output_bytes
    assert sum(row.bytes for row in result.attribution.constants) == account.constant_bytes
    assert sum(row.bytes for row in result.attribution.in_outputs) == account.scratch_bytes
    written = result.to_json()
    assert written["memory"]["account_bytes"] == memory.account_bytes
    assert sum(written["account"]["rows"].values()) == memory.account_bytes
    kept = Measurement.from_cache(json.loads(json.dumps(result.to_cache())), "now")
    assert (kept.account, kept.memory) == (account, memory)


OF_JAX = ("JAX_", "XLA_", "TPU_")  # beginnings of variables


def user_environment() -> dict[str, str]:
    """The environment of a process in which JAX begins afresh."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OF_JAX)}
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


# The first line of a process that is to be interrupted: it takes SIGINT as one that a shell starts
# in the foreground, also where the one that runs the tests ignores it, as behind `nohup … &`.
INTERRUPTIBLE = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"


LONGEST = 60  # seconds until a moment comes, or a process has ended, on a machine that is busy


@contextlib.contextmanager
def started(
    folder: Path, code: str, *arguments: str, **options: object
) -> Iterator[subprocess.Popen]:
    """A process that has SIGINT as a shell gives it, whatever the one that runs the tests has."""
    (folder / "tmp").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE + code, *arguments],
        env={**user_environment(), "TMPDIR": str(folder / "tmp")},
        cwd=folder,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def hosts_of(script: str, *arguments: str) -> Iterator[list[subprocess.Popen]]:
    """Two processes of a script, whose arguments are a port, a rank and the given ones."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    hosts = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(port), str(rank), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**user_environment(), "XLA_FLAGS": os.environ["XLA_FLAGS"]},
        )
        for rank in range(2)
    ]
    try:
        yield hosts
    finally:
        for host in hosts:
            host.kill()


def script(package: str) -> str:
    """What the console script of that package runs."""
    folder = {"nnx_pipeline": "nnx_pipeline.lab", "linen_compat": "linen_compat"}[package]
    return f"from {folder}._cli.console import main; main()"


def in_a_process(*arguments: str) -> Ended:
    """Runs a command as a user does; JAX begins afresh, with as many devices as it is told."""
    script = "from nnx_pipeline.lab._cli.main import main; main()"
    return run_fresh(script, *arguments, environment=user_environment())


def run_fresh(
    script: str | Path,
    *arguments: str,
    folder: Path = ROOT,
    environment: Mapping[str, str] = os.environ,
) -> Ended:
    """Runs a text or a file of Python as in a process of its own, in a folder.

    The seconds that importing JAX takes are not spent each time: a process that has imported the
    libraries waits, one for each set of JAX's variables, and the script runs in a fork of it. JAX
    starts afresh there: it knows no device yet, and has compiled nothing.
    """
    process = _waiting(
        frozenset(pair for pair in environment.items() if pair[0].startswith(OF_JAX))
    )
    with tempfile.TemporaryDirectory() as place:
        written = [str(Path(place) / name) for name in ("out", "err")]
        job = {
            "text": script.read_text("utf-8") if isinstance(script, Path) else script,
            "file": str(script) if isinstance(script, Path) else "-c",
            "arguments": arguments,
            "folder": str(folder),
            "environment": dict(environment),
            "written": written,
        }
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
        code = int(process.stdout.readline())
        return Ended(code, *(Path(path).read_text("utf-8") for path in written))


@functools.cache
def _waiting(of_jax: frozenset[tuple[str, str]]) -> Any:
    process = subprocess.Popen(
        [sys.executable, "-c", "import fresh; exec(fresh.wait())"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**user_environment(), **dict(of_jax)},
    )
    atexit.register(process.stdin.close)  # at which it ends
    return process


def pytest_in(folder: Path, *arguments: str) -> Ended:
    """Runs pytest in a project of its own, where only its entry point makes the plugin known."""
    entry_points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    ((name, module),) = entry_points["pytest11"].items()
    installed = folder / ".installed" / "nnx_pipeline_of_tests-1.0.dist-info"
    installed.mkdir(parents=True, exist_ok=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: nnx-pipeline-of-tests\n")
    (installed / "entry_points.txt").write_text(f"[pytest11]\n{name} = {module}\n")
    environment = user_environment()
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (installed.parent, ROOT)))
    # Hypothesis takes a second to say at the end of each run that it has nothing to say.
    without = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest")
    command = [sys.executable, "-m", "pytest", *without, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    return Ended(done.returncode, done.stdout, done.stderr)


def commands_of(group: click.Group) -> dict[str, click.Command]:
    """The commands of a program by name, with those that entry points add."""
    context = click.Context(group)
    return {name: group.get_command(context, name) for name in group.list_commands(context)}


def missing(*modules: str) -> bool:
    for name in modules:
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:  # the package of a module within one
            return True
        if found is None:
            return True
    return False
