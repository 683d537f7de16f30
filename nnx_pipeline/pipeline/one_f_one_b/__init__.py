"""The loop over ticks of the 1F1B schedule."""
