"""The steps of action.yml run as on a runner of GitHub, with a `gh` that takes notes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from documents import BLOCKS, PAGES, ROOT

from nnx_pipeline.lab._cli.main import cli

ACTION = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))
EXAMPLE = PAGES["docs/pull_requests.md"]
STEPS = {step["name"]: step for step in ACTION["runs"]["steps"] if "run" in step}
BODY = "**More memory**: the account rises.\n"
MARKER = "<!-- nnx-pipeline -->"

# What the steps call: each notes its words, and does what the file beside it says.
STAND_INS = {
    "gh": """
old = json.loads((here / "comments.json").read_text())
body = [word.partition("@")[2] for word in words if word.startswith("body=@")]
note(words, Path(body[0]).read_text() if body else None)
if (here / "refused").exists():
    sys.exit("HTTP 403: Resource not accessible by integration")
if "--jq" in words:
    assert words[words.index("--jq") + 1] == (
        ".[] | select(.body | startswith(env.MARKER)) | .id"
    )
    print(*[one["id"] for one in old if one["body"].startswith(os.environ["MARKER"])], sep="\\n")
""",
    "nnx-pipeline": """
note(words, None)
code = int((here / "code").read_text())
if code != 2:
    Path(words[words.index("--markdown") + 1]).write_text((here / "body").read_text())
sys.exit(code)
""",
    "python": "note(words, None)\n",
}
HEAD = """#!{python}
import json, os, sys
from pathlib import Path
here, words = Path(__file__).parent, sys.argv[1:]
def note(*what):
    with open(here / "notes", "a") as file:
        file.write(json.dumps([Path(sys.argv[0]).name, *what]) + "\\n")
"""


class Runner:
    """A job of a pull request: its repository, its folders and its programs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.programs = folder, folder / "bin"
        self.repository = folder / "repository"
        for made in (self.programs, self.repository, folder / "temp"):
            made.mkdir()
        for name, code in STAND_INS.items():
            path = self.programs / name
            path.write_text(HEAD.format(python=sys.executable) + code)
            path.chmod(0o755)
        self.says("comments.json", "[]").says("code", "0").says("body", f"{MARKER}\n\n{BODY}")
        self.git("init", "-q")
        self.git("commit", "-q", "--allow-empty", "-m", "first")
        self.base = self.git("rev-parse", "HEAD").strip()
        self.outputs: dict[str, str] = {}

    def says(self, name: str, text: str) -> "Runner":
        (self.programs / name).write_text(text)
        return self

    def git(self, *words: str, folder: Path | None = None) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        command = ["git", *who, *words]
        folder = folder or self.repository
        return subprocess.run(
            command, cwd=folder, check=True, capture_output=True, text=True
        ).stdout

    def run(self, name: str, /, **inputs: str) -> subprocess.CompletedProcess[str]:
        """One step, with the values of its `env`."""
        step = STEPS[name]
        given = {key: str(one.get("default", "")) for key, one in ACTION["inputs"].items()}
        given |= {"base": self.base} | {key.replace("_", "-"): it for key, it in inputs.items()}
        assert set(given) == set(ACTION["inputs"])
        values = {f"inputs.{key}": it for key, it in given.items()}
        values |= {f"steps.compare.outputs.{key}": it for key, it in self.outputs.items()}
        values["github.event.pull_request.number"] = "7"
        output, summary = self.folder / "output", self.folder / "summary"
        output.write_text("")
        environment = {
            "PATH": f"{self.programs}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(self.folder),
            "RUNNER_TEMP": str(self.folder / "temp"),
            "GITHUB_ACTION_PATH": "/actions/nnx",
            "GITHUB_OUTPUT": str(output),
            "GITHUB_STEP_SUMMARY": str(summary),
            "GITHUB_SERVER_URL": "https://github.example",
            "GITHUB_REPOSITORY": "some/where",
            "GITHUB_RUN_ID": "123",
        }
        for key, text in step.get("env", {}).items():
            environment[key] = re.sub(r"\$\{\{ (.+?) \}\}", lambda at: values[at[1]], text)
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            cwd=self.repository,
            env=environment,
            capture_output=True,
            text=True,
        )
        self.outputs |= dict(line.split("=", 1) for line in output.read_text().splitlines())
        return done

    @property
    def notes(self) -> list[Any]:
        path = self.programs / "notes"
        return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(tmp_path)


