"""Converts a checkpoint from one format to another, array by array, several at once."""

from dataclasses import dataclass, replace
from pathlib import Path

from linen_compat.formats import _streams as streams
from linen_compat.formats._comparison import compare_leaves, compare_with_itself
from linen_compat.formats._intact import Unchanged
from linen_compat.formats._merged import (
    MergedSource,
    adapter_of,
    files_of_adapter,
    merged,
    without_merged,
)
from linen_compat.formats._names import ORBAX, check_one_kind
from linen_compat.formats._new_folder import Room, check_free, new_folder
from linen_compat.formats._orbax.inspect import find_items, inspect, optimizer_names
from linen_compat.formats._orbax.layouts import FORMATS, HUGGINGFACE, NNX, PIPELINED, TreeLayout
from linen_compat.formats._orbax.stream import OrbaxDestination, OrbaxSource
from linen_compat.formats._parallel import threads
from linen_compat.formats._plausible import check_scalars
from linen_compat.formats._shapes import model_arrays
from linen_compat.formats._streams import Mismatch, copy
from linen_compat.formats.huggingface import _stream as huggingface
from linen_compat.formats.huggingface._folder import files_of
from linen_compat.maxtext._families import check_maxtext, check_rotary
from nnx_pipeline import Config, InputError
from nnx_pipeline.lab._files import place
from nnx_pipeline.lab.errors import one_of

AUTO = "auto"
TARGETS = (*FORMATS, HUGGINGFACE)
SOURCES = (*TARGETS, AUTO)


@dataclass(frozen=True)
class Opened:
    """An opened checkpoint, as the source of a conversion.

    `layout` is None for Hugging Face, and `config` where it is not known. `unused` are leaves that
    have no use here, `optimizer` parts of the optimizer's state that `source` leaves out.
    """

    source: streams.LayerSource
    files: Unchanged
    layout: TreeLayout | None
    config: Config | None
    unused: tuple[str, ...] = ()
    optimizer: tuple[str, ...] = ()
    step_is_lost: bool = False


@dataclass(frozen=True)
class Conversion:
    """A conversion that has been checked and not begun; `layout` is None for Hugging Face."""

    opened: Opened
    destination: Path
    layout: TreeLayout | None

    @property
    def nbytes(self) -> int:
        return streams.nbytes_of(self.opened.source)

    @property
    def left_behind(self) -> dict[str, tuple[str, ...]]:
        """The leaves of the source that are not converted, by the reason."""
        opened, lost = self.opened, ("step",) if self.opened.step_is_lost else ()
        if self.layout is not None:
            left = {"as --parameters-only asks": opened.optimizer, "whose chunk is missing": lost}
        else:
            step = lost or tuple({"step"} & opened.source.scalars.keys())
            left = {"for which a Hugging Face folder has no place": (*opened.optimizer, *step)}
        left["of which this project makes no use"] = opened.unused
        return {reason: names for reason, names in left.items() if names}

    def run(
        self, *, allow_nan: bool = False, progress: streams.Progress = streams.no_progress
    ) -> None:
        """Converts the checkpoint; the destination appears when it is complete.

        Raises Mismatch for missing bytes, for NaN, and for a file that has changed since `plan`.
        """
        source, layout, config = self.opened.source, self.layout, self.opened.config
        room = Room(self.nbytes, by_tensorstore=layout is not None)
        with new_folder(self.destination, room) as folder, self.opened.files:
            target: streams.LayerDestination
            if layout is None:
                assert config is not None, "a plan for Hugging Face has a config"
                target = huggingface.HuggingFaceDestination(folder, config, source.arrays)
            else:
                target = OrbaxDestination(source, folder, layout, durable=False)
            copy(source, target, allow_nan=allow_nan, progress=progress, workers=threads())
            stored = source.base if isinstance(source, MergedSource) else source
            if isinstance(stored, OrbaxSource):
                stored.check_files()  # after the arrays, whose errors name what is lost


@dataclass(frozen=True)
class From:
    """The checkpoint to convert; its format is `auto` to recognise it.

    Without a config that it must fit its layers must agree with each other. `parameters_only`
    leaves the optimizer's state behind, which may then be of any optimizer. `adapter` is the folder
    of an adapter of PEFT or MaxText to merge.
    """

    path: str | Path
    format: str = AUTO
    config: Config | None = None
    parameters_only: bool = False
    adapter: str | Path | None = None


@dataclass(frozen=True)
class To:
    """The checkpoint that a conversion writes, in a new folder.

    `stages` and `repeats` are for `maxtext:pipelined` and `nnx` only. If both are None, a source in
    one of these two layouts keeps its own. Otherwise None counts as 1, but `maxtext:pipelined`
    needs `stages`.
    """

    path: str | Path
    format: str
    stages: int | None = None
    repeats: int | None = None


