"""Whether `compare --baseline` and `bisect` find regressions in the history of another project.

    python benchmarks/outside_history.py [PLATFORM …]

makes a git repository of four training steps (plain JAX, NNX, Equinox and Linen), commits to it 20
changes that cost memory and 20 that cost none, compares each with the commit before it, bisects 12
histories of seven commits, and writes benchmarks/results/outside_history.md.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from nnx_pipeline.lab._files import write_text

RESULTS = Path(__file__).parent / "results" / "outside_history.md"
PLATFORMS = ("tpu:v5e:2x2",)
LIMIT = "5%"
ABOUT = f"""# Regressions in the history of another project

A repository of four training steps, made by `python benchmarks/outside_history.py`. Each change is
a commit, which `compare --baseline HEAD~1 FILE:step --fail-above {LIMIT}` compares with the one
before it: it should fail for a change that costs memory, and for no other. The sizes are the
changes of the account, in MB. `bisect` is given histories of seven commits, one of which costs
memory.

"""
HEAD = """import jax
import jax.numpy as jnp
import optax

WIDTH, HIDDEN, LAYERS, VOCAB, ROWS, CHUNKS = 256, 1024, 2, 4096, 2048, 8
RATE = 1e-3


def cross_entropy(table, x, labels):
    logits = (x @ table.T.astype(x.dtype)).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum()


def chunked(table, x, labels):
    add = jax.checkpoint(lambda total, part: (total + cross_entropy(table, *part), None))
    parts = x.reshape(CHUNKS, -1, WIDTH), labels.reshape(CHUNKS, -1)
    return jax.lax.scan(add, jnp.float32(0), parts)[0]


"""
TOKENS = "    tokens = jax.ShapeDtypeStruct((ROWS,), jnp.int32)\n"
FILES = {
    "plain": HEAD
    + """def layer(x, w):
    inner = jax.nn.gelu(x @ w["up"])
    return x + inner @ w["down"], None


def loss_fn(params, tokens, labels):
    x = params["embed"][tokens]
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
    return chunked(params["embed"], x, labels) / ROWS


def train_step(params, momentum, tokens, labels):
    loss, grads = jax.value_and_grad(loss_fn)(params, tokens, labels)
    momentum = jax.tree.map(lambda m, g: (0.9 * m + g).astype(m.dtype), momentum, grads)
    params = jax.tree.map(lambda p, m: (p - RATE * m).astype(p.dtype), params, momentum)
    return params, momentum, loss


step = jax.jit(train_step, donate_argnums=(0, 1))


def inputs():
    def make(dtype):
        layers = {"up": (LAYERS, WIDTH, HIDDEN), "down": (LAYERS, HIDDEN, WIDTH)}
        layers = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in layers.items()}
        return {"embed": jax.ShapeDtypeStruct((VOCAB, WIDTH), dtype), "layers": layers}

"""
    + TOKENS
    + """    return make(jnp.bfloat16), make(jnp.bfloat16), tokens, tokens
""",
    "with_nnx": HEAD.replace("import optax\n", "import optax\nfrom flax import nnx\n")
    + """class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, HIDDEN, dtype=jnp.bfloat16, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, x):
        inner = nnx.gelu(self.up(x))
        return x + self.down(inner)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = nnx.remat(lambda block, x: block(x))(block, x)
        return x


@nnx.jit(donate_argnums=(0, 1))
def step(model, optimizer, tokens, labels):
    def loss_fn(model):
        x = model(tokens)
        return chunked(model.embed.embedding[...], x, labels) / ROWS, x

    (loss, x), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    optimizer.update(model, grads)
    return loss


def inputs():
    def make():
        model = Model(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sgd(RATE, momentum=0.9), wrt=nnx.Param)

"""
    + TOKENS
    + """    return *nnx.eval_shape(make), tokens, tokens
""",
    "with_equinox": HEAD.replace("import jax\nimp", "import equinox as eqx\nimport jax\nimp")
    + """optim = optax.sgd(RATE, momentum=0.9)


