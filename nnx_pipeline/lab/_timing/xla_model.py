"""What XLA's own model of a GPU says of an instruction.

With `xla_gpu_collect_cost_model_stats` XLA writes estimates into an optimized program, a list for
each fusion, cuBLASLt call and collective. Each estimate has a name:

- `sol`, for speed of light, is what is read here. A product has a rate that was measured on this
  GPU, a fusion its bytes and operations, a collective within a host a rate that was measured, and
  one between hosts a model of the network.
- No name, `experimental-gemm-cost-model` and `indexing-cost-model`: with these XLA chooses fusions
  and tiles. None is read. Of a product of Triton that nothing has tuned they are 20 times too high:
  4,593, 3,978 and 3,902 µs for 4096³ in bfloat16 on an H100, where `sol` says 176, and the peak
  takes 139.

`sol` is no estimate everywhere:

- Of a fusion of Triton that is no product it is 0.01 µs, and of a collective that the model does
  not understand a multiple of 5,000 µs: weights for XLA's scheduler. They count as no figure.
- For a product of dtypes that were not measured XLA takes the rate of one in bfloat16, but counts
  its sizes in bytes. The time is too long by the third power of the bytes of a number of the
  result, which is taken out: 11,274 µs for 4096³ of bfloat16 into float32 is 64 times 176.
- It does not know the precision of a product: float32 takes as long at `highest` as in TF32.
- It is without the launch of a kernel (`LAUNCH`). Collectives have theirs in the measured rates,
  but below 1 kB the rate is that of 1 kB, and the time can fall to nothing (`LAUNCH_COLLECTIVE`).
"""

import re

from nnx_pipeline.lab._hlo.module import Instruction, Module

# Of one kernel, and the least of a collective: what XLA itself takes to choose fusions, and for a
# collective that it knows nothing of (`gpu_performance_model_base.h`).
LAUNCH, LAUNCH_COLLECTIVE = 1e-6, 5e-6

_SOL = re.compile(r'"exec_time_us":([\d.e+-]+)[^{}]*"name":"sol"')
_NO_COST, _NO_LATENCY = 0.01, (1.0, 5000.0)  # µs: what stands for no estimate
# Dtypes of the operands and of the result. `f32` was measured in TF32.
_MEASURED = (
    ("bf16", "bf16", "bf16"),
    ("f32", "f32", "f32"),
    ("f8e4m3fn", "f8e4m3fn", "bf16"),
    ("f8e4m3fn", "f8e5m2", "bf16"),
    ("f8e5m2", "f8e4m3fn", "bf16"),
)
_BYTES = {"f64": 8, "c64": 8, "c128": 16, "f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2}


def has_figures(module: Module) -> bool:
    """Whether XLA wrote figures of its model into a program."""
    return any(_SOL.search(instruction.config) for _, instruction in module.instructions())


def compute_seconds(instruction: Instruction) -> float | None:
    """What a fusion or a product takes once it runs; None where the model has no figure."""
    found = _microseconds(instruction)
    return None if found in (None, _NO_COST) else 1e-6 * float(found or 0)


def collective_seconds(*parts: Instruction) -> float | None:
    """What a collective takes, launch included; None where the model has no figure.

    - `parts`: the start, and the collective in it.
    """
    weight, step = _NO_LATENCY
    found = [micros for part in parts if (micros := _microseconds(part)) is not None]
    if not found or found[0] == weight or (found[0] and found[0] % step == 0):
        return None
    return max(1e-6 * found[0], LAUNCH_COLLECTIVE)


def share_of_peak(
    seconds: float, at_peak_of_bf16: float, dtypes: tuple[str, str, str]
) -> float | None:
    """The share of its peak that a product in bfloat16 of this size reaches, where `seconds` was
    made of that; None where the product itself was measured.

    - `at_peak_of_bf16`: seconds of the product at the peak of bfloat16.
    - `dtypes`: of both operands and of the result.
    """
    if dtypes in _MEASURED or not at_peak_of_bf16:
        return None
    too_long = _BYTES.get(dtypes[2], 1) ** 3
    # A version of XLA that counts the sizes right gives less than this, but for tiny products.
    if seconds >= too_long * at_peak_of_bf16:
        seconds /= too_long
    return at_peak_of_bf16 / seconds


def _microseconds(instruction: Instruction) -> float | None:
    found = _SOL.search(instruction.config)
    return float(found[1]) if found else None
