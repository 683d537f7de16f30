"""A checkpoint's leaves compared with those that a model needs: names, shapes and dtypes only."""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from linen_compat.formats import _names as naming
from linen_compat.formats._names import ORBAX, OUTSIDE, QK_NORMS, Names, check_one_kind
from linen_compat.formats._orbax import layouts
from linen_compat.formats._orbax.inspect import Inspection
from linen_compat.formats._orbax.layouts import NNX, PIPELINED, slashed
from linen_compat.formats._orbax.leaves import SCALAR_PATHS
from linen_compat.formats._shapes import model_arrays
from linen_compat.formats._streams import (
    GUARD,
    MOMENTS,
    PARAMETERS,
    ArraySpec,
    Mismatch,
    is_float,
)
from linen_compat.maxtext._families import check_maxtext
from nnx_pipeline import InputError
from nnx_pipeline.config.model import ModelConfig
from nnx_pipeline.lab.errors import counted, nearest

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
        self, name: str, spec: ArraySpec | None, shape: tuple[int, ...], dtype: np.dtype | None
    ) -> None:
        """Adds a leaf that the model needs; any dtype fits where `dtype` is None."""
        if spec is None:
            self.missing.append(name)
        elif spec.shape != shape:
            self.reshaped.append(Difference(name, str([*spec.shape]), str([*shape])))
        else:
            self.matched.append(name)
            if dtype is not None and spec.dtype != dtype:
                self.recast.append(Difference(name, spec.dtype.name, dtype.name))

    def require(self, where: object) -> None:
        """Raises Mismatch, naming leaves of `where`, unless every leaf is accounted for."""
        if problems := self.problems:
            lists = " (linen-compat check lists them)" if len(problems) > _SHOWN else ""
            raise Mismatch(f"{where} does not fit: {first_of(problems)}{lists}")


def first_of(problems: list[str]) -> str:
    """The first problems in one line, and how many more there are."""
    more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return "; ".join(problems[:_SHOWN]) + more


def compare_leaves(contents: Inspection, config: ModelConfig) -> Comparison:
    """Compares a checkpoint with a model; the attention scales may differ."""
    check_one_kind(config, ORBAX)
    layers = config.num_layers, config.num_dense_layers
    result = _compare(contents, model_arrays(config), layers)
    if contents.rotary and contents.rotary.interleaved != config.rope_interleaved:
        result.notes.append(  # which no shape shows
            f"model.rope_interleaved={config.rope_interleaved} does not suit the query and key "
            f"kernels of {contents.items}, which were written for {contents.rotary.interleaved}; "
            "give the config with which it was written"
        )
    return result


def compare_to_load(contents: Inspection, config: ModelConfig) -> Comparison:
    """Compares a checkpoint with a model that loads its arrays as they are."""
    result = compare_leaves(contents, config)
    if contents.layout.format != NNX:
        try:
            check_maxtext(config)
        except InputError as error:
            result.notes.append(str(error))
    # Where norms of queries are missing or left over, they are what is wrong, and not the scale.
    norms = tuple(slashed(names.nnx).removeprefix("attention/") for names in QK_NORMS)
    other = any(name.endswith(norms) for name in (*result.missing, *result.extra))
    if contents.attention_scale not in (None, config.attention_scale) and not other:
        result.notes.append(  # as loading an Orbax checkpoint scales no kernels
            f"model.attention_scale={config.attention_scale} does not suit the query kernels of "
            f"{contents.items}, which are for {contents.attention_scale}; "
            f"set it to {contents.attention_scale}"
        )
    return result


def compare_with_itself(contents: Inspection) -> tuple[Comparison, Mapping[str, ArraySpec]]:
    """Compares every layer with the first one, where no config says what is right.

    Also returns the parameters as `model_arrays` does.
    """
    layout, kinds = contents.layout, layer_names(contents)
    paths = {names: layout.slot(names, None).leaf for names in OUTSIDE}
    paths |= {names: layout.slot(names, 0).leaf for names in kinds}
    absent = [names for names, path in paths.items() if path not in contents.parameters]
    if absent:
        # Without a config, a lost head cannot be told from tied embeddings.
        notes = [_TIED] if absent == [OUTSIDE[-1]] else []
        return Comparison(missing=[paths[names] for names in absent], notes=notes), {}
    arrays: dict[str, ArraySpec] = {}
    for names, path in paths.items():
        spec = contents.parameters[path].spec
        shape = layout.unstacked(names, spec.shape) if names in kinds else spec.shape
        arrays[names.nnx] = ArraySpec(shape, spec.dtype)
    return _compare(contents, arrays, (layout.num_layers, layout.num_dense_layers)), arrays


