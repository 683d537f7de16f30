"""DeepSeek 2 and 3 of MaxText: configs, logits, and checkpoints with layers of two kinds."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import maxtext_data
import numpy as np
import pytest
import yaml
from helpers import fresh_state, mesh_of, replace
from huggingface_reference import FOLDER
from maxtext_data import DATA, Leaves
from safetensors.numpy import load_file, save_file
from test_deepseek_linen import deepseek

import linen_compat
from linen_compat.formats._streams import Mismatch
from nnx_pipeline import Config, InputError, preset

NAMES = ("deepseek2", "deepseek2_scanned", "deepseek3", "deepseek3_scanned")
MOE_LAYERS = 3
PREFIX = "params/params/"


def values_of(name: str, **changes: Any) -> dict[str, Any]:
    """The keys of a kept config, some of them replaced."""
    text = (DATA / "families" / name / "config.yml").read_text(encoding="utf-8")
    return {**yaml.safe_load(text), **changes}


def family(name: str) -> tuple[Config, Leaves, dict[str, np.ndarray]]:
    """The config, the parameters below `params/params`, and inputs with MaxText's logits."""
    folder = DATA / "families" / name
    config = linen_compat.config_from_maxtext(folder / "config.yml")
    return config, dict(np.load(folder / "params.npz")), dict(np.load(folder / "reference.npz"))


def stored(leaves: Leaves) -> Leaves:
    return {PREFIX + path: leaf for path, leaf in leaves.items()}


def apart(leaves: Leaves) -> Leaves:
    """The same parameters with every layer in a tree of its own."""
    found: Leaves = {}
    for path, leaf in leaves.items():
        if match := re.fullmatch(r"decoder/(dense|moe)_layers/(.+)", path):
            for number in range(leaf.shape[1]):
                found[f"decoder/{match[1]}_layers_{number}/{match[2]}"] = leaf[:, number]
        else:
            found[path] = leaf
    return found


def scanned(leaves: Leaves) -> Leaves:
    """The same parameters, of which each layer is apart, with the layers of a kind in one array."""
    found: Leaves = {}
    for path, leaf in leaves.items():
        match = re.fullmatch(r"decoder/(dense|moe)_layers_(\d+)/(.+)", path)
        if match is None:
            found[path] = leaf
        elif match[2] == "0":
            count = MOE_LAYERS if match[1] == "moe" else 1
            layers = [leaves[path.replace("layers_0", f"layers_{n}", 1)] for n in range(count)]
            found[f"decoder/{match[1]}_layers/{match[3]}"] = np.stack(layers, axis=1)
    return found


def in_three_stages(leaves: Leaves) -> Leaves:
    """Scanned parameters with one layer with experts on each of three stages."""
    start, pipeline = "decoder/moe_layers/", "decoder/pipeline_module/layers/"
    return {
        path.replace(start, pipeline): np.moveaxis(leaf, 1, 0) if start in path else leaf
        for path, leaf in leaves.items()
    }


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("name", NAMES)
def test_logits_and_checkpoints_of_maxtext(name: str, tmp_path: Path) -> None:
    """A checkpoint in stages has MaxText's logits, and is written in each layout to the bit."""
    config, leaves, reference = family(name)
    # Three layers with experts on two stages.
    config = replace(config, "pipeline", stage_layers="auto")
    source = maxtext_data.write(tmp_path / "source", stored(leaves))
    mesh = mesh_of("stage=2,fsdp=2")
    model = linen_compat.load(source, config, mesh=mesh)
    tokens, positions, segments = (
        jnp.asarray(reference[f"inputs{end}"]) for end in ("", "_position", "_segmentation")
    )
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        found = jax.jit(lambda model, tokens, **side: model(tokens, **side))(
            model, tokens, positions=positions, segment_ids=segments
        )
    np.testing.assert_allclose(found, reference["logits"], rtol=0, atol=2e-5)
    whole = apart(leaves)
    wanted = {"unscanned": whole, "scanned": scanned(whole)}
    wanted["pipelined"] = in_three_stages(wanted["scanned"])
    for layout, want in wanted.items():
        stages = {"stages": 3} if layout == "pipelined" else {}
        linen_compat.save(model, tmp_path / layout, f"maxtext:{layout}", **stages)
        maxtext_data.assert_same_leaves(maxtext_data.read(tmp_path / layout), stored(want))
        again = linen_compat.load(tmp_path / layout, config, mesh=mesh)
        jax.tree.map(np.testing.assert_array_equal, again, model)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek2", "deepseek3_scanned"])
