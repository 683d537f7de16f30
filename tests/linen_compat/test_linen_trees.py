"""The `params` of the Linen model are MaxText's in every layout, and so are its logits."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax import nnx
from helpers import mesh_of, packed_batch, replace
from linen_helpers import LAYOUTS, as_linen, assert_same_bits

from linen_compat import Transformer, logical_axis_rules
from nnx_pipeline import Config, InputError, Mixtral, ModelConfig, TrainConfig
from nnx_pipeline.sharding.layout import Layout

DATA = Path(__file__).parents[1] / "data"
TREES = json.loads((DATA / "maxtext" / "param_trees.json").read_text(encoding="utf-8"))
CONFIG = Config(
    model=ModelConfig(
        vocab_size=128,
        embed_dim=32,
        mlp_dim=64,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_token=2,
        dtype="float32",
    ),
    train=TrainConfig(global_batch=8, sequence_length=16, loss_chunks=2),
)
LLAMA = replace(CONFIG, "model", num_experts=1, num_experts_per_token=1)
TOKENS = jax.ShapeDtypeStruct((8, 16), jnp.int32)


def leaves(variables: Any) -> dict[str, dict[str, Any]]:
    """Each leaf as `param_trees.json` writes it."""
    found = {}
    boxed = jax.tree_util.tree_leaves_with_path(
        variables, is_leaf=lambda leaf: isinstance(leaf, nn.LogicallyPartitioned)
    )
    for path, box in boxed:
        found[f"params/{jax.tree_util.keystr(path, simple=True, separator='/')}"] = {
            "shape": list(box.value.shape),
            "dtype": str(box.value.dtype),
            "logical_axes": list(box.names),
        }
    return found


def abstract(model: Transformer) -> Any:
    return jax.eval_shape(model.init, jax.random.key(0), TOKENS)


def repeated(config: Config, repeats: int) -> Config:
    return replace(config, "pipeline", num_repeats=repeats)


CASES = [
    ("unscanned", "unscanned", "fsdp=2", 1),
    ("scanned", "scanned", "fsdp=2", 1),
    ("scanned", None, "fsdp=2", 1),
    ("pipelined (stage 2, 2 layers per stage, 1 repeat)", None, "stage=2,fsdp=2", 1),
    ("circular (stage 2, 2 repeats, 1 layer per stage)", "pipelined", "stage=2,tensor=2", 2),
]


def test_every_tree_of_maxtext_is_compared_with() -> None:
    assert {name for name, *_ in CASES} == set(TREES)


@pytest.mark.parametrize("mode", ["explicit", "auto"])
@pytest.mark.parametrize(("name", "layout", "mesh", "repeats"), CASES)
def test_tree_equals_maxtext(name: str, layout: Any, mesh: str, repeats: int, mode: str) -> None:
    """Names, shapes, dtypes and logical axes."""
    with jax.set_mesh(mesh_of(mesh, mode)):
        assert leaves(abstract(Transformer(repeated(CONFIG, repeats), layout))) == TREES[name]


@pytest.mark.parametrize("layout", ["unscanned", "scanned"])
def test_tree_without_a_mesh(layout: Any) -> None:
    assert leaves(abstract(Transformer(CONFIG, layout))) == TREES[layout]


@pytest.mark.parametrize(
    ("layers", "repeats", "names", "leading"),
    [
        (8, 2, ["layers/layers_0/", "layers/layers_1/"], {"circular_repeats": 2, "layers": 2}),
        (2, 1, ["layers/"], {"layers": 2}),
    ],
)
def test_the_other_pipelined_trees(
    layers: int, repeats: int, names: list[str], leading: dict[str, int]
) -> None:
    """Circular with several layers per stage, and one layer per stage without repeats.

    They follow from MaxText's: each leaf of a layer under each name, after the leading axes.
    """
    want, prefix = {}, "params/params/decoder/layers_0/"
    for path, leaf in TREES["unscanned"].items():
        if path.startswith(prefix):
            stacked = {
                **leaf,
                "shape": [*leading.values(), *leaf["shape"]],
                "logical_axes": [*leading, *leaf["logical_axes"]],
            }
            for name in names:
                path_in_pipeline = f"decoder/pipeline_module/{name}{path.removeprefix(prefix)}"
                want[f"params/params/{path_in_pipeline}"] = stacked
        elif "/layers_" not in path:
            want[path] = leaf
    config = repeated(replace(CONFIG, "model", num_layers=layers), repeats)
    with jax.set_mesh(mesh_of("stage=2")):
        assert leaves(abstract(Transformer(config))) == want


def test_tree_of_llama() -> None:
    """In the place of the experts the MLP, with its own axes."""
    found = leaves(abstract(Transformer(LLAMA, "unscanned")))
    of_experts = {path for path in TREES["unscanned"] if "MoeBlock_0" in path}
    same = {path: leaf for path, leaf in TREES["unscanned"].items() if path not in of_experts}
    mlp = {path: leaf for path, leaf in found.items() if "/mlp/" in path}
    assert {path: leaf for path, leaf in found.items() if path not in mlp} == same
    into = {"shape": [32, 64], "dtype": "float32", "logical_axes": ["embed", "mlp"]}
    out_of = {"shape": [64, 32], "dtype": "float32", "logical_axes": ["mlp", "embed"]}
    assert mlp == {
        f"params/params/decoder/layers_{layer}/mlp/{name}/kernel": leaf
        for layer in range(4)
        for name, leaf in (("wi_0", into), ("wi_1", into), ("wo", out_of))
    }


# ---- placement -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "mesh", "repeats", "mode"),
    [
        ("unscanned", "fsdp=2,tensor=2,expert=2", 1, "explicit"),
        ("pipelined", "stage=2,fsdp=2,tensor=2", 1, "auto"),
        ("pipelined", "stage=2,tensor=2,expert=2", 2, "explicit"),
    ],
)
def test_weights_are_born_where_the_rules_say(
    layout: Any, mesh: str, repeats: int, mode: str
) -> None:
    """By Flax's own functions with the rules of the package; and a model takes them there."""
    grid = mesh_of(mesh, mode)
    model = Transformer(repeated(CONFIG, repeats), layout)
    tokens = packed_batch(CONFIG).tokens
    with jax.set_mesh(grid):
        born = jax.jit(model.init)(jax.random.key(0), tokens)
        specs = nn.get_partition_spec(born)
        shardings = nn.logical_to_mesh_sharding(specs, grid, logical_axis_rules(grid))
        leaves = jax.tree.leaves(nn.unbox(born))
        for leaf, wanted in zip(leaves, jax.tree.leaves(shardings), strict=True):
            assert leaf.sharding.is_equivalent_to(wanted, leaf.ndim)
        assert sum(not leaf.is_fully_replicated for leaf in leaves) > 4
        jax.eval_shape(model.apply, jax.device_put(nn.unbox(born), shardings), tokens)


