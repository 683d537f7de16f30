"""What a search may compile: said before it starts, counted, and kept for the next run."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from helpers import user_environment

from nnx_pipeline import lab
from nnx_pipeline.lab._cli.progress import progress
from nnx_pipeline.lab.compile._cache import Cache
from nnx_pipeline.lab.compile.measure import Measurement, kept_in
from nnx_pipeline.lab.search.effort import Effort, Spent


def product(x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ x.T) @ x


def measured(*rows: int, function: object = product) -> list[Measurement]:
    """Of each of these numbers of rows, all measured from one line: it is part of the program."""
    shapes = [jax.ShapeDtypeStruct((number, 16), "float32") for number in rows]
    return [lab.measure(function, shape, platform="cpu") for shape in shapes]


def searched(effort: Effort, *rows: int) -> list[Measurement]:
    return [effort.measure(f"rows={n}", lambda n=n: measured(n)[0]) for n in rows]


def test_it_says_what_may_come_and_goes_on_where_it_was(tmp_path: Path) -> None:
    said: list[str] = []
    first = Effort(what="product", most=3, cache=Cache(tmp_path), say=said.append)
    first.begin()
    assert said == ["3 compiles at most; how long one takes is not known yet"]
    again = Effort(what="product", most=3, cache=Cache(tmp_path), say=said.append)
    before, after = (searched(effort, 8, 16) for effort in (first, again))
    assert said[1:] == 2 * ["1 of at most 3: rows=8", "2 of at most 3: rows=16"]
    assert (first.tried, first.left) == (2, 1)
    assert (again.tried, again.left) == (2, 1)
    assert [bool(one.measured) for one in (*before, *after)] == [False, False, True, True]
    for made, kept in zip(before, after, strict=True):
        assert (kept.memory, kept.account) == (made.memory, made.account)
        assert kept.attribution == made.attribution
    (new,) = searched(again, 24)
    assert not new.measured
    again.begin()
    assert re.fullmatch(r"3 compiles at most; the last such took \d+\.\d s, on [\d-]+", said[-1])
    other = Effort(what="another", most=1, cache=Cache(tmp_path), say=said.append)
    other.begin()
    assert "not known yet" in said[-1]


def test_what_may_come_stays_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Above the line that tells what is done, which the next one takes the place of."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with progress() as say:
        Effort(what="product", most=3, say=say).begin()
        say("1 of at most 3: rows=8")
    erased = "\x1b[2K"
    assert f"{erased}3 compiles at most; how long one takes is not known yet\n" in (
        capsys.readouterr().err
    )


def test_no_compile_beyond_what_was_said() -> None:
    effort = Effort(what="product", most=1)
    searched(effort, 8)
    with pytest.raises(Spent, match="rows=16 would be more than 1 compile"):
        searched(effort, 16)


def test_one_that_fails_counts() -> None:
    effort = Effort(what="product", most=2)

    def fail() -> Measurement:
        raise TypeError("no such shape")

    with pytest.raises(TypeError):
        effort.measure("rows=8", fail)
    assert effort.left == 1


def made(operation: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """Functions of one name and one line, which compute different things."""
    return lambda x: operation(x @ x.T) @ x


def test_a_program_is_known_by_its_text(tmp_path: Path) -> None:
    other, another = made(jnp.sin), made(jnp.cos)
    cache = Cache(tmp_path)

    def are_known(*rows: int, function: object = product) -> list[bool]:
        return [bool(one.measured) for one in measured(*rows, function=function)]

    with kept_in(cache):
        assert are_known(8, 8, 9, 9, 8) == [False, True, False, True, True]
        assert are_known(8, 8, function=other) == [False, True]
        assert are_known(8, 8, function=another) == [False, True]
        for path in tmp_path.glob("*.json"):
            path.write_text(path.read_text().replace('"platform": "cpu"', '"platform": "tpu"'))
        assert are_known(8, 8, function=other) == [False, True], "a damaged entry"
    assert are_known(8, 8) == [False, False], "nothing is looked up outside the context"


def test_the_options_of_a_functions_own_jit_are_part_of_its_name(tmp_path: Path) -> None:
    """They are in no text; `own_options` reads them where JAX has no public name."""

    known = []
    with kept_in(Cache(tmp_path)):
        for options in ({}, {}, {"xla_disable_all_hlo_passes": True}):
            function = jax.jit(product, compiler_options=options)
            known.append(bool(measured(8, function=function)[0].measured))
    assert known == [False, True, False]


OWN = """
import sys
from collections.abc import Callable
from pathlib import Path
import jax, jax.numpy as jnp
from nnx_pipeline import lab
from nnx_pipeline.lab.compile._cache import Cache
from nnx_pipeline.lab.compile.measure import kept_in

def f(a):
    return {name: jnp.tanh(x) for name, x in a.items()}

given = {name: jax.ShapeDtypeStruct((8,), "float32") for name in {"w", "b", "scale", "other"}}
with kept_in(Cache(Path(sys.argv[1]))):
    print(bool(lab.measure(f, given).measured))
"""


def test_another_process_finds_it(tmp_path: Path) -> None:
    """Whatever the seed of Python's hashes."""
    (tmp_path / "own.py").write_text(OWN)
    found = [
        subprocess.run(
            [sys.executable, "own.py", str(tmp_path / "cache")],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**user_environment(), "PYTHONHASHSEED": seed},
        )
        for seed in ("1", "2")
    ]
    assert [one.stdout for one in found] == ["False\n", "True\n"], found
