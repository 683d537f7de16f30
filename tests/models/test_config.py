"""Configs, meshes, presets, overrides and platforms: what is refused, with which cure."""

import ast
import dataclasses
import functools
import importlib.metadata
import math
import re
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
from flax import nnx
from helpers import mesh_of, replace, small_config
from hypothesis import given, settings
from hypothesis import strategies as st

import nnx_pipeline
from nnx_pipeline import (
    Config,
    InputError,
    MeshConfig,
    Mixtral,
    ModelConfig,
    PipelineConfig,
    TrainConfig,
    make_mesh,
    preset,
)
from nnx_pipeline.config._overrides import apply_overrides, known_keys, parse_overrides
from nnx_pipeline.config._stage_layers import layers_of_visits
from nnx_pipeline.config.config import SECTIONS, to_dict
from nnx_pipeline.config.parameter_count import count_parameters
from nnx_pipeline.config.presets import PRESETS
from nnx_pipeline.experiments._registry import choose
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.errors import nearest
from nnx_pipeline.lab.mesh import ambient_mesh
from nnx_pipeline.sharding.layout import Layout

PACKAGE = Path(nnx_pipeline.__file__).parent
SMALL = small_config()
LLAMA3 = {
    "rope_scaling": "llama3",
    "rope_factor": 8.0,
    "rope_low_frequency": 1.0,
    "rope_high_frequency": 4.0,
}
LATENT = {"num_kv_heads": 4, "kv_lora_rank": 8, "rope_head_dim": 2, "value_head_dim": 6}


def model(**changes: Any) -> Callable[[], Any]:
    return lambda: replace(SMALL, "model", **changes)


def pipeline(**changes: Any) -> Callable[[], Any]:
    return lambda: replace(SMALL, "pipeline", **changes)


def training(**changes: Any) -> Callable[[], Any]:
    return lambda: replace(SMALL, "train", **changes)


def on_mesh(text: str, config: Config = SMALL) -> Callable[[], Any]:
    return lambda: config.check_mesh(MeshConfig.parse(text))


def setting(*assignments: str) -> Callable[[], Any]:
    return lambda: apply_overrides(SMALL, parse_overrides(assignments))


def bad(make: Callable[[], Any], *expected: str) -> Any:
    return pytest.param(make, expected, id=" | ".join(expected))


