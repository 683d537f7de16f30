"""Continues prompts: a model with caches reads them at once, then makes token after token."""

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, PyTree

from nnx_pipeline.config.config import Config
from nnx_pipeline.config.pipeline import PipelineConfig
from nnx_pipeline.generate.sampling import Sampling, keys_of, next_tokens
from nnx_pipeline.lab.errors import InputError, counted, whole
from nnx_pipeline.lab.mesh import MeshConfig, ambient_mesh
from nnx_pipeline.modules import Attention, LatentAttention
from nnx_pipeline.modules._cache import KeyValueCache
from nnx_pipeline.modules.decoder import Mixtral
from nnx_pipeline.sharding import layout as layouts
from nnx_pipeline.sharding.layout import P, Variable, place, place_by

MOST_TOKENS = 2**24  # of a sequence: more than any model reads, and caches that still compile


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked of a model.

    - `prompts`: the token ids of each prompt, which may have different lengths.
    - `new_tokens`: how many tokens to make for each prompt at most.
    - `end_tokens`: tokens after which a sequence ends; the end token is part of the result.

    Raises InputError for a request without prompts, with an empty one, for no new token, and for
    tokens that are not whole numbers in a tuple or list.
    """

    prompts: tuple[tuple[int, ...], ...]
    new_tokens: int
    end_tokens: tuple[int, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        whole(self, "new_tokens")
        _check_ids("end_tokens", self.end_tokens)
        if not self.prompts:
            raise InputError("there is no prompt; give one or more")
        for number, prompt in enumerate(self.prompts, 1):
            _check_ids(f"prompt {number}", prompt)
            if not prompt:
                raise InputError(
                    f"prompt {number} has no tokens, and the first new token follows a token; give "
                    "it one or more"
                )

    @property
    def length(self) -> int:
        """The number of tokens of the longest prompt."""
        return max(map(len, self.prompts))

    def check(self, vocab_size: int, longest: int | None) -> None:
        """Raises InputError for tokens outside a vocabulary, or more of them than `longest`."""
        tokens = [*(token for prompt in self.prompts for token in prompt), *self.end_tokens]
        for token in tokens:
            if not 0 <= token < vocab_size:
                raise InputError(
                    f"token {token} is not in the model's vocabulary; give tokens from 0 to "
                    f"{vocab_size - 1} (model.vocab_size={vocab_size})"
                )
        total = self.length + self.new_tokens
        most = MOST_TOKENS if longest is None else min(longest, MOST_TOKENS)
        if total > most:
            whose = "caches are made" if most != longest else "the model was made"
            raise InputError(
                f"a prompt of {counted(self.length, 'token')} and {self.new_tokens} new ones are "
                f"{total}, and {whose} for {most}"
                f"{' (model.max_position_embeddings)' if most == longest else ''}; "
                "shorten the prompt, or ask for fewer new tokens"
            )


def _check_ids(name: str, ids: object) -> None:
    if not isinstance(ids, tuple | list) or any(
        isinstance(token, bool) or not isinstance(token, int | np.integer) for token in ids
    ):
        raise InputError(
            f"{name} is {ids!r}, and not a tuple of token ids; give whole numbers, such as (1, 2)"
        )


def generate(
    model: Mixtral, request: Request, *, progress: Callable[[], None] = lambda: None
) -> list[list[int]]:
    """The new tokens of each prompt, without the prompt's own.

    - `model`: called under the `jax.set_mesh` that it was made under; it is not changed.
    - `request`: the prompts, and how to go on from them.
    - `progress`: called each time that all sequences have one more token.

    The tokens of a prompt depend neither on the other prompts nor, but for rounding, on the mesh.
    Raises InputError as `Request.check` does, and for experts that drop tokens.
    """
    request.check(model.config.model.vocab_size, model.config.model.max_position_embeddings)
    prefill, decode = _programs(model, request.sampling, _Prompts.of(request))
    generated: list[list[int]] = [[] for _ in request.prompts]
    going, state = list(range(len(generated))), prefill()
    for number in range(request.new_tokens):
        if number:
            state = decode(state)
        tokens = np.asarray(state[1]).tolist()
        for sequence in going:
            generated[sequence].append(tokens[sequence])
        progress()
        going = [row for row in going if generated[row][-1] not in request.end_tokens]
        if not going:
            break
    return generated


@dataclass(frozen=True)
class _Prompts:
    """The prompts as arrays; rows that the mesh needs beyond the prompts repeat the first one.

    `tokens` are int32 `[batch, seq]`, with zeros after the end of a shorter prompt; `slots` is the
    number of tokens of a sequence, new ones included.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    slots: int

    @classmethod
    def of(cls, request: Request) -> "_Prompts":
        rows = rows_on(ambient_mesh())
        batch = math.ceil(len(request.prompts) / rows) * rows
        tokens = np.zeros((batch, request.length), np.int32)
        lengths = np.empty(batch, np.int32)
        for row in range(batch):
            prompt = request.prompts[row if row < len(request.prompts) else 0]
            tokens[row, : len(prompt)], lengths[row] = prompt, len(prompt)
        return cls(tokens, lengths, request.length + request.new_tokens)


