"""A training loop of your own that stops, is saved, and goes on with the same losses to the bit.

    python examples/train_and_resume.py

`nnx-pipeline train --checkpoint-dir DIR --resume` does the same, and finds the newest step itself.
"""

import dataclasses
import tempfile
from pathlib import Path

import jax

import linen_compat
from nnx_pipeline import MeshConfig, make_mesh, preset
from nnx_pipeline.train import jit_train_step, learnable_batches, make_state

jax.config.update("jax_platforms", "cpu")  # on real devices leave out both lines
jax.config.update("jax_num_cpu_devices", 8)
config = preset("tiny")
config = dataclasses.replace(
    config,
    model=dataclasses.replace(config.model, num_layers=4),
    train=dataclasses.replace(config.train, sequence_length=32),
)


def run(state, mesh, until):
    """Trains a state up to a step; gives the state then, and the losses."""
    losses = []
    with jax.set_mesh(mesh):
        step = jit_train_step(state, mesh)
        # The number of a batch is that of the steps before it, so that data needs no state.
        for batch in learnable_batches(config, mesh, first=int(state.step)):
            if int(state.step) == until:
                return state, losses
            state, metrics = step(state, batch)
            losses.append(float(metrics.loss))


pipelined = make_mesh(MeshConfig(stage=2, fsdp=2))
with jax.set_mesh(pipelined):
    state = make_state(config, pipelined)
state, first = run(state, pipelined, 3)

with tempfile.TemporaryDirectory() as folder:
    saved = Path(folder) / "3"
    linen_compat.save_train_state(state, saved, "nnx")  # before the next step, which donates it
    _, without_stop = run(state, pipelined, 6)
    again = linen_compat.load_train_state(saved, config, mesh=pipelined)
    _, resumed = run(again, pipelined, 6)
    plain = make_mesh(MeshConfig(fsdp=4))
    _, elsewhere = run(linen_compat.load_train_state(saved, config, mesh=plain), plain, 6)

print("steps 1 to 3:             ", *first)
print("4 to 6, without a stop:   ", *without_stop)
print("4 to 6, after a resume:   ", *resumed)
print("4 to 6, on a mesh fsdp=4: ", *elsewhere)
assert resumed == without_stop
assert all(abs(a - b) < 1e-4 for a, b in zip(elsewhere, without_stop, strict=True))