REFUSED = [
    # model
    bad(model(vocab_size=0), "vocab_size=0 is not a whole number of 1 or more"),
    bad(model(embed_dim=16.0), "embed_dim=16.0 is not a whole number"),
    bad(model(num_layers=True), "num_layers=True is not a whole number"),
    bad(model(mlp_dim="8"), "mlp_dim='8' is not a whole number"),
    bad(model(num_kv_heads=3), "num_heads=4 does not split over num_kv_heads=3", "such as 3 or 6"),
    bad(model(head_dim=3), "head_dim=3 must be even for rotary embeddings", "such as 2 or 4"),
    bad(model(num_experts_per_token=5), "exceeds num_experts=4; choose 4 or fewer"),
    bad(model(dtype="bfloat"), "dtype='bfloat' is not known; did you mean 'bfloat16'?"),
    bad(model(param_dtype="int8"), "param_dtype='int8' is not known; choose one of: bfloat16"),
    bad(
        model(attention="dot"),
        "attention='dot' is not known; choose one of: dot_product, chunked, flash, auto",
    ),
    *(
        bad(
            model(attention=kind, attention_block=128),
            f"attention_block=128 is for attention='dot_product' and 'chunked', and "
            f"attention='{kind}'; leave it at None",
        )
        for kind in ("flash", "auto")
    ),
    bad(model(sliding_window=0), "sliding_window=0 is not a whole number of 1 or more"),
    bad(model(attention_block=0), "attention_block=0 is not a whole number of 1 or more"),
    bad(model(expert_group=3), "expert_group=3 does not divide num_experts=4", "of: 1, 2, 4"),
    bad(model(expert_group=0), "expert_group=0 is not a whole number of 1 or more"),
    bad(
        model(experts="capacity", expert_group=2),
        "expert_group=2 is how many experts are computed at a time, and experts='capacity'",
        "leave it at None",
    ),
    bad(
        model(experts="grouped", capacity_factor=1.5),
        "capacity_factor=1.5 is how much each of experts='capacity' takes",
        "experts='grouped'; leave it at None",
    ),
    bad(model(experts="capacity", capacity_factor=0.0), "capacity_factor=0.0 must be above 0"),
    bad(model(router_score="tanh"), "router_score='tanh' is not known; choose one of: softmax"),
    bad(model(router_normalize=1), "router_normalize=1 is not known"),
    bad(model(router_scale=0.0), "router_scale=0.0 must be above 0"),
    bad(model(router_bias=1), "router_bias=1 is not known"),
    bad(model(num_shared_experts=-1), "num_shared_experts=-1 is not a whole number of 0 or more"),
    bad(
        model(router_score="sigmoid", router_groups=2, router_groups_per_token=3),
        "router_groups_per_token=3 exceeds router_groups=2; choose 2 or fewer",
    ),
    bad(model(router_groups=2, num_experts_per_token=3), "a group needs 1 expert, and all groups"),
    bad(
        model(qk_norm_over_heads=True), "qk_norm_over_heads=True is about a norm that qk_norm=False"
    ),
    bad(
        model(attention_sinks=True, attention="chunked"),
        "attention_sinks=True needs attention='dot",
    ),
    bad(model(expert_bias=True, experts="grouped"), "expert_bias=True needs experts='dense'"),
    bad(model(full_attention_first=1), "and sliding_window=None; give a window and 2 or more"),
    bad(model(full_attention_first=9, sliding_window=2), "full_attention_first=9 leaves none of"),
    bad(
        model(full_attention_first=1, full_attention_every=2, sliding_window=2),
        "each say which layers have no window",
    ),
    bad(model(rope_head_dim=4), "rope_head_dim=4 is a part of head_dim=4"),
    bad(model(rope_head_dim=2, rope_interleaved=True), "rope_interleaved=True need kv_lora_rank"),
    bad(model(latent_norm_epsilon=1e-6), "latent_norm_epsilon=1e-06 is for multi-head latent"),
    bad(
        model(router_score="sigmoid", router_groups=3),
        "num_experts=4 does not split into router_groups=3",
    ),
    bad(
        model(router_score="sigmoid", router_groups=2, num_experts_per_token=3),
        "router_groups=2 leaves 2 experts in each group, and a token chooses from 1 group; a group",
        "num_experts_per_token=3; choose fewer groups, or more per token",
    ),
    bad(
        model(num_shared_experts=1, num_experts=1, num_experts_per_token=1),
        "num_shared_experts=1 is about a router, which num_experts=1 does not have",
    ),
    bad(
        model(router_score="sigmoid", num_experts=1, num_experts_per_token=1),
        "router_score='sigmoid' is about a router, which num_experts=1 does not have",
        "leave it at 'softmax'",
    ),
    bad(
        model(experts="grouped", num_experts=1, num_experts_per_token=1),
        "experts='grouped' needs routed experts",
        "leave it at 'dense'",
    ),
    bad(model(experts="desne"), "experts='desne' is not known; did you mean 'dense'?"),
    bad(model(embedding="onehot"), "embedding='onehot' is not known; did you mean 'one_hot'?"),
    bad(model(norm_epsilon=-1.0), "norm_epsilon=-1.0 is out of range; choose 0"),
    bad(model(rope_theta=0.0), "rope_theta=0.0 must be above 0"),
    bad(model(rope_interleaved=1), "rope_interleaved=1 is not known"),
    bad(model(rope_scaling="ntk"), "rope_scaling='ntk' is not known"),
    bad(model(rope_scaling="yarn"), "rope_factor, which is not given; DeepSeek-V3 has 40.0"),
    bad(model(kv_lora_rank=8), "kv_lora_rank=8 needs rope_head_dim, which is not given"),
    bad(model(q_lora_rank=8), "q_lora_rank=8 is for multi-head latent attention"),
    bad(model(**{**LATENT, "rope_head_dim": 3}), "rope_head_dim=3 must be even"),
    bad(model(**{**LATENT, "rope_head_dim": 4}), "rope_head_dim=4 is a part of head_dim=4"),
    bad(model(**{**LATENT, "num_kv_heads": 2}), "num_kv_heads=2 differs from num_heads=4"),
    bad(model(**LATENT, qk_norm=True), "the latent vectors are normalised instead"),
    bad(model(num_dense_layers=-1), "num_dense_layers=-1 is not a whole number of 0 or more"),
    bad(model(num_dense_layers=1), "num_dense_layers=1 and dense_mlp_dim=None go together"),
    bad(
        model(num_dense_layers=4, dense_mlp_dim=8),
        "num_dense_layers=4 leaves no layer with experts of num_layers=4",
    ),
    bad(
        model(num_dense_layers=1, dense_mlp_dim=8, num_experts=1, num_experts_per_token=1),
        "and num_experts=1; leave it at 0",
    ),
    bad(pipeline(batch_split=0), "batch_split=0 is not a whole number of 1 or more"),
    bad(model(full_attention_every=2), "and sliding_window=None; give a window and 2 or more"),
    bad(
        model(full_attention_every=2, sliding_window=2, num_dense_layers=1, dense_mlp_dim=8),
        "and num_dense_layers=1 come before these; leave one of them out",
    ),
    bad(
        model(expert_group=1, num_experts=1, num_experts_per_token=1),
        "expert_group=1 is how many of several experts are computed at a time, and num_experts=1",
    ),
    bad(model(router_bias_in_weights=True), "needs a bias, and router_bias=False"),
    bad(model(rope_scaling="linear"), "rope_scaling='linear' needs rope_factor"),
    bad(model(rope_factor=2.0), "rope_factor=2.0 has no effect with rope_scaling=None; leave it"),
    bad(
        model(rope_scaling="linear", rope_factor=2.0, rope_original_length=8),
        "rope_original_length=8 has no effect with rope_scaling='linear'",
    ),
    bad(model(rope_scaling="linear", rope_factor=0.5), "rope_factor=0.5 is out of range"),
    bad(model(**LLAMA3, rope_original_length=0), "rope_original_length=0 is not a whole number"),
    bad(
        model(**{**LLAMA3, "rope_low_frequency": 4.0}, rope_original_length=8),
        "rope_low_frequency=4.0 must be below rope_high_frequency=4.0",
        "Llama 3.1 has 1.0 and 4.0",
    ),
    bad(model(qk_norm="yes"), "qk_norm='yes' is not known"),
    bad(model(quantization="int4"), "quantization='int4' is not known"),
    bad(
        model(quantization="int8", num_experts=4),
        "quantization='int8' needs a dense model, and num_experts=4",
    ),
    bad(
        model(quantization="fp8", dtype="float16", num_experts=1, num_experts_per_token=1),
        "'fp8' is not for dtype='float16'",
    ),
    bad(
        model(**LATENT, quantization="fp8", num_experts=1, num_experts_per_token=1),
        "'fp8' is not for multi-head latent attention",
    ),
    bad(model(**LATENT, attention_bias="qkv"), "attention_bias='qkv' is not for multi-head latent"),
    bad(model(attention_bias=True), "attention_bias=True is not known"),
    bad(model(attention_soft_cap=0.0), "attention_soft_cap=0.0 must be above 0"),
    bad(model(logits_soft_cap=-30.0), "logits_soft_cap=-30.0 must be above 0"),
    bad(model(tied_embeddings=1), "tied_embeddings=1 is not known"),
    bad(model(tied_embeddings=True, tied_head_dtype="float16"), "tied_head_dtype='float16' is not"),
    bad(model(tied_head_dtype="bfloat16"), "has no effect with tied_embeddings=False"),
    bad(model(attention_scale=-0.5), "attention_scale=-0.5 must be above 0"),
    bad(model(norm_epsilon=math.nan), "norm_epsilon=nan is not a finite number"),
    bad(model(rope_theta=math.nan), "rope_theta=nan is not a finite number"),
    bad(model(attention_scale=math.inf), "attention_scale=inf is not a finite number"),
    bad(model(max_position_embeddings=0), "max_position_embeddings=0 is not a whole number"),
    bad(model(rope_theta="big"), "rope_theta='big' is not a finite number"),
    bad(model(norm_scale_offset=math.nan), "norm_scale_offset=nan is not a finite number"),
    bad(model(norm_scale_offset="one"), "norm_scale_offset='one' is not a finite number"),
    bad(model(dropout_rate=1.0), "dropout_rate=1.0 must be at least 0 and below 1"),
    bad(model(dropout_rate=-0.1), "dropout_rate=-0.1 must be at least 0"),
    # pipeline
    bad(pipeline(num_repeats=0), "num_repeats=0 is not a whole number of 1 or more"),
    bad(pipeline(stage_layers="3,4,x"), "pipeline.stage_layers='3,4,x' is neither auto nor a list"),
    bad(pipeline(stage_layers="0,0"), "pipeline.stage_layers='0,0' is neither auto nor a list"),
    bad(pipeline(stage_layers=3), "pipeline.stage_layers=3 is neither auto nor a list"),
    bad(pipeline(num_microbatches=0), "num_microbatches=0 is not a whole number"),
    bad(pipeline(schedule="gpipe"), "schedule='gpipe' is not known; choose one of: circular, 1f1b"),
    bad(pipeline(backward="hand"), "backward='hand' is not known"),
    bad(
        pipeline(schedule="1f1b", num_repeats=2, fsdp_gather="prefetch"),
        "pipeline.fsdp_gather=prefetch holds the weights of two consecutive repeats",
        "choose use or step",
    ),
    bad(pipeline(schedule="1f1b", forwarding_delay=2), "pipeline.forwarding_delay=2 is for the"),
    bad(pipeline(schedule="1f1b", backward="accumulate"), "pipeline.backward=accumulate is for"),
    bad(pipeline(fsdp_gather="step", backward="autodiff"), "pipeline.fsdp_gather=step adds"),
    bad(pipeline(shift="permute"), "shift='permute' is not known; did you mean 'ppermute'?"),
    bad(pipeline(sharding="manual"), "sharding='manual' is not known", "auto"),
    bad(pipeline(remat="some"), "remat='some' is not known; choose one of: full, save_out_proj"),
    bad(pipeline(remat=3), "remat=3 is not known; choose one of: full, save_out_proj"),
    bad(
        pipeline(remat="keep:out_prj"),
        "pipeline.remat=keep:out_prj: keep has no 'out_prj'; did you mean 'out_proj'?",
    ),
    bad(
        pipeline(remat="keep:decoder_layer_input"),
        "keep has no 'decoder_layer_input'; choose one of: query_proj, key_proj, value_proj, "
        "out_proj, mlp_gate, mlp_up",
    ),
    bad(
        pipeline(remat="offload:out_proj/offload:mlp_up"),
        "'offload:mlp_up' is not of the form keep:NAME+NAME or offload:NAME+NAME, each once",
    ),
    bad(pipeline(remat="kept:out_proj"), "write for example keep:out_proj/offload:decoder_layer"),
    bad(pipeline(remat="keep:"), "keep has no ''"),
    bad(pipeline(remat="auto:76GB"), "nnx-pipeline fit … --over remat --limit 76GB finds it"),
    bad(pipeline(remat="auto"), "nnx-pipeline fit … --over remat --limit 80GB finds it"),
    *(
        bad(
            pipeline(remat=f"keep:{name}", remat_groups=2),
            f"{name} is not a group of layers; write the name of a value with a number from 1 on, "
            "for example out_proj@1",
        )
        for name in ("out_proj@0", "out_proj@one", "out_proj@1.5", "out_proj@-1")
    ),
    bad(
        pipeline(remat="offload:decoder_layer_input@1", remat_groups=2),
        "decoder_layer_input@1 is not a group of layers",
    ),
    bad(
        pipeline(remat="keep:out_proj@3", remat_groups=2),
        "names out_proj@3, but there are pipeline.remat_groups=2; set as many groups",
    ),
    bad(
        pipeline(remat="keep:out_proj/offload:out_proj@1", remat_groups=2),
        "both name ['out_proj@1']; keep each name in one of them",
    ),
    bad(
        pipeline(remat="keep:out_proj@1/offload:out_proj", remat_groups=2),
        "both name ['out_proj@1']; keep each name in one of them",
    ),
    bad(
        pipeline(remat="keep:out_proj/offload:out_proj"),
        "both name ['out_proj']; keep each name in one of them",
    ),
    bad(
        pipeline(remat="offload:decoder_layer_input", save_decoder_layer_input=False),
        "pipeline.remat=offload:decoder_layer_input sends the input of each layer to the host",
    ),
    bad(pipeline(forwarding_delay=3), "forwarding_delay=3 is not known; choose one of: 1, 2"),
    bad(pipeline(save_decoder_layer_input="no"), "save_decoder_layer_input='no'"),
    bad(
        pipeline(remat="inputs_offloaded", save_decoder_layer_input=False),
        "sends the input of each layer to the host",
        "would not keep; leave that out",
    ),
    # train
    bad(training(global_batch=0), "global_batch=0 is not a whole number"),
    bad(training(loss_chunks=3), "sequence_length=8 does not split into loss_chunks=3 pieces"),
    bad(training(learning_rate=-1e-3), "learning_rate=-0.001 is out of range; choose 0"),
    bad(training(learning_rate=math.nan), "learning_rate=nan is not a finite number"),
    bad(training(learning_rate=math.inf), "learning_rate=inf is not a finite number"),
    bad(training(warmup_steps=-1), "warmup_steps=-1 is not a whole number of 0 or more"),
    bad(training(learning_rate_decay="wsd"), "learning_rate_decay='wsd' is not known"),
    bad(
        training(learning_rate_decay="cosine"), "learning_rate_decay='cosine' needs schedule_steps"
    ),
    *(
        bad(training(**{name: value}), f"{name}={value} is about a learning rate that falls", cure)
        for name, value, cure in (
            ("schedule_steps", 5, "leave it at None"),
            ("decay_steps", 5, "leave it at None"),
            ("final_fraction", 0.5, "leave it at 0.1"),
        )
    ),
    *(
        bad(training(learning_rate_decay="linear", **fields), *said)
        for fields, said in (
            ({"schedule_steps": 0}, ("schedule_steps=0 is not a whole number of 1 or more",)),
            ({"schedule_steps": 9, "decay_steps": -1}, ("decay_steps=-1 is not a whole number",)),
            ({"schedule_steps": 9, "final_fraction": 1.5}, ("choose 0 to 1",)),
            ({"schedule_steps": 9, "final_fraction": -1.0}, ("final_fraction=-1.0 is out of",)),
            (
                {"schedule_steps": 9, "warmup_steps": 10},
                ("warmup_steps=10 do not fit into schedule_steps=9; choose 10 or more",),
            ),
            (
                {"schedule_steps": 9, "warmup_steps": 5, "decay_steps": 5},
                ("warmup_steps=5 + decay_steps=5 do not fit into schedule_steps=9",),
            ),
        )
    ),
    bad(training(accumulate_steps=0), "accumulate_steps=0 is not a whole number of 1 or more"),
    bad(training(master_dtype="bfloat16"), "master_dtype='bfloat16' is not known"),
    bad(
        training(master_dtype="float32"),
        "train.master_dtype='float32' is what the parameters are stored in already",
    ),
    bad(training(max_skipped_steps=-1), "max_skipped_steps=-1 is not a whole number of 0 or"),
    bad(training(spike_factor=6.0), "max_skipped_steps=0 skips none; set the latter to 1 or more"),
    bad(training(spike_interval=9), "spike_factor=None does not look; set it, such as to 6"),
    bad(training(spike_interval=3), "spike_interval=3 is not a whole number of 4 or more"),
    bad(training(spike_factor=0.0, max_skipped_steps=1), "spike_factor=0.0 must be above 0"),
    bad(training(adam_eps=-1.0), "adam_eps=-1.0 is out of range"),
    bad(training(adam_b1=1.0), "adam_b1=1.0 must be at least 0 and below 1"),
    bad(training(adam_b2=-0.1), "adam_b2=-0.1 must be at least 0 and below 1"),
    bad(training(adam_b2=math.nan), "adam_b2=nan is not a finite number"),
    bad(training(adam_b1="x"), "adam_b1='x' is not a finite number"),
    bad(training(weight_decay="0.1"), "weight_decay='0.1' is not a finite number"),
    bad(training(load_balance_weight=-1.0), "load_balance_weight=-1.0 is out of range"),
    bad(training(router_z_loss_weight=-1.0), "router_z_loss_weight=-1.0 is out of range"),
    bad(training(dropout_seed=0.5), "dropout_seed=0.5 is not a whole number"),
    bad(training(dropout_seed=-1), "dropout_seed=-1 is not a whole number from 0"),
    bad(training(dropout_seed=2**32), "dropout_seed=4294967296 is not a whole number from 0"),
    bad(training(clip_norm=0.0), "clip_norm=0.0 must be above 0; set it to None to clip nothing"),
    bad(training(shard_optimizer_over_data="yes"), "shard_optimizer_over_data='yes' is not known"),
    bad(training(grad_dtype="float16"), "grad_dtype='float16' is not known; did you mean"),
    bad(training(grad_dtype="int8"), "grad_dtype='int8' is not known; choose one of: None, bf"),
    bad(training(clip_norm=math.nan), "clip_norm=nan is not a finite number"),
    # together
    bad(
        pipeline(num_microbatches=5),
        "a batch of 8 (train.global_batch) does not split into 5 microbatches",
        "choose a multiple of 5, such as 5 or 10, for the batch, or pipeline.num_microbatches=4",
    ),
    bad(on_mesh("context=2"), "context=2 is not supported by attention yet; use context=1"),
    bad(on_mesh("stage=3"), "model.num_layers=4 does not split into 3 stages × 1 repeat"),
    bad(
        on_mesh("stage=2", pipeline(num_repeats=3)()),
        "num_layers=4 does not split into 2 stages × 3 repeats; choose a multiple of 6, such as 6",
    ),
    bad(
        on_mesh("stage=4", pipeline(num_microbatches=2)()),
        "pipeline.num_microbatches=2 does not split over stage=4; choose a multiple of 4",
    ),
    bad(
        on_mesh("stage=4", pipeline(num_microbatches=4, forwarding_delay=2)()),
        "pipeline.num_microbatches=4 is too few for stage=4 with pipeline.forwarding_delay=2",
        "choose 8 or more",
    ),
    bad(
        on_mesh("stage=4", training(global_batch=6)()),
        "a batch of 6 (train.global_batch) does not split into 4 microbatches; choose a",
    ),
    bad(
        on_mesh("stage=4,fsdp=4"),
        "a microbatch of 2 sequences does not split over data=1 × fsdp=4 × expert=1",
        "a batch of 8 (train.global_batch) in 4 microbatches",
    ),
    bad(
        on_mesh("fsdp=16"),
        "does not split over data=1 × fsdp=16",
        "a batch of 8",
    ),
    bad(
        on_mesh("stage=2,fsdp=2", pipeline(num_microbatches=8)()),
        "choose a multiple of 16, such as 16, for the batch, or pipeline.num_microbatches=4",
    ),
    bad(
        on_mesh("data=3", training(shard_optimizer_over_data=True, global_batch=12)()),
        "model.embed_dim=16 does not split over fsdp×expert×data=3",
        "train.shard_optimizer_over_data=True",
        "choose a multiple of 3, such as 15 or 18",
    ),
    bad(
        on_mesh("data=4", pipeline(num_microbatches=4)()),
        "a microbatch of 2 sequences does not split over data=4",
    ),
    bad(
        on_mesh("", model(max_position_embeddings=4)()),
        "sequences of 8 tokens (train.sequence_length) are longer than the model was made for, "
        "model.max_position_embeddings=4; shorten them",
    ),
    bad(
        lambda: small_config(
            model={"num_experts": 1, "num_experts_per_token": 1},
            train={"load_balance_weight": 0.1},
        ),
        "train.load_balance_weight=0.1 weighs the loss of a router, which model.num_experts=1",
    ),
    bad(
        lambda: small_config(
            model={"num_experts": 1, "num_experts_per_token": 1},
            train={"router_z_loss_weight": 0.1},
        ),
        "train.router_z_loss_weight=0.1 weighs the loss of a router, which model.num_experts=1",
    ),
    bad(on_mesh("tensor=64"), "model.mlp_dim=16 does not split over tensor=64"),
    bad(
        on_mesh("fsdp=2", model(embed_dim=15)()),
        "model.embed_dim=15 does not split over fsdp×expert=2",
    ),
    bad(
        on_mesh("expert=2", model(expert_group=4)()),
        "the 2 experts that a device of expert=2 has do not split into groups of "
        "model.expert_group=4; choose one of: 1, 2",
    ),
    bad(on_mesh("tensor=2", model(mlp_dim=5)()), "model.mlp_dim=5 does not split over tensor=2"),
    bad(on_mesh("tensor=4"), "model.num_kv_heads=2 does not split over tensor=4"),
    bad(
        on_mesh("tensor=4", model(num_heads=6, num_kv_heads=6)()),
        "model.num_heads=6 does not split over tensor=4",
    ),
    bad(
        on_mesh("expert=8", model(num_experts=4)()),
        "model.num_experts=4 does not split over expert=8",
    ),
    # mesh
    bad(lambda: MeshConfig(stage=0), "mesh axis stage=0 is not a whole number of 1 or more"),
    bad(lambda: MeshConfig(data=True), "mesh axis data=True is not a whole number"),
    bad(lambda: MeshConfig(fsdp=2.0), "mesh axis fsdp=2.0 is not a whole number"),
    bad(lambda: MeshConfig.parse("stages=4"), "no axis 'stages'; did you mean 'stage'?"),
    bad(lambda: MeshConfig.parse("stage=4,,fsdp=2"), "no axis ''; choose one of: data, stage"),
    bad(lambda: MeshConfig.parse(","), "no axis ''; choose one of: data, stage"),
    bad(lambda: MeshConfig.parse("pp=4"), "no axis 'pp'; choose one of: data, stage, fsdp"),
    bad(lambda: MeshConfig.parse("stage=2,stage=2"), "names stage twice; name each axis once"),
    bad(lambda: MeshConfig.parse("stage"), "write stage=N with a whole number of 1 or more"),
    bad(lambda: MeshConfig.parse("stage=-1"), "write stage=N"),
    bad(lambda: MeshConfig.parse("stage=0"), "mesh 'stage=0': write stage=N with a whole number"),
    bad(lambda: MeshConfig(dcn=MeshConfig(data=2)), "data=1 does not divide into dcn data=2 parts"),
    bad(lambda: MeshConfig.parse("stage=²"), "write stage=N"),
    bad(lambda: mesh_of("stage=16"), "stage=16 needs 16 devices and there are 8; make the product"),
    # overrides
    bad(setting("model.num_layers"), "'model.num_layers' is not of the form key=value"),
    bad(setting("=4"), "is not of the form key=value"),
    bad(setting("model.num_layers="), "is not of the form key=value"),
    bad(setting("num_layers=8"), "no such config field; did you mean 'model.num_layers'?"),
    bad(setting("model.num_layer=8"), "no such config field; did you mean 'model.num_layers'?"),
    bad(setting("mesh.stage=8"), "mesh.stage=8: no such config field"),
    bad(setting("model.num_layers=eight"), "model.num_layers=eight needs a whole number"),
    bad(setting("model.num_layers=8.0"), "needs a whole number"),
    bad(setting("train.learning_rate=fast"), "train.learning_rate=fast needs a number"),
    bad(setting("train.learning_rate=nan"), "learning_rate=nan is not a finite number"),
    bad(setting("pipeline.num_microbatches=x"), "needs a whole number or none"),
    bad(setting("train.clip_norm=null"), "train.clip_norm=null needs a number or none"),
    bad(setting("pipeline.forwarding_delay=x"), "forwarding_delay='x' is not known"),
    bad(setting("pipeline.save_decoder_layer_input=yes"), "needs true or false"),
    bad(setting("pipeline.shift=sliced"), "did you mean 'slice'?"),
    bad(setting("model.grad_dtype=float32"), "no such config field"),
    bad(
        setting("train.global_batch=12", "pipeline.num_microbatches=8"),
        "a batch of 12 (train.global_batch) does not split into 8 microbatches; choose a",
    ),
    # presets, experiments, layouts
    bad(lambda: preset("mixtral-smal"), "not a preset; did you mean 'mixtral-small'?"),
    bad(lambda: preset("gpt"), "model 'gpt' is not a preset; choose one of: tiny, mixtral-small"),
    bad(lambda: choose(["norm-scal"]), "is not known; did you mean 'norm-scale'?"),
    bad(
        lambda: Layout().spec("vocabulary"),
        "axis 'vocabulary' is neither a logical axis nor an axis of the mesh",
    ),
    # platforms
    bad(lambda: Platform.parse("gpu:h100:8"), "platform 'gpu:h100:8' is not known", "cuda"),
    bad(
        lambda: Platform.parse(""),
        "platform '' is not known; choose one of: cpu, tpu, cuda, rocm, local",
    ),
    bad(lambda: Platform.parse("cpu:8"), "takes no target; write cpu"),
    bad(lambda: Platform.parse("tpu"), "not complete; write for example tpu:v5p:2x2x2"),
    bad(lambda: Platform.parse("tpu:v5p:2x"), "no topology like 2x2x2"),
    bad(lambda: Platform.parse("tpu:v5p:2x2:x2"), "not complete"),
    bad(lambda: Platform.parse("cuda:h100"), "not complete; write for example cuda:h100:8"),
    bad(lambda: Platform.parse("cuda:a100:8"), "has no such GPU; choose a100-40gb or a100-80gb"),
    bad(
        lambda: Platform.parse("cuda:h100:0"),
        "in each such as 4x8, 65536 at most; write cuda:h100:8",
    ),
    bad(lambda: Platform.parse("cuda:h100:999992"), "more than 65536 devices; write cuda:h100:8"),
    bad(lambda: Platform.parse("tpu:v5p:1000x1000"), "more than 65536 devices; write tpu:v5p:"),
]


