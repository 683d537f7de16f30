"""Peak resident memory of `linen-compat convert`, on checkpoints made on the spot by Orbax.

    python benchmarks/convert_memory.py [--folder DIR] [--scale S]

A scanned checkpoint of about 4 GB becomes circular; then one with its layers apart, and one with
twice as many layers, do the same. The rule: at most 3.5 times the largest stored array plus 500 MB,
and the same within 10 % for twice as many arrays. Needs about 9 GB of disk, given back at the end.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

EMBED, MLP, EXPERTS, HEADS, HEAD_DIM, VOCAB = 1024, 4096, 4, 16, 64, 32_000
MEGABYTE = 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder by default")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of layers")
    parser.add_argument("--make", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.make:  # in a process of its own: a child's peak includes what its parent held
        make_checkpoint(arguments.make[0], arguments.make[1], int(arguments.make[2]))
        return
    layers = max(8, int(16 * arguments.scale) // 8 * 8)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        measure(Path(folder), "scanned", layers)
        half = measure(Path(folder), "unscanned", layers // 2)
        whole = measure(Path(folder), "unscanned", layers)
        print(f"twice as many arrays: {whole / half:.3f} of the peak")


def measure(folder: Path, layout: str, layers: int) -> float:
    """Makes a checkpoint, converts it in a process of its own, prints and returns the peak."""
    source, target = folder / "source", folder / "target"
    make = [sys.executable, __file__, "--make", str(source), layout, str(layers)]
    made = subprocess.run(make, check=True, stdout=subprocess.PIPE)
    largest, total = map(int, made.stdout.split())
    begun = time.monotonic()
    code = "from linen_compat._cli.main import main; main()"
    arguments = ["convert", str(source), str(target), "--to", "maxtext:pipelined"]
    stages = ["--stages", "2", "--repeats", "2"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments, *stages], stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"convert ended with {os.waitstatus_to_exitcode(status)}")
    peak, allowed = usage.ru_maxrss * 1024, 3.5 * largest + 500 * MEGABYTE
    sizes = (total, largest, peak, allowed)
    all_of_it, of_one, used, most = (f"{size / MEGABYTE:,.0f} MB" for size in sizes)
    print(
        f"{layout}, {layers} layers, {all_of_it}, largest array {of_one}: peak {used} of {most} "
        f"allowed, {(peak - 500 * MEGABYTE) / largest:.2f} × largest + 500 MB, "
        f"{time.monotonic() - begun:.0f} s",
        flush=True,
    )
    shutil.rmtree(source)
    shutil.rmtree(target)
    return peak


def make_checkpoint(folder: str, layout: str, layers: int) -> None:
    """Writes a checkpoint as MaxText does and prints the bytes of its largest array and of all."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    tile = np.random.default_rng(0).standard_normal(16 * 2**20, np.float32)

    def array(*shape: int) -> np.ndarray:
        return np.resize(tile, shape)

    heads = (HEADS, HEAD_DIM)
    shapes = {
        "pre_self_attention_layer_norm/scale": (EMBED,),
        "post_self_attention_layer_norm/scale": (EMBED,),
        **{f"self_attention/{name}/kernel": (EMBED, *heads) for name in ("query", "key", "value")},
        "self_attention/out/kernel": (*heads, EMBED),
        "MoeBlock_0/gate/kernel": (EMBED, EXPERTS),
        "MoeBlock_0/wi_0": (EXPERTS, EMBED, MLP),
        "MoeBlock_0/wi_1": (EXPERTS, EMBED, MLP),
        "MoeBlock_0/wo": (EXPERTS, MLP, EMBED),
    }
    tree: dict = {
        "token_embedder": {"embedding": array(VOCAB, EMBED)},
        "decoder": {
            "decoder_norm": {"scale": array(EMBED)},
            "logits_dense": {"kernel": array(EMBED, VOCAB)},
        },
    }
    for number in range(1 if layout == "scanned" else layers):
        for name, shape in shapes.items():
            stacked = (shape[0], layers, *shape[1:]) if layout == "scanned" else shape
            node = tree["decoder"]
            *parents, last = name.split("/")
            for parent in ("layers" if layout == "scanned" else f"layers_{number}", *parents):
                node = node.setdefault(parent, {})
            node[last] = array(*stacked)
    step = np.zeros((), np.int32)
    ocp.PyTreeCheckpointer().save(folder, {"params": {"params": tree}, "step": step})
    sizes = [leaf.nbytes for leaf in jax.tree.leaves(tree)]
    print(max(sizes), sum(sizes))


if __name__ == "__main__":
    main()
