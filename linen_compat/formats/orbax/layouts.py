"""Where each layout stores each layer of each parameter: names and indices, no arrays.

Layers are numbered in the order in which a token passes them. One layer of one parameter is one
slot: a stored array and an index into it. A checkpoint is converted to another layout by reading
the slots of one and writing those of the other.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from linen_compat.formats.names import (
    ATTENTION,
    EXPERTS,
    EXPERTS_OF_QWEN3,
    MLP,
    NORMS,
    OUTSIDE,
    QK_NORMS,
    Names,
)
from linen_compat.formats.streams import Mismatch
from nnx_pipeline.errors import InputError, one_of

UNSCANNED, SCANNED, PIPELINED = "maxtext:unscanned", "maxtext:scanned", "maxtext:pipelined"
NNX = "nnx"
FORMATS = (UNSCANNED, SCANNED, PIPELINED, NNX)
HUGGINGFACE = "huggingface"  # has one layout, which no `Layout` describes
SCAN_AXIS = 1  # where MaxText's `param_scan_axis` puts the layers of a scanned stack

_PIPELINE = "decoder/pipeline_module/layers"
_NNX_LAYERS = "pipeline/layers"
# The number of axes of each parameter in one layer: further axes are those of a stack.
_RANKS = {
    **dict.fromkeys((*NORMS, *QK_NORMS), 1),
    **dict.fromkeys(ATTENTION, 3),
    **{names: 2 if "gate/kernel" in names.linen else 3 for names in (*EXPERTS, *EXPERTS_OF_QWEN3)},
    **dict.fromkeys(MLP, 2),
}


@dataclass(frozen=True)
class Slot:
    """Where one layer of one parameter is stored.

    - `leaf`: the path of a stored array.
    - `index`: the index of the layer in that array; empty where it holds nothing else.
    """

    leaf: str
    index: tuple[int | slice, ...] = ()


@dataclass(frozen=True)
class Layout:
    """How a tree of parameters stores its layers.

    - `format`: one of `FORMATS`.
    - `num_layers`: the number of layers of the model.
    - `stages`: the number of stages of the pipeline; 1 for unscanned and scanned trees.
    - `repeats`: how often a microbatch passes through all stages; 1 for unscanned and scanned
      trees.

    layer = (repeat · stages + stage) · layers_per_stage + j. `maxtext:pipelined` has one array per
    j with leading axes `[repeats, stages]`, or `[stages]` with one repeat; `nnx` has one array with
    leading axes `[repeats, stages, layers_per_stage]`.

    Raises InputError for an unknown format, for stages or repeats where the format has none, and
    when the number of layers does not divide into them.
    """

    format: str
    num_layers: int
    stages: int = 1
    repeats: int = 1

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
        if self.num_layers % (self.stages * self.repeats):
            raise InputError(
                f"{self.num_layers} layers do not split into {self.stages} stages × "
                f"{self.repeats} repeats; choose --stages and --repeats (or stages, repeats) whose "
                f"product divides {self.num_layers}"
            )

    @property
    def layers_per_stage(self) -> int:
        """How many consecutive layers a stage applies at each visit."""
        return self.num_layers // (self.stages * self.repeats)

    def place(self, layer: int) -> tuple[int, int, int]:
        """The repeat and the stage of a layer, and its place within the stage."""
        visit, j = divmod(layer, self.layers_per_stage)
        return *divmod(visit, self.stages), j

    def slot(self, names: Names, layer: int) -> Slot:
        """Where one layer of a parameter is stored.

        - `names`: the names of a parameter of the layers.
        - `layer`: the number of the layer in the whole model, from 0.
        """
        repeat, stage, j = self.place(layer)
        if self.format == UNSCANNED:
            return Slot(f"decoder/layers_{layer}/{names.linen}")
        if self.format == SCANNED:
            return Slot(f"decoder/layers/{names.linen}", (slice(None),) * SCAN_AXIS + (layer,))
        if self.format == NNX:
            return Slot(f"{_NNX_LAYERS}/{slashed(names.nnx)}", (repeat, stage, j))
        inner = f"layers_{j}/" if self.layers_per_stage > 1 else ""
        index = (repeat, stage) if self.repeats > 1 else (stage,)
        return Slot(f"{_PIPELINE}/{inner}{names.linen}", index)

    def outside(self, names: Names) -> Slot:
        """Where a parameter outside the layers is stored."""
        return Slot(slashed(names.nnx) if self.format == NNX else names.linen)

    def stacked(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the stored array whose layers have this shape each."""
        if self.format == UNSCANNED:
            return shape
        if self.format == SCANNED:
            return (*shape[:SCAN_AXIS], self.num_layers, *shape[SCAN_AXIS:])
        if self.format == NNX:
            return (self.repeats, self.stages, self.layers_per_stage, *shape)
        return ((self.repeats, self.stages) if self.repeats > 1 else (self.stages,)) + shape

    def leaves(
        self, layer_names: Iterable[Names], shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, tuple[int, ...]]:
        """The shape of every stored array, by its path.

        - `layer_names`: the parameters of a layer, as from `names.of_layer`.
        - `shapes`: the shape of each parameter by NNX path; parameters of the layers as in one
          layer. Without one of a head, the embeddings are tied.
        """
        outside = [names for names in OUTSIDE if names.nnx in shapes]
        found = {self.outside(names).leaf: shapes[names.nnx] for names in outside}
        for names in layer_names:
            for layer in range(self.num_layers):
                found[self.slot(names, layer).leaf] = self.stacked(shapes[names.nnx])
        return found

    def order(self) -> Sequence[int]:
        """All layers, so that those of one stored array are next to each other."""
        if self.format != PIPELINED:
            return range(self.num_layers)
        return sorted(range(self.num_layers), key=lambda layer: (self.place(layer)[2], layer))


