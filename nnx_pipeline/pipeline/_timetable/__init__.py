"""Draws the timetable of a schedule, as text and as a figure."""
