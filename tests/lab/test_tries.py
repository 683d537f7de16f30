"""What `memory --try` changes of a function: the same numbers, and the program of the cure."""

import functools
import json
import math
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scanned_styles as styles
from documents import BLOCKS
from flax import nnx
from helpers import INTERRUPTIBLE, Run, missing, optax_promotion, user_environment

from nnx_pipeline import lab
from nnx_pipeline.lab._tracing.calls import traced_afresh
from nnx_pipeline.lab.api import traced_call
from nnx_pipeline.lab.comparison.changes import Change
from nnx_pipeline.lab.compile.measure import Measurement
from nnx_pipeline.lab.lint import tries

STYLES = {
    "plain": (styles.plain_step, styles.plain_made),
    "decorated": (styles.decorated_step, styles.plain_made),
    "nnx": (styles.nnx_step, styles.nnx_made),
    "equinox": (styles.equinox_step, styles.equinox_made),
    "linen": (styles.linen_step, styles.linen_made),
}
PLAIN = ("memory", "scanned_styles:plain_step", "--inputs", "scanned_styles:plain_inputs", "--try")


@pytest.fixture(autouse=True)
def promotion() -> Iterator[None]:
    with optax_promotion():
        yield


def changes_of(function: Any, *arguments: Any) -> tuple[list[Change], list[str]]:
    return tries.changes_of(functools.partial(traced_call, function, *arguments))


def changes(function: Any, *arguments: Any) -> dict[str, Change]:
    """By the kind; of loops and policies the first."""
    found: dict[str, Change] = {}
    for change in changes_of(function, *arguments)[0]:
        found.setdefault(change.kinds[0], change)
    return found


def measured(change: Change, function: Any, *arguments: Any) -> Measurement:
    with change.applied():
        return lab.measure(change.of(function), *arguments, platform="cpu")


def arrays(tree: Any) -> list[Any]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype")]


def computed(function: Any, made: Any) -> list[Any]:
    """All that a step returns and what it changes of its arguments."""
    arguments = made()
    with traced_afresh():
        jitted = function if hasattr(function, "lower") else jax.jit(function)
        result = jitted(*arguments)
    changed = [nnx.state(one) for one in arguments if isinstance(one, nnx.Module)]
    return arrays((result, changed))


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("style", STYLES)
def test_no_change_of_what_is_kept_changes_a_number(style: str) -> None:
    function, made = STYLES[style]
    before = computed(function, made)
    tried = [one for one in changes_of(function, *made())[0] if "donation" not in one.kinds]
    assert tried
    for change in tried:
        if "host" in change.name:
            continue  # the CPU has no memory of another kind
        with change.applied():
            after = computed(function, made)
        for one, other in zip(before, after, strict=True):
            np.testing.assert_allclose(other, one, rtol=2e-5, atol=1e-7, err_msg=change.name)


@pytest.mark.slow(but=3)
@pytest.mark.parametrize(
    ("function", "cured", "made", "kind"),
    [
        (styles.plain_step, styles.plain_cured, styles.plain_made, "loop"),
        (styles.decorated_step, styles.decorated_cured, styles.plain_made, "policy"),
        (
            styles.plain_step,
            jax.jit(styles.plain_step, donate_argnums=(0, 1)),
            styles.plain_made,
            "donation",
        ),
        (styles.nnx_step, styles.nnx_donating, styles.nnx_made, "donation"),
        (styles.equinox_step, styles.equinox_donating, styles.equinox_made, "donation"),
        (
            styles.linen_step,
            jax.jit(styles.linen_step.__wrapped__, donate_argnums=0),
            styles.linen_made,
            "donation",
        ),
    ],
)
def test_a_change_makes_the_program_of_its_cure(
    function: Any, cured: Any, made: Any, kind: str
) -> None:
    arguments = made()
    base = lab.measure(function, *arguments, platform="cpu").memory
    tried = measured(changes(function, *arguments)[kind], function, *arguments).memory
    by_hand = lab.measure(cured, *arguments, platform="cpu").memory
    assert tried.account_bytes != base.account_bytes
    # Equinox adds a number to the results of a jitted function, which is one of its program.
    for name in ("account_bytes", "alias_bytes", "heap_bytes"):
        pair = getattr(tried, name), getattr(by_hand, name)
        assert pair[0] == pytest.approx(pair[1], abs=8 if function is styles.equinox_step else 0), (
            name
        )


