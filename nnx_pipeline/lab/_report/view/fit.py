"""Says whether a program fits on a device, and if not, what takes the room and what to try."""

from collections.abc import Mapping

from nnx_pipeline.lab._report.view.buffers import buffer_rows
from nnx_pipeline.lab._report.view.figures import megabytes
from nnx_pipeline.lab._report.view.remarks import Remark
from nnx_pipeline.lab.compile.measure import Measurement

NAMED = 3  # the largest buffers that are named
_WORTH_NAMING = 0.01  # of what must fit
_PARTS = {
    "kept_argument_bytes": "arguments",
    "donated_argument_bytes": "arguments",
    "output_bytes": "outputs",
    "constant_bytes": "constants",
    "heap_bytes": "heap",
}
# What makes buffers of a role smaller, in any program.
ADVICE = {
    "saved residual": "jax.checkpoint, so that the backward pass computes values again",
    "activation": "fewer rows at a time, such as gradients of one microbatch after the other",
    "logits": "the loss computed for a part of the sequence at a time",
    "gathered weight": "weights gathered one layer at a time, in a jax.lax.scan over layers",
    "gradient accumulator": "gradients sharded as their parameters are",
    "arguments": "more devices along the mesh axis that the parameters are split over",
}


def fit_remarks(measurement: Measurement, advice: Mapping[str, str] = ADVICE) -> list[Remark]:
    """What must fit and what a device has, as the last words about a program.

    `advice` is for one that does not fit: what makes the buffers of each role smaller, and under
    `arguments` what makes these and the outputs smaller.
    """
    if not measurement.exceeds_device_memory:
        return [Remark(_sum(measurement), "strong")]
    rows = buffer_rows(measurement.attribution.buffers) if measurement.attribution else []
    least = _WORTH_NAMING * measurement.needed_bytes
    largest = [row for row in rows[:NAMED] if row.bytes >= least]
    lines = [
        f"  {megabytes(row.bytes)} MB: {row.role}, {row.shape or 'no array'}, {row.source}"
        for row in largest
    ]
    roles = [row.role for row in largest]
    account, half = measurement.account, measurement.needed_bytes / 2
    arguments = account.kept_argument_bytes + account.donated_argument_bytes
    if arguments + account.output_bytes > half:  # most outputs are as large as the arguments
        roles.insert(0, "arguments")
    tried = dict.fromkeys(advice[role] for role in roles if role in advice)
    lines += [f"  to try: {cure}" for cure in tried]
    return [Remark(_sum(measurement), "alarm"), *map(Remark, lines)]


def _sum(measurement: Measurement) -> str:
    """Such as `arguments 20.1 + heap 4.5 = 24.6 of 102.8 GB: fits`."""
    account, size = measurement.account, measurement.device_memory_bytes
    parts: dict[str, int] = {}
    for field, name in _PARTS.items():
        parts[name] = parts.get(name, 0) + (getattr(account, field) or 0)
    # Not GB for a small program on a large device: each of its parts would be 0.00.
    is_large = max(size or 0, measurement.needed_bytes) >= 1e9 and measurement.needed_bytes >= 1e8
    unit, scale = ("GB", 1e9) if is_large else ("MB", 1e6)
    digits = 2 if measurement.needed_bytes < 10 * scale else 1
    shown = [f"{name} {part / scale:,.{digits}f}" for name, part in parts.items() if part]
    text = f"{' + '.join(shown)} = {measurement.needed_bytes / scale:,.{digits}f}"
    if size is None:
        return f"{text} {unit} per device, whose memory is not known here"
    text += f" of {size / scale:,.{digits}f} {unit}"
    verdict = {True: "does not fit ✗", False: "fits", None: "fits, if it holds no constants"}
    return f"{text}: {verdict[measurement.exceeds_device_memory]}"
