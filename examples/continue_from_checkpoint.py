"""A MaxText checkpoint is loaded, trained on, and saved again as MaxText reads it.

    python examples/continue_from_checkpoint.py [FOLDER]

The checkpoint is one of a tiny model, and is made here too. FOLDER is new or empty, and keeps it.
"""

import itertools
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np

import linen_compat
from nnx_pipeline import MeshConfig, make_mesh
from nnx_pipeline.train import jit_train_step, learnable_batches, make_state

CONFIG = """\
{decoder_block: mixtral, vocab_size: 128, base_emb_dim: 64, base_mlp_dim: 128, head_dim: 16,
base_num_decoder_layers: 4, base_num_query_heads: 4, base_num_kv_heads: 2, num_experts: 4,
num_experts_per_tok: 2, max_target_length: 32, per_device_batch_size: 4, learning_rate: 0.003,
steps: 20}
"""


def train(state, steps):
    """Trains a state for some steps, on the data that follows what it has seen."""
    step = jit_train_step(state, mesh)
    batches = learnable_batches(config, mesh, first=int(state.step))
    for batch in itertools.islice(batches, steps):
        state, metrics = step(state, batch)
        print(f"step {int(state.step)}: loss {metrics.loss:.4f}")
    return state


jax.config.update("jax_num_cpu_devices", 4)  # or real devices
mesh = make_mesh(MeshConfig(stage=2, fsdp=2))
with tempfile.TemporaryDirectory() as temporary, jax.set_mesh(mesh):
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else temporary)
    folder.mkdir(exist_ok=True)
    (folder / "config.yml").write_text(CONFIG)  # MaxText has written yours
    config = linen_compat.config_from_maxtext(folder / "config.yml")
    linen_compat.save_train_state(train(make_state(config, mesh), 3), folder / "3")

    state = linen_compat.load_train_state(folder / "3", config)
    print(f"loaded: parameters, both moments of Adam, and step {int(state.step)}")
    state = train(state, 3)
    linen_compat.save_train_state(state, folder / "6", format="maxtext:scanned")

    again = linen_compat.load_train_state(folder / "6", config)
    pairs = list(zip(*map(jax.tree.leaves, (state, again)), strict=True))
assert int(again.step) == 6
assert all(np.array_equal(one, other) for one, other in pairs)
print(f"saved, and loaded again: {len(pairs)} arrays, each the same to the bit")