def test_check_and_convert(name: str, tmp_path: Path, bridge: Any) -> None:
    """The numerics of every layer are MaxText's, with a config and without one."""
    config, leaves, _ = family(name)
    source = maxtext_data.write(tmp_path / "source", stored(leaves))
    file = str(DATA / "families" / name / "config.yml")
    ended = bridge("check", source, "--config", file, "--read", "--numerics")
    assert ended.code == 0, ended.err
    assert "4 layers" in ended.out
    model = linen_compat.load(source, config)
    stack = ("--stages", "3")
    for target, options in (
        ("nnx", ("--config", file, *stack)),
        ("maxtext:pipelined", stack),
        ("maxtext:unscanned", ()),
    ):
        folder = tmp_path / target.replace(":", "_")
        ended = bridge("convert", source, folder, "--to", target, *options)
        assert ended.code == 0, ended.err
        jax.tree.map(np.testing.assert_array_equal, linen_compat.load(folder, config), model)
        source = folder
    assert bridge("check", source, "--config", file, "--numerics").code == 0


@pytest.mark.slow
def test_a_router_as_of_deepseek3_is_checked_by_its_numerics(tmp_path: Path, bridge: Any) -> None:
    """With this name of the model the bias only chooses, and experts are chosen from groups."""
    _, leaves, _ = family("deepseek3")
    source = maxtext_data.write(tmp_path / "source", stored(leaves))
    file = tmp_path / "config.yml"
    file.write_text(yaml.safe_dump(values_of("deepseek3", model_name="deepseek3-small")))
    model = linen_compat.config_from_maxtext(file).model
    assert (model.router_groups, model.router_groups_per_token) == (4, 2)
    assert not model.router_bias_in_weights
    ended = bridge("check", source, "--config", str(file), "--numerics")
    assert ended.code == 0, ended.err


@pytest.mark.slow
def test_a_training_state_is_saved_and_loaded_to_the_bit(tmp_path: Path) -> None:
    config, mesh = deepseek({"num_repeats": 2}), mesh_of("stage=2,fsdp=2")
    state = fresh_state(config, mesh)
    for format in ("maxtext:unscanned", "maxtext:pipelined", "nnx"):
        folder = tmp_path / format.replace(":", "_")
        linen_compat.save_train_state(state, folder, format)
        again = linen_compat.load_train_state(folder, config, mesh=mesh)
        jax.tree.map(np.testing.assert_array_equal, again, state)


def test_other_numbers_of_layers_are_named(tmp_path: Path) -> None:
    config, leaves, _ = family("deepseek2")
    source = maxtext_data.write(tmp_path / "source", stored(leaves))
    with pytest.raises(Mismatch, match=r"decoder/dense_layers_1/\S+ is missing"):
        linen_compat.load(source, replace(config, "model", num_layers=5, num_dense_layers=2))
    model = linen_compat.load(source, config)
    linen_compat.save(model, tmp_path / "piped", "maxtext:pipelined", stages=3)
    message = "holds 4 layers, 1 of them dense .* the model has 4, 2 of them dense"
    with pytest.raises(Mismatch, match=message):
        linen_compat.load(tmp_path / "piped", replace(config, "model", num_dense_layers=2))
    with pytest.raises(InputError, match="4 layers, 1 of them before the pipeline, do not split"):
        linen_compat.save(model, tmp_path / "new", "maxtext:pipelined", stages=2)


