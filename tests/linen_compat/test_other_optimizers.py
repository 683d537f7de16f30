"""Parameters beside the state of any optimizer are read; of states only that of AdamW is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from helpers import arrays_by_path
from maxtext_data import DATA, checkpoint, config_of, full_state, nested, read, write

import linen_compat
from linen_compat.checkpoints._check import diagnose
from linen_compat.formats._orbax.inspect import inspect
from linen_compat.formats._streams import Mismatch

CONFIG = DATA / "unscanned" / "config.yml"
MU = "opt_state/0/mu/params/decoder/decoder_norm/scale"
OTHERS = {
    "sgd": (optax.sgd(1e-3, momentum=0.9), "opt_state/0/trace,"),
    "clipped AdamW": (
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
        "opt_state/1/0/count, opt_state/1/0/mu, opt_state/1/0/nu,",
    ),
    "Adafactor": (optax.adafactor(1e-3), "opt_state/0/count, opt_state/0/v_row, "),
    "several steps": (optax.MultiSteps(optax.adamw(1e-3), 2), "opt_state/mini_step, "),
    "injected": (optax.inject_hyperparams(optax.adamw)(1e-3), "opt_state/count, "),
    "Lion": (optax.lion(1e-3), "opt_state/0/mu, opt_state/0/count,"),
    "Adam with a schedule": (
        optax.adam(lambda step: 1e-3),
        "opt_state/0/mu, opt_state/0/nu, opt_state/0/count, opt_state/1/count,",
    ),
}


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[Any], Path]:
    """Saves the kept parameters by Orbax, beside the state that an optimizer begins with."""

    def save(optimizer: optax.GradientTransformation) -> Path:
        leaves = {k: v for k, v in full_state().items() if k.startswith("params/")}
        params = nested(leaves)["params"]
        tree = {
            "step": np.asarray(2, np.int32),
            "params": params,
            "opt_state": optimizer.init(params),
        }
        with ocp.PyTreeCheckpointer() as saver:
            saver.save(tmp_path / "source", tree)
        return tmp_path / "source"

    return save


def assert_same_parameters(model: Any) -> None:
    expected = arrays_by_path(linen_compat.load(checkpoint("unscanned"), config_of()))
    for path, array in arrays_by_path(model).items():
        np.testing.assert_array_equal(array, expected[path], err_msg=path)


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("name", OTHERS)
def test_the_parameters_are_read_and_the_state_is_not(saved, tmp_path, bridge, name):
    optimizer, shown = OTHERS[name]
    source, out = saved(optimizer), tmp_path / "out"
    said = f"the optimizer's state is {shown}"
    assert_same_parameters(linen_compat.load(source, config_of()))
    with pytest.raises(Mismatch, match=r"; load the parameters alone with linen_compat.load$") as e:
        linen_compat.load_train_state(source, config_of())
    assert said in str(e.value)
    assert "only that of optax.adamw is read (opt_state/0/mu, opt_state/0/nu and" in str(e.value)

    ended = bridge("check", source, "--config", CONFIG, "--read", "--json", "-")
    assert ended.code == 0, ended.err
    assert said in ended.json["optimizer"]
    assert "load_train_state refuses it" in ended.json["optimizer"]

    ended = bridge("convert", source, out, "--to", "maxtext:scanned")
    assert (ended.code, said in ended.err) == (1, True)
    assert "convert the parameters alone with --parameters-only" in ended.err
    ended = bridge("convert", source, out, "--to", "maxtext:unscanned", "--parameters-only")
    assert ended.code == 0, ended.err
    assert "opt_state" in ended.out
    assert "as --parameters-only asks" in " ".join(ended.out.split())
    assert read(out).keys() == {k for k in read(source) if not k.startswith("opt_state/")}
    assert_same_parameters(linen_compat.load(out, config_of()))


def test_check_shows_what_becomes_of_the_state(saved, bridge):
    ended = bridge("check", saved(OTHERS["sgd"][0]), "--config", CONFIG)
    said = " ".join(ended.out.split())
    assert "the optimizer's state is opt_state/0/trace, and only that of optax.adamw is" in said
    assert "linen_compat.load and convert --parameters-only leave it out" in said


def test_a_hugging_face_folder_gets_no_state_of_any_optimizer(saved, tmp_path, bridge):
    source = saved(OTHERS["sgd"][0])
    ended = bridge("convert", source, tmp_path / "hf", "--to", "huggingface", "--config", CONFIG)
    assert ended.code == 0, ended.err
    left = "left behind: opt_state/0/trace, step, for which a Hugging Face folder has no place"
    assert left in " ".join(ended.out.split())


def test_adamw_alone_is_read(saved, tmp_path, bridge):
    leaves = read(saved(optax.adamw(1e-3)))
    source = write(tmp_path / "state", {**leaves, "step": leaves["opt_state/0/count"]})
    assert inspect(source).other_optimizer is None
    assert diagnose(source, config_of()).optimizer is None
    state = linen_compat.load_train_state(source, config_of())
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(optax.tree.get(state, "mu")))
    left = "opt_state/0/mu, opt_state/0/nu, opt_state/0/count, as --parameters-only asks"
    ended = bridge("convert", source, tmp_path / "out", "--to", "nnx", "--parameters-only")
    assert f"left behind: {left}" in " ".join(ended.out.split())


def test_infinity_in_a_state_that_is_left_out_is_no_damage(saved, bridge):
    source = saved(optax.contrib.reduce_on_plateau())  # its best value so far is infinity
    assert np.isinf(read(source)["opt_state/best_value"])
    ended = bridge("check", source, "--config", CONFIG, "--read")
    assert ended.code == 0, ended.err


@pytest.mark.parametrize("lost", ["step", MU, "opt_state/0/count"])
def test_a_damaged_state_of_adamw_leaves_the_parameters(tmp_path, bridge, lost):
    """`check` says so, and both ways to read them alone do."""
    source = write(tmp_path / "items", {k: v for k, v in full_state().items() if k != lost})
    ended = bridge("check", source, "--config", CONFIG, "--json", "-")
    assert (ended.code, f"{lost} is missing" in ended.err) == (1, True)
    assert ended.json["optimizer"].startswith("the parameters alone fit: linen_compat.load and")
    assert bridge("convert", source, tmp_path / "out", "--to", "nnx").code == 1
    assert_same_parameters(linen_compat.load(source, config_of()))
    ended = bridge("convert", source, tmp_path / "out", "--to", "nnx", "--parameters-only")
    assert ended.code == 0, ended.err


@pytest.mark.parametrize("other", ["batch_stats/mean", "ema/params/decoder/decoder_norm/scale"])
def test_what_is_no_state_of_an_optimizer_is_still_refused(saved, tmp_path, other):
    leaves = {**read(saved(OTHERS["sgd"][0])), other: np.zeros(3)}
    with pytest.raises(Mismatch, match=f"{other} has no place in the model"):
        linen_compat.load(write(tmp_path / "changed", leaves), config_of())


def test_parameters_that_do_not_fit_are_refused_beside_another_state(saved, tmp_path, bridge):
    leaves = read(saved(OTHERS["sgd"][0]))
    name = "params/params/decoder/decoder_norm/scale"
    source = write(tmp_path / "changed", {k: v for k, v in leaves.items() if k != name})
    with pytest.raises(Mismatch, match=f"{name} is missing"):
        linen_compat.load(source, config_of())
    ended = bridge("check", source, "--config", CONFIG)
    assert (ended.code, f"{name} is missing" in ended.err) == (1, True)
