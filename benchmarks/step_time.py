"""Processor time of a training step on virtual CPU devices, beside another version of the source.

    python benchmarks/step_time.py 7753bd3
    python benchmarks/step_time.py 7753bd3 --case "1 repeat, 1F1B" --rounds 31

checks that version out into a folder of its own, starts one process for each of the two, compiles
every case in both, and lets them take turns, so that other work on the machine meets both. All
cases together are written to benchmarks/results/step_time.md; those of --case are only printed. A
ratio is the median of those of the rounds.
"""

import argparse
import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results" / "step_time.md"
DEVICES = 8
SECONDS = 1.5  # of processor time that a process takes for its turn, about
MODEL = {
    "vocab_size": 1024,
    "embed_dim": 128,
    "mlp_dim": 256,
    "num_layers": 8,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "dtype": "float32",
}
STAGES = "stage=4,fsdp=2"
ROUND_THE_STAGES = {"num_microbatches": 8, "num_repeats": 2}
MANY, LARGER = {"num_microbatches": 32}, {"global_batch": 64}
SHORT = {"global_batch": 128, "sequence_length": 32}
NO_EXPERTS = {"num_experts": 1, "num_experts_per_token": 1}
TRIED = """
In `32 microbatches of 4 × 32` a device has 64 tokens of a microbatch, and the default computes 2 of
the 8 experts at a time. Its program executes 24,157 fusions, 1,182 copies and 3,317 collectives per
step. Groups of 4 make that 18,277, 902 and 2,337, all 8 experts at once 13,587, 202 and 1,777. That
gained nothing: 8.0, 8.9 and 8.9 s of processor time, medians of seven rounds in turn on a machine
with much other work. So it is not launches that this case waits for.

A profile of this case found one operation that took as long as several products of the experts: the
derivative by the router's weights, of which XLA for the CPU makes one loop that multiplies and sums
(97 µs for 128 rows of 256 numbers, alone in a loop, and 8 µs as a product of matrices). Since
8fea280, which is later than the table above, it is such a product. This change alone gave 0.95
(0.92 to 0.95) of the time before it in this case, and 0.92 (0.87 to 0.94) with 1 repeat, by
`python benchmarks/step_time.py d340855 --rounds 7` while about twenty other processes ran.

Tried, and left out: kernels in the order in which they are stored, so that no kernel is transposed
at a visit (0.99, within 0.99 and 1.01). Groups of one expert and of four, in four versions in turn,
five rounds: 0.81 (0.79 to 0.87) and 0.85 (0.81 to 0.85) of 7753bd3, and the default's groups of two
0.94 (0.87 to 0.95). The machine was too busy to say whether these differ.

Later, on a quiet machine, nine rounds of this case alone gave 0.90 (0.88 to 0.90) of 7753bd3: 6.1
and 5.4 s of processor time per step. Groups of 1, 2, 4 and 8 experts in turn took 4.9, 5.0, 5.2 and
5.6 s, medians of four rounds: the group is not what decides. The aim of 0.8 is not reached.

Half of the 4.9 s or more are matrix products. A step multiplies 226.7 GFLOP on all eight devices
(`flops` of `nnx-pipeline measure --json`, times eight), and products of these sizes (64 rows, and
matrices of 128 by 256 to 512 by 128), alone in a loop on one core, ran at 63 to 106 GFLOP/s: 2.1 to
3.6 s. Other settings are no faster: `backward=accumulate` took 4.98 s where the default took 4.90,
`sharding=auto` 5.41 and `remat=none`, which multiplies less and keeps more, 6.26 (medians of four
rounds in turn, with other work on the machine). For 0.8 of 7753bd3, all that is no product would
have to take a fifth to two fifths less.
"""
# Name: mesh, changes of the pipeline, of the training and of the model.
CASES: dict[str, tuple[str, dict, dict, dict]] = {
    "no pipeline": ("fsdp=8", {}, {}, {}),
    "1 repeat": (STAGES, {"num_microbatches": 8}, {}, {}),
    "1 repeat, 1F1B": (STAGES, {"num_microbatches": 8, "schedule": "1f1b"}, {}, {}),
    "2 repeats": (STAGES, ROUND_THE_STAGES, {}, {}),
    "2 repeats, accumulate": (STAGES, ROUND_THE_STAGES | {"backward": "accumulate"}, {}, {}),
    "2 repeats, gathered per step": (STAGES, ROUND_THE_STAGES | {"fsdp_gather": "step"}, {}, {}),
    "2 repeats, prefetched": (STAGES, ROUND_THE_STAGES | {"fsdp_gather": "prefetch"}, {}, {}),
    "32 microbatches of 4 × 32": (STAGES, MANY, SHORT, {}),
    "32 microbatches of 4 × 32, 1F1B": (STAGES, MANY | {"schedule": "1f1b"}, SHORT, {}),
    "32 microbatches of 2 × 128": (STAGES, MANY, LARGER, {}),
    "32 microbatches of 2 × 128, 1F1B": (STAGES, MANY | {"schedule": "1f1b"}, LARGER, {}),
    "1 repeat, bfloat16": (STAGES, {"num_microbatches": 8}, {}, {"dtype": "bfloat16"}),
    "1 repeat, no experts": (STAGES, {"num_microbatches": 8}, {}, NO_EXPERTS),
}


