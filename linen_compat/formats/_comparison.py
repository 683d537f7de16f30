"""A checkpoint's leaves compared with those that a model needs: names, shapes and dtypes only."""

import dataclasses
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from linen_compat.formats import _names as naming
from linen_compat.formats._names import EARLY, OUTSIDE, QK_NORMS, Names
from linen_compat.formats._orbax import layouts as layouts
from linen_compat.formats._orbax.inspect import SCALAR_PATHS, Inspection, Leaves
from linen_compat.formats._orbax.layouts import NNX, PIPELINED, TreeLayout, slashed
from linen_compat.formats._streams import PARAMETERS, ArraySpec, Mismatch
from linen_compat.maxtext._families import check_maxtext
from nnx_pipeline import Config, InputError, Mixtral
from nnx_pipeline.config.model import ModelConfig
from nnx_pipeline.config.pipeline import PipelineConfig
from nnx_pipeline.lab.errors import counted, nearest

LAYERS = "pipeline.layers."
_SHOWN = 3
_TIED = "a model with tied embeddings has no head: give its config, which says so"
# In NNX the experts have the names of an MLP; a router and one more axis tell them apart.
_NNX_ROUTER, _NNX_GATE = "pipeline/layers/feed_forward/router", "pipeline/layers/feed_forward/gate"


@dataclass(frozen=True)
class Difference:
    """A leaf of the checkpoint that has another shape or dtype than the model, as text."""

    leaf: str
    found: str
    expected: str


@dataclass(frozen=True)
class Comparison:
    """Which leaves of a checkpoint a model can take, and which would stay randomly initialised.

    `recast` leaves match and are to be cast to `model.param_dtype`; `ignored` ones are known to be
    of no use; `notes` has a line for each other problem, such as another number of layers.
    """

    matched: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    reshaped: list[Difference] = field(default_factory=list)
    recast: list[Difference] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def fresh(self) -> list[str]:
        """Leaves that a lenient loader would leave at their initial values."""
        return [*self.missing, *(difference.leaf for difference in self.reshaped)]

    @property
    def problems(self) -> list[str]:
        """One line for each problem; none when every leaf is accounted for."""
        # A leaf that is missing may be there under a similar name, which is then shown with it.
        near = {name: nearest(name, self.extra) for name in self.missing[:_SHOWN] if self.extra}
        close = {name: text for name, text in near.items() if text.startswith("did you mean")}
        renamed = {name: f" (the checkpoint has {close[name][:-1].split()[-1]})" for name in close}
        return [
            *self.notes,
            *(f"{name} is missing{renamed.get(name, '')}" for name in self.missing),
            *(f"{d.leaf} is {d.found} instead of {d.expected}" for d in self.reshaped),
            *(f"{name} has no place in the model" for name in self.extra),
        ]

    def add(
        self, name: str, found: ArraySpec, shape: tuple[int, ...], dtype: np.dtype | None
    ) -> None:
        """Adds a leaf that model and checkpoint have; any dtype fits where `dtype` is None."""
        if found.shape != shape:
            self.reshaped.append(Difference(name, str([*found.shape]), str([*shape])))
            return
        self.matched.append(name)
        if dtype is not None and found.dtype != dtype:
            self.recast.append(Difference(name, found.dtype.name, dtype.name))

    def require(self, where: object) -> None:
        """Raises Mismatch, naming leaves of `where`, unless every leaf is accounted for."""
        problems = self.problems
        if problems:
            rest = len(problems) - _SHOWN
            more = f"; and {rest} more (linen-compat check lists them)" if rest > 0 else ""
            raise Mismatch(f"{where} does not fit: {'; '.join(problems[:_SHOWN])}{more}")


@functools.lru_cache(maxsize=16)
def model_arrays(config: ModelConfig) -> Mapping[str, ArraySpec]:
    """Shape and dtype of each parameter by NNX path; parameters of the layers as in one layer.

    The model itself is traced, without a mesh and without making an array. The result is cached:
    for a small checkpoint, tracing takes longer than all the rest of a comparison.
    """
    naming.check_names(config)
    plain = Config(model=config, pipeline=PipelineConfig())
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        model = jax.eval_shape(lambda: Mixtral(plain, rngs=nnx.Rngs(0)))
    arrays = {}
    for path, leaf in parameter_paths(model).items():
        shape = leaf.shape[stack_axes(path) :]
        arrays[path.removeprefix(LAYERS)] = ArraySpec(shape, np.dtype(leaf.dtype))
    return MappingProxyType(arrays)


