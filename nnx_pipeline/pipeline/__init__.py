"""The pipeline: schedules as plain arithmetic, and the loops that follow them."""

from nnx_pipeline.pipeline.create import Pipeline, create_pipeline
from nnx_pipeline.pipeline.lend import AS_STORED, Lending
from nnx_pipeline.pipeline.loop import run_pipeline
from nnx_pipeline.pipeline.metrics import Max, Mean, MicrobatchMean, Sum
from nnx_pipeline.pipeline.module import CircularPipeline
from nnx_pipeline.pipeline.one_f_one_b import run_one_f_one_b
from nnx_pipeline.pipeline.one_f_one_b_state import Inputs, Weights
from nnx_pipeline.pipeline.schedule import (
    SCHEDULE_NAMES,
    CircularSchedule,
    OneForwardOneBackward,
    make_schedule,
)
from nnx_pipeline.pipeline.stages import over_stages, run_sequential

__all__ = [
    "AS_STORED",
    "SCHEDULE_NAMES",
    "CircularPipeline",
    "CircularSchedule",
    "Inputs",
    "Lending",
    "Max",
    "Mean",
    "MicrobatchMean",
    "OneForwardOneBackward",
    "Pipeline",
    "Sum",
    "Weights",
    "create_pipeline",
    "make_schedule",
    "over_stages",
    "run_one_f_one_b",
    "run_pipeline",
    "run_sequential",
]
