"""The loop over ticks of the circular schedule, and of the plain pipeline as its special case."""
