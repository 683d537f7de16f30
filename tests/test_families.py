"""Models of MaxText other than Mixtral: their logits, their checkpoints, and their gradients."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import maxtext_data
import numpy as np
import plain_model
import pytest
from helpers import assert_close, mesh_of, new_model, replace, small_config
from maxtext_data import DATA, Leaves
from safetensors.numpy import load_file, save_file
from test_random_options import LLAMA3, Case, in_pipeline

import linen_compat
from nnx_pipeline import Config, InputError
from nnx_pipeline.ops.head import head_of_table

FAMILIES = ("llama2", "llama3_1", "mistral", "qwen3", "qwen3_moe")
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


@pytest.mark.parametrize("name", ["llama3_1", "qwen3", "qwen3_moe"])
def test_linen_modules_read_the_same_trees(name: str) -> None:
    config, leaves, reference = family(name)
    model = linen_compat.Transformer(config, "unscanned")
    tokens, side = sides(reference)
    params = maxtext_data.nested(leaves)
    with jax.default_matmul_precision("highest"):
        found = jax.jit(lambda params: model.apply({"params": params}, tokens, **side))(params)
    np.testing.assert_allclose(found, reference["logits"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["llama3_1", "qwen3", "qwen3_moe"])
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
    """Of a tied model transformers ignores a stored head, and so does this project."""
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


def test_the_tied_head_is_rounded_and_its_gradient_is_not() -> None:
    table = jnp.asarray([[1.001, -3.3], [0.0, 7e-5]], jnp.float32)
    config = small_config(model={"tied_embeddings": True}).model
    np.testing.assert_array_equal(head_of_table(table, config), table.T)
    rounding = replace(Config(model=config), "model", tied_head_dtype="bfloat16").model
    head, pull = jax.vjp(jax.jit(lambda table: head_of_table(table, rounding)), table)
    np.testing.assert_array_equal(head, table.astype(jnp.bfloat16).astype(jnp.float32).T)
    np.testing.assert_array_equal(pull(table)[0], table.T)
