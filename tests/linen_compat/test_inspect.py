"""`linen-compat inspect` finds layout and leaves from the metadata of a checkpoint."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import linen_compat
from linen_compat._cli import main as cli
from linen_compat.formats._orbax.inspect import inspect
from nnx_pipeline import InputError, Mixtral
from tests.helpers import small_config

LAYER = {"self_attention": {"query": {"kernel": (4, 2, 8)}}, "MoeBlock_0": {"wi_0": (2, 4, 6)}}


def arrays(tree, leading=(), axis=0, dtype=jnp.float32):
    """Zeros for a tree of shapes, with `leading` axes inserted at `axis`."""
    if isinstance(tree, dict):
        return {name: arrays(child, leading, axis, dtype) for name, child in tree.items()}
    return jnp.zeros((*tree[:axis], *leading, *tree[axis:]), dtype)


LAYOUTS = {
    "unscanned": ({"layers_0": arrays(LAYER), "layers_1": arrays(LAYER)}, 2, 1, 1),
    "scanned": ({"layers": arrays(LAYER, (5,), 1)}, 5, 1, 1),
    "one layer per stage": ({"pipeline_module": {"layers": arrays(LAYER, (3,))}}, 3, 3, 1),
    "several per stage": (
        {"pipeline_module": {"layers": {f"layers_{j}": arrays(LAYER, (3,)) for j in range(2)}}},
        6,
        3,
        1,
    ),
    "circular": ({"pipeline_module": {"layers": arrays(LAYER, (2, 3))}}, 6, 3, 2),
    "circular, several": (
        {"pipeline_module": {"layers": {f"layers_{j}": arrays(LAYER, (2, 3)) for j in range(4)}}},
        24,
        3,
        2,
    ),
}


def save(folder, decoder):
    """Writes a checkpoint as MaxText does: step folder, items, params/params, step."""
    embedder = {"embedding": jnp.zeros((16, 4))}
    params = {"decoder": decoder, "token_embedder": embedder}
    tree = {"params": {"params": params}, "step": jnp.zeros((), jnp.int32)}
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).save(folder / "3" / "items", tree)


def managed(run, **items):
    """Writes steps 0 and 7 as Orbax's CheckpointManager does: under `default` unless named."""
    saved = {name: ocp.args.StandardSave(tree) for name, tree in items.items()}
    given = saved["default"] if [*saved] == ["default"] else ocp.args.Composite(**saved)
    with ocp.CheckpointManager(run) as manager:
        for step in (0, 7):
            manager.save(step, args=given)


@pytest.mark.parametrize("item", ["default", "state"])
def test_a_run_of_checkpoint_manager(tmp_path, item):
    decoder, layers, _, _ = LAYOUTS["scanned"]
    params = {"decoder": decoder, "token_embedder": {"embedding": jnp.zeros((16, 4))}}
    managed(tmp_path / "run", **{item: {"params": params}})
    for given in ("run", "run/7", f"run/7/{item}"):
        found = inspect(tmp_path / given)
        assert found.items == tmp_path / "run/7" / item
        assert found.layout.num_layers == layers


def test_a_step_with_several_items_is_not_chosen_from(tmp_path):
    params = {"decoder": LAYOUTS["scanned"][0], "token_embedder": {"embedding": jnp.zeros((16, 4))}}
    managed(tmp_path / "run", params={"params": params}, moments={"mu": jnp.zeros(3)})
    with pytest.raises(InputError, match=r"several .*\(moments, params\); give that of the param"):
        inspect(tmp_path / "run")
    assert inspect(tmp_path / "run/7/params").layout.num_layers == 5  # the cure
    with pytest.raises(InputError, match=r"moments has no parameters .*it holds mu; give"):
        inspect(tmp_path / "run/7/moments")


def test_steps_with_a_prefix_are_named_and_not_chosen_from(tmp_path):
    params = {"decoder": LAYOUTS["scanned"][0], "token_embedder": {"embedding": jnp.zeros((16, 4))}}
    run, options = tmp_path / "run", ocp.CheckpointManagerOptions(step_prefix="step")
    with ocp.CheckpointManager(run, options=options) as manager:
        for step in (2, 10):
            manager.save(step, args=ocp.args.StandardSave({"params": params}))
    with pytest.raises(InputError, match=r"it holds step_2, step_10; give one, such as (.*)") as no:
        inspect(run)
    cure = re.search(r"such as (.*)", str(no.value))[1]
    assert inspect(cure).items == run / "step_10/default"
    for step in (2, 10):
        (run / f"step_{step}").rename(run / f"step_{step}.orbax-checkpoint-tmp-{step}")
    with pytest.raises(
        InputError, match=r"has not finished step_10\.orbax-checkpoint-tmp-10, step_2"
    ):
        inspect(run)


