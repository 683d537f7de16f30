"""Checkpoints damaged in every way at every file: found, or no value is another one."""

import json
import random
import re
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from maxtext_data import DATA, checkpoint

import linen_compat
from linen_compat.checkpoints._check import diagnose, read_everything
from linen_compat.checkpoints._convert import From, To, open_checkpoint, plan
from linen_compat.formats._streams import Mismatch, walk
from linen_compat.formats.huggingface._stream import folder_config
from linen_compat.maxtext.config import config_from_yaml
from nnx_pipeline import InputError

LLAMA = DATA.parent / "huggingface" / "llama"
INTERNALS = re.compile(
    r"NoneType|object has no|KeyError|TypeError|IndexError|Traceback|<class|take it out|source loc"
)


def swap(file):
    others = [p for p in file.parent.parent.rglob("*") if p.is_file() and p != file]
    other = min(others, key=lambda path: path.name)
    file.write_bytes(other.read_bytes())


def overwrite(begin, end, content):
    """Replaces a part of a file, given as shares of its length, by a byte."""

    def change(file):
        whole = bytearray(file.read_bytes())
        first, last = (
            int(len(whole) * begin),
            max(int(len(whole) * begin) + 1, int(len(whole) * end)),
        )
        whole[first:last] = bytes([content]) * len(whole[first:last])
        file.write_bytes(whole)

    return change


def flip(share, bit):
    def change(file):
        whole = bytearray(file.read_bytes())
        whole[min(len(whole) - 1, int(len(whole) * share))] ^= 1 << bit
        file.write_bytes(whole)

    return change


def a_folder(file):
    file.unlink()
    file.mkdir()


def a_dangling_link(file):
    file.unlink()
    file.symlink_to(file.parent / "nowhere")


def cut(share):
    return lambda file: file.write_bytes(file.read_bytes()[: int(file.stat().st_size * share)])


DAMAGES = {
    "gone": lambda file: file.unlink(),
    "empty": cut(0),
    "cut early": cut(0.1),
    "cut": cut(0.5),
    "without its last byte": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "with a byte more": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
    "zeros at the beginning": overwrite(0, 0.1, 0),
    "zeros in the middle": overwrite(0.45, 0.55, 0),
    "zeros at the end": overwrite(0.9, 1, 0),
    "ones in the middle": overwrite(0.45, 0.55, 255),
    "text": lambda file: file.write_text("not what was here\n"),
    "another file": swap,
    "a folder": a_folder,
    "a dangling link": a_dangling_link,
    **{
        f"bit {bit} at {share:.0%}": flip(share, bit)
        for share, bit in ((0, 0), (0.2, 6), (0.4, 3), (0.6, 7), (0.8, 1), (1, 5))
    },
}


def forms(folder):
    """Checkpoints of each kind with the config that fits: two of our own, three of others."""
    unscanned = config_from_yaml(str(DATA / "unscanned" / "config.yml"))
    plan(From(checkpoint("scanned_nnx")), To(folder / "nnx", "nnx")).run()
    linen_compat.save(linen_compat.load(LLAMA), folder / "huggingface", "huggingface")
    shutil.copytree(checkpoint("scanned_params_only_bf16") / "0" / "items", folder / "maxtext")
    shutil.copytree(LLAMA, folder / "transformers")
    (folder / "transformers" / "reference.npz").unlink()
    found = {}
    for name in ("nnx", "huggingface", "maxtext", "transformers"):
        config = folder_config(LLAMA) if name in _SAFETENSORS else unscanned
        found[name] = folder / name, config, everything(folder / name, config)
    return found


_SAFETENSORS = ("huggingface", "transformers")


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return forms(tmp_path_factory.mktemp("forms"))


def everything(folder, config):
    """Every value of a checkpoint that was found whole, by its name."""
    read_everything(whole(diagnose(folder, config)), config)
    source = open_checkpoint(From(folder, config=config)).source
    values = {
        (part, path, layer): source.read(path, layer, part)
        for part in source.parts
        for path, layer in walk(source)
    }
    return {**values, **source.scalars}


def whole(found):
    if found.comparison.problems:
        raise Mismatch("; ".join(found.comparison.problems))
    return found


def same(found, expected):
    return found.keys() == expected.keys() and all(
        np.array_equal(found[key], value) for key, value in expected.items()
    )