def test_what_comes_back_is_donated_by_name_and_number() -> None:
    change = changes(styles.plain_step, *styles.plain_made())["donation"]
    assert change.donated == (0, 1)
    assert "donate_argnums=(0, 1)" in change.cure
    assert "donate_argnames=('parameters', 'state')" in change.cure
    assert changes(styles.linen_step, *styles.linen_made())["donation"].donated == (0,)
    donating = jax.jit(styles.plain_step, donate_argnums=(0, 1))
    assert "donation" not in changes(donating, *styles.plain_made())


def test_what_a_result_is_like_by_chance_is_donated_apart() -> None:
    def step(w: Any, cache: Any, x: Any) -> Any:
        x = x @ w
        return jax.lax.dynamic_update_slice(cache, x[None], (1, 0, 0)), x

    w, cache = jnp.ones((32, 32)), jnp.ones((4, 32, 32))
    own, others = changes_of(step, w, cache, w)[0]
    assert (own.donated, own.assumes) == ((1,), "")
    assert others.donated == (0, 1)
    assert others.assumes.startswith("w ")


def test_a_loop_that_has_a_checkpoint_is_left_alone() -> None:
    found, left_out = changes_of(styles.plain_cured, *styles.plain_made())
    assert not [one for one in found if "loop" in one.kinds]
    assert any("stores less" in why for why in left_out)


scan = jax.lax.scan


def test_a_loop_of_another_name_is_said() -> None:
    def step(w: Any, x: Any) -> Any:
        return jax.grad(lambda w: jnp.sum(scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]))(w)

    found, left_out = changes_of(step, jnp.ones((3, 8, 8)), jnp.ones((4, 8)))
    assert not [one for one in found if "loop" in one.kinds]
    assert any("imported by its own name" in why for why in left_out)


@pytest.mark.parametrize("name", ["map", "fori_loop"])
def test_other_loops_of_jax_are_changed_too(name: str) -> None:
    def layer(x: Any) -> Any:
        return jnp.tanh(jnp.sin(jnp.tanh(x)))

    def step(x: Any) -> Any:
        def loss(x: Any) -> Any:
            if name == "map":
                return jnp.sum(jax.lax.map(layer, x))
            return jnp.sum(jax.lax.fori_loop(0, 4, lambda at, x: layer(x), x))

        return jax.grad(loss)(x)

    x = jnp.ones((4, 1024))
    change = changes(step, x)["loop"]
    with change.applied():
        cured = jax.jit(step)(x)
    np.testing.assert_allclose(cured, jax.jit(step)(x), rtol=1e-6)


def test_everything_is_as_before_afterwards() -> None:
    loops = jax.lax.scan, jax.lax.map, jax.lax.fori_loop
    change = changes(styles.decorated_step, *styles.plain_made())["policy"]
    with pytest.raises(ZeroDivisionError), change.applied():
        raise ZeroDivisionError
    assert (jax.lax.scan, jax.lax.map, jax.lax.fori_loop) == loops
    before = computed(styles.decorated_step, styles.plain_made)
    assert measured(change, styles.decorated_step, *styles.plain_made()).fingerprint != (
        lab.measure(styles.decorated_step, *styles.plain_made(), platform="cpu").fingerprint
    )
    assert all(map(np.array_equal, before, computed(styles.decorated_step, styles.plain_made)))


def test_the_table_and_the_json(run: Run, tmp_path: Path) -> None:
    page, file = tmp_path / "page.html", tmp_path / "tried.json"
    ended = run(*PLAIN, "--platform", "cpu", "--json", file, "--html", page)
    assert ended.code == 0, ended.err
    assert "compiles to come; the first took" in ended.err
    found = json.loads(file.read_text())
    rows = found["tried"]
    assert [row["kinds"] for row in rows[-1:]] == [["loop", "donation"]]
    gains = [row["gain_bytes"] for row in rows[:-1]]
    assert gains == sorted(gains, reverse=True)
    base = found["memory"]["account_bytes"]
    for row in rows:
        assert row["gain_bytes"] == base - row["result"]["memory"]["account_bytes"]
        assert row["name"].split(",")[0] in ended.out
    assert rows[-1]["gain_bytes"] >= max(gains)
    shown = page.read_text()
    assert "donate_argnums=(0, 1)" in shown
    assert f"{rows[0]['name']}: {rows[0]['gain_bytes'] / 1e6:,.1f} MB less → " in shown


