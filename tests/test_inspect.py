"""`linen-compat inspect` finds layout and leaves from the metadata of a checkpoint."""

import json

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

from linen_compat.cli import main as cli
from linen_compat.formats.orbax.inspect import inspect
from nnx_pipeline import InputError

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
