"""Adapters of MaxText, merged while a model is read: W + A · B · alpha / rank in float64."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from helpers import mesh_of, replace
from huggingface_reference import FOLDER
from maxtext_data import (
    DATA,
    LAYERS,
    Leaves,
    checkpoint,
    config_of,
    laid_out,
    lists,
    nested,
    parameters,
    read,
    write,
)

from linen_compat import config_from_huggingface, load
from linen_compat.checkpoints._convert import From, To, plan
from linen_compat.formats._in_memory import parameter_paths
from linen_compat.formats._maxtext_lora import MaxTextAdapter, MaxTextChanges
from linen_compat.formats._streams import Mismatch
from nnx_pipeline import Config, InputError

RANK, ALPHA = 3, 7.0
ATTENTION = tuple(f"self_attention/{name}" for name in ("query", "key", "value", "out"))
TARGETS = ["q_proj", "self_attention.key", "v_proj", "o_proj"]
# Whether the matrices are those of the server, and where the layers of a stack are; None is apart.
STYLES = {
    "served, scanned": (True, 1),
    "served, apart": (True, None),
    "trained, layers second": (False, 1),
    "trained, layers first": (False, 0),
    "trained, apart": (False, None),
    "trained, in a list": (False, None),
}
PARAMS = "params/params/"
QUERY = f"{PARAMS}decoder/layers/self_attention/query/"
STATED = {"r": RANK, "lora_alpha": ALPHA, "target_modules": TARGETS}

Matrices = dict[str, list[tuple[np.ndarray, np.ndarray]]]


def matrices(base: Leaves, kernels: Iterable[str] = ATTENTION) -> Matrices:
    """A and B of each layer by kernel; all but the rank have the axes of the kernel."""
    rng, result = np.random.default_rng(0), {}
    for kernel in kernels:
        shape, axes = base[f"decoder/layers_0/{kernel}/kernel"].shape, 1 + kernel.endswith("/out")
        shapes = (*shape[:axes], RANK), (RANK, *shape[axes:])
        result[kernel] = [
            tuple(rng.normal(size=x).astype(np.float32) for x in shapes) for _ in range(LAYERS)
        ]
    return result


def leaves_of(of: Matrices, style: str) -> Leaves:
    served, axis = STYLES[style]
    leaves = {}
    for kernel, layers in of.items():
        for letter, pair in zip("ab", zip(*layers, strict=True), strict=True):
            flat = [x.reshape((-1, RANK) if letter == "a" else (RANK, -1)) for x in pair]
            end = f"{kernel}/lora_{letter}.kernel" if served else f"{kernel}/kernel_lora_{letter}"
            arrays, start = (pair, PARAMS) if served else (flat, "")
            end += "" if served else "/value"
            mark = "/" if style.endswith("list") else "_"
            if axis is None:
                each = {f"{start}decoder/layers{mark}{n}/{end}": x for n, x in enumerate(arrays)}
                leaves |= each
            else:
                leaves[f"{start}decoder/layers/{end}"] = np.stack(arrays, axis)
    return leaves


def save(
    folder: Path, leaves: Leaves, stated: Mapping[str, object] | None, lora: Any = None
) -> Path:
    """As MaxText does: a step of a manager, with metadata or a config beside it."""
    with ocp.CheckpointManager(folder) as manager:
        items = ocp.args.PyTreeSave({"step": 0, **lists(nested(leaves))})
        custom = None if lora is None else {"lora": lora}
        manager.save(0, args=ocp.args.Composite(items=items), custom_metadata=custom)
    if stated is not None:
        (folder / "adapter_config.json").write_text(json.dumps(stated))
    return folder


def adapter(folder: Path, of: Matrices, style: str = "served, scanned") -> Path:
    trained = {"lora_rank": RANK, "lora_alpha": ALPHA, "lora_weight_qtype": None}
    served = STYLES[style][0]
    return save(folder, leaves_of(of, style), *((STATED, None) if served else (None, trained)))


def grown(base: Leaves, of: Matrices) -> dict[str, np.ndarray]:
    """The kernels in float64, without any code of the project."""
    result = {}
    for kernel, layers in of.items():
        for n, (a, b) in enumerate(layers):
            name = f"decoder/layers_{n}/{kernel}/kernel"
            flat = a.reshape(-1, RANK).astype(np.float64) @ b.reshape(RANK, -1).astype(np.float64)
            whole = base[name].astype(np.float64)
            result[name] = whole + flat.reshape(whole.shape) * ALPHA / RANK
    return result


def assert_merged(folder: Path, base: Leaves, of: Matrices, rtol: float = 1e-6) -> None:
    """A checkpoint with its layers apart has the kernels of `grown`, and else those of `base`."""
    found = {name.removeprefix(PARAMS): leaf for name, leaf in read(folder).items()}
    found.pop("step", None)
    expected = grown(base, of)
    assert found.keys() == base.keys()
    for name, leaf in base.items():
        assert found[name].dtype == leaf.dtype, name
        if name in expected:
            got = found[name].astype(np.float64)
            np.testing.assert_allclose(got, expected[name], rtol=rtol, atol=1e-5, err_msg=name)
        else:
            np.testing.assert_allclose(found[name], leaf, rtol=rtol, err_msg=name)


def convert(base: Path, to: Path, format: str, config: Config, **options: Any) -> Path:
    stages = 2 if format == "maxtext:pipelined" else None
    plan(From(base, config=config, parameters_only=True, **options), To(to, format, stages)).run()
    return to


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write(tmp_path / "base", {PARAMS + name: leaf for name, leaf in parameters().items()})


@pytest.mark.parametrize("style", STYLES)
def test_each_way_to_store_matrices(style: str, base: Path, tmp_path: Path) -> None:
    of = matrices(parameters())
    folder = adapter(tmp_path / "adapter", of, style)
    out = convert(base, tmp_path / "out", "maxtext:unscanned", config_of(), adapter=folder)
    assert_merged(out, parameters(), of)


@pytest.mark.parametrize("format", ["maxtext:scanned", "maxtext:pipelined", "nnx", "huggingface"])
def test_merged_before_or_after_a_conversion(format: str, base: Path, tmp_path: Path) -> None:
    of, config = matrices(parameters()), config_of()
    folder, unscanned = adapter(tmp_path / "adapter", of), "maxtext:unscanned"
    plain = convert(base, tmp_path / "plain", format, config)
    merged = convert(base, tmp_path / "merged", format, config, adapter=folder)
    before = convert(merged, tmp_path / "before", unscanned, config)
    after = convert(plain, tmp_path / "after", unscanned, config, adapter=folder)
    for out in (before, after):
        assert_merged(out, parameters(), of)


@pytest.mark.parametrize("name", ["llama", "llama3_1", "qwen3"])
def test_a_model_of_hugging_face(name: str, tmp_path: Path) -> None:
    """Whose queries are scaled, and rotated as neighbours, where MaxText's are."""
    changes = {"rope_interleaved": True} if name == "llama3_1" else {}
    config = replace(config_from_huggingface(FOLDER / name), "model", **changes)
    plain = convert(FOLDER / name, tmp_path / "plain", "maxtext:unscanned", config)
    base = {leaf.removeprefix(PARAMS): array for leaf, array in read(plain).items()}
    of = matrices(base, (*ATTENTION, "mlp/wi_0", "mlp/wo"))
    folder = adapter(tmp_path / "adapter", of, "trained, layers second")
    out = convert(FOLDER / name, tmp_path / "out", "maxtext:unscanned", config, adapter=folder)
    assert_merged(out, base, of, rtol=2e-6)
    whole, parts = (
        load(FOLDER / name, config, adapter=folder, mesh=mesh)
        for mesh in (None, mesh_of("fsdp=2,tensor=2"))
    )
    for path, array in parameter_paths(whole).items():
        part = np.asarray(parameter_paths(parts)[path])
        np.testing.assert_allclose(part, np.asarray(array), rtol=0, atol=1e-5)