@pytest.mark.parametrize(("make", "expected"), REFUSED)
def test_what_is_refused_and_the_cure(make: Callable[[], Any], expected: tuple[str, ...]) -> None:
    with pytest.raises(InputError) as error:
        make()
    for part in expected:
        assert part in str(error.value)
    assert "\n" not in str(error.value)


NUMBERS = st.one_of(
    st.integers(-2, 9), st.floats(-2, 9), st.sampled_from([math.nan, math.inf, -math.inf, 1e30])
)
ANYTHING = st.one_of(NUMBERS, st.booleans(), st.none(), st.sampled_from(["", "8", "full", "auto"]))


@settings(max_examples=200)
@given(st.sampled_from([*SECTIONS.values(), MeshConfig]), st.data())
def test_a_config_is_made_or_refused(section: type, data: st.DataObject) -> None:
    """One field at a time takes any value at all: never another exception than InputError."""
    start = MeshConfig() if section is MeshConfig else getattr(SMALL, names_of_sections()[section])
    name = data.draw(st.sampled_from([field.name for field in dataclasses.fields(section)]))
    value = data.draw(ANYTHING)
    try:
        made = dataclasses.replace(start, **{name: value})
    except InputError as error:
        message = str(error)
    else:
        hint, message = typing.get_type_hints(section)[name], name
        if hint in (int, float):
            assert math.isfinite(getattr(made, name))
        if hint is bool:
            assert isinstance(getattr(made, name), bool)
    assert name in message


