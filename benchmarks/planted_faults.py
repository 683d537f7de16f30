"""Whether `memory` and `lint` name planted faults, in programs that nobody wrote for them.

    python benchmarks/planted_faults.py [PROGRAM …]

reads the programs in benchmarks/planted, each as a public repository would have it: `step` with one
fault in the line marked `# planted`, and `good` without. It compiles both for each platform, lints
both, and writes benchmarks/results/planted_faults.md.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from nnx_pipeline.lab._baseline.saved import measurements_of
from nnx_pipeline.lab._files import write_text
from nnx_pipeline.lab._report.view.buffers import buffer_rows
from nnx_pipeline.lab._report.view.figures import megabytes
from nnx_pipeline.lab.compile.measure import Measurement

HERE = Path(__file__).parent
PROGRAMS, RESULTS = HERE / "planted", HERE / "results" / "planted_faults.md"
PLATFORMS = ("tpu:v5p:2x2x2", "cuda:h100:8", "rocm:mi300x:8", "cpu")
ROWS = 3  # of the table, in which the line must stand
KEPT = 0.05  # by how much the account must be larger than that of the good version


class Program(NamedTuple):
    """A file, the lines that count as the fault's, words of its cure, and its options."""

    path: Path
    places: frozenset[str]
    cure: str
    mesh: tuple[str, ...]
    good_inputs: str

    @classmethod
    def read(cls, path: Path) -> "Program":
        text = path.read_text()
        marked = re.compile(r"# (planted|caller)$")
        lines = [n for n, line in enumerate(text.splitlines(), 1) if marked.search(line)]
        values = dict(re.findall(r'^(MESH|CURE) = r?"(.*)"$', text, re.MULTILINE))
        return cls(
            path,
            frozenset(f"{path.name}:{line}" for line in lines),
            values["CURE"],
            ("--mesh", values["MESH"]) if "MESH" in values else (),
            "good_inputs" if "def good_inputs" in text else "inputs",
        )

    def run(self, command: str, function: str, *options: str) -> dict[str, Any]:
        inputs = "inputs" if function == "step" else self.good_inputs
        program = Path(sys.executable).with_name("nnx-pipeline")
        subject = [f"{self.path}:{function}", "--inputs", f"{self.path}:{inputs}", *self.mesh]
        words = [str(program), command, *subject, *options, "--json", "-"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if not done.stdout:
            raise RuntimeError(f"{' '.join(words)}\n{done.stderr}")
        return json.loads(done.stdout)

    def measured(self, function: str, platform: str) -> Measurement:
        gemm = () if platform.startswith(("tpu", "cpu")) else ("--gemm", "cublas")
        found = self.run("memory", function, "--platform", platform, *gemm)
        return measurements_of(found, self.path.name)[0]

    def names(self, *sources: str | None) -> bool:
        return any(source.endswith(tuple(self.places)) for source in sources if source)


def in_memory(program: Program, platform: str) -> str:
    """The row in which the fault's line stands, among how many bytes it costs."""
    faulty, good = (program.measured(name, platform) for name in ("step", "good"))
    accounts = [one.memory.account_bytes or 0 for one in (faulty, good)]
    more = accounts[0] - accounts[1]
    if more < KEPT * accounts[1]:
        return f"not kept (+{megabytes(more)})"
    assert faulty.attribution
    rows = [row.source for row in buffer_rows(faulty.attribution.buffers)]
    places = [n for n, row in enumerate(rows, 1) if program.names(*row.split(" from "))]
    row = str(places[0]) if places else "no"
    return f"{row if places and places[0] <= ROWS else f'**{row}**'} (+{megabytes(more)})"


def in_lint(program: Program) -> tuple[str, str]:
    """The rule that names the line with the right cure; and what is found in the good version."""
    faulty, good = (program.run("lint", name)["findings"] for name in ("step", "good"))
    hits = [
        one["rule"]
        for one in faulty
        if program.names(f"{one['file']}:{one['line']}", str(one["caller"]).partition(" ")[0])
        and re.search(program.cure, one["cure"])
    ]
    return ", ".join(dict.fromkeys(hits)) or "**no**", ", ".join(one["rule"] for one in good)


def row_of(program: Program) -> str:
    named, alarms = in_lint(program)
    rows = [in_memory(program, platform) for platform in PLATFORMS]
    return f"| {' | '.join([program.path.stem, *rows, named, alarms or '–'])} |\n"


def score(rows: list[str]) -> str:
    """Hits among what counts, by column."""
    cells = [row.strip("|\n ").split(" | ")[1:] for row in rows]
    words = []
    for _, column in zip(PLATFORMS, zip(*cells, strict=True), strict=False):
        kept = [cell for cell in column if not cell.startswith("not kept")]
        words.append(f"{sum('**' not in cell for cell in kept)} of {len(kept)}")
    found = sum("**" not in row[-2] for row in cells)
    alarms = sum(row[-1] != "–" for row in cells)
    return f"| **named** | {' | '.join(words)} | {found} of {len(rows)} | {alarms} |\n"


def table(programs: list[Path]) -> str:
    heads = ["program", *PLATFORMS, "lint", "false alarms of lint"]
    rows = []
    for path in programs:
        rows.append(row_of(Program.read(path)))
        print(rows[-1], end="", file=sys.stderr, flush=True)
    return f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}\n{''.join(rows)}{score(rows)}"


def main() -> None:
    chosen = [PROGRAMS / f"{name}.py" for name in sys.argv[1:]] or sorted(PROGRAMS.glob("*.py"))
    write_text(str(RESULTS), table(chosen))


if __name__ == "__main__":
    main()
