"""Training in two processes, as on two hosts: the same losses as in one."""

import contextlib
import json
import re
import signal
from typing import Any

import pytest
from helpers import hosts_of, mesh_of, optax_promotion

from nnx_pipeline import preset
from nnx_pipeline.config._overrides import apply_overrides
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
from nnx_pipeline import MeshConfig, make_mesh, preset
from nnx_pipeline.config._overrides import apply_overrides
from nnx_pipeline.train import several_processes
from nnx_pipeline.train.data import Rule
from nnx_pipeline.train.loop import train

made, whole = set(), Rule.sequences
def sequences(self, batch, rows, length):
    made.update((batch, row) for row in rows)
    return whole(self, batch, rows, length)
Rule.sequences = sequences

found = []
with several_processes(f"127.0.0.1:{port}", processes=2, rank=int(rank)):
    for options, dcn in json.loads(cases):
        config = apply_overrides(preset("tiny"), options)
        grid = make_mesh(MeshConfig.parse(mesh), jax.devices(), dcn=MeshConfig.parse(dcn))
        hosts = {name: set() for name in ("data", "stage")}
        for at, device in np.ndenumerate(grid.devices):
            for name, seen in hosts.items():
                seen.add((at[grid.axis_names.index(name)], device.process_index))
        across = [name for name, seen in hosts.items() if len(seen) == 2]
        losses = []
        for step in train(config, grid, steps=int(steps)):
            losses.append(float(step.metrics.loss))
            print("step", len(losses), flush=True)
        assert len(made) == int(steps) * config.train.global_batch // 2, "whole batches on a host"
        made.clear()
        found.append([across, losses])
print("found", json.dumps(found))
"""


def started(cases: list[Any], steps: int) -> contextlib.AbstractContextManager[Any]:
    """Two processes that train together."""
    return hosts_of(HOST, MESH, str(steps), json.dumps(cases))


@pytest.mark.slow
@pytest.mark.parametrize("killed", [1, 0])
def test_a_process_ends_when_the_other_is_killed(killed: int) -> None:
    """Within a minute, by JAX, whose messages name it; a computation that failed says so before."""
    with started([(SMALL, "data=2")], 1_000_000) as hosts:
        for line in hosts[killed].stdout:
            if line == "step 2\n":
                break
        hosts[killed].kill()
        left = hosts[1 - killed]
        _, error = left.communicate(timeout=60)
    assert left.returncode == -signal.SIGABRT, error
    if killed:
        assert re.search(r"(?m)^process 0 of 2 cannot go on; if another one has ended, it", error)
        assert "unhealthy (stopped sending heartbeats):\n1\n" in error


ENDING = """
import os, signal, sys
import jax
import jax.numpy as jnp
import numpy as np

port, rank, how, victim = sys.argv[1:]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 1)
from jax.sharding import NamedSharding, PartitionSpec as P
from nnx_pipeline.train import several_processes

with several_processes(f"127.0.0.1:{port}", processes=2, rank=int(rank)):
    mesh = jax.make_mesh((2,), ("d",))
    total = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, P()))
    ones = lambda index: np.ones(2, np.float32)[index]
    x = jax.make_array_from_callback((2,), NamedSharding(mesh, P("d")), ones)
    total(x).block_until_ready()
    if rank == victim:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise eval(how)
    while True:
        total(x).block_until_ready()
"""


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, 0])
@pytest.mark.parametrize(
    ("how", "code", "told"),
    [
        ("SystemExit(3)", 3, ""),
        ("SystemExit()", 0, ""),
        ("SystemExit('no data is left')", 1, "no data is left\n"),
        ("KeyboardInterrupt", 130, "KeyboardInterrupt\n"),
        ("ValueError('of my own')", 1, "ValueError: of my own\n"),
        ("kill", -signal.SIGKILL, ""),
    ],
)
def test_both_processes_end_when_one_leaves(how: str, code: int, told: str, victim: int) -> None:
    """However it leaves, both end within a minute; the other one says why, and then JAX does."""
    with hosts_of(ENDING, how, str(victim)) as hosts:
        ended = [host.communicate(timeout=60)[1] for host in hosts]
    said = ["".join(re.sub(r"(?m)^(\[Gloo\]|[IWE]\d{4}) .*\n", "", error)) for error in ended]
    assert hosts[victim].returncode == code, ended
    assert said[victim].endswith(told), ended
    assert hosts[1 - victim].returncode == -signal.SIGABRT, ended


@pytest.mark.slow
def test_two_processes_train_as_one() -> None:
    """With copies of the model on different hosts, and with its stages."""
    cases = [(SMALL | {"pipeline.schedule": schedule}, dcn) for schedule, dcn in CASES]
    with started(cases, STEPS) as hosts:
        ended = [host.communicate(timeout=600) for host in hosts]
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
