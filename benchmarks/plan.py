"""What `nnx-pipeline plan` finds, beside published layouts and beside a compile of every layout.

    python benchmarks/plan.py big mixtral-8x7b
    python benchmarks/plan.py grid tiny
    python benchmarks/plan.py peer llama2_7b_v5p_128
    python benchmarks/plan.py

plan a large model as a user does, with the published layout compiled beside it; compile the layouts
of a small grid; plan the model of a config that MaxText publishes, with its own layout compiled
beside it; and write benchmarks/results/plan.md from all, with what a plan finds in each grid by a
tenth of the compiles. The first three keep each result in plan.json as soon as it is there, and go
on where they stopped.
"""

import json
import math
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any, NamedTuple, cast

from kept_rows import write_rows

from nnx_pipeline import preset
from nnx_pipeline.config._overrides import apply_overrides
from nnx_pipeline.experiments._programs import measure_step
from nnx_pipeline.experiments.plan.asked import Asked
from nnx_pipeline.experiments.plan.compiling import Compiler, NotCompiled
from nnx_pipeline.experiments.plan.layouts import Layout, options_of
from nnx_pipeline.experiments.plan.search import Budget, Plan, search
from nnx_pipeline.lab._cli.values import Chosen, Costing
from nnx_pipeline.lab._files import write_text
from nnx_pipeline.lab.compile._cache import Cache
from nnx_pipeline.lab.compile.measure import Measurement
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.errors import described
from nnx_pipeline.lab.mesh import MeshConfig
from nnx_pipeline.lab.search.effort import Effort

RESULTS = Path(__file__).parent / "results" / "plan.json"
CHOICES = Path(__file__).parent / "maxtext_choices.toml"
Found = dict[str, Any]


class Big(NamedTuple):
    """A plan of a large model, and the layout that others published for it, if any."""

    platform: str
    model: str
    settings: tuple[str, ...]
    published: str = ""
    mesh: str = ""
    options: tuple[str, ...] = ()


BIG = {
    "mixtral-8x7b": Big("tpu:v5p:4x4x4", "mixtral-8x7b", ()),
    "llama2-7b": Big(
        "cuda:h100:8",
        "llama2-7b",
        ("train.global_batch=16", "train.sequence_length=4096"),
        "JAX-Toolbox: fsdp=8, 2 × 4096 per device, remat=minimal, flash",
        "fsdp=8",
        ("pipeline.remat=minimal", "model.attention=flash"),
    ),
    "mixtral-8x7b-v5p-256": Big(
        "tpu:v5p:4x4x8",
        "mixtral-8x7b",
        ("train.global_batch=4608", "model.param_dtype=bfloat16"),
        "MaxText: fsdp=128, 36 × 4096 per device, remat=full, grouped experts",
        "fsdp=128",
        ("model.experts=grouped", "model.attention=flash"),
    ),
}


class Grid(NamedTuple):
    """A small model whose layouts are compiled.

    limit: megabytes of a device, so that some layouts do not fit.
    each: every so manyth layout is compiled, and the plan knows no other.
    """

    platform: str
    model: str
    settings: tuple[str, ...]
    limit: float
    each: int = 1


GRIDS = {
    "tiny": Grid(
        "tpu:v5p:2x2x1",
        "tiny",
        (
            *("model.num_layers=2", "train.global_batch=8", "model.attention=dot_product"),
            *("model.experts=dense", "pipeline.fsdp_gather=use", "pipeline.num_repeats=1"),
            "train.shard_optimizer_over_data=false",
        ),
        8.5,
    ),
    "mixtral-small": Grid(
        "tpu:v5p:2x2x1",
        "mixtral-small",
        (
            *("model.num_layers=2", "train.global_batch=8", "model.experts=grouped"),
            *("model.attention=flash", "pipeline.fsdp_gather=use", "pipeline.num_repeats=1"),
            "train.shard_optimizer_over_data=false",
        ),
        420.0,
        each=6,
    ),
}


