"""Models of MaxText other than Mixtral: their logits, their checkpoints, and their gradients."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import maxtext_data
import numpy as np
import plain_model
import pytest
from flax import linen as nn
from helpers import (
    assert_close,
    fresh_model,
    fresh_state,
    mesh_of,
    new_model,
    packed_batch,
    replace,
    small_config,
)
from huggingface_reference import FOLDER
from linen_helpers import as_linen
from maxtext_data import DATA, Leaves
from safetensors.numpy import load_file, save_file
from test_random_options import LLAMA3, Case, in_pipeline

import linen_compat
from linen_compat.checkpoints._convert import From, To, plan
from linen_compat.formats._streams import Mismatch
from nnx_pipeline import Config, InputError
from nnx_pipeline.experiments import floor
from nnx_pipeline.ops._head import head_of_table

FAMILIES = ("llama2", "llama3_1", "mistral", "qwen2", "qwen3", "qwen3_moe")
TOLERANCE = 2e-5
PREFIX = "params/params/"


def family(name: str) -> tuple[Config, Leaves, dict[str, np.ndarray]]:
    """The config, the parameters below `params/params`, and inputs with MaxText's logits."""
    folder = DATA / "families" / name
    config = linen_compat.config_from_maxtext(folder / "config.yml")
    return config, dict(np.load(folder / "params.npz")), dict(np.load(folder / "reference.npz"))


def stored(leaves: Leaves) -> Leaves:
    return {PREFIX + path: leaf for path, leaf in leaves.items()}


def sides(reference: dict[str, np.ndarray]) -> tuple[jax.Array, dict[str, jax.Array]]:
    tokens, positions, segments = (
        jnp.asarray(reference[f"inputs{end}"]) for end in ("", "_position", "_segmentation")
    )
    return tokens, {"positions": positions, "segment_ids": segments}


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_checkpoints_of_maxtext(name: str, tmp_path: Path) -> None:
    """A checkpoint in stages has MaxText's logits, and is written again to the bit."""
    config, leaves, reference = family(name)
    source = maxtext_data.write(tmp_path / "source", stored(leaves))
    mesh = mesh_of("stage=2,fsdp=2,tensor=2")
    model = linen_compat.load(source, config, mesh=mesh)
    tokens, side = sides(reference)
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        found = jax.jit(lambda model, tokens, side: model(tokens, **side))(model, tokens, side)
    np.testing.assert_allclose(found, reference["logits"], rtol=0, atol=TOLERANCE)
    layouts = (("unscanned", {}), ("scanned", {}), ("pipelined", {"stages": 2, "repeats": 2}))
    for layout, stack in layouts:
        linen_compat.save(model, tmp_path / layout, format=f"maxtext:{layout}", **stack)
        want = stored(maxtext_data.laid_out(leaves, layout, **stack))
        maxtext_data.assert_same_leaves(maxtext_data.read(tmp_path / layout), want)


LINEN = ("llama3_1", "qwen2", "qwen3", "qwen3_moe", "deepseek2", "deepseek3_scanned")
DEEPSEEK = ("deepseek2", "deepseek2_scanned", "deepseek3", "deepseek3_scanned")


def layout_of(name: str) -> Any:
    return "scanned" if name.endswith("_scanned") else "unscanned"


