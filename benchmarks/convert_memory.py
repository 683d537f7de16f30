"""Speed and peak memory of `linen-compat convert` beside `cp -r`; writes results/convert_memory.md.

    python benchmarks/convert_memory.py [--gigabytes 1.2 12] [--rounds 5] [--folder DIR]

For each size Orbax makes checkpoints on the spot, with the layers in one array and apart. They are
copied and converted in turns, so that both meet the same other work on the machine, from the page
cache. The rules: `convert` has a fourth of the speed of `cp -r`, and takes at most 2.5 times the
largest stored array and 300 MB, of a checkpoint with twice as many arrays too. Needs three times
the largest size on disk, given back at the end. Exit 1 when a rule about memory is broken.
"""

import argparse
import functools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EMBED, MLP, EXPERTS, HEADS, HEAD_DIM, VOCAB = 1024, 4096, 4, 16, 64, 32_000
PER_LAYER = 4 * (4 * EMBED * HEADS * HEAD_DIM + 3 * EXPERTS * EMBED * MLP)
OUTSIDE = 4 * 2 * VOCAB * EMBED
MEGABYTE, GIGABYTE = 1e6, 1e9
FACTOR, SPARE, SHARE = 2.5, 300 * MEGABYTE, 0.25
RESULTS = Path(__file__).parent / "results" / "convert_memory.md"
COMMAND = [str(Path(sys.executable).with_name("linen-compat")), "convert"]
CONFIG = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": EMBED,
    "intermediate_size": MLP,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "hidden_act": "silu",
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}
PIPELINED = ("maxtext:pipelined", "--stages", "1", "--repeats", "2")


@dataclass(frozen=True)
class Ended:
    """What a process took: seconds in all, seconds of processors, and bytes of memory at most."""

    seconds: float
    processors: float
    peak: int


@dataclass(frozen=True)
class Row:
    """One way of converting, in medians over the rounds."""

    way: str
    total: int
    largest: int
    copy: Ended
    convert: Ended

    @property
    def allowed(self) -> float:
        return FACTOR * self.largest + SPARE

    @property
    def share(self) -> float:
        """The speed of `convert` as a part of that of `cp -r`."""
        return self.copy.seconds / self.convert.seconds

    @property
    def cells(self) -> list[str]:
        peak, allowed = self.convert.peak / MEGABYTE, self.allowed / MEGABYTE
        return [
            self.way,
            f"{self.total / GIGABYTE:.1f} GB",
            f"{self.copy.seconds:.1f} s",
            f"{self.convert.seconds:.1f} s",
            f"**{100 * self.share:.0f} %**",
            f"{self.copy.processors:.1f} s",
            f"{self.convert.processors:.1f} s",
            f"{peak:,.0f} of {allowed:,.0f} MB",
        ]


