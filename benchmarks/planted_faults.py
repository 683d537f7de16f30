"""Whether `memory` and `lint` name planted faults, in programs that nobody wrote for them.

    python benchmarks/planted_faults.py [--texts FOLDER [--known]] [PROGRAM …]

reads the programs in benchmarks/planted, each as a public repository would have it: `step` with one
fault in the line marked `# planted`, and `good` without. It compiles both for each platform, lints
both, and writes benchmarks/results/planted_faults.md.

FOLDER keeps what the compilers write of each program. A second run reads it from there, so that
changed code is judged by the same programs within minutes. With --known nothing is compiled, and
what is not there has a dash.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kept_texts import path_of

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


class Texts(NamedTuple):
    """The folder of what the compilers write, and whether nothing is added to it."""

    folder: Path
    is_known: bool


def ended(*words: str) -> dict[str, Any]:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if not done.stdout:
        raise RuntimeError(f"{' '.join(words)}\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


class Program(NamedTuple):
    """A file, the lines that count as the fault's, words of its cure, and its options."""

    path: Path
    places: frozenset[str]
    planted: frozenset[str]
    cure: str
    mesh: tuple[str, ...]
    good_inputs: str
    texts: Texts

    @classmethod
    def read(cls, path: Path, texts: Texts) -> "Program":
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
            texts,
        )

    def words(self, command: str, function: str, *options: str) -> list[str]:
        inputs = "inputs" if function == "step" else self.good_inputs
        subject = [f"{self.path}:{function}", "--inputs", f"{self.path}:{inputs}", *self.mesh]
        return [command, *subject, *options, "--json", "-"]

    def measured(self, function: str, platform: str) -> tuple[Measurement, str] | None:
        """What `memory` measures, and the line that it says donates too little; None where it may
        not compile."""
        gemm = () if platform.startswith(("tpu", "cpu")) else ("--gemm", "cublas")
        words = self.words("memory", function, "--platform", platform, *gemm)
        if self.texts.is_known and not path_of(self.texts.folder, words).exists():
            return None
        found = ended(sys.executable, str(HERE / "kept_texts.py"), str(self.texts.folder), *words)
        kept = found["not_donated"] or {"source": ""}
        return measurements_of(found, self.path.name)[0], kept["source"]

    def names(self, *sources: str | None) -> bool:
        return any(source.endswith(tuple(self.places)) for source in sources if source)

    def is_named(self, buffers: Sequence[Buffer]) -> bool:
        """Whether the line of a row is the fault's or its caller's, or the fault's is in its path
        or what half of its buffers are copied into."""
        row, into = buffers[0], [one.into for one in buffers if one.into]
        others = [*row.path, *(into[:1] if 2 * len(into) >= len(buffers) else [])]
        return self.names(row.source) or any(one.endswith(tuple(self.planted)) for one in others)


def row_of_fault(program: Program, found: Attribution) -> str:
    """The first table with the fault among its first rows, and the row; else that of the heap."""
    tables = {"": found.buffers, "constant ": found.constants, "output ": found.outputs}
    tables |= {"argument ": found.arguments}
    places = {
        name: [
            n
            for n, rows in enumerate(grouped(those), 1)
            if program.is_named(rows) and sum(row.bytes for row in rows) >= SMALLEST
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
    lint = str(Path(sys.executable).with_name("nnx-pipeline"))
    faulty, good = (
        ended(lint, *program.words("lint", name))["findings"] for name in ("step", "good")
    )
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
        faulty, good = (program.measured(name, platform) for name in ("step", "good"))
        rows.append(in_memory(faulty, good, program) if faulty and good else "–")
    return f"| {' | '.join([program.path.stem, *rows, named, alarms or '–'])} |\n"


def score(rows: list[str]) -> str:
    """Hits among what counts, by column."""
    cells = [row.strip("|\n ").split(" | ")[1:] for row in rows]
    words = []
    for _, column in zip(PLATFORMS, zip(*cells, strict=True), strict=False):
        kept = [cell for cell in column if not cell.startswith(("not kept", "–"))]
        words.append(f"{sum('**' not in cell for cell in kept)} of {len(kept)}")
    found = sum("**" not in row[-2] for row in cells)
    alarms = sum(row[-1] != "–" for row in cells)
    return f"| **named** | {' | '.join(words)} | {found} of {len(rows)} | {alarms} |\n"


ABOUT = """# Faults planted in other people's programs

Each program of `benchmarks/planted` has one fault and a good version beside it; those named `later`
were written after the product was mended for the others, and nothing was changed for them. A cell
says in which row the fault's line, or its caller, stands: of the table of the heap, among the first
three of the constants, outputs or arguments, if that has 1 MB or more, or, as `not donated`, in the
line about arguments that are not donated; in bold where it is in none of these; and by how many MB
the fault makes the account larger. The lines of a row are its own, the three nearest that called it
(`‹`) and that of the larger array that it is copied into (`→`). A fault that adds less than 5 % is
not kept by the compiler. Lint must name the line and the right cure. GPUs are compiled for with
cuBLASLt or hipBLASLt. Made by `python benchmarks/planted_faults.py`.

"""


def table(programs: list[Path], texts: Texts) -> str:
    heads = ["program", *PLATFORMS, "lint", "false alarms of lint"]
    rows = []
    for path in programs:
        rows.append(row_of(Program.read(path, texts)))
        print(rows[-1], end="", file=sys.stderr, flush=True)
    return f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}\n{''.join(rows)}{score(rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", help="keeps what the compilers write in this folder")
    parser.add_argument("--known", action="store_true", help="compiles nothing")
    parser.add_argument("programs", nargs="*", metavar="PROGRAM")
    given = parser.parse_args()
    chosen = [PROGRAMS / f"{one}.py" for one in given.programs] or sorted(PROGRAMS.glob("*.py"))
    parts = [[path for path in chosen if path.stem.startswith("later") == late] for late in (0, 1)]
    with tempfile.TemporaryDirectory() as folder:
        texts = Texts(Path(given.texts or folder), given.known)
        tables = [table(part, texts) for part in parts if part]
    dashes = "Where a dash stands, nothing was compiled yet.\n\n" if given.known else ""
    write_text(str(RESULTS), ABOUT + dashes + "\n".join(tables))


if __name__ == "__main__":
    main()