@pytest.mark.parametrize("name", LINEN)
def test_linen_modules_read_the_same_trees(name: str) -> None:
    config, leaves, reference = family(name)
    model = linen_compat.Transformer(config, layout_of(name))
    tokens, side = sides(reference)
    params = maxtext_data.nested(leaves)
    with jax.default_matmul_precision("highest"):
        found = jax.jit(lambda params: model.apply({"params": params}, tokens, **side))(params)
    np.testing.assert_allclose(found, reference["logits"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", [*FAMILIES, *DEEPSEEK])
def test_linen_trees_are_those_of_maxtext(name: str) -> None:
    """Names, shapes and logical axes."""
    config, _, _ = family(name)
    tokens = jax.ShapeDtypeStruct((4, 16), jnp.int32)
    model = linen_compat.Transformer(config, layout_of(name))
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
    boxes = jax.tree_util.tree_leaves_with_path(
        params, is_leaf=lambda leaf: isinstance(leaf, nn.LogicallyPartitioned)
    )
    found = {
        jax.tree_util.keystr(path, simple=True, separator="/"): {
            "shape": list(box.value.shape),
            "axes": list(box.names),
        }
        for path, box in boxes
    }
    trees = json.loads((DATA / "families" / "trees.json").read_text(encoding="utf-8"))
    assert found == trees[name]


@pytest.mark.parametrize("name", ["llama3_1", "qwen2", "qwen3", "qwen3_moe"])
def test_check_and_convert(name: str, tmp_path: Path, bridge: Any) -> None:
    """The numerics of every layer are MaxText's, and other layouts hold the same bits."""
    config, leaves, _ = family(name)
    source = maxtext_data.write(tmp_path / "source", stored(leaves))
    file = str(DATA / "families" / name / "config.yml")
    assert bridge("check", source, "--config", file, "--read", "--numerics").code == 0
    for target in ("nnx", "maxtext:scanned"):
        folder = tmp_path / target.replace(":", "_")
        assert bridge("convert", source, folder, "--to", target, "--config", file).code == 0
        model, again = (linen_compat.load(each, config) for each in (source, folder))
        jax.tree.map(np.testing.assert_array_equal, model, again)


def test_qwen2_becomes_one_of_transformers_and_back_to_the_bit(tmp_path: Path) -> None:
    """Its query kernels do not contain head_dim^-0.5, so that no number changes."""
    config, leaves, _ = family("qwen2")
    source = maxtext_data.write(tmp_path / "source", stored(leaves))
    plan(From(source, config=config), To(tmp_path / "folder", "huggingface")).run()
    values = json.loads((tmp_path / "folder" / "config.json").read_text())
    assert (values["architectures"], values["use_sliding_window"]) == (["Qwen2ForCausalLM"], False)
    plan(From(tmp_path / "folder"), To(tmp_path / "scanned", "maxtext:scanned")).run()
    found = maxtext_data.read(tmp_path / "scanned")
    maxtext_data.assert_same_leaves(found, stored(maxtext_data.laid_out(leaves, "scanned")))


def test_nnx_says_the_order_of_its_queries_and_keys(tmp_path: Path, bridge: Any) -> None:
    """No shape tells it, and MaxText's Llama 3.1 has another one than transformers'."""
    halves = tmp_path / "halves"
    assert bridge("convert", FOLDER / "llama3_1", halves, "--to", "nnx").code == 0
    ended = bridge("convert", halves, tmp_path / "new", "--to", "maxtext:unscanned")
    assert (ended.code, "set model.rope_interleaved to True, as in" in ended.err) == (2, True)
    model = linen_compat.load(FOLDER / "llama3_1").config
    neighbours = replace(model, "model", rope_interleaved=True)
    wrong = "model.rope_interleaved=True does not suit the query and key kernels of .* for False"
    with pytest.raises(Mismatch, match=wrong):
        linen_compat.load(halves, neighbours)
    linen_compat.save(linen_compat.load(halves, model), tmp_path / "again", "nnx")
    with pytest.raises(Mismatch, match=wrong):
        linen_compat.load(tmp_path / "again", neighbours)
    reordered = linen_compat.load(FOLDER / "llama3_1", neighbours)
    linen_compat.save(reordered, tmp_path / "neighbours", "nnx")
    ended = bridge("convert", tmp_path / "neighbours", tmp_path / "out", "--to", "maxtext:scanned")
    assert ended.code == 0, ended.err


def test_a_checkpoint_without_a_head_needs_its_config(tmp_path: Path, bridge: Any) -> None:
    """Without a config, a head that was lost cannot be told from tied embeddings."""
    _, leaves, _ = family("qwen3")
    source = maxtext_data.write(tmp_path / "source", stored(leaves))
    ended = bridge("convert", source, tmp_path / "new", "--to", "nnx")
    assert ended.code == 1
    assert "decoder/logits_dense/kernel is missing" in ended.err
    assert "a model with tied embeddings has no head: give its config" in ended.err


def test_what_maxtext_does_not_compute_is_not_exchanged_with_it(tmp_path: Path) -> None:
    """Of Llama 3.1 it rotates neighbours, and so of no other scaling."""
    _, leaves, _ = family("llama3_1")
    source = maxtext_data.write(tmp_path / "source", stored(leaves))
    config, _, _ = family("llama3_1")
    halves = replace(config, "model", rope_interleaved=False)
    message = "rope_scaling='llama3' with model.rope_interleaved=False does not exist in MaxText"
    with pytest.raises(InputError, match=message):
        linen_compat.load(source, halves)
    model = new_model(small_config(model={**LLAMA3, "rope_interleaved": False}))
    for format in ("maxtext:unscanned", "maxtext:pipelined"):
        with pytest.raises(InputError, match=message):
            linen_compat.save(model, tmp_path / "new", format=format)
    linen_compat.save(model, tmp_path / "own", format="nnx")


def test_an_attention_scale_that_a_qk_norm_would_undo(tmp_path: Path) -> None:
    config, leaves, _ = family("qwen3")
    source = maxtext_data.write(tmp_path / "source", stored(leaves))
    with pytest.raises(InputError, match=r"attention_scale=1.0 does not suit .* set it to 0.3535"):
        linen_compat.load(source, replace(config, "model", attention_scale=1.0))
    model = new_model(small_config(model={"qk_norm": True, "attention_scale": 1.0}))
    with pytest.raises(InputError, match=r"a model with qk_norm cannot hold.* head_dim\^-0.5"):
        linen_compat.save(model, tmp_path / "new", format="maxtext:scanned")


# ---- Hugging Face --------------------------------------------------------------------------------


def test_neighbours_become_halves_at_hugging_face(tmp_path: Path) -> None:
    """A Llama 3.1 of MaxText, saved and loaded as it is there, has the same logits, and is back."""
    config, leaves, reference = family("llama3_1")
    source = maxtext_data.write(tmp_path / "source", stored(leaves))
    linen_compat.save(linen_compat.load(source, config), tmp_path / "model", "huggingface")
    other = linen_compat.load(tmp_path / "model")
    assert not other.config.model.rope_interleaved
    tokens, side = sides(reference)
    with jax.default_matmul_precision("highest"):
        found = jax.jit(lambda model: model(tokens, **side))(other)
    np.testing.assert_allclose(found, reference["logits"], rtol=0, atol=TOLERANCE)
    again = linen_compat.load(
        tmp_path / "model",
        replace(config, "model", attention_scale=other.config.model.attention_scale),
    )
    with pytest.raises(InputError, match=r"set model\.rope_interleaved to True"):
        linen_compat.save(other, tmp_path / "new", "maxtext:scanned")
    linen_compat.save(again, tmp_path / "back", "maxtext:unscanned")
    back = maxtext_data.read(tmp_path / "back")
    for path, leaf in stored(leaves).items():  # the query kernel was scaled, to and fro
        np.testing.assert_allclose(back[path], leaf, rtol=3e-7)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_qwen3_at_hugging_face(name: str, tmp_path: Path) -> None:
    config, leaves, _ = family(name)
    config = replace(config, "model", tied_head_dtype=None)
    source = maxtext_data.write(tmp_path / "source", stored(leaves))
    linen_compat.save(linen_compat.load(source, config), tmp_path / "model", "huggingface")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    assert ("lm_head.weight" in tensors) == (name == "qwen3_moe")
    scale = leaves["decoder/layers_2/self_attention/query_norm/scale"]
    np.testing.assert_array_equal(tensors["model.layers.2.self_attn.q_norm.weight"], scale)
    if name == "qwen3_moe":
        expert = tensors["model.layers.1.mlp.experts.5.down_proj.weight"]
        np.testing.assert_array_equal(expert.T, leaves["decoder/layers_1/moe_block/wo"][5])
    model = linen_compat.load(tmp_path / "model")
    linen_compat.save(model, tmp_path / "back", "maxtext:unscanned")
    maxtext_data.assert_same_leaves(maxtext_data.read(tmp_path / "back"), stored(leaves))


def test_a_head_that_a_tied_model_does_not_read(tmp_path: Path) -> None:
    """It is the table once more; another one is in `test_huggingface`."""
    config, leaves, _ = family("qwen3")
    config = replace(config, "model", tied_head_dtype=None)
    source = maxtext_data.write(tmp_path / "source", stored(leaves))
    linen_compat.save(linen_compat.load(source, config), tmp_path / "model", "huggingface")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    for leftover in (tmp_path / "model").iterdir():  # checksums of the files as they were
        if leftover.name not in ("config.json", "model.safetensors"):
            leftover.unlink()
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}, file)
    assert linen_compat.load(tmp_path / "model").head is None


