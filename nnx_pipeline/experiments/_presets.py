"""The presets for the commands of the lab; see `nnx_pipeline.lab._cli.presets`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nnx_pipeline.config._overrides import apply_overrides, known_keys, parse_overrides
from nnx_pipeline.config.config import Config, to_dict
from nnx_pipeline.config.presets import PRESETS, preset
from nnx_pipeline.experiments._advice import ADVICE
from nnx_pipeline.experiments._claim_table import CLAIM_TABLE
from nnx_pipeline.lab._cli.presets import is_file
from nnx_pipeline.lab._lazy import lazy
from nnx_pipeline.lab.errors import counted
from nnx_pipeline.lab.mesh import MeshConfig, make_mesh
from nnx_pipeline.train._cli.checkpoints import checkpoints

if TYPE_CHECKING:
    from nnx_pipeline.experiments._programs import measure_step
    from nnx_pipeline.experiments.plan.remat_space import remat_settings, remat_space
    from nnx_pipeline.lab._cli.outputs import ComparisonOutputs
    from nnx_pipeline.lab._cli.values import Chosen, Measuring, TwoArms
    from nnx_pipeline.lab.lint import Finding, Limits

__all__ = [
    "ADVICE",
    "check",
    "compare",
    "config_of",
    "experiments",
    "fields",
    "lint_config",
    "measure_step",
    "mesh_of",
    "names",
    "remat_settings",
    "remat_space",
    "title",
    "to_dict",
]

__getattr__, __dir__ = lazy(__name__)  # what measures is imported when it is asked for


def names() -> list[str]:
    return list(PRESETS)


def fields() -> list[str]:
    return list(known_keys())


def config_of(name: str, assignments: Sequence[str], mesh: MeshConfig | None = None) -> Config:
    config = checkpoints().config_from_yaml(name, mesh) if is_file(name) else preset(name)
    return apply_overrides(config, parse_overrides(assignments))


def mesh_of(name: str, devices: int | None, slices: int) -> MeshConfig:
    return checkpoints().mesh_from_yaml(name, devices, slices)


def title(name: str, config: Config, mesh: MeshConfig) -> str:
    train, pipeline = config.train, config.pipeline
    microbatches = pipeline.num_microbatches or mesh.stage
    sizes = f"batch {train.global_batch} × {train.sequence_length}"
    if mesh.stage > 1:
        sizes += f", {counted(microbatches, 'microbatch')}"
        sizes += f" × {pipeline.num_repeats} repeats" if pipeline.num_repeats > 1 else ""
        sizes += f", {pipeline.schedule}"
    return f"one training step of {name} on {mesh}: {sizes}"


def check(config: Config, axes: MeshConfig) -> None:
    config.check_mesh(axes)


def experiments() -> list[str]:
    return list(CLAIM_TABLE)


def compare(
    names: Sequence[str],
    chosen: Chosen,
    target: TwoArms,
    measuring: Measuring,
    outputs: ComparisonOutputs,
) -> None:
    from nnx_pipeline.experiments._cli.comparing import run_comparison

    run_comparison(names, chosen, target, measuring, outputs)


def lint_config(config: Config, mesh: MeshConfig, limits: Limits) -> list[Finding]:
    from nnx_pipeline.lab.compile.platform import Platform
    from nnx_pipeline.train.lint import lint_step

    # Linting only traces, so virtual CPU devices can stand for any others.
    devices = Platform("cpu").devices(mesh.num_devices)
    return lint_step(
        config, make_mesh(mesh, devices, sharding=config.pipeline.sharding), limits=limits
    )
