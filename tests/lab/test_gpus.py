"""GPUs that are compiled for without one: their descriptions, several hosts, and AMD's compiler."""

import ctypes
import json
import re
from pathlib import Path

import pytest
from helpers import missing, run_fresh, user_environment

from nnx_pipeline import InputError
from nnx_pipeline.lab.compile import _gpus, _rocm
from nnx_pipeline.lab.compile.platform import Platform

EVERY = [(kind, target) for kind in _gpus.GPUS for target in _gpus.targets(kind)]
MODULES = {"cuda": ("jax_cuda13_plugin",), "rocm": ("jax_plugins.xla_rocm7", "elftools")}
needs_rocm = pytest.mark.skipif(missing(*MODULES["rocm"]), reason="the extra rocm is not installed")


@pytest.mark.parametrize(
    ("topology", "hosts"),
    [("1", (1, 1)), ("8", (1, 8)), ("16", (2, 8)), ("4x8", (4, 8)), ("4x2", (4, 2))],
)
def test_gpus_by_host(topology: str, hosts: tuple[int, int]) -> None:
    assert _gpus.by_host("cuda", "h100", topology) == hosts


def test_a_rack_is_one_host() -> None:
    assert _gpus.by_host("cuda", "gb200", "72") == (1, 72)


@pytest.mark.parametrize("topology", ["12", "2x9", "1x16"])
def test_hosts_that_there_are_not(topology: str) -> None:
    with pytest.raises(
        InputError, match=r"8 GPUs are joined in a host.* write for example cuda:h100:2x8"
    ):
        Platform.parse(f"cuda:h100:{topology}")


@pytest.mark.slow(but=5)
@pytest.mark.parametrize(("kind", "target"), EVERY)
def test_every_gpu_can_be_compiled_for(kind: str, target: str) -> None:
    if missing(*MODULES[kind]):
        pytest.skip(f"the extra {kind} is not installed")
    done = run_fresh(COMPILED, f"{kind}:{target}:2x2", environment=user_environment())
    assert done.code == 0, done.err
    seen = json.loads(done.out)
    assert seen["by_hand"] == seen["lab"]
    assert target[:2] in seen["kind"].lower()


# The lab's figures beside a compile by hand, of the gradient of a scan of products over 4 devices.
COMPILED = """
import json, sys
import jax, jax.numpy as jnp
from nnx_pipeline import MeshConfig, lab, make_mesh
from nnx_pipeline.lab.compile.platform import Platform
platform = Platform.parse(sys.argv[1])
mesh = make_mesh(MeshConfig(fsdp=4), platform.devices(1))
spec = jax.sharding.PartitionSpec
def abstract(shape, *axes):
    return jax.ShapeDtypeStruct(
        shape, "bfloat16", sharding=jax.sharding.NamedSharding(mesh, spec(*axes))
    )
def f(x, w):
    return jnp.sum(jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, w)[0])
arguments = abstract((1024, 256), "fsdp"), abstract((4, 256, 256), None)
with jax.set_mesh(mesh):
    compiled = jax.jit(jax.grad(f, 1)).lower(*arguments).compile(platform.compiler_options)
    found = lab.measure(jax.grad(f, 1), *arguments, mesh=mesh, platform=platform).memory
by_hand = compiled.memory_analysis()
names = ("argument", "output", "temp")
print(json.dumps({
    "kind": mesh.devices.flat[0].device_kind,
    "by_hand": [getattr(by_hand, f"{name}_size_in_bytes") for name in names],
    "lab": [getattr(found, f"{name}_bytes") for name in names],
}))
"""