def serve() -> None:
    """Compiles the case whose name it reads, then makes as many steps as each number it reads."""
    import jax  # here, because the process that starts the two needs none

    from nnx_pipeline import MeshConfig, make_mesh, preset
    from nnx_pipeline.train import jit_train_step, make_state
    from nnx_pipeline.train.data import learnable_batches

    small = preset("mixtral-small")
    for name in map(str.strip, sys.stdin):
        mesh_text, pipeline, train, model = CASES[name]
        config = dataclasses.replace(
            small,
            model=dataclasses.replace(small.model, **(MODEL | model)),
            pipeline=dataclasses.replace(small.pipeline, **pipeline),
            train=dataclasses.replace(
                small.train, **({"global_batch": 16, "sequence_length": 128} | train)
            ),
        )
        mesh = make_mesh(MeshConfig.parse(mesh_text), jax.devices("cpu"))
        with jax.set_mesh(mesh):
            state, batch = make_state(config, mesh), next(learnable_batches(config, mesh))
            step = jit_train_step(state, mesh).lower(state, batch).compile()
            while steps := int(sys.stdin.readline()):
                started = time.process_time()
                for _ in range(steps):
                    state, metrics = step(state, batch)
                jax.block_until_ready((state, metrics))
                print(time.process_time() - started, flush=True)
        print("done", flush=True)


class Version:
    """A process that runs one version of the source."""

    def __init__(self, tree: Path) -> None:
        flags = f"--xla_force_host_platform_device_count={DEVICES}"
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve"],
            env={**os.environ, "PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, what: str) -> None:
        """Gives the process a line to read."""
        print(what, file=self.process.stdin, flush=True)

    def take(self, steps: int) -> float:
        """Seconds of processor time, of all threads, of one step."""
        self.tell(str(steps))
        said = self.process.stdout.readline()
        if not said:
            raise SystemExit("a process that makes steps has ended, see its messages above")
        return float(said) / steps

    def finish(self) -> None:
        """Ends a case."""
        self.tell("0")
        self.process.stdout.readline()

    def close(self) -> None:
        """Ends the process."""
        self.process.stdin.close()
        self.process.wait()


def commit_of(revision: str) -> str:
    """The short name of a commit, which stays when branches move on."""
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "--verify", "--quiet"]
    found = subprocess.run([*git, f"{revision}^{{commit}}"], stdout=subprocess.PIPE, text=True)
    if found.returncode:
        raise SystemExit(f"git knows no commit {revision!r}; name one that is here")
    return found.stdout.strip()


@contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """A folder with that version of the source."""
    with tempfile.TemporaryDirectory(prefix="nnx-pipeline-") as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), revision], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def compare(name: str, before: Version, after: Version, rounds: int) -> str:
    """The row of a case: each version in turn, and who is first alternates too."""
    pair = (before, after)
    for version in pair:
        version.tell(name)
    steps = [max(1, round(SECONDS / version.take(1))) for version in pair]
    # The first step may load or allocate; the second gives the number of steps of a turn.
    steps = [
        max(1, round(SECONDS / version.take(many)))
        for version, many in zip(pair, steps, strict=True)
    ]
    taken: list[list[float]] = [[], []]
    for turn in range(rounds):
        for which in (0, 1) if turn % 2 else (1, 0):
            taken[which].append(pair[which].take(steps[which]))
    for version in pair:
        version.finish()
    ratios = sorted(b / a for a, b in zip(*taken, strict=True))
    old, new = (statistics.median(times) * 1e3 for times in taken)
    middle = statistics.median(ratios)
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    return f"| {name} | {old:.1f} | {new:.1f} | {middle:.2f} | {low:.2f} to {high:.2f} |\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("revision", nargs="?", help="the version to compare with, as git names it")
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        return serve()
    if not asked.revision:
        parser.error("name a version of the source to compare with")
    if asked.rounds < 1:
        parser.error(f"--rounds is {asked.rounds}; a median needs 1 or more")
    before_that = commit_of(asked.revision)
    text = f"""# Processor time of a step, beside commit {before_that}

Milliseconds of processor time of all threads, for one training step on {DEVICES} virtual CPU
devices: embed 128, mlp 256, vocabulary 1024, 8 layers, 8 experts of which 2 are chosen, 16
sequences of 128 tokens in float32, where a case says nothing else; `{STAGES}`, or `fsdp=8` without
a pipeline. Medians of {asked.rounds} rounds of about {SECONDS} s, in which both versions take
turns; half of the ratios are in the range. Made by
`python benchmarks/step_time.py {before_that} --rounds {asked.rounds}`.

| case | before | now | ratio | range |
|---|--:|--:|--:|---|
"""
    with checked_out(before_that) as tree:
        before, after = Version(tree), Version(ROOT)
        for name in asked.case or CASES:
            row = compare(name, before, after, asked.rounds)
            print(row, end="", file=sys.stderr, flush=True)
            text += row
        for version in (before, after):
            version.close()
    if not asked.case:
        RESULTS.write_text(text + TRIED)


if __name__ == "__main__":
    main()