def kept() -> Found:
    return json.loads(RESULTS.read_text("utf-8")) if RESULTS.is_file() else {"big": {}, "grid": {}}


def keep(part: str, name: str, value: Found) -> None:
    found = kept()
    found.setdefault(part, {})[name] = value
    write_rows(RESULTS, found)


def asked_for(model: str, settings: tuple[str, ...], platform: str) -> Asked:
    config = apply_overrides(preset(model), dict(text.split("=", 1) for text in settings))
    return Asked.of(config, Chosen(model, settings), platform, Costing((), None))


def big(name: str) -> None:
    row = BIG[name]
    found = _by_command(row.model, row.settings, row.platform)
    keep("big", name, found)
    if row.published:
        settings = dict(text.split("=", 1) for text in (*row.settings, *row.options))
        config = apply_overrides(preset(row.model), settings)
        beside = measure_step(config, MeshConfig.parse(row.mesh), Platform.parse(row.platform))
        keep("big", name, found | {"published": _figures(beside)})


def _by_command(
    model: str, settings: tuple[str, ...], platform: str, limits: tuple[str, ...] = ()
) -> Found:
    """What the command `plan` says, and how long it took."""
    began = time.monotonic()
    words = ["plan", "--model", model, "--platform", platform, "--json", "-", *limits]
    words += [word for text in settings for word in ("--set", text)]
    script = "from nnx_pipeline.lab._cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", script, *words], stdout=subprocess.PIPE, text=True)
    found: Found = {"seconds": time.monotonic() - began, "code": done.returncode}
    return found | (json.loads(done.stdout)["plans"][0] if done.returncode == 0 else {})


class Choice(NamedTuple):
    """A config that MaxText publishes, and what its own program needs.

    - `source`: where MaxText has it; `command`: what gave the figures.
    - `mesh`, `remat`: its layout, which has no loop over microbatches.
    - `account`, `temp`, `peak`: bytes of a device; `step`: estimated seconds.
    """

    source: str
    command: str
    platform: str
    model: str
    settings: tuple[str, ...]
    mesh: str
    remat: str
    account: int
    temp: int | None
    peak: int | None
    step: float | None


def choices() -> dict[str, Choice]:
    tables = tomllib.loads(CHOICES.read_text("utf-8"))["choice"]
    return {
        name: Choice(**{**one, "settings": tuple(one["settings"])}) for name, one in tables.items()
    }


def peer(name: str, minutes: str = "10", most: str = "8") -> None:
    row = choices()[name]
    asked = asked_for(row.model, row.settings, row.platform)
    space = asked.plan().space
    compiler = Compiler(space, asked.platform, Cache.of_user(), patience=1800)
    kinds = row.remat, space.experts[0], space.attentions[0]
    layout = Layout(MeshConfig.parse(row.mesh), 1, 1, "circular", False, "use", *kinds)
    try:
        beside = _peaks(compiler.known(layout) or compiler(layout))
    except NotCompiled as error:
        beside = {"error": str(error)}
    keep("peer", name, {"same": beside})
    found = _by_command(
        row.model, row.settings, row.platform, ("--minutes", minutes, "--most", most)
    )
    keep("peer", name, {"same": beside, **found})


def _peaks(result: Measurement) -> Found:
    memory = result.memory
    return {**_figures(result), "temp": memory.temp_bytes, "peak": memory.peak_bytes}


def _figures(result: Measurement) -> Found:
    step = result.time.step_seconds if result.time and not result.is_refused else None
    return {"account": result.needed_bytes, "step": step}


