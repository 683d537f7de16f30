"""Names, files, sizes and addresses that nobody would choose, and that somebody may be handed."""

import io
import json
import os
import re
import shutil
import socket
import sys
import unicodedata
from pathlib import Path
from xml.etree import ElementTree

import click
import numpy as np
import pytest
from helpers import commands_of
from maxtext_data import DATA, checkpoint, config_of, full_state, write
from page_examples import measurement
from rich.panel import Panel
from rich.text import Text
from safetensors.numpy import load_file, save_file

import linen_compat
from linen_compat._cli import main as linen_main
from linen_compat.formats.huggingface._folder import INDEX_FILE, ONE_FILE, TensorFolder
from nnx_pipeline import InputError
from nnx_pipeline.lab._cli import main as nnx_main
from nnx_pipeline.lab._cli.progress import progress
from nnx_pipeline.lab._files import local, save_figure, say, write_text
from nnx_pipeline.lab._files import write_output as write_out
from nnx_pipeline.lab._page import measurement_page
from nnx_pipeline.lab._report.chart import program_chart
from nnx_pipeline.lab._report.columns import Column, Columns
from nnx_pipeline.lab._report.output import Screen, show
from nnx_pipeline.lab._tracing.jaxpr import Location
from nnx_pipeline.lab.errors import is_divisor, printable, shown
from nnx_pipeline.lab.lint import Finding
from nnx_pipeline.lab.lint._report import findings_view
from nnx_pipeline.pipeline._stack import make_stack

LLAMA = DATA.parent / "huggingface" / "llama"
CONFIG = str(DATA / "unscanned" / "config.yml")

# ---- names -------------------------------------------------------------------------------------

NAMES = [
    *("\x1b[31mred", "\x1b]0;title\x07", "\x1b]8;;http://x\x1b\\link", "\x1b[2J\x1b[H", "\x1bc"),
    *("\x9b31mred", "\x9d0;title\x9c", "\x90q\x9c", "next\x85line", "\x80", "bell\x07", "nul\0"),
    *("back\b\b\b", "over\rwritten", "two\nlines", "crlf\r\n", "tab\t", "vt\x0b", "ff\x0c"),
    *("del\x7f", "\u202eoverride", "\u2066isolate\u2069", "\u200fmark", "\u061cmark"),
    *("line\u2028line", "paragraph\u2029", "[red]markup[/red]", "[/]", ":smile: {x} %s $x^$"),
    *("<script>alert(1)</script>", "&amp;\"'", "plain"),
]
DIRECTIONS = {"LRO", "RLO", "LRE", "RLE", "PDF", "LRI", "RLI", "FSI", "PDI"}


def assert_tame(text: str) -> None:
    """No character but newlines that a terminal acts on, by the tables of Unicode."""
    for at in text:
        acts = unicodedata.category(at) in ("Cc", "Cs", "Zl", "Zp") and at != "\n"
        assert not acts, (at, text)
        assert unicodedata.bidirectional(at) not in DIRECTIONS, (at, text)
        assert at not in "\u200e\u200f\u061c", (at, text)


def without_ends(text: str) -> str:
    """A text without its newlines and spaces, at which a table may have folded it."""
    return "".join(text.split())


def test_what_a_name_looks_like() -> None:
    assert printable("a\x1b[31m\n\u202e\udcff") == r"a\x1b[31m\n\u202e\udcff"
    assert printable("a\nb\tc", keep="\n") == "a\nb\\tc"
    assert printable("norm é 中 😀 × … [red]") == "norm é 中 😀 × … [red]"
    assert str(InputError("no \x1b[2J\n")) == "no \\x1b[2J\n"


