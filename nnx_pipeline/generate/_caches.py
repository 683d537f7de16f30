"""A model as generation needs it: without what is for training, and with a cache in each layer."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_pipeline.config.config import Config
from nnx_pipeline.config.pipeline import PipelineConfig
from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.lab.mesh import MeshConfig, ambient_mesh
from nnx_pipeline.modules import Attention, LatentAttention
from nnx_pipeline.modules._cache import KeyValueCache
from nnx_pipeline.modules.decoder import Mixtral
from nnx_pipeline.sharding.layout import (
    Layout,
    Variable,
    is_variable,
    mesh_sizes,
    out_sharding,
    place,
)


def rows_on(mesh: MeshConfig) -> int:
    """The number that a batch must be a multiple of: each stage works on another microbatch."""
    return mesh.product("stage", "data", "fsdp", "expert")


def generation_config(config: Config) -> Config:
    """The config with which a model of `config` generates, without what is about training alone.

    Raises InputError for experts that drop tokens.
    """
    if config.model.experts == "capacity":
        raise InputError(
            "model.experts='capacity' drops tokens by how many of a sequence are computed at once, "
            "so that one token at a time would get other results than the whole sequence; set "
            "model.experts='grouped' or 'dense', which have the same weights and drop none"
        )
    pipeline = PipelineConfig(
        num_repeats=config.pipeline.num_repeats,
        pad_layers=config.pipeline.pad_layers,
        sharding=config.pipeline.sharding,
    )
    return Config(model=config.model, pipeline=pipeline)


def check_generation(config: Config, mesh: MeshConfig, length: int) -> None:
    """Raises InputError unless a model can generate sequences of `length` tokens on a mesh.

    The number of repeats is not checked: loading chooses one that fits.
    """
    found = generation_config(config)
    once = dataclasses.replace(found.pipeline, num_repeats=1)
    dataclasses.replace(found, pipeline=once).for_batch(rows_on(mesh)).check_mesh(mesh, length)


def cached_model(model: Mixtral, *, batch: int, slots: int) -> Mixtral:
    """The model with an empty cache in each layer, and the pipeline of `generation_config`.

    It shares the parameters. Call this in a jitted function, under the mesh on which the model was
    made, and call the result with token ids `[batch, seq]` for the first tokens of each sequence,
    then with one token of each and its position. Every call changes the caches (`nnx.Cache`),
    `[repeats, stages, layers per stage, microbatches, …]`, sharded over stages, sequences and
    key-value heads.
    """
    found, microbatches = generation_config(model.config), ambient_mesh().stage
    pipeline = dataclasses.replace(found.pipeline, num_microbatches=microbatches)
    # The default batch of a config is not the one of this model.
    config = dataclasses.replace(found.for_batch(batch), pipeline=pipeline)
    layout = model.embedding.layout
    made = jax.eval_shape(lambda: Mixtral(config, rngs=nnx.Rngs(0), layout=layout))
    cached: Mixtral = jax.tree.unflatten(jax.tree.structure(made), jax.tree.leaves(model))
    cached.cached = True
    empty = functools.partial(_empty_cache, batch=batch // microbatches, slots=slots)
    for attention in _with_caches(cached.pipeline.layers):
        # As the layer's parameters, `[repeats, stages, layers per stage, …]`.
        stack = (*jax.tree.leaves(attention)[0].shape[:3], microbatches)
        attention.cache = empty(attention, stack, (None, "stage", None, None), cached.layout)
    if cached.early is not None:  # one microbatch for each stage
        several = microbatches > 1
        stack = (cached.early.number, *([microbatches] if several else []))
        names = (None, *(["microbatch"] if several else []))
        for attention in _with_caches(cached.dense_layers):
            attention.cache = empty(attention, stack, names, cached.layout)
    return cached


def _empty_cache(
    attention: Attention | LatentAttention,
    stack: tuple[int, ...],
    names: tuple[str | None, ...],
    layout: Layout,
    *,
    batch: int,
    slots: int,
) -> KeyValueCache:
    """The empty caches of stacked layers, whose stacked axes have these sizes and logical axes."""
    one = jax.eval_shape(lambda layer: layer.new_cache(batch=batch, slots=slots), attention)

    def stacked(variable: Variable) -> Variable:
        inner = variable.get_value()
        axes = (*names, *variable.get_metadata("logical_axes"))
        spec = layout.spec(*axes)
        shape = (*stack, *inner.shape)
        zeros = jnp.zeros(shape, inner.dtype, out_sharding=out_sharding(spec))
        return nnx.Cache(place(zeros, spec) if mesh_sizes() else zeros, logical_axes=axes)

    empty: KeyValueCache = jax.tree.map(stacked, one, is_leaf=is_variable)
    return empty


def _with_caches(layers: nnx.Module) -> list[Attention | LatentAttention]:
    modules = [module for _, module in nnx.iter_modules(layers)]
    return [module for module in modules if isinstance(module, Attention | LatentAttention)]
