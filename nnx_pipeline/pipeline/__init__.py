"""The pipeline: a schedule as plain arithmetic, and the loop that follows it."""

from nnx_pipeline.pipeline.loop import run_pipeline
from nnx_pipeline.pipeline.schedule import (
    SCHEDULE_NAMES,
    SCHEDULES,
    CircularSchedule,
    OneForwardOneBackward,
    make_schedule,
)
from nnx_pipeline.pipeline.stages import over_stages, run_sequential

__all__ = [
    "SCHEDULES",
    "SCHEDULE_NAMES",
    "CircularSchedule",
    "OneForwardOneBackward",
    "make_schedule",
    "over_stages",
    "run_pipeline",
    "run_sequential",
]