def layer_names(contents: Inspection) -> tuple[Names, ...]:
    """The parameters of a layer of this checkpoint: Mixtral's, Qwen3's, Llama's or DeepSeek's."""
    if contents.is_latent:
        return naming.of_deepseek(_latent_paths(contents))

    def has(*suffixes: str) -> bool:
        return any(name.endswith(suffixes) for name in contents.parameters)

    gate, layout = contents.parameters.get(_NNX_GATE), contents.layout
    stacked = gate is not None and len(layout.unstacked(naming.EXPERTS[1], gate.shape)) == 3
    # Any parameter of the experts makes it routed, so that a lost router is reported as missing.
    of_qwen3 = tuple(names.linen for names in naming.EXPERTS_OF_QWEN3)
    routed = stacked or has(_NNX_ROUTER, *of_qwen3, *(names.linen for names in naming.EXPERTS))
    scales = (end for names in QK_NORMS for end in (names.linen, slashed(names.nnx)))
    layer = naming.of_layer(2 if routed else 1, qk_norm=has(*of_qwen3, *scales))
    return (*layer, *(names for names in naming.OPTIONAL if has(names.linen, slashed(names.nnx))))


def _latent_paths(contents: Inspection) -> set[str]:
    """The NNX paths of all parameters of layers with latent attention in a checkpoint."""

    def places(names: Names) -> set[str]:
        return {contents.layout.slot(names, at).leaf for at in range(contents.layout.count(names))}

    return {names.nnx for names in naming.OF_DEEPSEEK if places(names) & contents.parameters.keys()}


def _compare(
    contents: Inspection, arrays: Mapping[str, ArraySpec], layers: tuple[int, int]
) -> Comparison:
    """`layers` has the number of layers of the model, and of those before the pipeline."""
    result = Comparison(ignored=[leaf.stored for leaf in contents.ignored.values()])
    result.extra.extend(leaf.stored for leaf in contents.unknown.values())
    if contents.lora:
        first, *others = contents.lora.values()
        result.notes.append(
            f"{first.stored} and {counted(len(others), 'other array')} are matrices of LoRA, which "
            f"are not in the weights; give {contents.items} as --adapter (adapter of load) as well"
        )
    for name, leaf in contents.scalars.items():
        result.add(leaf.stored, leaf.spec, leaf.shape if name in GUARD else (), None)
    layout, (num_layers, dense) = contents.layout, layers
    if layout.format in (layouts.UNSCANNED, layouts.SCANNED):
        layout = dataclasses.replace(layout, num_layers=num_layers, num_dense_layers=dense)
    elif (layout.num_layers, layout.num_dense_layers) != layers:
        # Stages and repeats are fixed: say so once, then compare the leaves as they are stacked.
        prefix = "decoder/pipeline_module" if layout.format == PIPELINED else "pipeline/layers"
        leaves = (leaf for name, leaf in contents.parameters.items() if name.startswith(prefix))
        result.notes.append(
            f"{next(leaves).stored}: the checkpoint holds {counted(layout.num_layers, 'layer')}"
            f"{_some_dense(layout.num_dense_layers)} ({counted(layout.repeats, 'repeat')} × "
            f"{counted(layout.stages, 'stage')} × {layout.layers_per_stage}), "
            f"the model has {num_layers}{_some_dense(dense)}"
        )
    expected = layout.leaves(arrays)
    for part in contents.parts:
        _compare_part(result, contents, part, expected)
    if contents.moments:
        _compare_optimizer(result, contents)
    return result


def _some_dense(count: int) -> str:
    return f", {count} of them dense" if count else ""


def _compare_part(
    result: Comparison, contents: Inspection, part: str, expected: Mapping[str, ArraySpec]
) -> None:
    leaves, prefix = contents.parts[part], ""
    if leaves:  # all their stored paths begin as the first one
        name = next(iter(leaves))
        prefix = re.split(re.escape(name) + r"(?:/value)?$", leaves[name].stored)[0]
    for name, spec in expected.items():
        if (leaf := leaves.get(name)) is None:
            result.missing.append(prefix + name)
            continue
        if not is_float(leaf.spec.dtype):
            result.notes.append(
                f"{leaf.stored} is {leaf.dtype}, but weights must be floating-point"
            )
        dtype = spec.dtype if part == PARAMETERS else None  # casts of moments are not listed
        result.add(leaf.stored, leaf.spec, spec.shape, dtype)
    result.extra.extend(leaf.stored for name, leaf in leaves.items() if name not in expected)


def _compare_optimizer(result: Comparison, contents: Inspection) -> None:
    """Adds what is missing of an optimizer: both moments, their count and the step."""
    family, prefix = (
        ("nnx", "optimizer") if contents.layout.format == NNX else ("maxtext", "opt_state/0")
    )
    absent = [moment for moment in MOMENTS if moment not in contents.moments]
    result.missing.extend(f"{prefix}/{moment}" for moment in absent)
    absent = [name for name in ("step", "count") if name not in contents.scalars]
    result.missing.extend(SCALAR_PATHS[family][name] for name in absent)