def grid(name: str, minutes: float = 60.0) -> None:
    """Compiles what is not in the file yet, until the time is over."""
    row, until = GRIDS[name], time.monotonic() + 60 * minutes
    plan = asked_for(row.model, row.settings, row.platform).plan()
    listed = [one for shape in plan.listed.shapes for one in options_of(plan.space, shape)]
    every, rows = listed[:: row.each], _rows(name)
    for at, layout in enumerate(every):
        if str(layout) in rows or time.monotonic() > until:
            continue
        rows[str(layout)] = {"layout": str(layout), **_compiled(plan, layout, row.platform)}
        keep("grid", name, {"layouts": len(listed), "rows": [*rows.values()]})
        print(f"{at + 1} of {len(every)}: {layout}", file=sys.stderr)


def _rows(name: str) -> dict[str, Found]:
    """The layouts of a grid that are in the file, by their text."""
    return {one["layout"]: one for one in kept()["grid"].get(name, {"rows": []})["rows"]}


def _compiled(plan: Plan, layout: Layout, platform: str) -> Found:
    """In this process, which starts once for all layouts."""
    config = plan.space.config_of(layout)
    try:
        return _figures(measure_step(config, layout.mesh, Platform.parse(platform)))
    except Exception as error:
        return {"error": described(error)}


class _Step(NamedTuple):
    step_seconds: float


class _Known(NamedTuple):
    """What a search reads of a measurement."""

    needed_bytes: int
    time: _Step | None
    measured: str = "earlier"

    @property
    def is_refused(self) -> bool:
        return self.time is None


def _searched(name: str, limit: int | None, most: int) -> tuple[Plan, Found | None]:
    """A plan among the layouts in the file, and the best of these; None is the memory of a chip."""
    row, rows = GRIDS[name], _rows(name)
    plan = asked_for(row.model, row.settings, row.platform).plan()
    plan.limit = limit or plan.limit
    plan.candidates = [one for one in plan.candidates if str(one.layout) in rows]

    def compile(layout: Layout) -> Measurement:
        found = rows[str(layout)]
        if "error" in found:
            raise NotCompiled(found["error"])
        step = _Step(found["step"]) if found["step"] else None
        return cast(Measurement, _Known(found["account"], step))

    budget = Budget(time.monotonic() + 600, at_once=1)
    search(plan, compile, lambda layout: None, Effort(what="grid", most=most), budget)
    fitting = [one for one in rows.values() if one.get("step") and one["account"] <= plan.limit]
    return plan, min(fitting, key=lambda one: one["step"], default=None)


def page() -> str:
    found = kept()
    lines = ["# What a plan finds", "", *ABOUT.strip().splitlines(), ""]
    for name, one in found["big"].items():
        lines += _big_lines(name, one)
    lines += _grid_lines(found["grid"]) if found["grid"] else NO_GRID.splitlines()
    return "\n".join([*lines, *_peer_lines(found.get("peer", {}))]) + "\n"


def _peer_lines(peers: Found) -> list[str]:
    lines = ["", "## Beside MaxText's own choice", "", *ABOUT_PEER.strip().splitlines(), ""]
    lines += ["| config | program | layout | account, GB | temp, GB | peak, GB | step, s |"]
    lines += ["|---|---|---|--:|--:|--:|--:|"]
    rows = {name: row for name, row in choices().items() if name in peers}
    for name, row in rows.items():
        one = peers[name]
        lines.append(_peer_line(f"`{name}`", "MaxText's", row._asdict(), row.mesh, row.remat))
        lines.append(_peer_line("", "ours", one["same"], row.mesh, row.remat))
        lines += [_planned_line(one)] if "code" in one else []
    return [
        *lines,
        "",
        *(f"- `{name}`, {row.source}: `{row.command}`" for name, row in rows.items()),
    ]


def _planned_line(one: Found) -> str:
    how = f"planned in {one['seconds'] / 60:.0f} minutes"
    if (best := one.get("best")) is None:
        return _peer_line("", how, {}, "none was compiled that fits")
    figures = {"account": best["account_bytes"], "step": best["time"]["step_seconds"]}
    number = sum(row["account_bytes"] is not None for row in one["compiled"])
    return _peer_line("", f"{how}, {number} compiled", figures, _shown(best["layout"]))


