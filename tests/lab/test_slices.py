"""How a mesh is divided over slices or hosts, from the command line to the program."""

import re
from dataclasses import dataclass

import pytest
from helpers import Run, missing, run_fresh, user_environment

from nnx_pipeline.lab._cli.values import Target
from nnx_pipeline.lab.compile import platform as platforms
from nnx_pipeline.lab.compile._cache_key import entry_key
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.lab.mesh import MeshConfig, divided_over, make_mesh


@dataclass(frozen=True)
class Device:
    """What a mesh reads of a GPU."""

    id: int
    process_index: int
    platform: str = "gpu"


def test_a_mesh_has_its_division() -> None:
    mesh = MeshConfig.parse("data=2, fsdp=8", dcn="fsdp=4")
    assert mesh == MeshConfig(data=2, fsdp=8, dcn=MeshConfig(fsdp=4))
    assert str(mesh) == "data=2,fsdp=8 with dcn fsdp=4"
    assert mesh.sizes() == MeshConfig(data=2, fsdp=8).sizes()
    assert MeshConfig.parse("data=4", dcn=" ").dcn is None
    hosts = [Device(number, number // 4) for number in range(16)]
    placed = make_mesh(mesh, hosts)
    assert [one.id for one in placed.devices.flat] == [
        *(0, 1, 4, 5, 8, 9, 12, 13),
        *(2, 3, 6, 7, 10, 11, 14, 15),
    ]
    assert divided_over(placed) == {"fsdp": 4}
    with pytest.raises(InputError, match=r"dcn='data=2' is no MeshConfig; write MeshConfig"):
        MeshConfig(data=2, dcn="data=2")  # type: ignore[arg-type]


def test_it_is_part_of_the_key_of_a_program() -> None:
    cpu = Platform("cpu")
    keys = {entry_key(cpu, MeshConfig.parse("data=2,fsdp=2", dcn=dcn)) for dcn in DIVISIONS}
    assert len(keys) == len(DIVISIONS)
    assert None not in keys


DIVISIONS = ("", "data=2", "fsdp=2")


def test_a_target_has_it_in_its_words() -> None:
    target = Target("data=2,fsdp=8", ("tpu:v5p:2x2x2*2",), None, dcn="data=2")
    assert target.mesh_config == MeshConfig(data=2, fsdp=8, dcn=MeshConfig(data=2))
    words = ["--mesh", "data=2,fsdp=8", "--dcn", "data=2", "--platform", "tpu:v5p:2x2x2*2"]
    assert target.words() == words


@pytest.mark.parametrize(
    ("topology", "words"),
    [
        ("2x2x2*", "needs a number of slices behind *, 2 or more; write tpu:v5p:2x2x2*2 for two"),
        ("2x2x2*1", "needs a number of slices behind *"),
        ("2x2x2*2x2", "needs a number of slices behind *"),
        ("2*2*2", "needs a number of slices behind *"),
        ("2x2x*2", "has no topology like 2x2x2"),
        ("*2", "has no topology like 2x2x2"),
        ("64x64x8*9", "has more than 65536 devices"),
    ],
)
def test_wrong_spellings_of_slices(topology: str, words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)):
        Platform.parse(f"tpu:v5p:{topology}")


def test_gpus_have_hosts_and_no_slices() -> None:
    with pytest.raises(InputError, match="of hosts and of GPUs in each such as 4x8"):
        Platform.parse("cuda:h100:8*2")


def test_a_device_of_several_slices_has_its_own_memory() -> None:
    one, two = (Platform.parse(f"tpu:v5p:2x2x2{slices}").memory_bytes() for slices in ("", "*2"))
    assert one == two == int(95.74 * 2**30)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--dcn", "dat=2"), "dcn 'dat=2': a mesh has no axis 'dat'; did you mean 'data'?"),
        (("--dcn", "data=2"), "dcn data=2 needs 2 slices of 4 devices, and there are 1 of 8"),
        (("--dcn", "stage=2"), "mesh axis stage=1 does not divide into dcn stage=2 parts; choose"),
        (("--dcn", "data=0"), "dcn 'data=0': write data=N with a whole number of 1 or more"),
    ],
)
def test_a_division_that_cannot_be(run: Run, words: tuple[str, ...], said: str) -> None:
    ended = run("measure", "tiny", "--mesh", "data=2,fsdp=4", "--platform", "cpu", *words)
    assert (ended.code, said in ended.err) == (2, True), ended.err