def names_of_sections() -> dict[type, str]:
    return {section: name for name, section in SECTIONS.items()}


@settings(max_examples=100)
@given(
    mesh=st.builds(
        MeshConfig,
        **{
            axis: st.sampled_from([1, 2, 3, 4])
            for axis in ("data", "stage", "fsdp", "tensor", "expert", "context")
        },
    ),
    microbatches=st.one_of(st.none(), st.integers(1, 8)),
    repeats=st.integers(1, 3),
    batch=st.integers(1, 16),
)
def test_a_config_fits_a_mesh_or_is_refused(
    mesh: MeshConfig, microbatches: int | None, repeats: int, batch: int
) -> None:
    """What passes the check divides evenly in every way that the model needs."""
    try:
        config = Config(
            model=SMALL.model,
            pipeline=PipelineConfig(num_microbatches=microbatches, num_repeats=repeats),
            train=TrainConfig(global_batch=batch, sequence_length=8),
        )
        config.check_mesh(mesh)
    except InputError:
        return
    count = config.pipeline.microbatches_on(mesh.stage)
    assert config.layers_per_stage(mesh.stage) * mesh.stage * repeats == SMALL.model.num_layers
    assert count % mesh.stage == 0
    assert batch % count == 0
    assert batch % (mesh.stage * mesh.data * mesh.fsdp * mesh.expert) == 0
    assert mesh.context == 1


