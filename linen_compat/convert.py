"""One format to another, one array of one layer at a time."""

from dataclasses import dataclass
from pathlib import Path

from linen_compat import huggingface
from linen_compat.checkpoint import inspect
from linen_compat.compare import compare, compare_with_itself, model_arrays
from linen_compat.layouts import FORMATS, HUGGINGFACE, NNX, PIPELINED, Layout
from linen_compat.names import OUTSIDE
from linen_compat.new_folder import check_free, new_folder
from linen_compat.orbax_streams import OrbaxDestination, OrbaxSource
from linen_compat.scalars import check_scalars
from linen_compat.streams import (
    PARAMETERS,
    Mismatch,
    Progress,
    Source,
    copy,
)
from nnx_pipeline import Config, InputError
from nnx_pipeline.errors import one_of

AUTO = "auto"
TARGETS = (*FORMATS, HUGGINGFACE)
SOURCES = (*TARGETS, AUTO)


@dataclass(frozen=True)
class Opened:
    """A source with what is known of it. layout: None for Hugging Face.

    ignored: leaves and parts that it has and does not give. config: of the model, where known.
    """

    source: Source
    layout: Layout | None
    ignored: tuple[str, ...]
    config: Config | None


@dataclass(frozen=True)
class Plan:
    """A conversion that has been checked and not begun."""

    opened: Opened
    destination: Path
    layout: Layout | None

    @property
    def nbytes(self) -> int:
        """Bytes that will pass, taking the moments to be as large as the parameters."""
        source = self.opened.source
        parts = [part for part in source.parts if self.layout or part == PARAMETERS]
        outside = {names.nnx for names in OUTSIDE}
        each = sum(
            spec.nbytes * (1 if path in outside else source.num_layers)
            for path, spec in source.arrays.items()
        )
        return each * len(parts)

    @property
    def left_behind(self) -> tuple[str, ...]:
        """What the source has and the destination has no place for."""
        parts = () if self.layout else self.opened.source.parts[1:]
        return (*self.opened.ignored, *parts)

    def run(
        self, *, allow_nan: bool = False, progress: Progress = lambda name, nbytes: None
    ) -> None:
        """Converts. Raises Mismatch, naming the leaf, for bytes that are missing and for NaN."""
        source = self.opened.source
        with new_folder(self.destination) as folder:
            if self.layout is None:
                config = self.opened.config
                assert config is not None, "a plan for Hugging Face has a config"
                target = huggingface.HuggingFaceDestination(folder, config, source.arrays)
                copy(source, target, allow_nan=allow_nan, progress=progress)
            else:
                scale = source.attention_scale
                orbax = OrbaxDestination(folder, self.layout, source.arrays, attention_scale=scale)
                copy(source, orbax, allow_nan=allow_nan, progress=progress)
            if isinstance(source, OrbaxSource):
                source.check_files()


def plan(
    source: str | Path,
    destination: str | Path,
    *,
    source_format: str = AUTO,
    target_format: str,
    config: Config | None = None,
    stages: int | None = None,
    repeats: int | None = None,
    parameters_only: bool = False,
) -> Plan:
    """Checks everything that can be checked without reading an array.

    source_format, target_format: `maxtext:unscanned`, `maxtext:scanned`, `maxtext:pipelined`,
    `nnx`, `huggingface`; for a source also `auto`. config: what the checkpoint must fit; without
    one it has to be consistent in itself. stages, repeats: of a pipelined target; without both,
    those of a pipelined source. Optimizer state goes along, but not to Hugging Face or with
    parameters_only.

    Raises InputError for arguments that cannot be used, Mismatch for what the checkpoint lacks.
    """
    one_of("--from", source_format, SOURCES)
    one_of("--to", target_format, TARGETS)
    if target_format not in (PIPELINED, NNX) and (stages, repeats) != (None, None):
        raise InputError(
            f"--stages and --repeats are of a pipelined target, and --to {target_format} is none; "
            "leave them out"
        )
    check_free(destination)
    opened = open_checkpoint(source, source_format, config, parameters_only=parameters_only)
    if target_format == HUGGINGFACE:
        if opened.config is None:
            raise InputError(
                "--to huggingface needs --config: MaxText's checkpoints do not say how many heads "
                "a token is rotated with, and config.json does"
            )
        layout = None
    else:
        layout = _target_layout(opened, target_format, stages, repeats)
    return Plan(opened, Path(destination), layout)


def open_checkpoint(
    checkpoint: str | Path,
    source_format: str = AUTO,
    config: Config | None = None,
    *,
    parameters_only: bool = False,
) -> Opened:
    """A checkpoint of any format as a source, once every leaf is accounted for."""
    if source_format == HUGGINGFACE or (
        source_format == AUTO and huggingface.is_huggingface(checkpoint)
    ):
        config = huggingface.config_for(checkpoint, config)
        source = huggingface.HuggingFaceSource(checkpoint, config.model)
        return Opened(source, None, (), config)
    found = inspect(checkpoint)
    if source_format not in (AUTO, found.layout.format):
        raise Mismatch(
            f"{found.items} is {found.layout.format}; pass --from {found.layout.format} or auto"
        )
    if config is None:
        comparison, arrays = compare_with_itself(found)
    else:
        comparison, arrays = compare(found, config.model), model_arrays(config.model)
    comparison.require(found.items)
    given = OrbaxSource(found, arrays, parameters_only=parameters_only)
    check_scalars(given.scalars)
    left = [part for part in found.parts if part not in given.parts]
    left += ["step"] if "step" in found.scalars and "step" not in given.scalars else []
    return Opened(given, found.layout, (*comparison.ignored, *left), config)


def _target_layout(
    opened: Opened, target_format: str, stages: int | None, repeats: int | None
) -> Layout:
    layers, own = opened.source.num_layers, opened.layout
    if (stages, repeats) == (None, None) and own and own.format in (PIPELINED, NNX):
        stages, repeats = own.stages, own.repeats
    if target_format == PIPELINED and stages is None:
        raise InputError(f"--to {PIPELINED} needs --stages, how many stages the pipeline has")
    if target_format not in (PIPELINED, NNX):
        return Layout(target_format, layers)
    return Layout(target_format, layers, stages or 1, repeats or 1)
