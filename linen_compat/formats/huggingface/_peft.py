"""Adapters of PEFT: folders of `adapter_config.json` and `adapter_model.safetensors`.

A weight `[out, in]` of the model grows by scale · B · A. Other tensors of an adapter, such as
biases and `modules_to_save`, take the place of those of the model.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from linen_compat.formats._streams import ArraySpec, Mismatch
from linen_compat.formats.huggingface._architecture import Allowed, Keys, Only
from linen_compat.formats.huggingface._folder import TensorFolder
from linen_compat.formats.huggingface._tensors import Index
from linen_compat.formats.huggingface.config import read_json
from nnx_pipeline import InputError
from nnx_pipeline.lab._files import place
from nnx_pipeline.lab.errors import shown

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_LORA = re.compile(r"(.+)\.lora_(embedding_)?([AB])(?:\.weight)?")
_TABLE, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
PATTERNS = ("rank_pattern", "alpha_pattern")
_READ = ("r", "lora_alpha", "target_modules", *PATTERNS)
_AT_START = (True, False, None, "gaussian", "eva", "orthogonal")
_NO_PRODUCT = "it is not the product of two matrices that is merged here"
_ONLY: Only = {
    "peft_type": Allowed(("LORA",), "adapters of LoRA alone are merged"),
    "task_type": Allowed(("CAUSAL_LM", None), "the model here predicts the next token"),
    "init_lora_weights": Allowed(_AT_START, "PEFT then changes the weights of the model too"),
    **dict.fromkeys(
        ("use_dora", "use_qalora", "lora_bias", "use_bdlora", "kasa_config", "monteclora_config"),
        Allowed((False, None), _NO_PRODUCT),
    ),
    "alora_invocation_tokens": Allowed((None,), "it changes some positions alone"),
    "arrow_config": Allowed((None,), "it chooses among several adapters"),
    "layer_replication": Allowed((None,), "it changes the number of layers"),
    "target_parameters": Allowed((None, []), "experts in one tensor have no adapter here"),
    "trainable_token_indices": Allowed((None,), "rows of the table have no adapter here"),
    "use_rslora": Allowed((True, False, None), "it is true or false"),
    "ensure_weight_tying": Allowed((False, None), "tied embeddings have no adapter here"),
    "megatron_config": Allowed((None,), "the model here is one of transformers"),
}
# Which modules have an adapter the tensors say, and `fan_in_fan_out` has no effect on linear layers
# of torch, which all classes here have. The others are about training.
_IGNORED = {
    *("base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version"),
    *("lora_dropout", "fan_in_fan_out", "bias", "modules_to_save", "exclude_modules"),
    *("layers_to_transform", "layers_pattern", "megatron_core", "qalora_group_size"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config"),
}


@dataclass(frozen=True)
class Pair:
    """The names of the two matrices of a module, and the factor on their product."""

    a: str
    b: str
    scale: float
    is_embedding: bool


class Adapter:
    """An adapter, by the names of the tensors of the model that it changes.

    Raises InputError for what is no adapter of LoRA, and for keys that are not computed here, and
    Mismatch for tensors that contradict the keys.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = place(folder)
        self._values = _read_values(self.folder)
        self._tensors = TensorFolder(self.folder, TENSORS)
        self.pairs: dict[str, Pair] = {}
        self.replaced: dict[str, str] = {}
        found: dict[str, dict[str, str]] = {}
        for name in self.specs:
            inner = name.removeprefix(_PREFIX)
            lora = _LORA.fullmatch(inner)
            if inner == name or ("lora_" in inner and not lora):
                raise Mismatch(f"{name} in {self.folder} is no tensor of LoRA that is merged here")
            if lora:
                found.setdefault(lora[1], {})[f"{lora[2] or ''}{lora[3]}"] = name
            elif self.replaced.setdefault(inner.replace(".base_layer.", "."), name) != name:
                raise Mismatch(
                    f"{name} in {self.folder} is there twice, with base_layer and without"
                )
        for module, parts in found.items():
            self.pairs[f"{module}.weight"] = self._pair(module, parts)

    @property
    def files(self) -> list[Path]:
        return [self.folder / name for name in (CONFIG, TENSORS)]

    @property
    def specs(self) -> Mapping[str, ArraySpec]:
        """Shape and dtype of each tensor of the adapter itself."""
        return self._tensors.specs

    def problems(self, specs: Mapping[str, ArraySpec]) -> list[str]:
        """One line for each tensor that a model with these tensors cannot take."""
        shapes = {name: self._shape(pair) for name, pair in self.pairs.items()}
        changed = {name: [pair.a, shapes[name]] for name, pair in self.pairs.items()}
        changed |= {name: [of, self.specs[of].shape] for name, of in self.replaced.items()}
        tied, wrong = _HEAD not in specs, []
        for name, (of, shape) in changed.items():
            if tied and name in (_TABLE, _HEAD):
                wrong.append(f"{of} changes one of two tied embeddings, which is not supported")
            elif name not in specs:
                wrong.append(f"{of} of the adapter is for {name}, which the model does not have")
            elif shape != specs[name].shape:
                wrong.append(
                    f"{of} of the adapter is for {name} of shape {[*shape]}, the model has "
                    f"{[*specs[name].shape]}"
                )
        return wrong

    def changes(self, names: tuple[str, ...]) -> bool:
        return any(name in self.pairs for name in names)

    def delta(self, name: str, index: Index) -> np.ndarray | None:
        """What a part of a tensor grows by, in float32; None where it stays as it is."""
        if (pair := self.pairs.get(name)) is None:
            return None
        rows, columns, whole = *index, slice(None)
        if pair.is_embedding:  # its matrices are for the table's transpose
            a, b = self.read(pair.a, (whole, rows)), self.read(pair.b, (columns, whole))
            product = (b @ a).T
        else:
            product = self.read(pair.b, (rows, whole)) @ self.read(pair.a, (whole, columns))
        grown: np.ndarray = product * np.float32(pair.scale)
        return grown

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        """A part of one of the adapter's own tensors in float32."""
        return self._tensors.read(name, index).astype(np.float32)

    def _pair(self, module: str, parts: Mapping[str, str]) -> Pair:
        embedding = "embedding_A" in parts
        a, b = (("embedding_" if embedding else "") + letter for letter in "AB")
        if parts.keys() != {a, b}:
            raise Mismatch(f"{next(iter(parts.values()))} in {self.folder} has no second matrix")
        if not is_target(self._values.get("target_modules"), module):
            raise Mismatch(f"{parts[a]} in {self.folder} is not among its target_modules")
        rank = _by_pattern(self._values, "rank_pattern", "r", module)
        alpha = _by_pattern(self._values, "alpha_pattern", "lora_alpha", module)
        left, right = (self.specs[parts[name]].shape for name in (a, b))
        if len(left) != 2 or (left[:1], right[1:]) != ((rank,), (rank,)):
            raise Mismatch(f"{parts[a]} in {self.folder} is not of rank {rank:g}, as {CONFIG} says")
        root = math.sqrt(rank) if self._values.get("use_rslora") else rank
        return Pair(parts[a], parts[b], alpha / root, embedding)

    def _shape(self, pair: Pair) -> tuple[int, ...]:
        """Of the tensor of the model."""
        outputs, inputs = self.specs[pair.b].shape[0], self.specs[pair.a].shape[1]
        return (inputs, outputs) if pair.is_embedding else (outputs, inputs)