@pytest.mark.parametrize(
    ("mesh", "microbatches", "batch", "other"),
    [
        ("stage=2,fsdp=2", 8, 8, 4),
        ("stage=2", 6, 8, 4),  # said before the mesh is known
        ("stage=2", None, 9, None),
        ("fsdp=16", None, 8, None),
        ("data=2", 1, 9, None),
        ("stage=4,fsdp=4", 4, 8, None),
    ],
)
def test_numbers_that_a_message_names_split(
    mesh: str, microbatches: int | None, batch: int, other: int | None
) -> None:
    """Each batch and each number of microbatches of the message is taken in turn."""

    def checked(batch: int, microbatches: int | None) -> None:
        given = replace(SMALL, "train", global_batch=batch)
        replace(given, "pipeline", num_microbatches=microbatches).check_mesh(MeshConfig.parse(mesh))

    with pytest.raises(InputError) as raised:
        checked(batch, microbatches)
    named = re.search(r"such as ([\d or]+), for the batch(, or .*=(\d+))?$", str(raised.value))
    for size in re.findall(r"\d+", named[1]):
        checked(int(size), microbatches)
    assert named[3] == (other and str(other))
    if other:
        checked(batch, other)


@settings(max_examples=200)
@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 4), st.integers(1, 3))
def test_layers_that_do_not_divide_are_spread(
    layers: int, stages: int, repeats: int, kinds: int
) -> None:
    """No other numbers have fewer layers on the fullest stages of all repeats together."""
    sizes = {"stages": stages, "repeats": repeats, "kinds": kinds}
    found = layers_of_visits(layers, **sizes, stage_layers="auto")
    assert sum(found) == layers
    assert len(found) == stages * repeats
    full = [-(-number // kinds) * kinds for number in found]
    fullest = [max(full[at : at + stages]) for at in range(0, len(full), stages)]
    assert sum(fullest) == -(-layers // (stages * kinds)) * kinds
    assert max(fullest) - min(fullest) <= kinds
    text = ",".join(map(str, found))
    assert layers_of_visits(layers, **sizes, stage_layers=text) == found
    if layers % (stages * repeats * kinds) == 0:
        assert found == layers_of_visits(layers, **sizes)


def test_a_list_of_layers_per_stage() -> None:
    sizes = {"stages": 1, "repeats": 2}
    assert layers_of_visits(11, **sizes, stage_layers="3,4,4,0") == (7, 4)
    for numbers, layers, kinds, message in (
        ("3,4,4", 11, 1, r"has 3 numbers and 11 layers, and the pipeline 2 stages × 2 repeats"),
        ("3,4,4,3", 15, 1, r"4 numbers and 14 layers, .* and 15 layers; give a number for each"),
        ("2,3,2,0", 7, 2, r"2 kinds of layers take turns.* give multiples of 2, all but the last"),
    ):
        with pytest.raises(InputError, match=message):
            layers_of_visits(layers, stages=2, repeats=2, kinds=kinds, stage_layers=numbers)


@settings(max_examples=100)
@given(st.text(alphabet="stagefdp=,0123456789- ", max_size=20))
def test_a_mesh_text_is_read_or_refused(text: str) -> None:
    try:
        mesh = MeshConfig.parse(text)
    except InputError:
        return
    assert all(size >= 1 for size in mesh.sizes().values())
    if mesh.num_devices > 1:
        assert MeshConfig.parse(str(mesh)) == mesh


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SMALL.model.num_layers = 3


def test_reading_a_mesh() -> None:
    assert MeshConfig.parse("stage=4, fsdp=2") == MeshConfig(stage=4, fsdp=2)
    assert MeshConfig.parse("") == MeshConfig()
    assert str(MeshConfig()) == "one device"
    assert str(MeshConfig(stage=4, fsdp=2)) == "stage=4,fsdp=2"
    assert MeshConfig(stage=4, fsdp=2).num_devices == 8
    mesh = mesh_of("stage=2,fsdp=2")  # virtual devices may be left over
    assert dict(mesh.shape) == MeshConfig(stage=2, fsdp=2).sizes()
    with jax.set_mesh(mesh):
        assert ambient_mesh() == MeshConfig(stage=2, fsdp=2)


def test_devices_that_cost_money_are_not_left_out() -> None:
    class Chip:
        platform = "tpu"

    with pytest.raises(InputError, match="needs 4 devices and there are 8"):
        make_mesh(MeshConfig(stage=4), [Chip()] * 8)


def test_a_mesh_with_foreign_axes() -> None:
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh), pytest.raises(InputError, match="mesh axis 'batch' is not known"):
        Mixtral(SMALL, rngs=nnx.Rngs(0))


def test_nearest_names_one_or_all() -> None:
    assert nearest("tiy", ["tiny", "large"]) == "did you mean 'tiny'?"
    assert nearest("x", ["tiny", "large"]) == "choose one of: tiny, large"


FIELDS = (
    ("model.vocab_size", "64", 64),
    ("model.embed_dim", "32", 32),
    ("model.mlp_dim", "24", 24),
    ("model.num_layers", "6", 6),
    ("model.num_heads", "8", 8),
    ("model.num_kv_heads", "4", 4),
    ("model.head_dim", "6", 6),
    ("model.num_experts", "2", 2),
    ("model.num_experts_per_token", "1", 1),
    ("model.dtype", "bfloat16", "bfloat16"),
    ("model.param_dtype", "bfloat16", "bfloat16"),
    ("model.norm_epsilon", "1e-6", 1e-6),
    ("model.norm_scale_offset", "1", 1.0),
    ("model.rope_theta", "10000", 1e4),
    ("model.rope_interleaved", "true", True),
    ("model.rope_scaling", "linear", "linear"),
    ("model.rope_factor", "4", 4.0),
    ("model.rope_original_length", "4096", 4096),
    ("model.rope_low_frequency", "0.5", 0.5),
    ("model.rope_high_frequency", "8", 8.0),
    ("model.rope_truncate", "false", False),
    ("model.rope_amplitude", "1.5", 1.5),
    ("model.rope_window_theta", "100", 100.0),
    ("model.latent_norm_epsilon", "1e-6", 1e-6),
    ("model.norm_placement", "both", "both"),
    ("model.qk_norm_over_heads", "true", True),
    ("model.activation", "gelu_tanh", "gelu_tanh"),
    ("model.attention_sinks", "true", True),
    ("model.router_logits_bias", "true", True),
    ("model.expert_bias", "true", True),
    ("model.embedding_scale", "8", 8.0),
    ("model.residual_scale", "0.5", 0.5),
    ("model.logits_divisor", "8", 8.0),
    ("model.full_attention_first", "2", 2),
    ("model.qk_norm", "true", True),
    ("model.quantization", "int8", "int8"),
    ("model.attention_bias", "qkv", "qkv"),
    ("model.attention_soft_cap", "50", 50.0),
    ("model.logits_soft_cap", "30", 30.0),
    ("model.tied_embeddings", "true", True),
    ("model.tied_head_dtype", "bfloat16", "bfloat16"),
    ("model.attention_scale", "0.5", 0.5),
    ("model.attention", "dot_product", "dot_product"),
    ("model.experts", "dense", "dense"),
    ("model.attention_block", "128", 128),
    ("model.sliding_window", "128", 128),
    ("model.expert_group", "2", 2),
    ("model.embedding", "auto", "auto"),
    ("model.full_attention_every", "2", 2),
    ("model.num_dense_layers", "1", 1),
    ("model.dense_mlp_dim", "48", 48),
    ("model.kv_lora_rank", "16", 16),
    ("model.q_lora_rank", "24", 24),
    ("model.rope_head_dim", "2", 2),
    ("model.value_head_dim", "6", 6),
    ("model.router_bias_in_weights", "true", True),
    ("pipeline.num_microbatches", "4", 4),
    ("pipeline.num_microbatches", "None", None),
    ("pipeline.num_repeats", "2", 2),
    ("pipeline.batch_split", "2", 2),
    ("pipeline.unrolled_layers", "2", 2),
    ("pipeline.remat_groups", "2", 2),
    ("pipeline.stage_layers", "3,4,4,3", "3,4,4,3"),
    ("pipeline.schedule", "1f1b", "1f1b"),
    ("pipeline.backward", "accumulate", "accumulate"),
    ("pipeline.fsdp_gather", "step", "step"),
    ("pipeline.shift", "slice", "slice"),
    ("pipeline.sharding", "auto", "auto"),
    ("pipeline.remat", "none", "none"),
    ("pipeline.forwarding_delay", "2", 2),
    ("pipeline.save_decoder_layer_input", "false", False),
    ("model.dropout_rate", "0.1", 0.1),
    ("model.max_position_embeddings", "4096", 4096),
    ("train.dropout_seed", "7", 7),
    ("train.global_batch", "4", 4),
    ("train.sequence_length", "16", 16),
    ("train.learning_rate", "1e-3", 1e-3),
    ("train.warmup_steps", "5", 5),
    ("train.learning_rate_decay", "cosine", "cosine"),
    ("train.schedule_steps", "100", 100),
    ("train.decay_steps", "10", 10),
    ("train.final_fraction", "0", 0.0),
    ("train.master_dtype", "float32", "float32"),
    ("train.accumulate_steps", "4", 4),
    ("train.max_skipped_steps", "3", 3),
    ("train.spike_factor", "6", 6.0),
    ("train.spike_interval", "64", 64),
    ("train.adam_b1", "0.8", 0.8),
    ("train.adam_b2", "0.9", 0.9),
    ("train.adam_eps", "1e-6", 1e-6),
    ("train.weight_decay", "0", 0.0),
    ("train.clip_norm", "2", 2.0),
    ("train.clip_norm", "none", None),
    ("train.loss_chunks", "4", 4),
    ("train.load_balance_weight", "0.01", 0.01),
    ("train.router_z_loss_weight", "1e-3", 1e-3),
    ("model.capacity_factor", "1.5", 1.5),
    ("model.router_score", "sigmoid", "sigmoid"),
    ("model.router_normalize", "false", False),
    ("model.router_scale", "2.5", 2.5),
    ("model.router_bias", "true", True),
    ("model.router_groups", "2", 2),
    ("model.router_groups_per_token", "2", 2),
    ("model.num_shared_experts", "1", 1),
    ("train.grad_dtype", "bfloat16", "bfloat16"),
    ("train.shard_optimizer_over_data", "true", True),
    ("train.grad_dtype", "None", None),
    ("model.num_layers", " 6 ", 6),
)


_LLAMA3 = {
    "model.rope_scaling": "llama3",
    "model.rope_factor": "8",
    "model.rope_original_length": "8192",
    "model.rope_low_frequency": "1",
    "model.rope_high_frequency": "4",
}
_LATENT = {
    "model.num_kv_heads": "4",
    "model.kv_lora_rank": "8",
    "model.rope_head_dim": "2",
    "model.value_head_dim": "8",
}
_DENSE = {"model.num_dense_layers": "1", "model.dense_mlp_dim": "24"}
_SPIKES = {"train.max_skipped_steps": "2", "train.spike_factor": "4"}
_SCHEDULE = {"train.learning_rate_decay": "linear", "train.schedule_steps": "20"}
# What some fields need beside themselves.
BESIDE = {
    "train.master_dtype": {"model.param_dtype": "bfloat16"},
    **dict.fromkeys(["train.spike_factor", "train.spike_interval"], _SPIKES),
    **dict.fromkeys([*_SCHEDULE, "train.decay_steps", "train.final_fraction"], _SCHEDULE),
    **dict.fromkeys([*_LATENT][1:], _LATENT),
    "model.q_lora_rank": _LATENT,
    **dict.fromkeys(_DENSE, _DENSE),
    "model.full_attention_every": {"model.sliding_window": "4"},
    "model.full_attention_first": {"model.sliding_window": "4"},
    "model.latent_norm_epsilon": _LATENT,
    "model.qk_norm_over_heads": {"model.qk_norm": "true"},
    "model.router_bias_in_weights": {"model.router_bias": "true"},
    "model.rope_scaling": {"model.rope_factor": "2"},
    **dict.fromkeys(list(_LLAMA3)[1:], _LLAMA3),
    "model.tied_head_dtype": {"model.tied_embeddings": "true"},
    "model.quantization": {"model.num_experts": "1", "model.num_experts_per_token": "1"},
    "model.capacity_factor": {"model.experts": "capacity"},
    "model.router_groups": {"model.router_score": "sigmoid"},
    "model.router_groups_per_token": {
        "model.router_score": "sigmoid",
        "model.router_groups": "2",
    },
}


@pytest.mark.parametrize(("key", "text", "value"), FIELDS)
def test_every_field_can_be_set(key: str, text: str, value: object) -> None:
    section, name = key.split(".")
    beside = BESIDE.get(key, {})
    changed = apply_overrides(SMALL, {**beside, **parse_overrides([f"{key}={text}"])})
    got = getattr(getattr(changed, section), name)
    assert got == value
    assert type(got) is type(value)
    other = {(s, f): v for s, fields in to_dict(changed).items() for f, v in fields.items()}
    start = {(s, f): v for s, fields in to_dict(SMALL).items() for f, v in fields.items()}
    allowed = {tuple(place.split(".")) for place in (key, *beside)}
    assert {place for place in start if start[place] != other[place]} <= allowed


def test_no_field_was_left_out_above() -> None:
    assert set(known_keys()) == {key for key, *_ in FIELDS}


def test_the_last_assignment_wins() -> None:
    changed = apply_overrides(SMALL, parse_overrides(["model.mlp_dim=8", "model.mlp_dim=24"]))
    assert changed.model.mlp_dim == 24


def test_fields_that_fit_only_together_can_be_set_together() -> None:
    assignments = ["train.sequence_length=9", "train.loss_chunks=3", "train.global_batch=6"]
    changed = apply_overrides(SMALL, parse_overrides([*assignments, "pipeline.num_microbatches=3"]))
    assert (changed.train.sequence_length, changed.pipeline.num_microbatches) == (9, 3)


# Recorded for Hugging Face, and read where its `config.json` is written.
READ_BY = {"max_position_embeddings": PACKAGE.parent / "linen_compat/formats/huggingface/config.py"}


@functools.cache
def fields_read(*files: Path) -> set[str]:
    """Names read as attributes of a config, anywhere but where it checks itself."""
    found = set()
    for path in files or PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if path.parent == PACKAGE / "config":
            checks = [
                node
                for node in ast.walk(tree)
                if isinstance(node, ast.FunctionDef)
                and ("check" in node.name or node.name == "__post_init__")
            ]
            skipped = {inner for node in checks for inner in ast.walk(node)}
        else:
            skipped = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node not in skipped:
                owner = re.split(r"[.(]", ast.unparse(node.value))[-1]
                if owner in ("config", "model", "pipeline", "train", "self"):
                    found.add(node.attr)
    return found


@pytest.mark.parametrize("key", sorted(known_keys()))
def test_every_field_is_read(key: str) -> None:
    """A field that nothing reads would be accepted and ignored."""
    name = key.split(".")[1]
    assert name in (fields_read(READ_BY[name]) if name in READ_BY else fields_read())


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("mixtral-8x7b", 46.70e9, 12.88e9),
        ("mixtral-8x22b", 140.6e9, 39.2e9),
        ("llama2-7b", 6.738e9, 6.738e9),
        ("deepseek-v3", 671e9, 37.55e9),  # published as 37: without the embedding table
    ],
)
def test_published_parameter_counts(name: str, total: float, active: float) -> None:
    count = count_parameters(PRESETS[name].model)
    assert count.total == pytest.approx(total, rel=2e-3)
    assert count.active == pytest.approx(active, rel=2e-3)


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("llama3.1-8b", 8_030_261_248),
        ("mistral-7b", 7_241_732_096),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("deepseek-v2-lite", 15_706_484_224),
    ],
)
def test_published_parameter_counts_to_the_last(name: str, total: int) -> None:
    """The numbers of elements that Hugging Face shows for the published weights."""
    assert count_parameters(PRESETS[name].model).total == total


