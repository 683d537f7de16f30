"""The step and the counts of a training state: checked by whoever reads or writes them."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from maxtext_data import DATA, checkpoint, config_of, full_state, read, write

import linen_compat
from linen_compat.formats._plausible import is_count
from linen_compat.formats._streams import Mismatch
from nnx_pipeline import InputError

CONFIG = str(DATA / "unscanned" / "config.yml")
NU = "opt_state/0/nu/params/decoder/layers_1/self_attention/out/kernel"
COUNTS = ("opt_state/0/count", "opt_state/2/count")


def all_to(value):
    return dict.fromkeys(("step", *COUNTS), value)


def negative(value=-1e-9):
    moment = full_state()[NU].copy()
    moment[1, 2, 3] = value
    return moment


BAD = {
    "half a step": (all_to(np.float32(2.5)), "the step is 2.5, and not a whole number from 0"),
    "below zero": (all_to(np.int32(-5)), "the step is -5, and not a whole number from 0 to 2147"),
    "no number": ({"step": np.float32(np.nan)}, "the step is nan, and not a whole number"),
    "infinite": ({"step": np.float32(np.inf)}, "the step is inf, and not a whole number"),
    "too large": (all_to(np.int64(2**40)), "the step is 1099511627776, and not a whole number"),
    "a truth": ({"step": np.bool_(True)}, "the step is True, and not a whole number"),
    "a count": ({COUNTS[0]: np.float32(np.nan)}, "the count of Adam is nan, and not a whole"),
    "another step": ({"step": np.int32(9)}, "the step is 9 and Adam's count is 3"),
    "another count": ({COUNTS[1]: np.int32(9)}, "counts 3 steps of Adam and 9 of its learning"),
    "a square that is no number": ({NU: negative(np.nan)}, f"{NU} holds NaN or infinity in 1 of"),
    "a square below zero": ({NU: negative()}, f"{NU} is below 0 in 1 of 1024 values"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_cannot_be_is_refused_by_all_alike(tmp_path, bridge, kind):
    changes, message = BAD[kind]
    leaves = {k: np.asarray(v) for k, v in {**full_state(), **changes}.items()}
    write(tmp_path / "items", leaves)
    with pytest.raises(Mismatch, match=message.replace("(", r"\(")):
        linen_compat.load_train_state(tmp_path, config_of())
    for words in (
        ("check", tmp_path, "--config", CONFIG, "--read"),
        ("convert", tmp_path, tmp_path / "out", "--to", "nnx"),
    ):
        ended = bridge(*words)
        assert (ended.code, message in ended.err) == (1, True), ended.err
    assert [path.name for path in tmp_path.iterdir()] == ["items"]
    linen_compat.load(tmp_path, config_of())  # which takes neither


def test_a_square_below_zero_of_the_own_format(tmp_path):
    state = linen_compat.load_train_state(checkpoint("unscanned"), config_of())
    moments = state.optimizer
    nu = linen_compat.checkpoints.train_state.moment_of(moments, "nu")
    nu.head[...] = nu.head[...].at[0, 0].set(-1.0)
    with pytest.raises(Mismatch, match=r"nu of head is below 0 in 1 of 4096 values"):
        linen_compat.save_train_state(state, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_state_that_could_not_be_read_is_not_written(tmp_path):
    state = linen_compat.load_train_state(checkpoint("unscanned"), config_of())
    other = dataclasses.replace(state, step=jnp.asarray(9, jnp.int32))
    with pytest.raises(Mismatch, match="the step is 9 and Adam's count is 3"):
        linen_compat.save_train_state(other, tmp_path / "out")


@pytest.mark.parametrize("step", [2.5, -5, 2**40, float("nan"), True, "3"])
def test_a_step_that_is_none_is_not_saved(tmp_path, step):
    model = linen_compat.load(checkpoint("unscanned"), config_of())
    with pytest.raises(InputError, match="is not a whole number from 0 to 2147483647"):
        linen_compat.save(model, tmp_path / "out", step=step)
    assert not list(tmp_path.iterdir())


def test_no_step_is_invented(tmp_path, bridge):
    """Of weights alone nobody knows how long they were trained."""
    folder = DATA.parent / "huggingface" / "llama"
    linen_compat.save(linen_compat.load(folder), tmp_path / "saved")
    assert bridge("convert", folder, tmp_path / "converted", "--to", "nnx").code == 0
    assert bridge("convert", tmp_path / "converted", tmp_path / "b", "--to", "nnx").code == 0
    for name in ("saved", "converted", "b"):
        leaves = read(tmp_path / name)
        assert leaves
        assert "step" not in leaves
    with pytest.raises(
        Mismatch, match="not a complete training state: it lacks mu, nu, step, count"
    ):
        linen_compat.load_train_state(tmp_path / "saved", config_of())


@pytest.mark.parametrize("value", [0, 3, 2**31 - 1, np.uint32(7), np.float32(8.0), np.int64(1)])
def test_whole_numbers_of_any_dtype_are_counts(value):
    assert is_count(value)