class Block(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        self.up = eqx.nn.Linear(WIDTH, HIDDEN, dtype=jnp.bfloat16, key=key)
        self.down = eqx.nn.Linear(HIDDEN, WIDTH, dtype=jnp.bfloat16, key=key)

    def __call__(self, x):
        inner = jax.nn.gelu(self.up(x))
        return x + self.down(inner)


class Model(eqx.Module):
    embed: jax.Array
    blocks: list

    def __init__(self, key):
        self.embed = jax.random.normal(key, (VOCAB, WIDTH), jnp.bfloat16)
        self.blocks = [Block(key) for _ in range(LAYERS)]

    def __call__(self, tokens):
        x = self.embed[tokens]
        for block in self.blocks:
            x = eqx.filter_checkpoint(jax.vmap(block))(x)
        return x


@eqx.filter_jit(donate="all-except-first")
def step(batch, model, state):
    def loss_fn(model):
        x = model(batch[0])
        return chunked(model.embed, x, batch[1]) / ROWS, x

    (loss, x), grads = eqx.filter_value_and_grad(loss_fn, has_aux=True)(model)
    updates, state = optim.update(grads, state, model)
    return eqx.apply_updates(model, updates), state, loss


def inputs():
    def make():
        model = Model(jax.random.key(0))
        return model, optim.init(eqx.filter(model, eqx.is_inexact_array))

"""
    + TOKENS
    + """    return (tokens, tokens), *eqx.filter_eval_shape(make)
""",
    "with_linen": "from functools import partial\n\nimport flax.linen as nn\n"
    + HEAD.replace(
        "import optax\n", "import optax\nfrom flax.training.train_state import TrainState\n"
    )
    + """class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        inner = nn.gelu(nn.Dense(HIDDEN, dtype=jnp.bfloat16)(x))
        return x + nn.Dense(WIDTH, dtype=jnp.bfloat16)(inner)


class Model(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDTH, dtype=jnp.bfloat16, name="embed")(tokens)
        for _ in range(LAYERS):
            x = nn.remat(Block)()(x)
        return x


@partial(jax.jit, donate_argnames="state")
def step(state, tokens, labels):
    def loss_fn(params):
        x = state.apply_fn({"params": params}, tokens)
        return chunked(params["embed"]["embedding"], x, labels) / ROWS, x

    (loss, x), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads), loss


def inputs():
    def make():
        model = Model()
        params = model.init(jax.random.key(0), jnp.zeros(8, jnp.int32))["params"]
        tx = optax.sgd(RATE, momentum=0.9)
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

"""
    + TOKENS
    + """    return jax.eval_shape(make), tokens, tokens