@pytest.mark.parametrize("name", PRESETS)
def test_counted_parameters_are_those_of_the_model(name: str) -> None:
    config = preset(name)
    abstract = jax.eval_shape(lambda: Mixtral(config, rngs=nnx.Rngs(0)))
    leaves = jax.tree.leaves(abstract)
    count = count_parameters(config.model)
    assert sum(math.prod(leaf.shape) for leaf in leaves) == count.total
    assert {str(leaf.dtype) for leaf in leaves} == {config.model.param_dtype}
    if config.model.num_experts == 1:
        assert count.active == count.total
    else:
        experts = [
            math.prod(leaf.shape)
            for leaf in leaves
            if leaf.ndim == 6
            and leaf.shape[3] == config.model.num_experts
            and config.model.mlp_dim in leaf.shape[4:]
        ]
        share = config.model.num_experts_per_token / config.model.num_experts
        assert count.active == count.total - sum(experts) + share * sum(experts)


@pytest.mark.parametrize("kind", ["qkv", "all"])
def test_counted_parameters_of_biases(kind: str) -> None:
    config = replace(preset("tiny"), "model", attention_bias=kind)
    abstract = jax.eval_shape(lambda: Mixtral(config, rngs=nnx.Rngs(0)))
    size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract))
    assert count_parameters(config.model).total == size


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("tiny", "stage=4,fsdp=2"),
        ("mixtral-small", "stage=4,fsdp=2"),
        ("mixtral-8x7b", "stage=4,fsdp=16"),
        ("mixtral-8x22b", "stage=4,fsdp=16"),
        ("llama2-7b", "fsdp=4"),
        ("deepseek-small", "stage=4,fsdp=2"),
        ("deepseek-v2-lite", "stage=2,fsdp=4"),
        ("deepseek-v3", "stage=2,fsdp=32"),
    ],
)
def test_presets_fit_their_meshes(name: str, mesh: str) -> None:
    preset(name).check_mesh(MeshConfig.parse(mesh))


