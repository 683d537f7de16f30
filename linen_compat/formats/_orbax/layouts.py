"""Where each layout stores each layer of each parameter: names and indices, no arrays."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from linen_compat.formats import _names as naming
from linen_compat.formats._names import QK_NORMS, Names, of_model
from linen_compat.formats._streams import ArraySpec, Mismatch
from nnx_pipeline.lab.errors import InputError, counted, one_of

UNSCANNED, SCANNED, PIPELINED = "maxtext:unscanned", "maxtext:scanned", "maxtext:pipelined"
NNX = "nnx"
FORMATS = (UNSCANNED, SCANNED, PIPELINED, NNX)
HUGGINGFACE = "huggingface"  # has one layout, which no `TreeLayout` describes
SCAN_AXIS = 1  # where MaxText's `param_scan_axis` puts the layers of a scanned stack

_PIPELINE = "decoder/pipeline_module/layers"
_NNX_LAYERS = "pipeline/layers"
_NNX_EARLY = "dense_layers"
# MaxText's groups of layers: most models have `layers`, DeepSeek's the other two.
_LATER_GROUPS = ("layers", "moe_layers")


def _rank(name: str) -> int:
    """The number of axes of a parameter in one layer, by its name in MaxText."""
    if name.endswith(("query/bias", "key/bias", "value/bias", "_bias")):
        return 2
    if name.endswith(("scale", "bias", "sinks")):
        return 1
    if name.startswith("self_attention/"):
        return 2 if name.endswith("_a/kernel") else 3
    return 2 if name.endswith("kernel") else 3  # stacks of experts are no kernels by their names


# Of names that are equal in NNX, the first that leaves axes to stack layers counts.
_RANKS = {
    names: _rank(names.linen)
    for names in (
        *(
            *naming.NORMS,
            *QK_NORMS,
            *naming.OPTIONAL,
            *naming.EXPERT_BIASES,
            *naming.ATTENTION,
            *naming.EXPERTS,
            *naming.EXPERTS_OF_QWEN3,
        ),
        *(*naming.MLP, *naming.LATENT_ATTENTION, naming.PLAIN_QUERY[0]),
        *naming.EXPERTS_OF_DEEPSEEK,
    )
}


@dataclass(frozen=True)
class Slot:
    """The path of a stored array, and the index of one layer in it, if it holds others too."""

    leaf: str
    index: tuple[int | slice, ...] = ()


@dataclass(frozen=True)
class TreeLayout:
    """How a tree of parameters stores its layers, numbered from 0 within each kind.

    Of the layers of the pipeline, layer = (repeat · stages + stage) · layers_per_stage + j.
    `maxtext:pipelined` has one array per j with leading axes `[repeats, stages]`, or `[stages]`
    with one repeat; `nnx` has one array with leading axes `[repeats, stages, layers_per_stage]`.
    The layers before the pipeline are scanned in both: with their axis first in `nnx`, and second
    in `maxtext:pipelined`. Unscanned and scanned trees have one stage and one repeat.
    """

    format: str
    num_layers: int
    stages: int = 1
    repeats: int = 1
    num_dense_layers: int = 0

    def __post_init__(self) -> None:
        one_of("format", self.format, FORMATS)
        if min(self.num_layers, self.stages, self.repeats) < 1:
            raise InputError(
                f"num_layers={self.num_layers}, stages={self.stages} and repeats={self.repeats} "
                f"for {self.format}: each of them must be 1 or more"
            )
        if self.format in (UNSCANNED, SCANNED) and (self.stages, self.repeats) != (1, 1):
            raise InputError(
                f"stages={self.stages} and repeats={self.repeats} are for {PIPELINED} and {NNX}; "
                f"leave them out for {self.format}"
            )
        if self.num_pipeline_layers % (self.stages * self.repeats):
            which = f", {self.num_dense_layers} of them before the pipeline,"
            dense = which if self.num_dense_layers else ""
            raise InputError(
                f"{self.num_layers} layers{dense} do not split into "
                f"{counted(self.stages, 'stage')} × {counted(self.repeats, 'repeat')}; choose "
                "--stages and --repeats (or stages, repeats) whose product divides "
                f"{self.num_pipeline_layers}"
            )

    @property
    def layers_per_stage(self) -> int:
        return self.num_pipeline_layers // (self.stages * self.repeats)

    @property
    def num_pipeline_layers(self) -> int:
        """All layers but the dense ones before the pipeline."""
        return self.num_layers - self.num_dense_layers

    def count(self, names: Names) -> int:
        """How many layers have a parameter."""
        return self.num_dense_layers if names.is_early else self.num_pipeline_layers

    def position(self, layer: int) -> tuple[int, int, int]:
        """The repeat and the stage of a layer of the pipeline, and its place in the stage."""
        visit, j = divmod(layer, self.layers_per_stage)
        return *divmod(visit, self.stages), j

    def slot(self, names: Names, layer: int | None) -> Slot:
        """Where a layer is stored, by its number within its kind; None is outside the layers."""
        if layer is None:
            return Slot(slashed(names.nnx) if self.format == NNX else names.linen)
        if self.format == UNSCANNED:
            return Slot(f"decoder/{names.group}_{layer}/{names.linen}")
        if self.format == NNX and names.is_early:
            return Slot(slashed(names.nnx), (layer,))
        if self.format == SCANNED or names.is_early:
            index = (slice(None),) * SCAN_AXIS + (layer,)
            return Slot(f"decoder/{names.group}/{names.linen}", index)
        repeat, stage, j = self.position(layer)
        if self.format == NNX:
            return Slot(f"{_NNX_LAYERS}/{slashed(names.nnx)}", (repeat, stage, j))
        inner = f"layers_{j}/" if self.layers_per_stage > 1 else ""
        at = (repeat, stage) if self.repeats > 1 else (stage,)
        return Slot(f"{_PIPELINE}/{inner}{names.linen}", at)

    def _stack(self, names: Names) -> tuple[int, tuple[int, ...]]:
        """The first of the axes that stack layers in a stored array, and the sizes of these."""
        if self.format == UNSCANNED:
            return 0, ()
        if self.format == NNX:
            whole = (self.repeats, self.stages, self.layers_per_stage)
            return 0, (self.num_dense_layers,) if names.is_early else whole
        if self.format == SCANNED or names.is_early:
            return SCAN_AXIS, (self.count(names),)
        return 0, (self.repeats, self.stages) if self.repeats > 1 else (self.stages,)

    def stacked(self, names: Names, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the stored array of layers that have this shape each."""
        axis, sizes = self._stack(names)
        return (*shape[:axis], *sizes, *shape[axis:])

    def stacked_axes(self, names: Names) -> range:
        axis, sizes = self._stack(names)
        return range(axis, axis + len(sizes))

    def unstacked(self, names: Names, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that one layer has in a stored array of this shape."""
        axes = self.stacked_axes(names)
        return tuple(size for axis, size in enumerate(shape) if axis not in axes)

    def leaves(self, arrays: Mapping[str, ArraySpec]) -> dict[str, ArraySpec]:
        """Every stored array by its path, from parameters by NNX path as in one layer."""
        outside, of_layers = of_model(arrays)
        specs = {self.slot(names, None).leaf: arrays[names.nnx] for names in outside}
        for names in of_layers:
            spec = arrays[names.nnx]
            whole = ArraySpec(self.stacked(names, spec.shape), spec.dtype)
            specs |= {self.slot(names, layer).leaf: whole for layer in range(self.count(names))}
        return specs

    def order(self, names: Names) -> Sequence[int]:
        """All layers that have a parameter, in an order that reads each stored array once."""
        layers = range(self.count(names))
        if self.format != PIPELINED or names.is_early:
            return layers
        return sorted(layers, key=lambda layer: (self.position(layer)[2], layer))


def scale_of_maxtext(head_dim: int | None) -> float:
    """The `model.attention_scale` of MaxText's models without latent attention.

    It is 1 where the factor head_dim^-0.5 is part of the query kernel. Models with a norm or a bias
    of the queries, of which `head_dim` is given, multiply by the factor after it.
    """
    return 1.0 if head_dim is None else head_dim**-0.5


def slashed(nnx_path: str) -> str:
    """An NNX path with the slashes of a path in a checkpoint's tree."""
    return nnx_path.replace(".", "/")


def find_layout(
    shapes: Mapping[str, tuple[int, ...]], where: object = "the checkpoint"
) -> TreeLayout:
    """The layout of a tree, from shapes by path below `params/params`, or below `model`.

    What most arrays say counts, so that one of another shape changes nothing.
    """
    _refuse_what_is_outside(shapes)
    dense = _dense_layers(shapes)
    if axes := _leading(shapes, f"{_NNX_LAYERS}/", nnx=True):
        repeats, stages, per_stage = axes
        return TreeLayout(NNX, repeats * stages * per_stage + dense, stages, repeats, dense)
    if axes := _leading(shapes, f"{_PIPELINE}/"):
        return _pipelined(shapes, axes, dense)
    for group in _LATER_GROUPS:
        if axes := _leading(shapes, f"decoder/{group}/", axis=SCAN_AXIS):
            return TreeLayout(SCANNED, axes[0] + dense, num_dense_layers=dense)
        if layers := _count_layers(shapes, f"decoder/{group}_"):
            return TreeLayout(UNSCANNED, layers + dense, num_dense_layers=dense)
    raise Mismatch(
        f"{where} has no layers of MaxText's decoder (decoder/layers_0, decoder/layers or "
        "decoder/pipeline_module/layers); is it a checkpoint of another model?"
    )


def _dense_layers(shapes: Mapping[str, tuple[int, ...]]) -> int:
    axes = _leading(shapes, f"{_NNX_EARLY}/", nnx=True)
    axes = axes or _leading(shapes, f"decoder/{_NNX_EARLY}/", axis=SCAN_AXIS)
    return axes[0] if axes else _count_layers(shapes, f"decoder/{_NNX_EARLY}_")


def _count_layers(shapes: Mapping[str, tuple[int, ...]], prefix: str) -> int:
    """How many layers a tree holds in subtrees `<prefix>0`, `<prefix>1` and so on."""
    numbers = [re.match(rf"{prefix}(\d+)/", name) for name in shapes]
    return max((int(number.group(1)) + 1 for number in numbers if number), default=0)


def _pipelined(
    shapes: Mapping[str, tuple[int, ...]], axes: tuple[int, ...], dense: int
) -> TreeLayout:
    if len(axes) > 2:
        example = next(name for name in shapes if name.startswith(_PIPELINE))
        raise Mismatch(
            f"{example} has {len(axes)} axes before those of one layer; "
            "MaxText's scan_layers_per_stage is not supported: convert it with "
            "scan_layers_per_stage=false"
        )
    per_stage = _count_layers(shapes, f"{_PIPELINE}/layers_") or 1
    repeats, stages = axes if len(axes) == 2 else (1, *axes)
    return TreeLayout(PIPELINED, per_stage * repeats * stages + dense, stages, repeats, dense)


def _leading(
    shapes: Mapping[str, tuple[int, ...]], prefix: str, *, axis: int = 0, nnx: bool = False
) -> tuple[int, ...]:
    """The sizes of the stacking axes that most arrays below `prefix` have; () without any."""
    counts = Counter[tuple[int, ...]]()
    for name, shape in shapes.items():
        if not name.startswith(prefix):
            continue
        inner = re.sub(r"^layers_\d+/", "", name.removeprefix(prefix))
        for names, rank in _RANKS.items():
            extra = len(shape) - rank
            if inner == (slashed(names.nnx) if nnx else names.linen) and extra > 0:
                counts[shape[axis : axis + extra]] += 1
                break
    return counts.most_common(1)[0][0] if counts else ()


def _refuse_what_is_outside(shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises Mismatch for layers outside the pipeline, and scanned ones of a stage."""
    piped = any(name.startswith(f"{_PIPELINE}/") for name in shapes)
    for name in shapes:
        if "layers_outside_pipeline" in name or (
            piped and re.match(r"decoder/(moe_)?layers(_\d+)?/", name)
        ):
            raise Mismatch(
                f"{name} is a layer outside the pipeline, which is not supported; "
                "save the checkpoint with pipeline_parallel_layers equal to the number of layers"
            )
        if "layers_per_stage/" in name or name.startswith(f"{_PIPELINE}/layers/"):
            raise Mismatch(
                f"{name} comes from MaxText's scan_layers_per_stage, which is not supported; "
                "save the checkpoint with scan_layers_per_stage=false"
            )