def scale_of_maxtext(head_dim_of_norm: int | None) -> float:
    """The `model.attention_scale` with which MaxText's models compute.

    - `head_dim_of_norm`: the size of a head in a model with QK norm; None for a model without.

    It is 1 where the factor head_dim^-0.5 is part of the query kernel. A norm of the queries would
    undo that, so that models with QK norm multiply by the factor after it.
    """
    return 1.0 if head_dim_of_norm is None else head_dim_of_norm**-0.5


def slashed(nnx_path: str) -> str:
    """An NNX path with the slashes of a path in a checkpoint's tree."""
    return nnx_path.replace(".", "/")


def find_layout(shapes: Mapping[str, tuple[int, ...]], where: object = "the checkpoint") -> Layout:
    """The layout of a tree, worked out from the names and shapes of its arrays.

    - `shapes`: the shape of each array by its path below `params/params`, or below `model` for
      `nnx`.
    - `where`: what messages call the checkpoint.

    The sizes of the stacking axes that occur most often count, so that one array of another shape
    than the rest does not change the answer.

    Raises Mismatch when there are no layers of MaxText's decoder, or when they are stacked in a way
    that cannot be read.
    """
    _refuse_what_is_outside(shapes)
    if leading := _leading(shapes, f"{_NNX_LAYERS}/", nnx=True):
        (repeats, stages, per_stage), _ = leading.most_common(1)[0]
        return Layout(NNX, repeats * stages * per_stage, stages, repeats)
    if leading := _leading(shapes, f"{_PIPELINE}/"):
        return _pipelined(shapes, leading)
    if scanned := _leading(shapes, "decoder/layers/", axis=SCAN_AXIS):
        return Layout(SCANNED, scanned.most_common(1)[0][0][0])
    numbers = [re.match(r"decoder/layers_(\d+)/", name) for name in shapes]
    if found := {int(number.group(1)) for number in numbers if number}:
        return Layout(UNSCANNED, max(found) + 1)
    raise Mismatch(
        f"{where} has no layers of MaxText's decoder (decoder/layers_0, decoder/layers or "
        "decoder/pipeline_module/layers); is it a checkpoint of another model?"
    )


def _pipelined(shapes: Mapping[str, tuple[int, ...]], leading: Counter) -> Layout:
    """The layout of a pipelined tree, given how often each tuple of stacking axes occurs."""
    axes, _ = leading.most_common(1)[0]
    if len(axes) > 2:
        example = next(name for name in shapes if name.startswith(_PIPELINE))
        raise Mismatch(
            f"{example} has {len(axes)} axes before those of one layer; "
            "MaxText's scan_layers_per_stage is not supported: convert it with "
            "scan_layers_per_stage=false"
        )
    numbers = [re.match(rf"{_PIPELINE}/layers_(\d+)/", name) for name in shapes]
    per_stage = max((int(number.group(1)) + 1 for number in numbers if number), default=1)
    repeats, stages = axes if len(axes) == 2 else (1, *axes)
    return Layout(PIPELINED, per_stage * repeats * stages, stages, repeats)


def _leading(
    shapes: Mapping[str, tuple[int, ...]], prefix: str, *, axis: int = 0, nnx: bool = False
) -> Counter:
    """How often each tuple of stacking axes occurs in the arrays below `prefix`."""
    found: Counter = Counter()
    for name, shape in shapes.items():
        if not name.startswith(prefix):
            continue
        inner = re.sub(r"^layers_\d+/", "", name.removeprefix(prefix))
        for names, rank in _RANKS.items():
            extra = len(shape) - rank
            if inner == (slashed(names.nnx) if nnx else names.linen) and extra > 0:
                found[shape[axis : axis + extra]] += 1
                break
    return found


def _refuse_what_is_outside(shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises Mismatch for layers that MaxText's options put where they cannot be read."""
    piped = any(name.startswith(f"{_PIPELINE}/") for name in shapes)
    for name in shapes:
        if "layers_outside_pipeline" in name or (
            piped and re.match(r"decoder/layers(_\d+)?/", name)
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