def _read_values(folder: Path) -> Keys:
    for name in (CONFIG, TENSORS):
        if not (folder / name).is_file():
            raise InputError(
                f"{folder} holds no {name}; give the folder of an adapter as PEFT saves it (no "
                "pickle), or as MaxText does (an Orbax checkpoint)"
            )
    values = checked_values(folder / CONFIG)
    if "peft_type" not in values:
        raise InputError(
            f"{folder / CONFIG}: peft_type is missing; it is 'LORA' where PEFT saved an adapter"
        )
    return values


def checked_values(where: Path) -> Keys:
    """The values of an adapter's config; raises InputError for any that is not computed here."""
    values = read_json(where)
    for key, value in values.items():
        allowed, reason = _ONLY.get(key, ((), ""))
        if allowed and not any(value is one or value == one for one in allowed):
            raise InputError(
                f"{where}: {key}={shown(value)} is not supported, only {allowed[0]!r}: {reason}"
            )
        if value and key not in (*_READ, *_ONLY, *_IGNORED):
            raise InputError(f"{where}: {key}={shown(value)} is not a known key of LoRA")
    for key in ("r", "lora_alpha"):
        check_number(where, key, values.get(key))
    for key in PATTERNS:
        if not isinstance(values.get(key) or {}, dict):
            raise InputError(f"{where}: {key}={shown(values[key])} is not an object")
        for pattern, value in (values.get(key) or {}).items():
            check_number(where, f"{key}.{pattern}", value)
    return values


def _by_pattern(values: Keys, patterns: str, usual: str, module: str) -> float:
    """The value of the first pattern that is the end of a module's name, as PEFT chooses it."""
    for pattern, value in (values.get(patterns) or {}).items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                return float(value)
        except re.error as error:
            raise InputError(f"{CONFIG}: {patterns} has {pattern!r}: {error}") from error
    return float(values[usual])


def check_number(file: Path, key: str, value: Any) -> None:
    """Raises InputError for what is no rank, or no alpha."""
    is_rank = key == "r" or key.startswith(PATTERNS[0])
    number = isinstance(value, int if is_rank else int | float) and not isinstance(value, bool)
    if number and -math.inf < value < math.inf and (value >= 1 or not is_rank):
        return
    what = "a whole number of 1 or more" if is_rank else "a number"
    raise InputError(f"{file}: {key}={shown(value)} is not {what}; state that of the training")


def is_target(targets: object, module: str) -> bool:
    """Whether a module is among the `target_modules` of an adapter."""
    if targets is None or targets == "all-linear":
        return True
    if isinstance(targets, str):
        try:
            return re.fullmatch(targets, module) is not None
        except re.error as error:
            raise InputError(f"{CONFIG}: target_modules={targets!r}: {error}") from error
    if not isinstance(targets, list):
        raise InputError(f"{CONFIG}: target_modules={shown(targets)} is no list of names")
    return any(module == one or module.endswith(f".{one}") for one in targets)