def stack_axes(path: str) -> int:
    """How many axes a parameter of a model has before those that it has in one layer.

    They are repeats, stages and layers per stage, or the layers before the pipeline.
    """
    return 3 if path.startswith(LAYERS) else 1 if path.startswith(EARLY) else 0


def parameter_paths(model: Mixtral) -> dict[str, jax.Array]:
    """Every array of a model by its path, such as `pipeline.layers.attention.query`."""
    leaves = jax.tree_util.tree_leaves_with_path(model)
    return {dotted_path(path): leaf for path, leaf in leaves}


def dotted_path(path: tuple[object, ...]) -> str:
    """A key path of JAX as dotted attributes of the model, without a variable's own `value`."""
    return jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")


def compare_leaves(found: Inspection, config: ModelConfig) -> Comparison:
    """Compares a checkpoint with what a model needs, by names, shapes and dtypes alone.

    The attention scales may differ.
    """
    return _compare(found, model_arrays(config), (config.num_layers, config.num_dense_layers))


def compare_to_load(found: Inspection, config: ModelConfig) -> Comparison:
    """Compares a checkpoint with a model that loads its arrays as they are.

    It also reports a differing attention scale, as loading an Orbax checkpoint scales no kernels.
    """
    result = compare_leaves(found, config)
    if found.layout.format != NNX:
        try:
            check_maxtext(config)
        except InputError as error:
            result.notes.append(str(error))
    # Where norms of queries are missing or left over, they are what is wrong, and not the scale.
    norms = tuple(slashed(names.nnx).removeprefix("attention/") for names in QK_NORMS)
    other = any(name.endswith(norms) for name in (*result.missing, *result.extra))
    if found.attention_scale not in (None, config.attention_scale) and not other:
        result.notes.append(
            f"model.attention_scale={config.attention_scale} does not suit the query kernels of "
            f"{found.items}, which are for {found.attention_scale}; "
            f"set it to {found.attention_scale}"
        )
    return result


def compare_with_itself(found: Inspection) -> tuple[Comparison, Mapping[str, ArraySpec]]:
    """Compares every layer with the first one, where no config says what is right.

    Without a config, a lost head cannot be told from tied embeddings. So a checkpoint without a
    head does not fit. Also returns the parameters as `model_arrays` does.
    """
    arrays: dict[str, ArraySpec] = {}
    kinds = layer_names(found)
    for names in (*OUTSIDE, *kinds):
        inside = names in kinds
        leaf = found.parameters.get(found.layout.slot(names, 0 if inside else None).leaf)
        if leaf is not None:
            shape = found.layout.unstacked(names, leaf.shape) if inside else leaf.shape
            arrays[names.nnx] = ArraySpec(shape, leaf.spec.dtype)
    absent = [names for names in (*OUTSIDE, *kinds) if names.nnx not in arrays]
    if absent:
        slots = [found.layout.slot(names, 0 if names in kinds else None) for names in absent]
        notes = [_TIED] if absent == [OUTSIDE[-1]] else []
        return Comparison(missing=[slot.leaf for slot in slots], notes=notes), arrays
    layers = (found.layout.num_layers, found.layout.num_dense_layers)
    return _compare(found, arrays, layers), arrays


def layer_names(found: Inspection) -> tuple[Names, ...]:
    """The parameters of a layer of this checkpoint: Mixtral's, Qwen3's, Llama's or DeepSeek's.

    Any parameter of the experts makes it routed, so a lost router is reported as missing; and any
    scale of a QK norm, or the name of Qwen3's experts, makes it Qwen3's.
    """
    if found.is_latent:
        return naming.of_deepseek(_latent_paths(found))

    def has(*ends: str) -> bool:
        return any(name.endswith(ends) for name in found.parameters)

    gate = found.parameters.get(_NNX_GATE)
    stacked = gate is not None and len(found.layout.unstacked(naming.EXPERTS[1], gate.shape)) == 3
    of_qwen3 = tuple(names.linen for names in naming.EXPERTS_OF_QWEN3)
    routed = stacked or has(_NNX_ROUTER, *of_qwen3, *(names.linen for names in naming.EXPERTS))
    scales = (end for names in QK_NORMS for end in (names.linen, slashed(names.nnx)))
    return naming.of_layer(2 if routed else 1, qk_norm=has(*of_qwen3, *scales))


