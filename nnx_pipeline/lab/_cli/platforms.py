"""What `platforms` shows."""

from nnx_pipeline.lab._report.columns import Column, Columns
from nnx_pipeline.lab._report.output import check_writable, emit_json, show
from nnx_pipeline.lab._timing.devices import device_of
from nnx_pipeline.lab.compile._packages import missing_packages
from nnx_pipeline.lab.compile.platform import targets
from nnx_pipeline.lab.errors import install

BASES = {
    "cycles": "the compiler's cycles",
    "xla-model": "XLA's own model",
    "roofline": "a roofline",
    None: "–",
}


def list_platforms(json_path: str | None) -> None:
    check_writable(json_path, "--json")
    table = Columns([Column("platform"), Column("GB", is_number=True), Column("time by")])
    rows = []
    for platform in targets():
        device = device_of(platform.kind, platform.target)
        basis = None if device is None else "cycles" if device.clock else "roofline"
        if basis == "roofline" and not platform.why_a_roofline:
            basis = "xla-model"
        memory = platform.memory_bytes() or 0
        table.add_row(str(platform), f"{memory / 1e9:,.1f}", BASES[basis])
        rows.append({"platform": str(platform), "memory_bytes": memory, "time_basis": basis})
    show(table, json_path=json_path)
    missing = {kind: missing_packages(kind) for kind in ("tpu", "cuda", "rocm")}
    for kind in filter(missing.__getitem__, missing):
        show(
            f"{kind}: {' and '.join(missing[kind])} not installed; {install(kind)}",
            json_path=json_path,
        )
    emit_json(json_path, {"schema": 1, "platforms": rows, "missing": missing})
