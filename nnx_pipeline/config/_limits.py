"""The largest sizes that a config may have, far above those of all models."""

MOST_LAYERS = 10_000  # what is done layer by layer then takes seconds
MOST_WIDTH = 2**24  # of one axis of a weight
MOST_PARAMETERS = 10**13  # of a model
MOST_TOKENS = 2**30  # of a batch
MOST_MICROBATCHES = 2**20  # a schedule is written out in tables of them
MOST_PARTS = 1024  # each part of a batch is traced apart