@needs_rocm
def test_stand_ins_answer_nothing_but_errors(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("NNX_PIPELINE_CACHE", str(tmp_path))
    wanted, anywhere = _rocm.functions_of(_rocm.plugin())
    wanted[next(iter(wanted))][""] = anywhere
    made = _rocm.stand_ins(wanted)
    called = 0
    for name, functions in wanted.items():
        library = ctypes.CDLL(str(made / name))
        for function in (one for names in functions.values() for one in names):
            call = getattr(library, function)
            if _rocm.IS_TEXT.search(function):
                call.restype = ctypes.c_char_p
                assert b"no AMD GPU" in call()
            else:
                assert call() == 100, function
            called += 1
    assert called > 200
    before = {file: file.stat().st_mtime_ns for file in made.iterdir()}
    assert _rocm.stand_ins(wanted) == made  # made once
    assert {file: file.stat().st_mtime_ns for file in made.iterdir()} == before


@needs_rocm
def test_without_a_compiler_it_is_one_line(tmp_path: Path) -> None:
    words = ("measure", "jax.numpy:tanh", "--arg", "float32[8]", "--platform", "rocm:mi300x:1")
    done = run_fresh(WITHOUT_COMPILER, str(tmp_path), *words, environment=user_environment())
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(
        r"nnx-pipeline: AMD's compiler needs .*, and found none; pip install ziglang, which brings "
        r"one\n",
        done.err,
    )


WITHOUT_COMPILER = """
import os, sys
folder = sys.argv.pop(1)
os.environ.update(NNX_PIPELINE_CACHE=folder, PATH=folder, ROCM_PATH=folder)
sys.modules["ziglang"] = None
from nnx_pipeline.lab._cli.main import main
main()
"""


@needs_rocm
@pytest.mark.parametrize(
    ("damaged", "words"),
    [
        ("rocm", r"libamdhip64\.so\.7 is there, but has no \w+ and \d+ more, which jax-rocm7"),
        ("stand-in", r"libamdhip64\.so\.7 does not load; delete .*/rocm-\w+, and run it again"),
    ],
)
def test_a_library_that_cannot_serve_is_named(tmp_path: Path, damaged: str, words: str) -> None:
    """The loader would end the process without a word."""
    done = run_fresh(UNFIT, str(tmp_path), damaged, environment=user_environment())
    assert (done.code, done.out) == (2, "")
    assert re.search(words, done.err), done.err


UNFIT = """
import os, sys
from pathlib import Path
folder, damaged = Path(sys.argv.pop(1)), sys.argv.pop(1)
os.environ.update(NNX_PIPELINE_CACHE=str(folder / "cache"), ROCM_PATH=str(folder / "rocm"))
from nnx_pipeline.lab.compile import _rocm
name, plugin = "libamdhip64.so.7", _rocm.plugin()
if damaged == "rocm":
    (folder / "rocm" / "lib").mkdir(parents=True)
    (folder / "rocm" / "lib" / name).symlink_to(_rocm.stand_ins({name: {}}) / name)
else:
    wanted, anywhere = _rocm.functions_of(plugin)
    wanted[next(iter(wanted))][""] = anywhere
    (_rocm.stand_ins(wanted) / name).write_bytes(b"no library")
words = ["measure", "jax.numpy:tanh", "--arg", "float32[8]", "--platform", "rocm:mi300x:1"]
sys.argv[1:] = words
from nnx_pipeline.lab._cli.main import main
main()
"""


@needs_rocm
def test_libraries_of_rocm_come_first(tmp_path: Path) -> None:
    done = run_fresh(PREFERRED, str(tmp_path), environment=user_environment())
    assert done.code == 0, done.err
    first, others = json.loads(done.out)
    assert first == str(tmp_path / "rocm" / "lib" / "libamdhip64.so.7")
    assert all(str(tmp_path / "cache") in path for path in others)


PREFERRED = """
import json, os, shutil, sys
from pathlib import Path
folder = Path(sys.argv[1])
os.environ.update(NNX_PIPELINE_CACHE=str(folder / "cache"), ROCM_PATH=str(folder / "rocm"))
from nnx_pipeline.lab.compile import _rocm
name, plugin = "libamdhip64.so.7", _rocm.plugin()
wanted, _ = _rocm.functions_of(plugin)
(folder / "rocm" / "lib").mkdir(parents=True)
shutil.copy(_rocm.stand_ins({name: wanted[name]}) / name, folder / "rocm" / "lib")
paths = dict(zip(wanted, _rocm.load_libraries(plugin)))
print(json.dumps([paths.pop(name), list(paths.values())]))
"""