@pytest.mark.parametrize("name", [*NAMES, os.fsdecode(b"\xff\xfe")])
def test_outlets(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Lines, tables, progress, findings, pages and pictures."""
    table = Columns([Column("name"), Column("shape", 1)], title=name)
    table.add_row(name, "[3]")
    place = Location(f"{name}.py", 3, name)
    finding = Finding(
        rule="one-hot",
        severity="advice",
        location=place,
        bytes=9,
        per_device=True,
        what=name,
        cure="none",
    )
    for view in (name, Text(name), Panel(Text(name), title=Text(name)), table):
        show(view, json_path=None)
    show(findings_view(name, [finding]), json_path=None)
    show(table, json_path=None)
    with progress() as begin:
        begin(name)
    say(name)
    printed = capsys.readouterr()
    assert_tame(printed.out + printed.err)
    assert len(printed.err.splitlines()) == 2
    assert without_ends(printed.out).count(without_ends(printable(name))) >= 6
    program = measurement(None)
    page = measurement_page(name, program)
    assert_tame(page)
    assert "<script>alert" not in page
    write_text(str(tmp_path / "page.html"), page)
    picture = tmp_path / "x.svg"
    save_figure(program_chart(name, measurement(None)), str(picture))
    drawn = "".join(ElementTree.parse(picture).getroot().itertext())
    assert_tame(drawn)  # a title is broken at whatever Python takes for the end of a line
    assert printable(name.split()[0][:5]) in drawn


def test_a_model_that_writes_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    write_out("one\n\ttwo \x1b[31m\u202e")
    assert capsys.readouterr().out == "one\n\ttwo \\x1b[31m\\u202e\n"


def test_a_terminal_gets_the_colours_of_tables_and_no_others() -> None:
    screen = Screen()
    screen._force_terminal, screen._color_system = True, None
    with screen.capture() as captured:
        screen.print(Text("\x1b[31mred"))
    assert captured.get() == "\\x1b[31mred\n"


def test_names_of_tensors(bridge, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(LLAMA, folder)
    (folder / "nnx-pipeline-checksums.json").unlink(missing_ok=True)
    tensors = load_file(folder / ONE_FILE)
    save_file({**tensors, **{name: np.zeros(2, np.float32) for name in NAMES}}, folder / ONE_FILE)
    ended = bridge("check", folder, "--config", folder, "--json", tmp_path / "x.json")
    assert ended.code == 1
    assert_tame(ended.out + ended.err)
    assert len(ended.err.splitlines()) == 1
    for name in NAMES:
        assert without_ends(printable(name)) in without_ends(ended.out)
    told = json.loads((tmp_path / "x.json").read_text("ascii"))
    assert all(any(name in problem for problem in told["problems"]) for name in NAMES)
    ended = bridge("check", folder, "--config", folder, "--json", "-")
    assert ended.json["problems"] == told["problems"]
    assert_tame(ended.out)


def test_names_in_a_tree(bridge, tmp_path: Path) -> None:
    extra = {f"{name}/{name}": np.zeros(2, np.float32) for name in NAMES if "/" not in name}
    folder = write(tmp_path / "state", {**full_state(), **extra})
    for words in (("inspect", folder), ("check", folder, "--config", CONFIG)):
        ended = bridge(*words)
        assert_tame(ended.out + ended.err)
        assert "\\x1b[31mred" in ended.out
    assert json.loads(bridge("inspect", folder, "--json", "-").out)["other"].keys() >= extra.keys()


def test_names_of_files_in_an_index(tmp_path: Path) -> None:
    for name in (*NAMES, "", "x" * 256, "é" * 128, "\ud800", "a/b", ".", "..", "~/x"):
        (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {name: name}}))
        with pytest.raises(InputError) as caught:
            TensorFolder(tmp_path)
        assert_tame(str(caught.value))
        assert f"{tmp_path} is missing" not in str(caught.value)


@pytest.mark.parametrize("file", ["x.yml", "config.json"])
def test_keys_and_values_of_configs(bridge, tmp_path: Path, file: str) -> None:
    path = tmp_path / file
    known = json.loads((LLAMA / "config.json").read_text()) if file == "config.json" else {}
    for name in NAMES:
        for given in ({name: name}, {"model_name": name, "architectures": [name]}):
            path.write_text(json.dumps({**known, **given}))  # which is YAML too
            ended = bridge("check", LLAMA, "--config", path)
            assert ended.code == 2, ended
            assert_tame(ended.err)
            assert len(ended.err.splitlines()) == 1


def test_names_of_functions(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a function whose program has a warning, and of one that raises."""
    (tmp_path / "hostile.py").write_text(
        "import jax.numpy as jnp\n"
        f"NAMES = {NAMES!r}\n"
        "def cast(x):\n    return (x.astype('float32') * 2).sum()\n"
        "def fail(x):\n    raise ValueError(''.join(NAMES))\n"
        "for one in (cast, fail):\n    one.__name__ = one.__qualname__ = ''.join(NAMES)\n"
    )
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "x.html"
    words = ("hostile:cast", "hostile:cast", "--arg", "bfloat16[8]", "--html", page)
    ended = run("compare", *words)
    assert ended.code == 0, ended.err
    assert_tame(ended.out + ended.err)
    assert_tame(page.read_text())
    ended = run("measure", "hostile:fail", "--arg", "bfloat16[8]")
    assert ended.code == 1
    assert_tame(ended.out + ended.err)


def test_a_screen_without_the_characters_of_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """With PYTHONIOENCODING=ascii; JSON is ASCII anyway."""
    for words, shows in (
        (("schedule", "--stages", "2", "--microbatches", "2"), "?"),
        (("models", "--json", "-"), '"models": ['),
    ):
        out = io.TextIOWrapper(io.BytesIO(), "ascii")
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "argv", ["nnx-pipeline", *words])
        with pytest.raises(SystemExit) as exit:
            nnx_main.main()
        out.flush()
        assert exit.value.code == 0
        assert shows in out.buffer.getvalue().decode("ascii")