def test_layers_outside_the_pipeline_stay_refused(tmp_path: Path) -> None:
    """But for dense layers; MaxText may leave layers with experts out too."""
    _, leaves, _ = family("deepseek2_scanned")
    config, _, _ = family("deepseek2")
    piped = in_three_stages(leaves)
    path = "moe_layers/self_attention/wkv_a/kernel"
    piped[f"decoder/{path}"] = leaves[f"decoder/{path}"]
    source = maxtext_data.write(tmp_path / "source", stored(piped))
    with pytest.raises(Mismatch, match=rf"decoder/{path} is a layer outside the pipeline"):
        linen_compat.load(source, config)


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_from_hugging_face_to_maxtext_and_back(name: str, tmp_path: Path) -> None:
    """Both multiply scores by what the config says, and rotate the same neighbours."""
    model = linen_compat.load(FOLDER / name)
    linen_compat.save(model, tmp_path / "maxtext", "maxtext:unscanned")
    again = linen_compat.load(tmp_path / "maxtext", model.config)
    linen_compat.save(again, tmp_path / "back", "huggingface")
    found, want = (load_file(at / "model.safetensors") for at in (tmp_path / "back", FOLDER / name))
    maxtext_data.assert_same_leaves(found, want)
    first = maxtext_data.read(tmp_path / "maxtext")
    kernel = first[f"{PREFIX}decoder/moe_layers_1/self_attention/wkv_b/kernel"]
    values = want["model.layers.3.self_attn.kv_b_proj.weight"].T.reshape(kernel.shape)
    np.testing.assert_array_equal(kernel, values)


def test_tensors_that_predict_further_tokens_are_named(tmp_path: Path, bridge: Any) -> None:
    """transformers leaves them out without a word; and a new bias of zeros is no lost block."""
    for file in ("config.json", "model.safetensors"):
        shutil.copy(FOLDER / "deepseek_v3" / file, tmp_path)
    values = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    config = linen_compat.config_from_huggingface({**values, "num_nextn_predict_layers": 1})
    bias = "model.layers.2.mlp.gate.e_score_correction_bias"
    tensors = {**load_file(tmp_path / "model.safetensors"), bias: np.zeros(8, np.float32)}
    save_file(tensors, tmp_path / "model.safetensors")
    linen_compat.load(tmp_path, config)
    (tmp_path / "own.yml").write_text(
        yaml.safe_dump({"model": dataclasses.asdict(config.model)}), encoding="utf-8"
    )
    ended = bridge("check", tmp_path, "--config", str(tmp_path / "own.yml"), "--read")
    assert ended.code == 0, ended.err
    further = {"model.layers.4.enorm.weight": np.ones(16, np.float32)}
    save_file({**tensors, **further}, tmp_path / "model.safetensors")
    message = r"model\.layers\.4\.enorm\.weight has no place in the model"
    with pytest.raises(Mismatch, match=message):
        linen_compat.load(tmp_path, config)


def test_another_score_than_of_the_folder_is_named() -> None:
    """No kernel is scaled or reordered to make up for it."""
    config = linen_compat.config_from_huggingface(FOLDER / "deepseek_v3")
    for changes, message in (
        ({"attention_scale": 0.1}, "has attention_scale=0.32.*, the model 0.1"),
        ({"rope_interleaved": False}, "has rope_interleaved=True, the model False"),
        ({"router_bias_in_weights": True}, "has router_bias_in_weights=False, the model True"),
    ):
        with pytest.raises(Mismatch, match=message):
            linen_compat.load(FOLDER / "deepseek_v3", replace(config, "model", **changes))


# ---- configs -------------------------------------------------------------------------------------


def test_named_models_are_the_presets() -> None:
    """But for groups of experts, which MaxText's file of DeepSeek-V3 does not set."""
    for name, ours in (("deepseek2-16b", "deepseek-v2-lite"), ("deepseek3-671b", "deepseek-v3")):
        found = linen_compat.config_from_maxtext({"model_name": name}).model
        wanted = dataclasses.replace(
            preset(ours).model,
            max_position_embeddings=163_840,
            router_groups=1,
            router_groups_per_token=1,
        )
        assert found == wanted