@pytest.mark.parametrize("below", [None, "model"])
def test_a_model_that_orbax_alone_wrote_is_taken_by_the_cure(tmp_path, below):
    config = small_config()
    model = Mixtral(config, rngs=nnx.Rngs(0))
    tree = nnx.to_pure_dict(nnx.state(model))
    managed(tmp_path / "run", default=tree if below is None else {below: tree})
    with pytest.raises(InputError, match=r"Orbax alone wrote .*nnx.state .*linen_compat.save"):
        inspect(tmp_path / "run")
    again = Mixtral(config, rngs=nnx.Rngs(1))
    like = nnx.to_pure_dict(nnx.state(again))
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        args = ocp.args.StandardRestore(like if below is None else {below: like})
        found = manager.restore(7, args=args)
    nnx.update(again, found if below is None else found[below])
    linen_compat.save(again, tmp_path / "out")
    loaded = linen_compat.load(tmp_path / "out", config)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(loaded), nnx.state(model))


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_are_told_apart(tmp_path, name):
    decoder, layers, stages, repeats = LAYOUTS[name]
    save(tmp_path, decoder)
    for given in (tmp_path, tmp_path / "3", tmp_path / "3" / "items"):
        found = inspect(given)
        layout = found.layout
        assert (layout.num_layers, layout.stages, layout.repeats) == (layers, stages, repeats)
    per_layer = 4 * 2 * 8 + 2 * 4 * 6
    assert found.parameter_count == layers * per_layer + 16 * 4
    assert set(found.other) == {"step"}
    assert layout.format == "maxtext:" + (name if name in ("unscanned", "scanned") else "pipelined")


def test_latest_step_is_taken(tmp_path):
    save(tmp_path, LAYOUTS["scanned"][0])
    (tmp_path / "2").mkdir()
    assert inspect(tmp_path).items == tmp_path / "3" / "items"


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda folder: None, "holds no Orbax checkpoint"),
        (lambda folder: (folder / "config.json").write_text("{}"), "looks like a Hugging Face"),
        (lambda folder: (folder / "_METADATA").write_text("{"), "cannot be read"),
        (lambda folder: save(folder, {"blocks": jnp.zeros(3)}), "no layers of MaxText's decoder"),
    ],
)
def test_what_is_no_checkpoint_is_refused(tmp_path, prepare, message):
    prepare(tmp_path)
    with pytest.raises(InputError, match=message):
        inspect(tmp_path)


def test_command(tmp_path, monkeypatch, capsys):
    save(tmp_path, LAYOUTS["circular"][0])
    monkeypatch.setattr("sys.argv", ["linen-compat", "inspect", str(tmp_path), "--json", "-"])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    result = json.loads(capsys.readouterr().out)
    assert exit_.value.code == 0
    assert (result["layout"], result["stages"], result["repeats"]) == ("maxtext:pipelined", 3, 2)
    monkeypatch.setattr("sys.argv", ["linen-compat", "inspect", str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 2
    assert "nowhere does not exist; give a run" in capsys.readouterr().err


def test_a_narrow_screen_keeps_the_end_of_names(tmp_path, monkeypatch, capsys):
    """And says in words what else is in the checkpoint."""
    save(tmp_path, LAYOUTS["several per stage"][0])
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("sys.argv", ["linen-compat", "inspect", str(tmp_path)])
    with pytest.raises(SystemExit):
        cli.main()
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 60
    words = " ".join(shown.split())
    assert "6 layers, 3 stages, 1 repeat; " in words
    assert "1 other leaf (step)" in words
    for name, shape in (
        ("layers_0/self_attention/query/kernel", "3×4×2×8"),
        ("layers/layers_1/MoeBlock_0/wi_0", "3×2×4×6"),
    ):
        assert f"│ …/{name} " in shown
        assert shape in shown


def test_a_hugging_face_folder_is_said_not_to_be_inspected(tmp_path, bridge):
    (tmp_path / "config.json").write_text("{}")
    ended = bridge("inspect", tmp_path)
    assert (ended.code, "which inspect and load_train_state do not read" in ended.err) == (2, True)