def _latent_paths(found: Inspection) -> set[str]:
    """The NNX paths of all parameters of layers with latent attention in a checkpoint."""

    def places(names: Names) -> set[str]:
        return {found.layout.slot(names, at).leaf for at in range(found.layout.count(names))}

    return {names.nnx for names in naming.OF_DEEPSEEK if places(names) & found.parameters.keys()}


def _compare(
    found: Inspection, arrays: Mapping[str, ArraySpec], layers: tuple[int, int]
) -> Comparison:
    """Compares a checkpoint with a model that has these arrays, in the checkpoint's layout.

    `layers` has the number of layers of the model, and of those before the pipeline.
    """
    result = Comparison(ignored=[leaf.stored for leaf in found.ignored.values()])
    result.extra.extend(leaf.stored for leaf in found.unknown.values())
    for leaf in found.scalars.values():
        result.add(leaf.stored, leaf.spec, (), None)
    layout = _expected_layout(found.layout, *layers)
    if layout is None:  # say so once, then compare the leaves as they are stacked
        has, what = found.layout, counted(found.layout.num_layers, "layer")
        dense = f", {has.num_dense_layers} of them dense" if has.num_dense_layers else ""
        wanted = f"{layers[0]}{f', {layers[1]} of them dense' if layers[1] else ''}"
        result.notes.append(
            f"{_first_layer_leaf(found)}: the checkpoint holds {what}{dense} "
            f"({counted(has.repeats, 'repeat')} × {counted(has.stages, 'stage')} × "
            f"{has.layers_per_stage}), the model has {wanted}"
        )
        layout = found.layout
    expected = layout.leaves(arrays)
    for part in found.parts:
        _compare_part(result, found, part, expected)
    if found.moments:
        _compare_optimizer(result, found)
    return result


def _expected_layout(found: TreeLayout, num_layers: int, dense: int) -> TreeLayout | None:
    """The layout of this kind for that many layers, of which some are dense ones at first.

    None for a pipelined one that holds another number, as its stages and repeats are fixed.
    """
    if (found.num_layers, found.num_dense_layers) == (num_layers, dense):
        return found
    if found.format in (layouts.UNSCANNED, layouts.SCANNED):
        return dataclasses.replace(found, num_layers=num_layers, num_dense_layers=dense)
    return None


def _first_layer_leaf(found: Inspection) -> str:
    prefix = "decoder/pipeline_module" if found.layout.format == PIPELINED else "pipeline/layers"
    return next(leaf.stored for name, leaf in found.parameters.items() if name.startswith(prefix))


def _compare_part(
    result: Comparison, found: Inspection, part: str, expected: Mapping[str, ArraySpec]
) -> None:
    leaves = found.part(part)
    prefix = _prefix(leaves)
    for name, spec in expected.items():
        leaf = leaves.get(name)
        if leaf is not None and not jnp.issubdtype(leaf.spec.dtype, jnp.floating):
            result.notes.append(
                f"{leaf.stored} is {leaf.dtype}, but weights must be floating-point"
            )
        if leaf is None:
            result.missing.append(prefix + name)
        else:
            dtype = spec.dtype if part == PARAMETERS else None  # casts of moments are not listed
            result.add(leaf.stored, leaf.spec, spec.shape, dtype)
    result.extra.extend(leaf.stored for name, leaf in leaves.items() if name not in expected)


def _compare_optimizer(result: Comparison, found: Inspection) -> None:
    """Adds what is missing of an optimizer: both moments, their count and the step."""
    family = "nnx" if found.layout.format == NNX else "maxtext"
    for moment in {"mu", "nu"} - set(found.moments):
        result.missing.append(f"{'optimizer' if family == 'nnx' else 'opt_state/0'}/{moment}")
    result.missing.extend(
        path
        for name, path in SCALAR_PATHS[family].items()
        if name in ("step", "count") and name not in found.scalars
    )


def _prefix(leaves: Leaves) -> str:
    """The beginning that the stored paths of these leaves share."""
    for name, leaf in leaves.items():
        return re.split(re.escape(name) + r"(?:/value)?$", leaf.stored)[0]
    return ""
