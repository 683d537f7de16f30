"""What can be kept of own functions, and the policy to paste: the same numbers and program."""

import ast
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from nnx_pipeline.lab._cli.changing.policies import change_of, to_paste, written
from nnx_pipeline.lab.api import measure, traced_call
from nnx_pipeline.lab.comparison.changes import Watched
from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.lab.lint.tries import space_of
from nnx_pipeline.lab.search.choices import Choice, Fate, Kind, Space

STEPS = Path(__file__).parents[2] / "benchmarks" / "remat_steps"


class Own(NamedTuple):
    """A step of `benchmarks/remat_steps`, and what its source is changed in.

    - `sizes`: the line of sizes that takes the place of its own.
    - `names`: of the values that its backward pass computes again, in order.
    - `loops`: how many of its loops store less with a checkpoint.
    - `call`: what the policy is pasted into, with its place.
    """

    sizes: str
    names: tuple[str, ...]
    loops: int
    call: tuple[str, str]
    gradients: Callable[[ModuleType], Any]


def of_arrays(module: ModuleType) -> Any:
    weights, batch = filled(module.inputs())
    return jax.value_and_grad(module.loss)(weights, batch)


def of_equinox(module: ModuleType) -> Any:
    _, (ids, _) = module.inputs()
    model = module.Transformer(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), ids.shape, 0, module.VOCABULARY)
    return eqx.filter_value_and_grad(module.loss)(model, (tokens, tokens))


def of_nnx(module: ModuleType) -> Any:
    _, batch = module.inputs()
    images, _ = filled(batch)
    labels = jnp.arange(len(images)) % module.CLASSES
    loss, gradients = nnx.value_and_grad(module.loss)(module.Mixer(nnx.Rngs(0)), (images, labels))
    return loss, nnx.to_pure_dict(gradients)


def filled(shapes: Any) -> Any:
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    arrays = [
        jax.random.normal(key, leaf.shape) / 4
        if jnp.issubdtype(leaf.dtype, jnp.floating)
        else jnp.zeros(leaf.shape, leaf.dtype)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, arrays)


OWN = {
    "unet": Own(
        "SIZE, CHANNELS, BATCH = 8, 4, 2",
        ("norm", "first_conv", "gelu"),
        0,
        ("jax.checkpoint(block)", "jax.checkpoint(block, policy={})"),
        of_arrays,
    ),
    "transformer": Own(
        "WIDTH, LAYERS, HEADS, BATCH, LENGTH, VOCABULARY = 8, 2, 2, 2, 6, 16",
        ("norm", "qkv", "shares", "out", "up"),
        0,
        ("jax.checkpoint(visit)", "jax.checkpoint(visit, policy={})"),
        of_equinox,
    ),
    "plain_nnx": Own(
        "PATCHES, WIDTH, LAYERS, CLASSES, BATCH = 6, 8, 2, 3, 2",
        ("turned", "across", "middle", "up"),
        1,
        ("scan(visit,", "scan(jax.checkpoint(visit, prevent_cse=False, policy={}),"),
        of_nnx,
    ),
}


def source(name: str) -> str:
    text = (STEPS / f"{name}.py").read_text("utf-8")
    small, count = re.subn(r"(?m)^[A-Z, ]+ = [\d, ]+$", OWN[name].sizes, text)
    assert count == 1
    return small


def module_of(text: str, folder: Path, name: str) -> ModuleType:
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(f"remat_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def found_in(module: ModuleType, *, offloads: bool = True) -> tuple[Space, Watched]:
    given = module.inputs()
    return space_of(lambda: traced_call(module.step, *given, platform="cpu"), offloads=offloads)


def mixed(space: Space, *fates: Fate) -> Choice:
    """Loops recomputed, and the names with these fates in turn."""
    named = (fates[at % len(fates)] for at in range(len(space.kinds)))
    return tuple("recompute" if kind.is_loop else next(named) for kind in space.kinds)


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("name", OWN)
def test_what_is_found(name: str, tmp_path: Path) -> None:
    """Names whose values the backward pass does not read are left out."""
    space, watched = found_in(module_of(source(name), tmp_path, name))
    assert tuple(kind.name for kind in space.kinds if not kind.is_loop) == OWN[name].names
    assert sum(kind.is_loop for kind in space.kinds) == OWN[name].loops
    assert space.has_checkpoint == bool(watched.checkpoints) == (OWN[name].loops == 0)
    assert not watched.checkpointed or name == "transformer"
    without, _ = found_in(module_of(source(name), tmp_path, name), offloads=False)
    assert all(kind.fates == ("recompute", "keep") for kind in without.kinds)


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("fates", [("keep", "recompute"), ("recompute", "offload", "keep")])
def test_the_pasted_policy(name: str, fates: tuple[Fate, ...], tmp_path: Path) -> None:
    """In the source it gives equal losses and gradients, and the program that was measured."""
    own, text = OWN[name], source(name)
    plain = module_of(text, tmp_path, name)
    space, _ = found_in(plain)
    choice = mixed(space, *fates)
    code = written(space, choice)
    before, after = own.call
    assert text.count(before) == 1
    pasted = module_of(text.replace(before, after.format(code)), tmp_path, f"{name}_pasted")
    (loss, gradients), (want, wanted) = own.gradients(pasted), own.gradients(plain)
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(wanted)) > 1e-4
    for one, other in zip(*map(jax.tree.leaves, (gradients, wanted)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    with change_of(space, choice).applied():
        changed = measure(plain.step, *plain.inputs(), platform="cpu")
    assert measure(pasted.step, *pasted.inputs(), platform="cpu").fingerprint == changed.fingerprint
    assert measure(plain.step, *plain.inputs(), platform="cpu").fingerprint != changed.fingerprint


def test_where_to_paste(tmp_path: Path) -> None:
    """The lines that call what is in a checkpoint, or the loop that gets one."""
    scan = r"jax\.lax\.scan"
    for name, words in (("unet", r"remat\("), ("plain_nnx", scan), ("transformer", scan)):
        text = source(name)
        space, watched = found_in(module_of(text, tmp_path, name))
        said = to_paste(space, mixed(space, "keep"), [*watched.checkpoints])
        lines = [int(number) for number in re.findall(rf"{name}\.py:(\d+)", said)]
        assert lines == [
            at for at, line in enumerate(text.splitlines(), 1) if re.search(rf"= .*{words}", line)
        ]
        assert "names_which_can_be_saved" in said
        everything = to_paste(space, space.everything, [*watched.checkpoints])
        assert "everything is kept" in everything


def test_names_are_written_as_python_has_them() -> None:
    names = ['a"b', "back\\slash", "line\nbreak", "größe", "plain"]
    space = Space(tuple(map(Kind, names)))
    (kept, _, *_) = ast.parse(written(space, ("keep",) * 5)).body[0].value.keywords
    assert ast.literal_eval(kept.value) == names
    assert '"größe", "plain"]' in written(space, ("keep",) * 5)


def test_nothing_to_choose() -> None:
    x = jnp.ones((4, 4))

    def named(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(checkpoint_name(jnp.sin(x), "inner")))

    def refused(function: Callable[..., Any]) -> str:
        with pytest.raises(InputError) as error:
            space_of(lambda: traced_call(function, x, platform="cpu"), offloads=True)
        return str(error.value)

    assert "has no backward pass" in refused(named)
    assert "calls no jax.checkpoint, and has no loop" in refused(jax.grad(named))
    unnamed = jax.checkpoint(lambda x: jnp.sum(jnp.sin(jnp.sin(x))))
    assert "names no value that its jax.checkpoint computes again" in refused(jax.grad(unnamed))
