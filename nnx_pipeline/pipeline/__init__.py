"""The pipeline: a schedule as plain arithmetic, and the loop that follows it."""

from nnx_pipeline.pipeline.loop import run_pipeline
from nnx_pipeline.pipeline.schedule import SCHEDULES, CircularSchedule
from nnx_pipeline.pipeline.stages import over_stages, run_sequential

__all__ = ["SCHEDULES", "CircularSchedule", "over_stages", "run_pipeline", "run_sequential"]
