"""Timetables of published schedules, and a loop that carries out any of them: an experiment."""

from nnx_pipeline.experiments.timetables.executor.run import run_timetable
from nnx_pipeline.experiments.timetables.make import make_timetable

__all__ = ["make_timetable", "run_timetable"]