# ---- files -------------------------------------------------------------------------------------

DEEP, DIGITS = 900, "9" * 5000
BOMB = "a0: &a0 [x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)
)
TEXTS = {
    "empty": b"",
    "NUL": b"a\0b",
    "not UTF-8": b"\xff\xfe\x00",
    "UTF-16": "model: {}".encode("utf-16"),
    "nested lists": b"vocab_size: " + b"[" * DEEP + b"]" * DEEP,
    "nested mappings": "\n".join(" " * n + "a:" for n in range(DEEP)).encode(),
    "nested braces": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "digits": f"base_emb_dim: {DIGITS}".encode(),
    "digits of a key": f"0x{'f' * 5000}: 1".encode(),
    "hexadecimal digits": f"base_emb_dim: 0x{'f' * 5000}".encode(),
    "layers": b"base_num_decoder_layers: 1000000000",
    "infinity": b"base_emb_dim: .inf",
    "aliases": BOMB.encode(),
    "an alias of itself": b"vocab_size: &a [*a]",
    "a tag": b"a: !!python/object/apply:os.system [ls]",
    "a list": b"- 1\n- 2",
}
ODD = (*TEXTS, "pipe", "device", "socket", "folder", "link to nothing", "circle", "1 TiB")


def odd(folder: Path, kind: str) -> Path:
    """A file that is none of what a command reads."""
    path = folder / "odd"
    if kind in TEXTS:
        path.write_bytes(TEXTS[kind])
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))
    elif kind == "folder":
        path.mkdir()
    elif kind == "link to nothing":
        path.symlink_to(folder / "nothing")
    elif kind == "circle":
        path.symlink_to(path)
    else:
        with open(path, "wb") as file:
            file.truncate(2**40)
    return path


@pytest.mark.parametrize("kind", ODD)
def test_odd_files(run, bridge, tmp_path: Path, monkeypatch, kind: str) -> None:
    """One line and exit code 2, wherever a command reads a file; nothing is waited for."""
    monkeypatch.chdir(tmp_path)  # the name of a socket is short
    path = odd(Path(), kind)
    training = ("--model", "tiny", "--steps", "1", "--set", "model.vocab_size=256")
    uses = [bridge("check", LLAMA, "--config", path), run("schedule", "--read", path)]
    if kind not in TEXTS or kind in ("empty", "NUL", "not UTF-8"):
        uses.append(run("train", *training, "--data", path))
    tokenizer = ("--checkpoint", LLAMA, "--prompt", "a", "--tokenizer", path)
    uses.append(run("generate", *tokenizer))
    if kind in TEXTS:
        model = tmp_path / "model"
        shutil.copytree(LLAMA, model)
        shutil.copy(path, model / "config.json")
        uses.append(bridge("check", LLAMA, "--config", model))
    for ended in uses:
        assert ended.code == 2, ended
        assert len(ended.err.splitlines()) == 1, ended.err
        assert len(ended.err) < 2500
        assert_tame(ended.err)
        assert "Traceback" not in ended.err
        assert "recursion" not in ended.err
        assert "sys.set" not in ended.err
    if kind in ("nested lists", "nested braces"):
        assert "nested too deeply; give something flatter" in uses[0].err