def test_what_is_compared(runner: Runner) -> None:
    arguments = "'my model.py:step' --inputs m:inputs\n--arg 'f32[8, 4]'"
    done = runner.run("Compare", arguments=arguments, fail_above="5% step=10%")
    assert done.returncode == 0, done.stderr
    ((program, words, _),) = runner.notes
    folder = runner.folder / "temp" / "nnx-pipeline"
    assert [program, *words] == [
        *("nnx-pipeline", "compare", "--baseline", runner.base),
        *("my model.py:step", "--inputs", "m:inputs", "--arg", "f32[8, 4]"),
        *("--fail-above", "5%", "--fail-above", "step=10%", "--platform", "tpu:v5p:2x2x1"),
        *("--html", f"{folder}/page.html", "--json", f"{folder}/result.json"),
        *("--markdown", f"{folder}/compared.md"),
        *("--link", "https://github.example/some/where/actions/runs/123#artifacts"),
    ]
    options = {option for one in cli.commands["compare"].params for option in one.opts}
    used = {word for word in words if word.startswith("--")}
    assert used <= options
    assert (runner.folder / "summary").read_text() == f"{MARKER}\n\n{BODY}"


def test_a_base_that_the_checkout_lacks_is_fetched(runner: Runner) -> None:
    shallow = runner.folder / "shallow"
    runner.git("commit", "-q", "--allow-empty", "-m", "second")
    where = runner.repository.as_uri()
    runner.git("clone", "-q", "--depth=1", where, str(shallow), folder=runner.folder)
    runner.repository = shallow
    assert runner.run("Compare", arguments="m:f").returncode == 0
    assert runner.notes[0][1][2] == runner.base
    assert runner.run("Compare", arguments="m:f", base="0" * 40).returncode != 0


@pytest.mark.parametrize("name", ["", "large"])
def test_one_comment_is_kept_up_to_date(runner: Runner, name: str) -> None:
    marker = f"<!-- nnx-pipeline{f' {name}' if name else ''} -->"
    runner.run("Compare", arguments="m:f", name=name)
    assert runner.run("Comment").returncode == 0
    others = [{"id": 3, "body": f"> {marker}"}, {"id": 4, "body": "<!-- nnx-pipeline other -->"}]
    runner.says("comments.json", json.dumps([*others, {"id": 5, "body": f"{marker}\nold"}]))
    assert runner.run("Comment").returncode == 0
    sent = [(words, body) for program, words, body in runner.notes if program == "gh" and body]
    assert [body for _, body in sent] == [f"{marker}\n\n{BODY}"] * 2
    of_all, of_one = "repos/some/where/issues/7/comments", "repos/some/where/issues/comments/5"
    places = [words[words.index("--method") + 1 :][:2] for words, _ in sent]
    assert places == [["POST", of_all], ["PATCH", of_one]]


def test_what_is_worse_is_said_and_fails(runner: Runner) -> None:
    runner.says("code", "1")
    assert runner.run("Compare", arguments="m:f", fail_above="5%").returncode == 0
    assert runner.run("Comment").returncode == 0
    assert runner.notes[-1][2].endswith(BODY)
    assert runner.run("Result").returncode == 1


def test_nothing_was_compared(runner: Runner) -> None:
    runner.says("code", "2")
    runner.run("Compare", arguments="m:f")
    runner.run("Comment")
    assert runner.notes[-1][2].splitlines() == [
        MARKER,
        "",
        "**Nothing was compared** (exit code 2): "
        "[the log](https://github.example/some/where/actions/runs/123) says why.",
    ]
    assert runner.run("Result").returncode == 2


def test_a_token_that_may_only_read_is_a_warning(runner: Runner) -> None:
    runner.run("Compare", arguments="m:f")
    runner.says("refused", "")
    done = runner.run("Comment")
    assert done.returncode == 0
    assert done.stdout.startswith("::warning::The comment was not written")
    assert "403" in done.stderr


def test_what_is_installed(runner: Runner) -> None:
    assert runner.run("Install").returncode == 0
    (note,) = runner.notes
    words = ["-m", "pip", "install", "--quiet", "nnx-pipeline[tpu] @ file:///actions/nnx"]
    assert note == ["python", words, None]


def test_the_workflow_of_the_page() -> None:
    texts = (block.text for block in BLOCKS if block.language == "yaml")
    (workflow,) = (found for found in map(yaml.safe_load, texts) if "jobs" in found)
    (job,) = workflow["jobs"].values()
    assert job["permissions"]["pull-requests"] == "write"
    (step,) = [one for one in job["steps"] if "nnx-pipeline" in one.get("uses", "")]
    assert set(step["with"]) <= set(ACTION["inputs"])
    for name in ACTION["inputs"]:
        assert f"`{name}`" in EXAMPLE, name
    required = {name for name, one in ACTION["inputs"].items() if one.get("required")}
    assert required <= set(step["with"])