def _peer_line(name: str, program: str, figures: Found, *layout: str) -> str:
    sizes = [figures.get(key) for key in ("account", "temp", "peak")]
    cells = [name, program, ", ".join(layout)]
    cells += ["–" if one is None else f"{one / 1e9:,.1f}" for one in sizes]
    return f"| {' | '.join([*cells, _seconds(figures.get('step'))])} |"


def _grid_lines(grids: Found) -> list[str]:
    lines = ["## Beside a compile of every layout", "", *ABOUT_GRID.strip().splitlines(), ""]
    lines += [
        "| model | limit, MB | layouts | compiled | best, ms | a tenth | found, ms | apart "
        "| within 3% after |"
    ]
    lines += ["|---|--:|--:|--:|--:|--:|--:|--:|--:|"]
    rows = [(name, limit) for name in grids for limit in (None, int(GRIDS[name].limit * 1e6))]
    spent, every = 0, 0
    for name, limit in rows:
        line, enough = _grid_line(name, limit, grids[name]["layouts"])
        lines.append(line)
        spent, every = spent + enough, every + len(_rows(name))
    return [*lines, "", f"In sum {spent} of {every} compiles, {spent / every:.1%}."]


def _grid_line(name: str, limit: int | None, layouts: int) -> tuple[str, int]:
    number = len(_rows(name))
    plan, best = _searched(name, limit, number // 10)
    assert best is not None, "of a limit that some layouts fit"
    cells = [name, f"{plan.limit / 1e6:,.1f}", layouts, number, f"{best['step'] * 1e3:.3f}"]
    found = plan.best.step if plan.best and plan.best.step else math.nan
    cells += [len(plan.compiled), f"{found * 1e3:.3f}", f"{found / best['step'] - 1:.1%}"]
    for enough in range(1, number + 1):
        plan, _ = _searched(name, limit, enough)
        if plan.best and plan.best.step and plan.best.step <= 1.03 * best["step"]:
            break
    return f"| {' | '.join(map(str, [*cells, enough]))} |", enough


def _big_lines(name: str, one: Found) -> list[str]:
    row = BIG[name]
    settings = " ".join(f"--set {text}" for text in row.settings)
    command = " ".join(
        filter(None, [f"plan --model {row.model}", settings, f"--platform {row.platform}"])
    )
    lines = [f"## `{command}`", ""]
    if one["code"]:
        return [*lines, f"It ended with {one['code']} after {one['seconds']:,.0f} s.", ""]
    compiled = len(one["compiled"])
    lines += [
        f"{one['seconds'] / 60:.1f} minutes from an empty cache; {one['layouts']:,} layouts, of "
        f"which {one['cannot_fit']:,} cannot fit and {one['predicted_too_slow']:,} are predicted "
        f"too slow; {compiled} compiled.",
        "",
        "| compiled, in this order | account, GB | step, s | predicted GB | predicted s |",
        "|---|--:|--:|--:|--:|",
    ]
    for it in one["compiled"]:
        step = it["time"]["step_seconds"] if it["time"] else None
        account = it["account_bytes"]
        lines.append(
            f"| {_shown(it['layout'])} | {account / 1e9:,.1f} | {_seconds(step)} | "
            f"{it['predicted_bytes'] / 1e9:,.1f} | {it['predicted_step_seconds']:.3f} |"
            if account
            else f"| {_shown(it['layout'])} | {it['error'][:80]} | | | |"
        )
    lines.append("")
    if published := one.get("published"):
        best = one["best"]["time"]["step_seconds"]
        apart = published["step"] / best - 1 if published["step"] else None
        lines += [
            f"Published, {row.published}: {published['account'] / 1e9:,.1f} GB, "
            f"{_seconds(published['step'])} s"
            + (f", {apart:+.1%} beside the best found." if apart is not None else "."),
            "",
        ]
    return [*lines, "What fell out:", "", *(f"- {k}: {v}" for k, v in one["fell_out"].items()), ""]


def _shown(layout: Found) -> str:
    axes = ",".join(f"{axis}={size}" for axis, size in layout["mesh"].items() if size > 1)
    loop = f"{layout['schedule']} {layout['repeats']}×{layout['microbatches']} {layout['gather']}"
    loops = layout["mesh"]["stage"] > 1 or layout["microbatches"] > 1
    parts = [axes, loop if loops else "", "zero1" if layout["zero1"] else "", layout["remat"]]
    return ", ".join(filter(None, [*parts, layout["experts"], layout["attention"]]))


def _seconds(step: float | None) -> str:
    return "–" if step is None else f"{step:.3f}"


ABOUT = """
Made by `python benchmarks/plan.py`, with JAX 0.10.2 and libtpu 0.0.42.1. Steps are estimates from
compiled programs; nothing here ran on a chip.

The plans of large models below were made on two cores: that of Llama2-7B while other work took a
third of them, those of Mixtral 8x7B beside work of low priority. A compile of Mixtral 8x7B has 1 to
3 minutes of processor time, one of Llama2-7B half a minute to one. The first compile of Mixtral
8x7B on 64 chips is no plain sharding of weights: with one sequence for each chip that is predicted
to be slower than 20,000 other layouts.

Of Mixtral 8x7B on 64 chips, weights gathered over all of them (`fsdp=64, remat=minimal`), as
MaxText's recipes have it, are 2.87 s by the same estimate, and 3.09 s with gathers in one step:
`nnx-pipeline measure mixtral-8x7b --mesh fsdp=64 --platform tpu:v5p:4x4x4 --set
model.experts=grouped --set model.attention=flash --set pipeline.remat=minimal`, here and before
`sharding/_gather.py` was there.

The published layout of Llama2-7B (JAX-Toolbox) is `fsdp=8`, 2 × 4096 per device, products kept.
With the settings that its run published its estimate is 0.59 s (time_estimates.md).
"""
NO_GRID = """## Beside a compile of every layout

Not measured yet: `python benchmarks/plan.py grid tiny` compiles 156 layouts, and `grid
mixtral-small` 172."""
ABOUT_PEER = """
MaxText's own training step in the layout of a config that it publishes, compiled and measured by
this lab; this project's in the same layout; and what a plan of the same model, batch and chips
finds in 14 minutes beside other work, to which the layout above is known if it is one of a plan:
`save_qkv_proj` is none. Of Llama2-7B on v5e the estimate stays longer than MaxText's. Without the
stored order of its attention kernels (README.md, note 4) ours would be 3.394 s in the same layout,
and the account 10.56 GB; of 128 experts that order spares memory. What a plan does not choose is
which layers keep what: with a product of every second layer kept too it is 3.192 s and 15.9 of 16.9
GB, by `nnx-pipeline measure llama2-7b --mesh fsdp=256 --platform tpu:v5e:16x16` with the batch of
the config, `--set model.attention=flash --set pipeline.remat_groups=2 --set
pipeline.remat=keep:query_proj+key_proj+value_proj+out_proj+mlp_gate@1`.
"""
ABOUT_GRID = """
Layouts of a small model are compiled: all of `tiny`, and each sixth of `mixtral-small`. A plan that
knows these alone may ask for a tenth of them: `apart` is how much slower its best is than the best
of all, under the memory of a chip and under a smaller limit. The last column is how many compiles
it takes until that is 3 % at most; a tenth of 29 are two.
"""


def main() -> None:
    what, *rest = sys.argv[1:] or ["page"]
    commands = {"big": big, "grid": grid, "peer": peer}
    commands[what](*rest) if what in commands else None
    if kept()["big"] or kept()["grid"]:
        write_text(str(RESULTS.with_suffix(".md")), page())


if __name__ == "__main__":
    main()