@pytest.mark.parametrize("text", ["cpu", "local", "tpu:v5p:2x2x2", "tpu:v6e:4x4", "cuda:h200:16"])
def test_reading_a_platform(text: str) -> None:
    assert str(Platform.parse(text)) == text


def hide(monkeypatch: pytest.MonkeyPatch, package: str, version: str | None) -> None:
    """Makes a package look as if another version, or none, were installed."""
    real = importlib.metadata.version

    def fake(name: str) -> str:
        if name != package:
            return real(name)
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", fake)


@pytest.mark.parametrize(
    ("platform", "package", "version", "expected"),
    [
        ("tpu:v5p:2x2x2", "libtpu", None, ("libtpu, which is not", "nnx-pipeline[tpu]")),
        ("tpu:v5p:2x2x2", "libtpu", "9.9.9", ("found 9.9.9", "cannot read back", "pip install")),
        (
            "cuda:h100:8",
            "jax-cuda13-plugin",
            None,
            ("which is not installed", "nnx-pipeline[cuda]"),
        ),
        ("cuda:h100:8", "jax-cuda13-plugin", "0.0.1", ("found 0.0.1", "pip install")),
    ],
)
def test_a_compiler_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch,
    platform: str,
    package: str,
    version: str | None,
    expected: tuple[str, ...],
) -> None:
    hide(monkeypatch, package, version)
    with pytest.raises(InputError) as error:
        Platform.parse(platform).devices(8)
    for part in (platform, *expected):
        assert part in str(error.value)
    assert re.search(r"pip install '\S+", str(error.value))