# ---- gradients, of all that is new at once -------------------------------------------------------

NEW = {
    "qk_norm": True,
    "tied_embeddings": True,
    "tied_head_dtype": "bfloat16",
    "rope_interleaved": True,
    "num_layers": 4,
    **LLAMA3,
}
CASES = {
    "circular": ("stage=2,fsdp=2,tensor=2", {"num_repeats": 2}, {}),
    "1f1b": ("stage=2,fsdp=2,tensor=2", {"schedule": "1f1b"}, {"loss_chunks": 4}),
    "zero1": ("data=2,stage=2,fsdp=2", {}, {"shard_optimizer_over_data": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_equals_plain_jnp(case: str) -> None:
    """The table gets the gradients of both of its uses, and the norms theirs."""
    mesh, pipeline, train = CASES[case]
    config = small_config(model=NEW, pipeline=pipeline, train=train)
    one = Case(config, mesh, packed=True)
    found, gradients, model = in_pipeline(one, None)

    @jax.jit
    def plain(weights: plain_model.Weights) -> Any:
        return jax.value_and_grad(plain_model.loss, has_aux=True)(
            weights, one.batch, config, microbatches=one.microbatches
        )

    want, want_gradients = plain(plain_model.weights_of(model))
    assert_close(found, want, 1e-5)
    assert_close(plain_model.weights_of(gradients), want_gradients, 1e-4)
    assert np.any(want_gradients.layers["query norm"])


@pytest.mark.slow
def test_linen_modules_in_a_pipeline_equal_plain_jnp() -> None:
    """The same gradients by the Linen modules, in 1F1B, with experts of Qwen3's names."""
    config = small_config(model=NEW, pipeline={"schedule": "1f1b", "num_microbatches": 2})
    mesh, linen = mesh_of("stage=2,fsdp=2"), linen_compat.Transformer(config)
    batch = packed_batch(config)
    with jax.set_mesh(mesh):
        model = fresh_model(config, mesh)
        params = as_linen(model, "pipelined")

        @jax.jit
        def evaluate(params: Any) -> Any:
            def loss(params: Any) -> Any:
                side = {"positions": batch.positions, "segment_ids": batch.segment_ids}
                weights = batch.weights / np.sum(batch.weights)
                whole = (batch.tokens, batch.targets, weights)
                return linen.apply({"params": params}, *whole, **side, method="loss")[0]

            return jax.value_and_grad(loss)(params)

        found, gradients = evaluate(params)
    weights = plain_model.weights_of(model)

    def plain(weights: plain_model.Weights) -> Any:
        return plain_model.loss(weights, batch, config, microbatches=2)[0]

    want, of_plain = jax.jit(jax.value_and_grad(plain))(weights)
    assert_close(found, want, 1e-5)
    assert_close(gradients["token_embedder"]["embedding"], of_plain.embedding, 1e-4)
    attention = gradients["decoder"]["pipeline_module"]["layers"]["layers_1"]["self_attention"]
    of_layers = of_plain.layers["query norm"].reshape(2, 2, -1)[:, 1]  # stages, layers per stage
    assert_close(attention["query_norm"]["scale"], of_layers, 1e-4)


def test_a_training_state_is_saved_and_loaded_to_the_bit(tmp_path: Path) -> None:
    sizes = {"qk_norm": True, "tied_embeddings": True, "attention_scale": 4**-0.5}
    config, mesh = small_config(model=sizes), mesh_of("stage=2,fsdp=2")
    state = fresh_state(config, mesh)
    for format in ("maxtext:scanned", "nnx"):
        folder = tmp_path / format.replace(":", "_")
        linen_compat.save_train_state(state, folder, format)
        again = linen_compat.load_train_state(folder, config, mesh=mesh)
        jax.tree.map(np.testing.assert_array_equal, again, state)
        with pytest.raises(InputError, match=r"(logits_dense/kernel|head) is missing"):
            linen_compat.load(folder, replace(config, "model", tied_embeddings=False), mesh=mesh)


def test_the_floor_of_tied_embeddings() -> None:
    """It holds one table less, and its gradient until both uses have theirs."""
    configs = [small_config(model={"tied_embeddings": tied}) for tied in (False, True)]
    apart, tied = (floor(config, "stage=2") for config in configs)
    table = 32 * 16 * 4 // 2  # vocabulary × embed × float32, over the stages
    assert apart.arguments[0].bytes - tied.arguments[0].bytes == table


def test_the_tied_head_is_rounded_and_its_gradient_is_not() -> None:
    table = jnp.asarray([[1.001, -3.3], [0.0, 7e-5]], jnp.float32)
    config = small_config(model={"tied_embeddings": True}).model
    np.testing.assert_array_equal(head_of_table(table, config), table.T)
    rounding = replace(Config(model=config), "model", tied_head_dtype="bfloat16").model
    head, pull = jax.vjp(jax.jit(lambda table: head_of_table(table, rounding)), table)
    np.testing.assert_array_equal(head, table.astype(jnp.bfloat16).astype(jnp.float32).T)
    np.testing.assert_array_equal(pull(table)[0], table.T)
