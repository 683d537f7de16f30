"""The pipeline: schedules in plain integers, and the loops over ticks that carry them out."""

from nnx_pipeline.ops.dropout import dropout
from nnx_pipeline.pipeline.circular.run import run_pipeline
from nnx_pipeline.pipeline.create import create_pipeline
from nnx_pipeline.pipeline.executor.run import run_timetable
from nnx_pipeline.pipeline.layers import Shared
from nnx_pipeline.pipeline.metrics import Max, Mean, MicrobatchMean, Sum
from nnx_pipeline.pipeline.module import CircularPipeline, Pipeline
from nnx_pipeline.pipeline.one_f_one_b.run import run_one_f_one_b
from nnx_pipeline.pipeline.one_f_one_b.state import Inputs, ModelEnds, ModelFunctions, Weights
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
from nnx_pipeline.pipeline.timetable.make import make_timetable
from nnx_pipeline.pipeline.weights.gathered import AS_STORED, WeightGathering

__all__ = [
    "AS_STORED",
    "SCHEDULE_NAMES",
    "Accumulation",
    "CircularPipeline",
    "CircularSchedule",
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
    "WeightGathering",
    "WeightOptions",
    "Weights",
    "WithState",
    "create_pipeline",
    "dropout",
    "make_schedule",
    "make_timetable",
    "map_stages",
    "run_one_f_one_b",
    "run_pipeline",
    "run_sequential",
    "run_timetable",
]