# The state between two steps: caches, the tokens `[batch]` made last, and their positions.
_State = tuple[PyTree, Array, Array]


def _programs(
    model: Mixtral, sampling: Sampling, prompts: _Prompts
) -> tuple[Callable[[], _State], Callable[[_State], _State]]:
    """The two programs: one reads the prompts, and one makes another token of each sequence."""
    batch = len(prompts.lengths)
    keys = keys_of(sampling.seed, batch)
    make = functools.partial(cached_model, batch=batch, slots=prompts.slots)
    # Checks the model and its config before anything is compiled.
    graph, *states = nnx.split(jax.eval_shape(make, model), nnx.Cache, ...)
    weights = jax.tree.unflatten(jax.tree.structure(states[1]), jax.tree.leaves(model))

    def chosen(logits: Array, positions: Array) -> Array:
        # Few numbers, which every device gets whole: then all choose the same tokens.
        logits = place(logits[:, 0], P(None, None))
        return next_tokens(logits, sampling, keys, positions)

    def caches_of(model: Mixtral) -> PyTree:
        # In auto mode the compiler would choose where the caches are, and copy them at every step.
        model.pipeline.layers = place_by(model.pipeline.layers, model.layout)
        if model.early is not None:
            model.dense_layers = place_by(model.dense_layers, model.layout)
        return nnx.split(model, nnx.Cache, ...)[1]

    @jax.jit
    def prefill(model: Mixtral, tokens: Array, lengths: Array) -> _State:
        cached = make(model)
        logits = cached(tokens, at=lengths - 1)
        return caches_of(cached), chosen(logits, lengths), lengths

    @functools.partial(jax.jit, donate_argnums=0)
    def decode(caches: PyTree, weights: PyTree, tokens: Array, positions: Array) -> _State:
        cached = nnx.merge(graph, caches, weights)
        logits = cached(tokens[:, None], positions=positions[:, None])
        return caches_of(cached), chosen(logits, positions + 1), positions + 1

    tokens, lengths = jnp.asarray(prompts.tokens), jnp.asarray(prompts.lengths)
    return (
        lambda: prefill(model, tokens, lengths),
        lambda state: decode(state[0], weights, *state[1:]),
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
        stage_layers=config.pipeline.stage_layers,
        sharding=config.pipeline.sharding,
    )
    return Config(model=config.model, pipeline=pipeline)


def check_generation(config: Config, mesh: MeshConfig, length: int) -> None:
    """Raises InputError unless a model can generate sequences of `length` tokens on a mesh.

    The number of repeats is not checked: loading chooses one that fits.
    """
    generation = generation_config(config)
    once = dataclasses.replace(generation.pipeline, num_repeats=1)
    dataclasses.replace(generation, pipeline=once).for_batch(rows_on(mesh)).check_mesh(mesh, length)


def cached_model(model: Mixtral, *, batch: int, slots: int) -> Mixtral:
    """The model with an empty cache in each layer, and the pipeline of `generation_config`.

    It shares the parameters. Call this in a jitted function, under the mesh on which the model was
    made, and call the result with token ids `[batch, seq]` for the first tokens of each sequence,
    then with one token of each and its position. Every call changes the caches (`nnx.Cache`),
    `[repeats, stages, layers per stage, microbatches, …]`, sharded over stages, sequences and
    key-value heads.
    """
    generation, microbatches = generation_config(model.config), ambient_mesh().stage
    pipeline = dataclasses.replace(generation.pipeline, num_microbatches=microbatches)
    # The default batch of a config is not the one of this model.
    config = dataclasses.replace(generation.for_batch(batch), pipeline=pipeline)
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
    layout: layouts.Layout,
    **sizes: int,
) -> KeyValueCache:
    """The empty caches of stacked layers, whose stacked axes have these sizes and logical axes."""
    cache = jax.eval_shape(lambda layer: layer.new_cache(**sizes), attention)

    def stacked(variable: Variable) -> Variable:
        inner = variable.get_value()
        axes = (*names, *variable.get_metadata("logical_axes"))
        spec = layout.spec(*axes)
        shape = (*stack, *inner.shape)
        zeros = jnp.zeros(shape, inner.dtype, out_sharding=layouts.out_sharding(spec))
        return nnx.Cache(place(zeros, spec) if layouts.mesh_sizes() else zeros, logical_axes=axes)

    empty: KeyValueCache = jax.tree.map(stacked, cache, is_leaf=layouts.is_variable)
    return empty


def _with_caches(layers: nnx.Module) -> list[Attention | LatentAttention]:
    modules = [module for _, module in nnx.iter_modules(layers)]
    return [module for module in modules if isinstance(module, Attention | LatentAttention)]