HEAD = (
    *("from, to", "size", "`cp -r`", "`convert`", "speed", "processors, `cp -r`"),
    *("processors, `convert`", "peak memory"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[1.2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder by default")
    parser.add_argument("--make", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.make:  # in a process of its own: a child's peak includes what its parent held
        make_checkpoint(arguments.make[0], arguments.make[1], int(arguments.make[2]))
        return
    rows: list[Row] = []
    for size in arguments.gigabytes:
        layers = max(4, round((size * GIGABYTE - OUTSIDE) / PER_LAYER / 4) * 4)
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            for row in measured(Path(folder), layers, arguments.rounds):
                print(" | ".join(row.cells), flush=True)
                rows.append(row)
                RESULTS.write_text(page(rows, arguments.rounds), encoding="utf-8")
    sys.exit(any(row.convert.peak > row.allowed for row in rows))


def measured(folder: Path, layers: int, rounds: int) -> Iterator[Row]:
    """All ways of converting a model with so many layers; each source is deleted after its use."""
    config = folder / "config.json"
    config.write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
    source, huggingface = folder / "source", folder / "huggingface"

    def way(name: str, source: Path, sizes: Sequence[int], *to: str) -> Row:
        return in_turns(name, source, (sizes[0], sizes[1]), to, rounds)

    sizes = made(source, "scanned", layers)
    yield way("Orbax, scanned, to circular", source, sizes, *PIPELINED)
    shutil.rmtree(source)
    half = made(source, "unscanned", layers // 2)
    yield way("Orbax, unscanned, to circular, half the layers", source, half, *PIPELINED)
    shutil.rmtree(source)
    sizes = made(source, "unscanned", layers)
    yield way("Orbax, unscanned, to circular", source, sizes, *PIPELINED)
    to_huggingface = ("huggingface", "--config", str(config))
    yield way("Orbax, unscanned, to Hugging Face", source, sizes, *to_huggingface)
    ended([*COMMAND, str(source), str(huggingface), "--to", *to_huggingface])
    shutil.rmtree(source)
    yield way("Hugging Face to scanned", huggingface, sizes, "maxtext:scanned")
    ended([*COMMAND, str(huggingface), str(source), "--to", "maxtext:unscanned"])
    shutil.rmtree(huggingface)
    yield way("this project, unscanned, to scanned", source, sizes, "maxtext:scanned")


def in_turns(way: str, source: Path, sizes: tuple[int, int], to: Sequence[str], rounds: int) -> Row:
    """Copies and converts a checkpoint in turns; `sizes` of the largest array and of all."""
    copies, conversions, target = list[Ended](), list[Ended](), source.with_name("target")
    for _ in range(rounds):  # the source has just been written, and so is in the page cache
        copies.append(ended(["cp", "-r", str(source), str(target)]))
        shutil.rmtree(target)
        conversions.append(ended([*COMMAND, str(source), str(target), "--to", *to]))
        shutil.rmtree(target)
    return Row(way, sizes[1], sizes[0], median(copies), median(conversions))


def median(all_ended: Sequence[Ended]) -> Ended:
    """The medians of seconds, and the largest of the peaks."""
    return Ended(
        statistics.median(one.seconds for one in all_ended),
        statistics.median(one.processors for one in all_ended),
        max(one.peak for one in all_ended),
    )


def ended(command: Sequence[str]) -> Ended:
    begun = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    said = process.stderr.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{command} ended with {os.waitstatus_to_exitcode(status)}: {said}")
    processors = usage.ru_utime + usage.ru_stime
    return Ended(time.monotonic() - begun, processors, usage.ru_maxrss * 1024)


def made(folder: Path, layout: str, layers: int) -> tuple[int, int]:
    """Makes a checkpoint; returns the bytes of its largest array and of all."""
    command = [sys.executable, __file__, "--make", str(folder), layout, str(layers)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    largest, total = map(int, done.stdout.split())
    return largest, total


def page(rows: Sequence[Row], rounds: int) -> str:
    lines = [[*HEAD], ["---", *["--:"] * (len(HEAD) - 1)], *(row.cells for row in rows)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    below = [row for row in rows if row.share < SHARE]
    verdict = "All ways have" if not below else f"{len(rows) - len(below)} of {len(rows)} ways have"
    load = os.getloadavg()[2]
    return f"""# Conversions beside `cp -r`

Made by `python benchmarks/convert_memory.py` on {os.cpu_count()} processors: medians of {rounds}
rounds, in each of which the checkpoint was copied and then converted, from the page cache. The load
of the machine was {load:.1f} in the last 15 minutes: seconds depend on that, and seconds of
processors say more. Checkpoints are random float32, which Orbax compresses to 92 %. `convert` is a
whole process, from the start of Python on.

{table}

{verdict} a fourth of the speed of `cp -r` or more. Memory may be {FACTOR} times the largest stored
array and {SPARE / MEGABYTE:.0f} MB. With half the layers the largest array is the same.
"""


def make_checkpoint(folder: str, layout: str, layers: int) -> None:
    """Writes a checkpoint as MaxText does and prints the bytes of its largest array and of all."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    tile = np.random.default_rng(0).standard_normal(16 * 2**20, np.float32)

    @functools.cache
    def flat(size: int) -> np.ndarray:  # arrays of one size share their memory
        return np.resize(tile, size)

    def array(*shape: int) -> np.ndarray:
        return flat(math.prod(shape)).reshape(shape)

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
    tree: dict[str, Any] = {
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
    handler = ocp.PyTreeCheckpointHandler(save_concurrent_gb=2)
    ocp.Checkpointer(handler).save(folder, {"params": {"params": tree}, "step": step})
    sizes = [leaf.nbytes for leaf in jax.tree.leaves(tree)]
    print(max(sizes), sum(sizes))


if __name__ == "__main__":
    main()