@pytest.mark.slow(but=20)
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("form", ["nnx", "huggingface", "maxtext", "transformers"])
def test_damage_is_found_or_changes_no_value(tmp_path, kept, form, damage):
    """Of other formats only overwritten data may pass: they have no checksums."""
    folder = kept[form][0]
    files = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    assert len(files) >= 2
    for file in files:
        copy = tmp_path / str(len(list(tmp_path.iterdir()))) / folder.name
        shutil.copytree(folder, copy)
        DAMAGES[damage](copy / file)
        assert found_or_harmless(copy, kept[form]) or (form in BLIND and may_pass(file, damage)), (
            file
        )


def found_or_harmless(copy: Path, kept: tuple) -> bool:
    """Whether a damaged copy is refused in words, or every value in it is what it was."""
    _, config, expected = kept
    try:
        found = everything(copy, config)
    except InputError as error:
        message = str(error)
        assert not INTERNALS.search(message), message
        named = f"{re.escape(str(copy))}|model\\.layers|lm_head|params/|config.json"
        assert re.search(named, message), message
        return True
    return same(found, expected)


BLIND = ("maxtext", "transformers")


def may_pass(file: Path, damage: str) -> bool:
    overwritten = damage.startswith(("bit", "zeros", "ones"))
    return overwritten and ("d" in file.parts or file.suffix == ".safetensors")


def test_there_are_enough_kinds(kept):
    """A kind is a damage to a file with a task of its own; data files of one folder share one."""
    roles = {
        (form, re.sub("[0-9a-f]{32}", "data", str(path.relative_to(folder))))
        for form, (folder, *_) in kept.items()
        for path in folder.rglob("*")
        if path.is_file()
    }
    assert len(roles) * len(DAMAGES) >= 120


NEW_VALUES = (None, "", -1, 0, 2**70, True, [], {}, "F32", "BF16", 1.5)


def places(tree: Any, path: tuple = ()) -> Iterator[tuple]:
    """The keys that lead to every value inside a tree of JSON."""
    if path:
        yield path
    if isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from places(value, (*path, key))


def say_something_else(tree: Any, chosen: random.Random) -> str:
    """Changes one place of a tree of JSON, and says what was done to it."""
    *way, last = chosen.choice(list(places(tree)))
    parent = tree
    for key in way:
        parent = parent[key]
    kind = chosen.choice(["gone", "another value", "exchanged", "one more", "renamed or twice"])
    if kind == "gone":
        del parent[last]
    elif kind == "another value":
        parent[last] = chosen.choice(NEW_VALUES)
    elif kind == "exchanged":
        other = chosen.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
        parent[last], parent[other] = parent[other], parent[last]
    elif kind == "one more" and isinstance(parent[last], int | float):
        parent[last] += 1
    elif isinstance(parent, dict):
        parent[f"{last}0"] = parent.pop(last)
    else:
        parent.insert(last, parent[last])
    return f"{kind}: {[*way, last]}"


def spoken(file: Path) -> tuple[Any, bytes] | None:
    """The JSON of a file and the bytes behind it, or None where it has none."""
    whole = file.read_bytes()
    if file.suffix != ".safetensors":
        return (json.loads(whole), b"") if whole.startswith((b"{", b"[")) else None
    (length,) = struct.unpack("<Q", whole[:8])
    return json.loads(whole[8 : 8 + length]), whole[8 + length :]


def put(file: Path, tree: Any, rest: bytes) -> None:
    text = json.dumps(tree).encode()
    length = struct.pack("<Q", len(text)) if file.suffix == ".safetensors" else b""
    file.write_bytes(length + text + rest)


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("form", ["nnx", "huggingface", "maxtext", "transformers"])
def test_what_a_file_says_is_not_believed_against_the_arrays(tmp_path, kept, form):
    """Forty changes to text that still parses, in any file of each form.

    Without checksums too a name, a shape, a dtype and a place that do not go together are found
    from each other. Two tensors of one shape that exchange their places could not be.
    """
    folder = kept[form][0]
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and spoken(path)]
    assert files
    chosen = random.Random(form)
    for count in range(40):
        copy = tmp_path / str(count) / folder.name
        shutil.copytree(folder, copy)
        file = copy / chosen.choice(files).relative_to(folder)
        tree, rest = spoken(file)
        done = say_something_else(tree, chosen)
        put(file, tree, rest)
        exchanged = form in BLIND and done.startswith("exchanged")
        assert found_or_harmless(copy, kept[form]) or exchanged, (file.name, done)