def test_a_sweep_over_meshes_has_none(run: Run) -> None:
    sweep = ("--sweep", "mesh=data=8/fsdp=8")
    ended = run("compare", "tiny", *sweep, "--dcn", "data=2", "--platform", "cpu")
    assert "--dcn has no effect beside --sweep mesh" in ended.err


def test_slices_where_no_platform_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"libtpu": "0.0.42.1"}
    monkeypatch.setattr(platforms, "version", lambda package: found.get(package, ""))
    monkeypatch.setattr(platforms, "required", lambda extra, package: "")
    assert platforms.default_platform(16, on_mesh=True, slices=2)[0] == "tpu:v5p:2x2x2*2"
    found |= {"libtpu": "", "jax-cuda13-plugin": "1", "jax": "1", "nvidia-cuda-nvcc": "1"}
    assert platforms.default_platform(16, on_mesh=True, slices=2)[0] == "cuda:h100:2x8"
    assert platforms.default_platform(8, on_mesh=True)[0] == "cuda:h100:8"


# The figures of the lab beside a compile by hand, with a division of `fsdp` over two networks.
COMPILED = """
import json, sys
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from nnx_pipeline import MeshConfig, lab, make_mesh
from nnx_pipeline.lab.compile.platform import Platform
platform = Platform.parse(sys.argv[1])
config = MeshConfig.parse(sys.argv[2], dcn="fsdp=2")
mesh = make_mesh(config, platform.devices(1), sharding="auto")
def of(shape, *axes):
    return jax.ShapeDtypeStruct(shape, "bfloat16", sharding=NamedSharding(mesh, P(*axes)))
def f(x, w):
    return jnp.sum(jnp.tanh(x @ w))
arguments = of((4096, 512), ("data", "fsdp")), of((512, 512), "fsdp")
with jax.set_mesh(mesh):
    by_hand = jax.jit(jax.grad(f, 1)).lower(*arguments).compile(platform.compiler_options)
found = lab.measure(jax.grad(f, 1), *arguments, mesh=config, platform=platform)
sizes = by_hand.memory_analysis()
names = ("argument", "output", "temp")
print(json.dumps({
    **found.to_json(),
    "by_hand": [getattr(sizes, f"{name}_size_in_bytes") for name in names],
    "lab": [getattr(found.memory, f"{name}_bytes") for name in names],
}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("platform", "mesh", "compiler"),
    [
        ("tpu:v5p:2x2x1*2", "data=2,fsdp=4", "libtpu"),
        ("tpu:tpu7x:2x2x1*2", "data=4,fsdp=4", "libtpu"),
        ("cuda:h100:2x4", "data=2,fsdp=4", "jax_cuda13_plugin"),
    ],
)
def test_a_program_over_two_networks(platform: str, mesh: str, compiler: str) -> None:
    if missing(compiler):
        pytest.skip(f"{compiler} is not installed")
    done = run_fresh(COMPILED, platform, mesh, environment=user_environment())
    assert done.code == 0, done.err
    found = done.json
    assert found["by_hand"] == found["lab"]
    assert found["dcn"] == {"fsdp": 2}
    assert found["time"]["collective_seconds"] > 0
    assert found["time"]["step_seconds"] is not None
    # Of a network between slices of TPUs the rate alone counts; for GPUs XLA's model has the rest.
    assert found["time"]["is_partial"] == platform.startswith("tpu")
    assert sum(kind["executed"] for kind in found["collectives"].values()) >= 2