def plan(source: From, target: To) -> Conversion:
    """Checks everything about a conversion that can be checked without reading an array."""
    one_of("--from", source.format, SOURCES)
    one_of("--to", target.format, TARGETS)
    if target.format not in (PIPELINED, NNX) and (target.stages, target.repeats) != (None, None):
        raise InputError(
            f"--stages and --repeats are for --to {PIPELINED} and --to {NNX} only; "
            f"leave them out for --to {target.format}"
        )
    check_free(target.path)
    if target.format == HUGGINGFACE:  # has no place for the state of any optimizer
        opened = open_checkpoint(replace(source, parameters_only=True))
        if opened.config is None:
            raise InputError(
                "--to huggingface needs --config, as config.json states values that an Orbax "
                "checkpoint does not hold, such as rope_theta and the number of experts per token; "
                "give the config of the model, which for a run of `nnx-pipeline train` is its "
                "config.yml"
            )
        return Conversion(opened, place(target.path), None)
    opened = open_checkpoint(source)
    layout = _target_layout(opened, target)
    scalars = opened.source.scalars
    if target.format != NNX and (more := streams.ours_alone(opened.source.parts, scalars)):
        raise Mismatch(
            f"{source.path} has {more}, for which {target.format} has no place; convert to nnx, or "
            "the parameters alone with --parameters-only"
        )
    is_latent = opened.source.attention_scale is None
    if target.format != NNX and opened.source.rotary is not None and not is_latent:
        check_rotary(*opened.source.rotary)
    if opened.config is not None:
        check_one_kind(opened.config.model, ORBAX)
        if target.format != NNX:
            check_maxtext(opened.config.model)
    return Conversion(opened, place(target.path), layout)


def open_checkpoint(source: From) -> Opened:
    """Opens a checkpoint of any format as a source, once every leaf is accounted for."""
    path, config, adapter = source.path, source.config, adapter_of(source.adapter, source.path)
    if source.format == HUGGINGFACE or (source.format == AUTO and huggingface.is_huggingface(path)):
        files = Unchanged(path, [*files_of(path), *files_of_adapter(adapter)])
        config = huggingface.config_for(path, config)
        whole_model = huggingface.HuggingFaceSource(path, config.model)
        return Opened(merged(whole_model, adapter, path, config.model), files, None, config)
    files = Unchanged(path, [*find_items(path).glob("**/*"), *files_of_adapter(adapter)])
    if adapter and config is None:
        raise InputError(
            "--adapter needs --config for an Orbax checkpoint, which does not say of which model "
            "its weights are"
        )
    contents = whole = without_merged(inspect(path), adapter)
    if source.format not in (AUTO, contents.layout.format):
        raise Mismatch(
            f"{whole.items} is {whole.layout.format}; pass --from {whole.layout.format} or auto"
        )
    if source.parameters_only:
        contents = whole.parameters_alone
    elif whole.other_optimizer:
        raise Mismatch(
            f"{contents.items} has a state that cannot be converted: {whole.other_optimizer}; "
            "convert the parameters alone with --parameters-only"
        )
    if config is None:
        comparison, arrays = compare_with_itself(contents)
    else:
        comparison, arrays = compare_leaves(contents, config.model), model_arrays(config.model)
    comparison.require(contents.items)
    rotary = None if config is None else streams.Rotary.of(config.model)
    stream = OrbaxSource(contents, arrays, rotary=rotary, parameters_only=source.parameters_only)
    check_scalars(stream.scalars)
    return Opened(
        merged(stream, adapter, path, config.model) if config else stream,
        files,
        contents.layout,
        config,
        unused=tuple(leaf.stored for leaf in whole.ignored.values()),
        optimizer=tuple(optimizer_names(whole.optimizer)) if source.parameters_only else (),
        step_is_lost="step" in contents.scalars and "step" not in stream.scalars,
    )


def _target_layout(opened: Opened, target: To) -> TreeLayout:
    source, layout, stacked = opened.source, opened.layout, {PIPELINED, NNX}
    stages, repeats = target.stages, target.repeats
    if (stages, repeats) == (None, None) and layout and {layout.format, target.format} <= stacked:
        stages, repeats = layout.stages, layout.repeats
    if target.format == PIPELINED and stages is None:
        raise InputError(f"--to {PIPELINED} needs --stages, how many stages the pipeline has")
    return TreeLayout(
        target.format, source.num_layers, stages or 1, repeats or 1, source.num_dense_layers
    )
