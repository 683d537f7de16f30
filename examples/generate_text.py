"""A tiny Mixtral learns the beginning of a file by heart, and goes on from a few words of it.

    python examples/generate_text.py [FILE]

Tokens are bytes. To go on from a checkpoint, take `linen_compat.load(folder, config)` as the model.
"""

import dataclasses
import itertools
import sys
from pathlib import Path

import jax
import numpy as np

from nnx_pipeline import MeshConfig, make_mesh, preset
from nnx_pipeline.generate import Request, Sampling, generate
from nnx_pipeline.train import batches, jit_train_step, make_state

STEPS, NEW_TOKENS = 150, 40
text = Path(sys.argv[1] if len(sys.argv) > 1 else __file__).read_bytes()[:800]


class Windows:
    """Pieces of the text that begin anywhere in it: a source of batches."""

    def sequences(self, batch, rows, length):
        tokens, last = np.frombuffer(text, np.uint8).astype(np.int32), len(text) - length
        starts = [np.random.default_rng((batch, row)).integers(last + 1) for row in rows]
        return np.stack([tokens[start : start + length] for start in starts])


def show(request):
    for prompt, new in zip(request.prompts, generate(state.model, request), strict=True):
        print(repr(bytes(prompt).decode()), "->", repr(bytes(new).decode(errors="replace")))


config = preset("tiny")
small = dataclasses.replace(config.model, vocab_size=256, num_layers=2)
config = dataclasses.replace(config, model=small)
mesh = make_mesh(MeshConfig())  # one device
with jax.set_mesh(mesh):
    state = make_state(config, mesh)
    step = jit_train_step(state, mesh)
    for batch in itertools.islice(batches(config, mesh, Windows()), STEPS):
        state, metrics = step(state, batch)
    print(f"loss {metrics.loss:.2f} nats per byte at step {STEPS}; the likeliest, then drawn:")

    prompts = (tuple(text[3:17]), tuple(text[270:284]))
    likeliest = Request(prompts=prompts, new_tokens=NEW_TOKENS)
    show(likeliest)
    show(dataclasses.replace(likeliest, sampling=Sampling(temperature=1.5, seed=1)))
    learned = generate(state.model, likeliest)[0]
assert bytes(prompts[0] + tuple(learned[:10])) in text  # by heart
