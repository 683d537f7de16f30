"""Training in two processes, as on two hosts: the same losses as in one."""

import json
import os
import socket
import subprocess
import sys

import pytest
from helpers import mesh_of, optax_promotion, user_environment

from nnx_pipeline import preset
from nnx_pipeline.config.overrides import apply_overrides
from nnx_pipeline.train.loop import train

MESH = "data=2,stage=2,fsdp=2"
SMALL = {
    "model.vocab_size": "32",
    "model.embed_dim": "16",
    "model.mlp_dim": "16",
    "model.num_layers": "2",
    "model.head_dim": "4",
    "pipeline.num_microbatches": "4",
    "train.global_batch": "16",
    "train.sequence_length": "8",
    "train.loss_chunks": "2",
}
STEPS = 2  # the loss of the second depends on the gradients of the first
# The schedule, and what is on different hosts: the copies of the model, or its stages.
CASES = (("circular", "data=2"), ("1f1b", "stage=2"))
HOST = """
import json, sys
import jax
import numpy as np

port, rank, mesh, steps, cases = sys.argv[1:]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=int(rank))

from nnx_pipeline import MeshConfig, make_mesh, preset
from nnx_pipeline.config.overrides import apply_overrides
from nnx_pipeline.train.data import Rule
from nnx_pipeline.train.loop import train

made, whole = set(), Rule.sequences
def sequences(self, batch, rows, length):
    made.update((batch, row) for row in rows)
    return whole(self, batch, rows, length)
Rule.sequences = sequences

found = []
for options, dcn in json.loads(cases):
    config = apply_overrides(preset("tiny"), options)
    grid = make_mesh(MeshConfig.parse(mesh), jax.devices(), dcn=MeshConfig.parse(dcn))
    hosts = {name: set() for name in ("data", "stage")}
    for at, device in np.ndenumerate(grid.devices):
        for name, seen in hosts.items():
            seen.add((at[grid.axis_names.index(name)], device.process_index))
    across = [name for name, seen in hosts.items() if len(seen) == 2]
    losses = [float(step.metrics.loss) for step in train(config, grid, steps=int(steps))]
    assert len(made) == int(steps) * config.train.global_batch // 2, "whole batches on a host"
    made.clear()
    found.append([across, losses])
print("found", json.dumps(found))
"""


@pytest.mark.slow
def test_two_processes_train_as_one() -> None:
    """With copies of the model on different hosts, and with its stages."""
    cases = [(SMALL | {"pipeline.schedule": schedule}, dcn) for schedule, dcn in CASES]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    hosts = [
        subprocess.Popen(
            [sys.executable, "-c", HOST, str(port), str(rank), MESH, str(STEPS), json.dumps(cases)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**user_environment(), "XLA_FLAGS": os.environ["XLA_FLAGS"]},
        )
        for rank in range(2)
    ]
    try:
        ended = [host.communicate(timeout=600) for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    for out, error in ended:
        assert "found" in out, error[-2000:]
    first, second = (json.loads(out.split("found ", 1)[1]) for out, _ in ended)
    assert first == second
    for (options, dcn), (across, losses) in zip(cases, first, strict=True):
        assert across == [dcn.removesuffix("=2")]
        mesh = mesh_of(MESH)
        with optax_promotion():
            config = apply_overrides(preset("tiny"), options)
            alone = [float(step.metrics.loss) for step in train(config, mesh, steps=STEPS)]
        assert losses == pytest.approx(alone, rel=1e-5)
        assert losses[0] != losses[1]
