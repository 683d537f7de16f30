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
from nnx_pipeline.lab._report.view.buffers import grouped
from nnx_pipeline.lab._report.view.figures import megabytes
from nnx_pipeline.lab.attribution._result import Attribution, Buffer
from nnx_pipeline.lab.compile.measure import Measurement

HERE = Path(__file__).parent
PROGRAMS, RESULTS = HERE / "planted", HERE / "results" / "planted_faults.md"
PLATFORMS = ("tpu:v5p:2x2x2", "cuda:h100:8", "rocm:mi300x:8", "cpu")
ROWS = 3  # of the table, in which the line must stand
SMALLEST = 1e6  # bytes of that row
KEPT = 0.05  # by how much the account must be larger than that of the good version


class Program(NamedTuple):
    """A file, the lines that count as the fault's, words of its cure, and its options."""

    path: Path
    places: frozenset[str]
    planted: frozenset[str]
    cure: str
    mesh: tuple[str, ...]
    good_inputs: str

    @classmethod
    def read(cls, path: Path) -> "Program":
        text = path.read_text()
        marked = re.compile(r"# (planted|caller)$")
        lines = dict(enumerate(text.splitlines(), 1))
        places = {n: f"{path.name}:{n}" for n, line in lines.items() if marked.search(line)}
        values = dict(re.findall(r'^(MESH|CURE) = r?"(.*)"$', text, re.MULTILINE))
        return cls(
            path,
            frozenset(places.values()),
            frozenset(place for n, place in places.items() if lines[n].endswith("planted")),
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

    def measured(self, function: str, platform: str) -> tuple[Measurement, str]:
        """What `memory` measures, and the line that it says donates too little."""
        gemm = () if platform.startswith(("tpu", "cpu")) else ("--gemm", "cublas")
        found = self.run("memory", function, "--platform", platform, *gemm)
        kept = found["not_donated"] or {"source": ""}
        return measurements_of(found, self.path.name)[0], kept["source"]

    def names(self, *sources: str | None) -> bool:
        return any(source.endswith(tuple(self.places)) for source in sources if source)

    def is_named(self, row: Buffer) -> bool:
        """Whether a row's line is the fault's or its caller's, or the fault's is in its path."""
        return self.names(row.source) or any(one.endswith(tuple(self.planted)) for one in row.path)


def row_of_fault(program: Program, found: Attribution) -> str:
    """The first table with the fault among its first rows, and the row; else that of the heap."""
    tables = {"": found.buffers, "constant ": found.constants, "output ": found.outputs}
    tables |= {"argument ": found.arguments}
    places = {
        name: [
            n
            for n, rows in enumerate(grouped(those), 1)
            if program.is_named(rows[0]) and sum(row.bytes for row in rows) >= SMALLEST
        ]
        for name, those in tables.items()
    }
    hits = [f"{name}{rows[0]}" for name, rows in places.items() if rows and rows[0] <= ROWS]
    return hits[0] if hits else f"**{places[''][0] if places[''] else 'no'}**"


def in_memory(
    faulty: tuple[Measurement, str], good: tuple[Measurement, str], program: Program
) -> str:
    """The row in which the fault's line stands, and how many bytes the fault costs."""
    (bad, donor), (without, _) = faulty, good
    accounts = [one.memory.account_bytes or 0 for one in (bad, without)]
    more = accounts[0] - accounts[1]
    if more < KEPT * accounts[1]:
        return f"not kept ({more / 1e6:+,.1f})"
    assert bad.attribution
    row = row_of_fault(program, bad.attribution)
    row = "not donated" if "**" in row and program.names(donor) else row
    return f"{row} (+{megabytes(more)})"


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
    rows = []
    for platform in PLATFORMS:
        both = [program.measured(name, platform) for name in ("step", "good")]
        rows.append(in_memory(*both, program))
    return f"| {' | '.join([program.path.stem, *rows, named, alarms or '–'])} |\n"


def score(rows: list[str]) -> str:
    """Hits among what counts, by column."""
    cells = [row.strip("|\n ").split(" | ")[1:] for row in rows]
    words = []
    for _, column in zip(PLATFORMS, zip(*cells, strict=True), strict=False):
        kept = [cell for cell in column if not cell.startswith(("not ", "–"))]
        words.append(f"{sum('**' not in cell for cell in kept)} of {len(kept)}")
    found = sum("**" not in row[-2] for row in cells)
    alarms = sum(row[-1] != "–" for row in cells)
    return f"| **named** | {' | '.join(words)} | {found} of {len(rows)} | {alarms} |\n"


ABOUT = """# Faults planted in other people's programs

Each program of `benchmarks/planted` has one fault and a good version beside it; those named `later`
were written after the product was mended for the others, and nothing was changed for them. A cell
says in which row the fault's line, or its caller, stands: of the table of the heap, among the first
three of the constants, outputs or arguments, if that has 1 MB or more, or in the line about what is
not donated; in bold where it is in none of these; and by how many MB the fault makes the account
larger. A fault that adds less than 5 % is not kept by the compiler. Lint must name the line and the
right cure. Made by `python benchmarks/planted_faults.py`.

"""


def table(programs: list[Path]) -> str:
    heads = ["program", *PLATFORMS, "lint", "false alarms of lint"]
    rows = []
    for path in programs:
        rows.append(row_of(Program.read(path)))
        print(rows[-1], end="", file=sys.stderr, flush=True)
    return f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}\n{''.join(rows)}{score(rows)}"


def main() -> None:
    chosen = [PROGRAMS / f"{name}.py" for name in sys.argv[1:]] or sorted(PROGRAMS.glob("*.py"))
    parts = [[path for path in chosen if path.stem.startswith("later") == late] for late in (0, 1)]
    write_text(str(RESULTS), ABOUT + "\n".join(table(part) for part in parts if part))


if __name__ == "__main__":
    main()