def test_a_change_that_fails_is_a_row(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nnx_pipeline.lab.lint.tries.loop_changes", loops_that_fail)
    ended = run(*PLAIN, "--platform", "cpu", "--json", "-")
    assert ended.code == 0, ended.err
    (row,) = [row for row in json.loads(ended.out)["tried"] if row["error"]]
    assert row["gain_bytes"] is None
    assert "no policy of this kind" in row["error"]


def loops_that_fail(lines: Any, *, keeping: bool = True) -> Iterator[Change]:
    def policy(*_: Any, **__: Any) -> Any:
        raise ValueError("no policy of this kind")

    keeps = policy if keeping else None
    yield Change(kinds=("loop",), name="fails", cure="", loops=frozenset(lines), keeps=keeps)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["memory", "tiny", "--try", "--platform", "cpu"], "tiny is none"),
        ([*PLAIN, "--platform", "cuda:h100:1", "--gemm", "both"], "one kind of matrix products"),
    ],
)
def test_what_cannot_be_tried_is_refused(words: list[str], said: str, run: Run) -> None:
    ended = run(*words)
    assert (ended.code, ended.out) == (2, "")
    assert said in ended.err


def test_an_interrupted_run_shows_what_it_has(tmp_path: Path) -> None:
    written = ("--json", str(tmp_path / "x.json"))
    script = "from nnx_pipeline.lab._cli.console import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE + script, *PLAIN, "--platform", "cpu", *written],
        cwd=Path(__file__).parents[1],
        env=user_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if " 2 of " in line:
            process.send_signal(signal.SIGINT)
            break
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "as it is" in out
    assert "not tried yet" in out
    assert json.loads((tmp_path / "x.json").read_text())["buffers"]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    "platform",
    [
        pytest.param(
            "cuda:h100:1",
            marks=pytest.mark.skipif(missing("jax_cuda13_plugin"), reason="no plugin"),
        ),
        pytest.param(
            "tpu:v5p:2x2x1", marks=pytest.mark.skipif(missing("libtpu"), reason="no libtpu")
        ),
    ],
)
def test_a_promise_is_kept_where_it_is_tried(platform: str, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "tried.json"
    ended = run(*PLAIN, "--platform", platform, "--json", file)
    assert ended.code == 0, ended.err
    rows = json.loads(file.read_text())["tried"]
    promised = [row for row in rows if row["promised_bytes"]]
    assert promised
    for row in promised:
        assert 0 < row["promised_bytes"] <= row["gain_bytes"], row["name"]
    assert all(math.isfinite(row["result"]["time"]["step_seconds"]) for row in rows)


@pytest.mark.slow
@pytest.mark.skipif(missing("jax_cuda13_plugin"), reason="the plugin is not installed")
def test_the_table_of_the_page(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (code,) = [one for one in BLOCKS if one.file == "my_layers.py"]
    (shown,) = [one for one in BLOCKS if one.text.lstrip().startswith("change ")]
    (command,) = [line for one in BLOCKS for line in one.lines if "my_layers:step" in line]
    (tmp_path / code.file).write_text(code.text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    ended = run(*command.split()[1:])
    assert ended.code == 0, ended.err
    lines = [" ".join(line.split()) for line in ended.out.splitlines()]
    if jax.__version__ == "0.10.2":
        assert not {" ".join(line.split()) for line in shown.lines} - {*lines}
    assert any("donate_argnums=(0, 1)" in line for line in lines)


UPDATES = """
import jax

def step(weights, moments, x):
    gradients = jax.grad(lambda w: ((x @ w["up"]) ** 2).sum())(weights)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradients)
    return jax.tree.map(lambda w, m: w - 0.1 * m, weights, moments), moments

donated = jax.jit(step, donate_argnums=(0, 1))

def inputs():
    w = {"up": jax.ShapeDtypeStruct((512, 512), "float32")}
    return w, w, jax.ShapeDtypeStruct((64, 512), "float32")
"""


def test_memory_says_what_is_not_donated(run: Run, tmp_path: Path) -> None:
    """With the line of the function; nothing of one that donates it."""
    file = tmp_path / "updates.py"
    file.write_text(UPDATES)
    words = ("--inputs", f"{file}:inputs", "--platform", "cpu")
    said = " ".join(run("memory", f"{file}:step", *words).out.split())
    assert "not donated: weights, moments (2 arrays), whose memory results could take: " in said
    assert "step is at updates.py:4; donate what its caller does not read again" in said
    found = run("memory", f"{file}:step", *words, "--json", "-").json["not_donated"]
    assert (found["arguments"], found["source"]) == (["weights", "moments"], "updates.py:4")
    assert 0 < found["bytes"] <= 2 * 4 * 512 * 512
    donated = run("memory", f"{file}:donated", *words, "--json", "-").json
    assert donated["not_donated"] is None