@pytest.mark.slow
def test_boxes_and_rules_do_not_matter_to_apply() -> None:
    """What a training loop hands over, unboxed, gives the same; so do rules set around it."""
    grid, config = mesh_of("stage=2,fsdp=2"), CONFIG
    model, tokens = Transformer(config), packed_batch(config).tokens
    with jax.set_mesh(grid):
        boxed = jax.jit(model.init)(jax.random.key(0), tokens)
        want = jax.jit(model.apply)(boxed, tokens)
        assert_same_bits(jax.jit(model.apply)(nn.unbox(boxed), tokens), want)
        with nn.logical_axis_rules(logical_axis_rules(grid)):
            assert_same_bits(jax.jit(lambda v, t: model.apply(v, t))(boxed, tokens), want)


def test_the_rules_follow_the_layout_and_leave_out_single_devices() -> None:
    rules = dict(logical_axis_rules(mesh_of("stage=2,tensor=2"), Layout(mlp=())))
    assert rules["vocab"] == ("stage", "tensor")
    assert rules["layers"] == ("stage",)
    assert rules["q_heads"] == rules["kv_heads"] == ("tensor",)
    assert all(rules[name] is None for name in ("embed", "mlp", "mlp_moe", "circular_repeats"))


# ---- logits --------------------------------------------------------------------------------------


