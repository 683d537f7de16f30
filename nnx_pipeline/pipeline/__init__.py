"""The pipeline: schedules in plain integers, and the loops over ticks that carry them out."""

from typing import TYPE_CHECKING

from nnx_pipeline.lab._lazy import lazy

if TYPE_CHECKING:
    from nnx_pipeline.pipeline.circular.run import run_pipeline
    from nnx_pipeline.pipeline.contract import Inputs, ModelEnds, ModelFunctions, Weights
    from nnx_pipeline.pipeline.create import create_pipeline
    from nnx_pipeline.pipeline.gather import FsdpGather
    from nnx_pipeline.pipeline.layers import Shared
    from nnx_pipeline.pipeline.metrics import Max, Mean, MicrobatchMean, Sum
    from nnx_pipeline.pipeline.module import CircularPipeline, Pipeline
    from nnx_pipeline.pipeline.one_f_one_b.run import run_one_f_one_b
    from nnx_pipeline.pipeline.options import Accumulation, LoopOptions, WeightOptions
    from nnx_pipeline.pipeline.schedule import (
        SCHEDULE_NAMES,
        CircularSchedule,
        OneForwardOneBackward,
        make_schedule,
    )
    from nnx_pipeline.pipeline.stage.apply import map_stages, run_sequential
    from nnx_pipeline.pipeline.stage.layers import LayerPlace
    from nnx_pipeline.pipeline.stage.state import PerMicrobatch, WithState
    from nnx_pipeline.pipeline.stage.variables import LayerState
    from nnx_pipeline.sharding.dropout import dropout

__all__ = [
    "SCHEDULE_NAMES",
    "Accumulation",
    "CircularPipeline",
    "CircularSchedule",
    "FsdpGather",
    "Inputs",
    "LayerPlace",
    "LayerState",
    "LoopOptions",
    "Max",
    "Mean",
    "MicrobatchMean",
    "ModelEnds",
    "ModelFunctions",
    "OneForwardOneBackward",
    "PerMicrobatch",
    "Pipeline",
    "Shared",
    "Sum",
    "WeightOptions",
    "Weights",
    "WithState",
    "create_pipeline",
    "dropout",
    "make_schedule",
    "map_stages",
    "run_one_f_one_b",
    "run_pipeline",
    "run_sequential",
]

__getattr__, __dir__ = lazy(__name__)