""",
}


class Change(NamedTuple):
    """An edit of a file; the first text becomes the second wherever it is."""

    file: str
    name: str
    old: str
    new: str

    def edit(self, text: str) -> str:
        if self.old not in text:
            raise ValueError(f"{self.file} has no {self.old!r}")
        return text.replace(self.old, self.new)


_LOSS = "the loss of all tokens at once", "return chunked(", "return cross_entropy("
_WIDER = "a wider layer", "ROWS, CHUNKS = 256, 1024,", "ROWS, CHUNKS = 256, 4096,"
_VOCABULARY = "a larger vocabulary", "1024, 2, 4096,", "1024, 2, 16384,"
COSTLY = [
    Change("plain", "no remat", "jax.checkpoint(layer)", "layer"),
    Change("plain", *_LOSS),
    Change("plain", "momentum in float32", "make(jnp.bfloat16), tok", "make(jnp.float32), tok"),
    Change("plain", *_VOCABULARY),
    Change("plain", *_WIDER),
    Change("with_nnx", *_WIDER),
    Change("with_nnx", *_LOSS),
    Change("with_nnx", "Adam", "optax.sgd(RATE, momentum=0.9)", "optax.adam(RATE)"),
    Change(
        "with_nnx",
        "the logits are returned",
        "return loss\n",
        "return loss, x @ model.embed.embedding[...].T\n",
    ),
    Change("with_nnx", *_VOCABULARY),
    Change("with_equinox", *_WIDER),
    Change("with_equinox", *_LOSS),
    Change("with_equinox", "fewer parts of the loss", "4096, 2048, 8", "4096, 2048, 2"),
    Change(
        "with_equinox",
        "the logits are returned",
        "loss\n\n\ndef",
        "loss, x @ model.embed.T\n\n\ndef",
    ),
    Change("with_equinox", *_VOCABULARY),
    Change("with_linen", *_WIDER),
    Change("with_linen", *_LOSS),
    Change("with_linen", "Adam", "optax.sgd(RATE, momentum=0.9)", "optax.adam(RATE)"),
    Change("with_linen", *_VOCABULARY),
    Change(
        "with_linen",
        "the logits are returned",
        "grads), loss\n",
        'grads), loss, x @ state.params["embed"]["embedding"].T\n',
    ),
]
HARMLESS = [
    Change(file, name, old, new)
    for file in FILES
    for name, old, new in (
        ("a comment", "def cross", "# Of all rows.\n\n\ndef cross"),
        ("another name", "inner", "wide"),
        ("another rate", "1e-3", "3e-4"),
        ("a sum in two lines", "return optax.softmax", "return 1.0 * optax.softmax"),
        ("a helper", "def inputs", "def count(tree):\n    return len(tree)\n\n\ndef inputs"),
    )
]


class Repository:
    """The repository with its four files, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.git("init", "-q", "-b", "main")
        (folder / ".git/info/exclude").write_text("__pycache__\n")
        self.git("config", "user.email", "a@b.c")
        self.git("config", "user.name", "A")
        self.base = self.commit("Four training steps", FILES)

    def git(self, *words: str) -> str:
        command = ["git", "-c", "commit.gpgsign=false", *words]
        done = subprocess.run(command, cwd=self.folder, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def commit(self, subject: str, files: dict[str, str]) -> str:
        for name, text in files.items():
            (self.folder / f"{name}.py").write_text(text)
        self.git("add", "-A")
        self.git("commit", "-qm", subject)
        return self.git("rev-parse", "HEAD")

    def change(self, change: Change) -> str:
        text = (self.folder / f"{change.file}.py").read_text()
        return self.commit(change.name, {change.file: change.edit(text)})

    def run(self, *words: str) -> tuple[int, dict[str, Any], str]:
        program = str(Path(sys.executable).with_name("nnx-pipeline"))
        command = [program, *words, "--json", "-"]
        done = subprocess.run(
            command, cwd=self.folder, capture_output=True, text=True, check=False, env=os.environ
        )
        return done.returncode, json.loads(done.stdout or "{}"), done.stderr


class Compared(NamedTuple):
    change: Change
    megabytes: float  # by which the account changes
    is_flagged: bool


def compared(repository: Repository, platform: str, change: Change) -> Compared:
    repository.git("checkout", "-q", repository.base)
    repository.change(change)
    given = f"{change.file}.py:step", "--inputs", f"{change.file}.py:inputs"
    limits = "--platform", platform, "--fail-above", LIMIT
    code, found, error = repository.run("compare", "--baseline", "HEAD~1", *given, *limits)
    if not found:
        raise RuntimeError(error)
    arms = found["experiments"][0]["arms"]
    a, b = (arms[arm]["memory"]["account_bytes"] for arm in ("a", "b"))
    print(f"{change.file}: {change.name}: {code} {b - a:+,}", file=sys.stderr, flush=True)
    return Compared(change, (b - a) / 1e6, code == 1)


def bisected(repository: Repository, platform: str, number: int) -> bool:
    """Whether the commit with a costly change is found among six with harmless ones."""
    change = COSTLY[number]
    own = [one for one in HARMLESS if one.file == change.file]
    repository.git("checkout", "-q", repository.base)
    before, after = own[: number % 6], own[number % 6 :]
    for one in before:
        repository.change(one)
    wanted = repository.change(change)
    for one in after:
        repository.change(one)
    given = f"{change.file}.py:step", "--inputs", f"{change.file}.py:inputs"
    ends = repository.base, repository.git("rev-parse", "HEAD")
    _, found, error = repository.run("bisect", *ends, *given, "--platform", platform)
    first = [one["commit"] for one in found.get("first", [])]
    print(f"bisect {change.file}: {change.name}: {first == [wanted]}", file=sys.stderr, flush=True)
    if not found:
        print(error, file=sys.stderr)
    return first == [wanted]


def section(platform: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        repository = Repository(Path(folder))
        start = time.monotonic()
        costly, harmless = (
            [compared(repository, platform, change) for change in changes]
            for changes in (COSTLY, HARMLESS)
        )
        seconds = time.monotonic() - start
        chosen = [number for number in range(len(COSTLY)) if number % 5 < 3]
        hits = sum(bisected(repository, platform, number) for number in chosen)
    rows = [
        f"| {one.change.file} | {one.change.name} | {kind} | {one.megabytes:+,.1f} | "
        f"{'yes' if one.is_flagged else 'no'} |\n"
        for kind, those in (("costs memory", costly), ("harmless", harmless))
        for one in those
    ]
    return (
        f"## {platform}\n\nOf the changes that cost memory {sum(one.is_flagged for one in costly)} "
        f"of {len(costly)} are found; of the harmless ones "
        f"{sum(one.is_flagged for one in harmless)} of {len(harmless)} are flagged. All compares "
        f"took {seconds:.0f} s. `bisect` found the commit in {hits} of {len(chosen)}.\n\n"
        f"| file | change | kind | MB | flagged |\n|---|---|---|--:|---|\n{''.join(rows)}"
    )


def main() -> None:
    sections = [section(platform) for platform in sys.argv[1:] or PLATFORMS]
    write_text(str(RESULTS), ABOUT + "\n".join(sections))


if __name__ == "__main__":
    main()
