"""The loop that carries out any timetable, with one branch for each kind of action."""