def test_kernels_keep_their_dtype(tmp_path: Path) -> None:
    kept = "scanned_params_only_bf16"
    config = config_of(kept)
    plain = convert(checkpoint(kept), tmp_path / "plain", "maxtext:unscanned", config)
    base = {leaf.removeprefix(PARAMS): array for leaf, array in read(plain).items()}
    base.pop("step", None)
    of = matrices(base)
    folder = adapter(tmp_path / "adapter", of)
    out = convert(checkpoint(kept), tmp_path / "out", "maxtext:unscanned", config, adapter=folder)
    assert {leaf.dtype for leaf in base.values()} == {np.dtype(ml_dtypes.bfloat16)}
    assert_merged(out, base, of, rtol=2**-8)


def served(edit: Callable[[Leaves], object], **stated: object) -> Callable[[Path], object]:
    """An adapter of the server with other arrays, and other values in its config."""

    def write_it(folder: Path) -> None:
        leaves = leaves_of(matrices(parameters()), "served, scanned")
        edit(leaves)
        values = {**STATED, **stated}
        save(folder, leaves, {key: value for key, value in values.items() if value is not None})

    return write_it


def three_layers(leaves: Leaves) -> None:
    leaves |= {name: leaf[:, :3] for name, leaf in leaves.items()}


def other_module(name: str) -> Callable[[Leaves], None]:
    def edit(leaves: Leaves) -> None:
        for letter in "ab":
            leaves[f"{PARAMS}{name}_lora_{letter}"] = np.ones((4, 4, RANK), np.float32)

    return edit