def test_more_virtual_devices_than_the_process_has() -> None:
    with pytest.raises(InputError, match="needs 16 virtual CPU devices and this process"):
        Platform.parse("cpu").devices(16)


def test_values_of_the_public_names() -> None:
    """The names that the contract promises and that exist so far."""
    for name in ("Config", "ModelConfig", "PipelineConfig", "TrainConfig", "Mixtral"):
        assert name in nnx_pipeline.__all__
    for name in nnx_pipeline.__all__:
        assert hasattr(nnx_pipeline, name)
    assert isinstance(preset("tiny").model, ModelConfig)


@pytest.mark.parametrize(
    ("name", "head_dim", "factor"),
    [
        ("qwen3-8b", 128, 0.0),
        ("qwen3-30b-a3b", 128, 0.0),
        ("deepseek-small", 96, 0.0),
        ("deepseek-v2-lite", 192, 0.707),
        ("deepseek-v3", 192, 1.0),
    ],
)
def test_attention_scales_of_presets(name: str, head_dim: int, factor: float) -> None:
    """To the last bit by the formula, of which YaRN's own term is 0 without it."""
    model = preset(name).model
    assert model.head_dim == head_dim
    assert model.attention_scale == head_dim**-0.5 * (0.1 * factor * math.log(40.0) + 1.0) ** 2
