"""Training in two processes, as on two hosts: the same losses as in one."""

import json
import socket
import subprocess
import sys

import pytest
from helpers import mesh_of, optax_promotion, user_environment

from nnx_pipeline import Config, preset
from nnx_pipeline.config.overrides import apply_overrides
from nnx_pipeline.train.loop import train

MESH = "data=2,stage=2,fsdp=2"
OPTIONS = {"pipeline.num_microbatches": "4", "train.global_batch": "16"}
SCHEDULES = {"circular": {}, "1f1b": {"pipeline.schedule": "1f1b"}}
HOST = """
import json, sys
import jax

port, rank, mesh, overrides = sys.argv[1:]
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

found = {}
for name, options in json.loads(overrides).items():
    config = apply_overrides(preset("tiny"), options)
    for dcn in ("data=2", "stage=2"):
        grid = make_mesh(MeshConfig.parse(mesh), jax.devices(), dcn=MeshConfig.parse(dcn))
        losses = [float(metrics.loss) for metrics in train(config, grid, steps=3)]
        found[f"{name}, {dcn}"] = losses
        assert len(made) == 3 * config.train.global_batch // 2, "whole batches on a host"
        made.clear()
print("found", json.dumps(found))
"""


def config_of(name: str) -> Config:
    return apply_overrides(preset("tiny"), OPTIONS | SCHEDULES[name])


@pytest.mark.slow
def test_two_processes_train_as_one() -> None:
    """With the copies, and with the stages, on different hosts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    overrides = json.dumps({name: OPTIONS | own for name, own in SCHEDULES.items()})
    hosts = [
        subprocess.Popen(
            [sys.executable, "-c", HOST, str(port), str(rank), MESH, overrides],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=user_environment(),
        )
        for rank in range(2)
    ]
    try:
        ended = [host.communicate(timeout=1500) for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    for out, error in ended:
        assert "found" in out, error[-2000:]
    first, second = (json.loads(out.split("found ", 1)[1]) for out, _ in ended)
    assert first == second
    for name in SCHEDULES:
        config = config_of(name)
        mesh = mesh_of(MESH)
        with optax_promotion():
            alone = [float(metrics.loss) for metrics in train(config, mesh, steps=3)]
        for dcn in ("data=2", "stage=2"):
            assert first[f"{name}, {dcn}"] == pytest.approx(alone, rel=1e-5)