def apart(layers: int, more: int = 0) -> Callable[[Path], object]:
    """An adapter of the server with the first layers, or one after the last, of query alone."""

    def write_it(folder: Path) -> None:
        of = {ATTENTION[0]: matrices(parameters())[ATTENTION[0]]}
        leaves = leaves_of(of, "served, apart")
        kept = {name: leaf for name, leaf in leaves.items() if f"layers_{layers}" not in name}
        if more:
            kept |= {name.replace("layers_0", "layers_4"): leaf for name, leaf in kept.items()}
        save(folder, kept, STATED)

    return write_it


A, B = f"{QUERY}lora_a.kernel", f"{QUERY}lora_b.kernel"
REFUSED: dict[str, tuple[Callable[[Path], object], type[InputError], str]] = {
    "another rank": (served(dict, r=4), Mismatch, r"lora_a.kernel is \[32, 4, 3\] and not of rank"),
    "fewer layers": (
        served(three_layers),
        Mismatch,
        r"\[32, 3, 3\] and \[3, 3, 4, 8\] instead of \[32, 4, 3\] and \[3, 4, 4, 8\] for 4 layers",
    ),
    "fewer layers, apart": (
        apart(3),
        Mismatch,
        "query/kernel has matrices in 3 layers of the adapter, and the model has 4",
    ),
    "more layers, apart": (
        apart(9, more=1),
        Mismatch,
        r"for decoder/layers_4/self_attention/query/kernel, which is no kernel of .* with 4 layers",
    ),
    "a module of another model": (
        served(other_module("decoder/layers/mlp/wi_0/kernel")),
        Mismatch,
        "kernel_lora_a of the adapter is for decoder/layers/mlp/wi_0/kernel, which is no kernel",
    ),
    "experts": (
        served(other_module("decoder/layers/MoeBlock_0/wi_0")),
        Mismatch,
        "is for decoder/layers/MoeBlock_0/wi_0, which is no kernel",
    ),
    "other targets": (
        served(dict, target_modules=TARGETS[1:]),
        Mismatch,
        "query/lora_a.kernel is not among the target_modules of",
    ),
    "half a pair": (
        served(lambda leaves: leaves.pop(B)),
        Mismatch,
        "query/lora_a.kernel in .* has no second matrix; take a whole copy",
    ),
    "matrices twice": (
        served(other_module("decoder/layers/self_attention/query/kernel")),
        Mismatch,
        "query/kernel in .* has matrices twice",
    ),
    "a layer in a stack and apart": (
        served(
            lambda leaves: leaves.update(
                {
                    A.replace("layers", "layers_0"): np.ones((32, RANK), np.float32),
                    B.replace("layers", "layers_0"): np.ones((RANK, 4, 8), np.float32),
                }
            )
        ),
        Mismatch,
        "is for layers that other matrices of the adapter are for too",
    ),
    "whole numbers": (
        served(lambda leaves: leaves.update({A: np.ones((32, 4, RANK), np.int32)})),
        Mismatch,
        "query/lora_a.kernel is int32, but matrices must be floating-point",
    ),
    "no alpha": (served(dict, lora_alpha=None), InputError, "lora_alpha=None is not a number"),
    "nothing stated": (
        lambda folder: save(folder, {A: np.ones(1), B: np.ones(1)}, None),
        InputError,
        "does not say rank and alpha of the adapter .*; write those of its training to",
    ),
    "no rank in the metadata": (
        lambda folder: save(folder, {A: np.ones(1), B: np.ones(1)}, None, {"lora_alpha": 1.0}),
        InputError,
        "_CHECKPOINT_METADATA: r=None is not a whole number",
    ),
    "no table in the metadata": (
        lambda folder: save(folder, {A: np.ones(1), B: np.ones(1)}, None, [1]),
        InputError,
        "_CHECKPOINT_METADATA: r=None is not a whole number",
    ),
    "two statements": (
        lambda folder: save(
            folder, {A: np.ones(1), B: np.ones(1)}, STATED, {"lora_rank": RANK, "lora_alpha": 99}
        ),
        InputError,
        "says r=3 and lora_alpha=.*, and .*_CHECKPOINT_METADATA 3 and 99; remove the one that",
    ),
    "another factor": (
        served(dict, use_rslora=True),
        InputError,
        "use_rslora=True is not supported in an adapter of MaxText, which multiplies by",
    ),
    "several ranks": (
        served(dict, rank_pattern={"q_proj": 2}),
        InputError,
        "rank_pattern={'q_proj': 2} is not supported in an adapter of MaxText",
    ),
    "a model": (
        lambda folder: save(folder, {f"{QUERY}kernel": np.ones(1)}, STATED),
        InputError,
        "holds no matrices of LoRA",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_in_a_line(
    name: str, base: Path, tmp_path: Path, bridge: Any
) -> None:
    write_it, kind, message = REFUSED[name]
    write_it(tmp_path / "adapter")
    with pytest.raises(kind, match=message) as found:
        load(base, config_of(), adapter=tmp_path / "adapter")
    assert "\n" not in str(found.value)
    config = DATA / "unscanned" / "config.yml"
    ended = bridge("check", base, "--config", config, "--adapter", tmp_path / "adapter")
    assert ended.code == (1 if kind is Mismatch else 2)


def test_a_stack_that_does_not_tell_its_axis(tmp_path: Path) -> None:
    config = replace(config_from_huggingface(FOLDER / "llama"), "model", mlp_dim=LAYERS)
    kernel = "decoder/layers/mlp/wo/kernel_lora_"
    shapes = {kernel + "a": (LAYERS,) * 3, kernel + "b": (LAYERS, LAYERS, 16)}
    leaves = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    stated = {"r": LAYERS, "lora_alpha": 1}
    changes = MaxTextChanges(MaxTextAdapter(save(tmp_path, leaves, stated)), config.model)
    assert "which does not tell the axis of layers" in "".join(changes.problems)


def test_a_model_that_maxtext_rotates_in_another_order(tmp_path: Path) -> None:
    """The config of the folder has halves, and MaxText's Llama 3.1 neighbours."""
    folder = adapter(tmp_path, matrices(parameters()))
    with pytest.raises(Mismatch, match=r"set model.rope_interleaved to True"):
        load(FOLDER / "llama3_1", adapter=folder)


def test_matrices_in_a_checkpoint_are_named_or_merged(tmp_path: Path, bridge: Any) -> None:
    of, config = matrices(parameters()), config_of()
    leaves = {PARAMS + name: leaf for name, leaf in laid_out(parameters(), "scanned").items()}
    both = save(tmp_path / "both", {**leaves, **leaves_of(of, "served, scanned")}, STATED)
    with pytest.raises(Mismatch, match="and 7 other arrays are matrices of LoRA, which are not in"):
        load(both, config)
    command = (
        "check",
        both,
        "--config",
        DATA / "unscanned" / "config.yml",
        "--read",
        "--json",
        "-",
    )
    assert bridge(*command).code == 1
    ended = bridge(*command, "--adapter", both)
    assert ended.code == 0
    size = sum(
        leaf.nbytes for leaf in (*leaves.values(), *leaves_of(of, "served, scanned").values())
    )
    assert 0 <= json.loads(ended.out)["read_bytes"] - size <= 8  # and the step
    out = convert(both, tmp_path / "out", "maxtext:unscanned", config, adapter=both)
    assert_merged(out, parameters(), of)


def test_an_adapter_is_no_model(tmp_path: Path, bridge: Any) -> None:
    folder = adapter(tmp_path / "adapter", matrices(parameters()))
    ended = bridge("convert", folder, tmp_path / "out", "--to", "nnx")
    assert (ended.code, "it is an adapter; give the folder of its model" in ended.err) == (2, True)