def test_a_pipe_in_the_place_of_a_file_of_a_checkpoint(bridge, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    shutil.copytree(checkpoint("unscanned") / "2" / "items", whole)
    files = [path.relative_to(whole) for path in whole.rglob("*") if path.is_file()]
    assert len(files) > 5
    for file in files:
        damaged = tmp_path / "damaged"
        shutil.copytree(whole, damaged)
        (damaged / file).unlink()
        os.mkfifo(damaged / file)
        ended = bridge("convert", damaged, tmp_path / "out", "--to", "nnx")
        assert ended.code == 1, file
        assert f"{damaged / file} is not a regular file" in ended.err
        shutil.rmtree(damaged)


def test_values_in_messages() -> None:
    """Python itself refuses to write the first, and takes minutes for the second."""
    assert shown(16**5000 - 1) == "a number of 20000 bits"
    nest: list[object] = ["x"]
    for _ in range(30):
        nest = [nest, nest]
    assert len(shown(nest)) < 500
    assert shown("a" * 10_000).startswith("'aaa")
    assert len(shown("a" * 10_000)) < 300
    assert shown((True, None, "a", 1.5)) == "(True, None, 'a', 1.5)"


# ---- sizes -------------------------------------------------------------------------------------

TINY = ("--model", "tiny")
SIZES = [
    ("schedule", "--stages", "4", "--microbatches", "8", "--layers", "300000000"),
    ("schedule", "--stages", "4", "--microbatches", "8", "--repeats", "300000000"),
    ("schedule", "--stages", "4", "--microbatches", DIGITS),
    ("schedule", "--stages", "2", "--microbatches", "50000", "--both", "x.svg"),
    ("schedule", "--stages", DIGITS[:4000], "--microbatches", DIGITS[:4000]),
    ("lint", *TINY, "--set", "model.num_layers=1000000000"),
    ("lint", *TINY, "--set", f"model.num_layers={DIGITS}"),
    ("lint", *TINY, "--set", f"model.num_layers={DIGITS[:4000]}"),
    ("lint", *TINY, "--set", "train.sequence_length=10000000000"),
    ("lint", *TINY, "--set", f"train.learning_rate={DIGITS}"),
    ("lint", *TINY, "--set", "train.sequence_length=2147483647", "--set", "train.loss_chunks=1"),
    ("lint", *TINY, "--set", "pipeline.batch_split=1000000000"),
    ("lint", *TINY, "--set", "pipeline.num_microbatches=1000000000"),
    ("lint", *TINY, "--mesh", f"stage={DIGITS}"),
    ("compile", *TINY, "--mesh", "stage=100000", "--set", "model.num_layers=100000"),
    ("compile", *TINY, "--platform", "cuda:h100:1000000000"),
    ("compile", *TINY, "--platform", f"tpu:v5p:{DIGITS}"),
    ("measure", "math:sqrt", "--arg", f"float32[{DIGITS}]"),
    ("generate", "--checkpoint", str(LLAMA), "--tokens", DIGITS),
    ("generate", "--checkpoint", str(LLAMA), "--tokens", "1", "--new-tokens", "1000000000"),
    ("lint", *TINY, "--set", f"pipeline.stage_layers={DIGITS}"),
    (
        *("lint", *TINY, "--mesh", "stage=2", "--set", "pipeline.num_repeats=1000000000"),
        *("--set", "pipeline.stage_layers=auto"),
    ),
]


@pytest.mark.parametrize("words", SIZES, ids=lambda words: " ".join(words)[:60])
def test_sizes(run, words: tuple[str, ...]) -> None:
    ended = run(*words)
    assert ended.code == 2, ended
    *before, _ = ended.err.splitlines()
    assert before in ([], ["0:00 tracing"])
    assert len(ended.err) < 2500


HUGE = [
    *((f"model.{size}=2000000000",) for size in ("embed_dim", "mlp_dim", "vocab_size", "head_dim")),
    ("model.num_heads=2000000000", "model.num_kv_heads=2000000000"),
    ("model.num_experts=2000000000",),
    ("train.sequence_length=2000000000", "train.loss_chunks=1"),
    ("train.global_batch=2000000000",),
    # Each size is allowed, and what they make together is not.
    ("model.embed_dim=16000000", "model.mlp_dim=16000000"),
    ("train.global_batch=1000000", "train.sequence_length=1000000"),
]


@pytest.mark.parametrize("sizes", HUGE, ids=" ".join)
def test_a_model_or_a_batch_that_is_too_large(run, sizes: tuple[str, ...]) -> None:
    """By every command that takes a config, before it traces, compiles or allocates anything."""
    settings = [word for size in sizes for word in ("--set", size)]
    for command in (["train", "--steps", "1"], ["memory"], ["compile"], ["ab", "norm-scale"]):
        ended = run(*command, *TINY, *settings)
        assert (ended.code, ended.err.count("\n")) == (2, 1), ended
        assert re.search(r"(out of range|[0-9,]{14,}.*); choose ", ended.err), ended.err


def test_what_the_devices_cannot_hold_is_not_trained(run) -> None:
    """A size that a cluster holds is for other commands; `measure` has a bound of its own."""
    for size in ("model.embed_dim=16000000", "model.mlp_dim=16000000"):
        ended = run("train", "--steps", "1", *TINY, "--set", size)
        assert (ended.code, ended.err.count("\n")) == (2, 1), ended
        assert "of the mesh ha" in ended.err
        assert "; choose a smaller model or batch, or a mesh of more devices" in ended.err
    ended = run("measure", "math:sqrt", "--arg", "float32[2000000000,2000000000]")
    assert (ended.code, "; give smaller axes" in ended.err) == (2, True)


def test_divisors_are_found_without_counting() -> None:
    with pytest.raises(InputError, match=r"choose one of: 1, 2147483647$"):
        is_divisor(3, 2**31 - 1, rule="x")
    with pytest.raises(InputError, match=r"choose one of: 1, 2, 3, 4, 6, 9, 12, 18, 36$"):
        is_divisor(5, 36, rule="x")


def test_the_most_layers() -> None:
    assert make_stack(10_000, stages=4, repeats=1).per_stage == 2500
    with pytest.raises(InputError, match="choose fewer"):
        make_stack(4, stages=4, repeats=5000, stage_layers="auto")


# ---- addresses ---------------------------------------------------------------------------------

ADDRESSES = (
    *("gs://bucket/x", "s3://bucket/x", "file:///tmp/x", "hf://x", "https://host/x", "gs:/x"),
    *("gs:b", "S3:bucket", " gs://bucket/x", "\tgs:b", "\u00a0s3://x"),
)
# What takes a checkpoint or its config takes the first three; `test_object_stores.py` has them.
OF_CHECKPOINTS = {"CKPT", "SRC", "DST", "--checkpoint", "--checkpoint-dir"}
OF_CHECKPOINTS |= {"--config", "--tokenizer", "--adapter"}
PATHS = {"PATH", "FILE", "DIR", "CKPT", "SRC", "DST"}  # metavars of what names a file or a folder
# Each command with what it needs, and for its path arguments one that is there.
COMMANDS = {
    "models": (),
    "platforms": (),
    "measure": ("math:sqrt",),
    "compare": ("math:sqrt", "math:sqrt"),
    "lint": TINY,
    "bisect": ("HEAD", "HEAD", *TINY),
    "fit": (*TINY, "--over", "train.global_batch=8..16:8", "--limit", "1GB"),
    "plan": ("--model", "tiny", "--platform", "tpu:v5e:2x2"),
    "explain": (str(DATA.parent / "explain" / "tpu_v4_scores.txt"),),
    "memory": TINY,
    "schedule": ("--stages", "2", "--microbatches", "2"),
    "train": (*TINY, "--steps", "1", "--set", "model.vocab_size=256"),
    "generate": ("--checkpoint", str(LLAMA), "--tokens", "1", "--new-tokens", "1"),
    "inspect": ("{CKPT}",),
    "check": ("{CKPT}", "--config", CONFIG),
    "convert": ("{SRC}", "{DST}", "--to", "nnx"),
    "formats": (),
    "overhead": (),
}
NAMED = {**commands_of(nnx_main.cli), **commands_of(linen_main.commands)}
PLACES = {"CKPT": str(LLAMA), "SRC": str(LLAMA), "DST": "out"}


def test_every_command_is_in_the_table() -> None:
    assert NAMED.keys() == COMMANDS.keys()


def test_every_number_of_an_option_has_an_end() -> None:
    kinds = [
        (name, one.opts[0], one.type) for name, command in NAMED.items() for one in command.params
    ]
    ranges = [(*where, kind.max) for *where, kind in kinds if isinstance(kind, click.IntRange)]
    assert len(ranges) > 10
    assert [one for one in ranges if one[-1] is None] == []


def options_of(command: str) -> list[tuple[str, str]]:
    """Each option of a command that takes a path, and each argument by its metavar."""
    given = [one for one in NAMED[command].params if one.metavar in PATHS]
    return [(command, one.opts[0] if one.opts[0][0] == "-" else one.metavar) for one in given]


@pytest.mark.parametrize(
    ("command", "option"), [one for command in COMMANDS for one in options_of(command)]
)
def test_addresses(run, bridge, tmp_path: Path, monkeypatch, command: str, option: str) -> None:
    monkeypatch.chdir(tmp_path)
    for address in ADDRESSES[3:] if option in OF_CHECKPOINTS else ADDRESSES:
        places = {**PLACES, option: address}
        words = [word.format(**places) for word in COMMANDS[command]]
        words = words if option in PLACES else [*words, option, address]
        if option == "--read":
            words = [command, option, address][1:]
        elif option == "--tokenizer" and command == "train":
            words += ["--data", __file__]  # without texts it has no meaning
        ended = (run if command in commands_of(nnx_main.cli) else bridge)(command, *words)
        assert ended.code == 2, ended
        assert len(ended.err.splitlines()) == 1, ended.err
        assert f"{address.strip()} is an address" in ended.err
        assert os.listdir() == []


def test_addresses_in_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = linen_compat.load(LLAMA)
    state = linen_compat.load_train_state(checkpoint("unscanned"), config_of())
    uses = (
        linen_compat.load,
        lambda address: linen_compat.load(address, config_of()),
        lambda address: linen_compat.load_train_state(address, config_of()),
        lambda address: linen_compat.save(model, address),
        lambda address: linen_compat.save(model, address, "huggingface"),
        lambda address: linen_compat.save_train_state(state, address),
        linen_compat.config_from_maxtext,
        linen_compat.config_from_huggingface,
    )
    for address in (*ADDRESSES[3:], Path("gs://bucket/x")):
        for use in uses:
            with pytest.raises(InputError, match="is an address, and only gs://bucket/…, s3://"):
                use(address)
    assert os.listdir() == []


def test_a_folder_with_the_name_of_an_address(tmp_path: Path, monkeypatch) -> None:
    """The cure of the error, and a second look at what it has led to."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"begin it with \./ where a folder here has that name"):
        local("file.v1:/x")
    for name in ("run:1", "at 12:30", "12:30"):
        assert local(name) == Path(name)
    for name in ("./file.v1:/x", "./gs://x", "./gs:b", "./ gs:b"):
        found = local(name)
        assert found == local(found) == local(str(found)) == tmp_path / name
        linen_compat.save(linen_compat.load(LLAMA), name, "huggingface")
        assert linen_compat.load(name).config.model == linen_compat.load(LLAMA).config.model


def test_a_cache_at_an_address(run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NNX_PIPELINE_CACHE", "gs://bucket/x")
    ended = run("ab", "norm-scale", *TINY)
    assert (ended.code, "gs://bucket/x is an address" in ended.err) == (2, True)
    assert os.listdir() == []