def test_logits_of_a_checkpoint_of_maxtext() -> None:
    """Its parameters as they are on disk, in bfloat16, applied in float32."""
    folder = DATA / "maxtext" / "scanned_params_only_bf16"
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    items, handler = folder / "checkpoint" / "0" / "items", ocp.PyTreeCheckpointHandler()
    with ocp.Checkpointer(handler) as checkpointer:
        tree = checkpointer.metadata(items).item_metadata.tree
        how = jax.tree.map(lambda _: ocp.ArrayRestoreArgs(sharding=device), tree)
        stored = checkpointer.restore(items, args=ocp.args.PyTreeRestore(restore_args=how))
    assert stored["params"]["params"]["token_embedder"]["embedding"].dtype == jnp.bfloat16
    reference = np.load(folder / "reference.npz")
    model = Transformer(CONFIG, "scanned")
    with jax.default_matmul_precision("highest"):
        logits = jax.jit(model.apply)(
            stored["params"],
            reference["inputs"],
            positions=reference["inputs_position"],
            segment_ids=reference["inputs_segmentation"],
        )
    assert np.max(np.abs(logits - reference["logits_dense"])) < 1e-5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tree_of_another_layout_is_refused(layout: Any) -> None:
    """It never runs with fresh weights instead."""
    source = jax.eval_shape(lambda: Mixtral(CONFIG, rngs=nnx.Rngs(0)))
    tokens = packed_batch(CONFIG).tokens
    with jax.set_mesh(mesh_of("stage=2" if layout == "pipelined" else "", "auto")):
        model = Transformer(CONFIG, layout)
        for other in {*LAYOUTS} - {layout}:
            params = jax.eval_shape(lambda model, other=other: as_linen(model, other), source)
            message = f"params hold the layers as {other} .* choose layer_layout='{other}'"
            with pytest.raises(InputError, match=message):
                jax.eval_shape(model.apply, {"params": params}, tokens)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("layers", [2, 8])
def test_another_number_of_layers_is_refused(layout: Any, layers: int) -> None:
    """More than the config says would else be left out silently."""
    other = replace(CONFIG, "model", num_layers=layers)
    tokens = packed_batch(CONFIG).tokens
    with jax.set_mesh(mesh_of("stage=2" if layout == "pipelined" else "", "auto")):
        params = abstract(Transformer(other, layout))
        with pytest.raises(InputError, match=r"layers_|hold [28] layers and model.num_layers=4"):
            jax.eval_shape(Transformer(CONFIG, layout).apply, params, tokens)


def test_a_leaf_that_is_missing_added_or_of_another_shape_in_a_pipeline() -> None:
    """The loop takes its layers as they come, so the module looks at them first."""
    tokens = packed_batch(CONFIG).tokens
    with jax.set_mesh(mesh_of("stage=2", "auto")):
        model = Transformer(CONFIG)
        params = nn.unbox(abstract(model))["params"]
        stage = params["decoder"]["pipeline_module"]["layers"]

        def refused(message: str) -> None:
            with pytest.raises(InputError, match=message):
                jax.eval_shape(model.apply, {"params": params}, tokens)

        second = stage["layers_1"]
        scale = second["pre_self_attention_layer_norm"].pop("scale")
        refused("no layers_1/pre_self_attention_layer_norm/scale, which must be .2, 32.; give the")
        second["pre_self_attention_layer_norm"]["scale"] = second["MoeBlock_0"]["wo"]
        refused("layers_1/pre_self_attention_layer_norm/scale has shape .* must be .2, 32.")
        second["pre_self_attention_layer_norm"] = {"scale": scale, "bias": scale}
        refused("have layers_1/pre_self_attention_layer_norm/bias, which no layer reads")


@pytest.mark.parametrize(
    ("mesh", "layout", "change", "message"),
    [
        ("stage=2", "scanned", {}, "layer_layout='scanned' .* stage=2 .* layer_layout='pipelined'"),
        ("", "unscanned", {"schedule": "1f1b"}, "schedule=1f1b, .*; choose layer_layout"),
        ("", "scaned", {}, "layer_layout='scaned' is not known; did you mean 'scanned'"),
        (
            "",
            "scanned",
            {"fsdp_gather": "step"},
            "fsdp_gather=step .*; choose layer",
        ),
        ("stage=8", None, {}, "4 layers do not split|num_layers=4 does not split"),
        ("stage=2,data=2", None, {"num_microbatches": 8}, "a microbatch of 1 sequence"),
    ],
)
def test_layouts_and_configs_that_do_not_fit_the_mesh(
    mesh: str, layout: Any, change: dict[str, Any], message: str
) -> None:
    config = replace(CONFIG, "pipeline", **change)
    with jax.set_mesh(mesh_of(mesh)), pytest.raises(InputError, match=message):
        abstract(Transformer(config, layout))


def test_an_optimizer_spread_over_data_is_not_for_linen() -> None:
    config = replace(CONFIG, "train", shard_optimizer_over_data=True)
    with pytest.raises(
        InputError, match=r"is for nnx_pipeline.Mixtral and not for Linen.*set it to False"
    ):
        abstract(Transformer(config))