def test_what_the_keys_become() -> None:
    model = linen_compat.config_from_maxtext(values_of("deepseek3")).model
    assert model.attention_scale == pytest.approx(24**-0.5 * (0.1 * np.log(4) + 1) ** 2, rel=1e-12)
    assert model.router_bias_in_weights
    assert (model.router_groups, model.mlp_dim, model.dense_mlp_dim) == (1, 32, 64)
    short = linen_compat.config_from_maxtext(
        values_of("deepseek2", max_position_embeddings=16, q_lora_rank=12, beta_fast=8, beta_slow=2)
    ).model
    assert (short.attention_scale, short.q_lora_rank) == (24**-0.5, 12)
    assert (short.rope_low_frequency, short.rope_high_frequency) == (2.0, 8.0)
    plain = linen_compat.config_from_maxtext(values_of("deepseek2", rope_type="default")).model
    assert (plain.rope_scaling, plain.rope_interleaved) == (None, False)
    staged = values_of("deepseek2", ici_pipeline_parallelism=3)
    assert linen_compat.config_from_maxtext(staged).pipeline.num_repeats == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_type": "global"}, "attention_type='global' with decoder_block='deepseek'"),
        ({"rope_attention_scaling": True}, "rope_attention_scaling=True .* the rotary embedding"),
        ({"rope_truncate": False}, "rope_truncate=False .* not supported, only True"),
        ({"rope_type": "llama3.1"}, r"rope_type='llama3.1' is not known"),
        ({"use_qk_norm": True}, "use_qk_norm=True .* latent vectors"),
        ({"routed_score_func": ""}, "routed_score_func='' is not known"),
        ({"routed_bias_update_rate": 0.1}, "routed_bias_update_rate=0.1 .* only 0.0"),
        ({"load_balance_loss_weight": 0.1}, "load_balance_loss_weight=0.1 .* only 0.0"),
        ({"shared_experts": 0}, "shared_experts=0 .* its layers have one or more"),
        ({"num_experts": 1}, "decoder_block='deepseek' with num_experts=1"),
        ({"base_num_kv_heads": 2}, "num_kv_heads=2 differs .* num_kv_heads is base_num_kv_heads"),
        ({"first_num_dense_layers": 4}, "num_dense_layers is first_num_dense_layers"),
        ({"rope_factor": 0.5}, "rope_factor=0.5: both must be at least 1"),
        (
            {
                **{"model_name": "deepseek3-x", "routed_score_func": "sigmoid"},
                **{"n_routing_groups": 4, "topk_routing_group": 5},
            },
            "router_groups_per_token=5 exceeds .* router_groups_per_token is topk_routing_group",
        ),
        ({"pipeline_parallel_layers": 2}, "pipeline_parallel_layers=2 .* outside the pipeline"),
        ({"ici_pipeline_parallelism": 2}, "base_num_decoder_layers=4 - first_num_dense_layers=1"),
        ({"mtp_num_layers": 1}, "mtp_num_layers=1 is not supported"),
        ({"decoder_block": "mixtral"}, "attention_type='mla' with decoder_block='mixtral'"),
    ],
)
def test_configs_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        linen_compat.config_from_maxtext(values_of("deepseek2", **changes))


def test_another_name_must_say_what_its_file_would() -> None:
    values = values_of("deepseek3", model_name="deepseek3-tiny")
    del values["routed_bias"], values["mscale"], values["head_dim"]
    with pytest.raises(InputError, match="so the file must say mscale, routed_bias"):
        linen_compat.config_from_maxtext(values)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_shared_experts": 0}, "num_shared_experts=0 with kv_lora_rank does not exist"),
        ({"router_normalize": False}, "router_normalize=False .* after a sigmoid alone"),
        (
            {
                "rope_scaling": None,
                "rope_factor": None,
                "rope_original_length": None,
                "rope_low_frequency": None,
                "rope_high_frequency": None,
            },
            "rope_interleaved=True .* with yarn alone",
        ),
    ],
)
def test_models_that_maxtext_does_not_compute(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    config = deepseek(**changes)
    with pytest.raises(InputError, match=message):
        linen_compat.save(abstract(config), tmp_path / "new", "maxtext:scanned")


def abstract(config: Config) -> Any:
    """A model without values, which is refused before they are read."""
    from flax import nnx

    from nnx_pipeline import Mixtral

    return jax.eval_shape(lambda: Mixtral(config, rngs=nnx.Rngs(0)))
