"""What a change costs: compile for an accelerator that is not there, and compare."""
