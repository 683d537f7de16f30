"""The frozen config of the whole, which checks what its parts must have in common.

The mesh is not part of `Config`; `Config.check_mesh` says why a mesh does not fit.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field

from nnx_pipeline.config._fields import MOST_PARAMETERS
from nnx_pipeline.config._stage_layers import numbers_in
from nnx_pipeline.config.model import ModelConfig
from nnx_pipeline.config.parameter_count import count_parameters
from nnx_pipeline.config.pipeline import PipelineConfig
from nnx_pipeline.config.train import TrainConfig
from nnx_pipeline.lab import errors
from nnx_pipeline.lab.errors import InputError, counted, do_not_split
from nnx_pipeline.lab.mesh import MeshConfig


@dataclass(frozen=True, kw_only=True)
class Config:
    """A model, how it is pipelined and how it is trained.

    Raises InputError when the global batch does not split into the given number of microbatches, or
    one expert has a load to balance.
    """

    model: ModelConfig
    """The architecture."""
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    """How the layers run over the `stage` axis of the mesh."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """The batch, the loss and the optimizer."""

    def __post_init__(self) -> None:
        parameters = count_parameters(self.model).total
        if parameters > MOST_PARAMETERS:
            raise InputError(
                f"a model of these sizes has {parameters:,} parameters, more than "
                f"{MOST_PARAMETERS:,}; choose smaller ones, such as model.embed_dim, "
                "model.mlp_dim, model.num_heads or model.num_experts"
            )
        if self.pipeline.num_microbatches is not None:
            self._check_batch(self.pipeline.num_microbatches)
        if self.train.master_dtype == self.model.param_dtype:
            raise InputError(
                f"train.master_dtype={self.train.master_dtype!r} is what the parameters are stored "
                "in already; leave it at None, or set model.param_dtype to bfloat16"
            )
        for name in ("load_balance_weight", "router_z_loss_weight"):
            weight = getattr(self.train, name)
            if self.model.num_experts == 1 and weight > 0:
                raise InputError(
                    f"train.{name}={weight} weighs the loss of a router, which "
                    "model.num_experts=1 does not have; set it to 0"
                )

    def _check_batch(self, microbatches: int, mesh: MeshConfig | None = None) -> None:
        batch = self.train.global_batch
        rule = f"a batch of {batch} (train.global_batch) does not split into"
        errors.divides(
            microbatches,
            batch,
            rule=f"{rule} {microbatches} microbatches",
            cure=self._other_cure(microbatches, mesh or MeshConfig()),
        )

    def _other_cure(self, microbatches: int, mesh: MeshConfig) -> str:
        """What else than another batch helps: the next number of microbatches into which it splits,
        if there is one."""
        part, rest = divmod(self.train.global_batch, mesh.product("data", "fsdp", "expert"))
        fewest = self.pipeline.forwarding_delay * mesh.stage
        known = [one for one in errors.divisors(part) if one % mesh.stage == 0 and one >= fewest]
        fitting = [] if rest else known
        if not fitting:
            return "for the batch"
        nearest = max((one for one in fitting if one < microbatches), default=fitting[0])
        return f"for the batch, or pipeline.num_microbatches={nearest}"

    def layers_per_stage(self, stages: int) -> int:
        """The most layers that one of `stages` stages applies to a microbatch per visit."""
        numbers = numbers_in(self.pipeline.stage_layers)
        even = -(-self.model.num_pipeline_layers // (stages * self.pipeline.num_repeats))
        return even if not numbers or stages == 1 else max(numbers)

    def for_batch(self, batch: int, length: int | None = None) -> "Config":
        """The same config with a global batch of `batch` sequences of `length` tokens, if not None.

        Raises InputError where the batch, or the loss of that length, does not split.
        """
        length = self.train.sequence_length if length is None else length
        train = dataclasses.replace(self.train, global_batch=batch, sequence_length=length)
        return dataclasses.replace(self, train=train)

    def check_mesh(self, mesh: MeshConfig, length: int | None = None) -> None:
        """Raises InputError, which says what to change, unless everything divides over `mesh`.

        `length` is that of the sequences; None for `train.sequence_length`.
        """
        self.check_weights(mesh)
        self._check_length(self.train.sequence_length if length is None else length)
        self._check_groups(mesh)
        self._check_pipeline(mesh)
        self._check_batch_on(mesh)

    def check_weights(self, mesh: MeshConfig) -> None:
        """Raises InputError, which says what to change, unless `mesh` can hold the weights."""
        for divisor, size, rule in self.weight_rules(mesh):
            errors.divides(divisor, size, rule=rule, cure="or another mesh")

    def weight_rules(self, mesh: MeshConfig) -> Iterator[tuple[int, int, str]]:
        """(divisor, size, rule) of each condition under which `mesh` can hold the weights.

        The divisor must divide the size, and the rule is the text that says so.
        """
        model, repeats = self.model, self.pipeline.num_repeats
        if self.pipeline.stage_layers is None:
            dense = f" - num_dense_layers={model.num_dense_layers}"
            which = f"{model.num_layers}{dense if model.num_dense_layers else ''}"
            parts = f"{counted(mesh.stage, 'stage')} × {counted(repeats, 'repeat')}"
            rule = f"model.num_layers={which} does not split into {parts}"
            yield mesh.stage * repeats, model.num_pipeline_layers, rule
            kinds, per_stage = len(model.of_kinds), self.layers_per_stage(mesh.stage)
            rule = f"{do_not_split(per_stage, 'layer')} by {kinds} kinds that take turns"
            yield kinds, per_stage, f"on a stage {rule}"
        for name, axes in MODEL_DIVISORS.items():
            divisor, size, spread = mesh.product(*axes), getattr(model, name), "×".join(axes)
            rule = f"model.{name}={size} does not split over {spread}={divisor} of the mesh"
            if size is not None:
                yield divisor, size, rule
        if self.train.shard_optimizer_over_data:
            shards = mesh.product("fsdp", "expert", "data")
            for name in ("embed_dim", "kv_lora_rank", "q_lora_rank"):
                size = getattr(model, name)
                rule = f"model.{name}={size} does not split over fsdp×expert×data={shards} {_ZERO1}"
                if size is not None:
                    yield shards, size, rule

    def _check_length(self, length: int) -> None:
        longest = self.model.max_position_embeddings
        if longest is not None and length > longest:
            raise InputError(
                f"sequences of {length} tokens (train.sequence_length) are longer than the model "
                f"was made for, model.max_position_embeddings={longest}; shorten them, or set "
                "max_position_embeddings to their length or to None"
            )

    def _check_groups(self, mesh: MeshConfig) -> None:
        group, num = self.model.expert_group, self.model.num_experts // mesh.expert
        if group is not None:
            rule = f"the {num} experts that a device of expert={mesh.expert} has do not split into "
            errors.is_divisor(group, num, rule=f"{rule}groups of model.expert_group={group}")

    def _check_pipeline(self, mesh: MeshConfig) -> None:
        stages, repeats = mesh.stage, self.pipeline.num_repeats
        microbatches = self.pipeline.microbatches_on(stages)
        if mesh.context > 1:
            raise InputError(
                f"mesh axis context={mesh.context} is not supported by attention yet; use context=1"
            )
        rule = f"pipeline.num_microbatches={microbatches} does not split over stage={stages}"
        errors.divides(stages, microbatches, rule=rule)
        fewest = self.pipeline.forwarding_delay * stages
        if microbatches < fewest:
            raise InputError(
                f"pipeline.num_microbatches={microbatches} is too few for stage={stages} with "
                f"pipeline.forwarding_delay={self.pipeline.forwarding_delay}; choose {fewest} or "
                "more"
            )
        at_once = microbatches == fewest or self.pipeline.schedule == "1f1b"
        if self.pipeline.shift == "pad" and repeats > 1 and at_once:
            raise InputError(
                "pipeline.shift=pad sends nothing from the last stage to the first, but with "
                f"pipeline.num_microbatches={microbatches} and "
                f"pipeline.schedule={self.pipeline.schedule} the first stage takes its input "
                "directly from the last; choose 'slice', or circular with more microbatches"
            )

    def _check_batch_on(self, mesh: MeshConfig) -> None:
        microbatches = self.pipeline.microbatches_on(mesh.stage)
        self._check_batch(microbatches, mesh)
        copies = mesh.data * mesh.fsdp * mesh.expert
        microbatch = self.train.global_batch // microbatches
        errors.divides(
            copies * microbatches,
            self.train.global_batch,
            rule=f"a microbatch of {counted(microbatch, 'sequence')} does not split over "
            f"data={mesh.data} × fsdp={mesh.fsdp} × expert={mesh.expert}, with a batch "
            f"of {self.train.global_batch} (train.global_batch) in "
            f"{counted(microbatches, 'microbatch')}",
            cure=self._other_cure(microbatches, mesh),
        )
        parts, num = self.pipeline.batch_split, microbatch // copies
        rule = f"a device has {counted(num, 'sequence')} of a microbatch, which "
        rule += f"pipeline.batch_split={parts} does not divide"
        errors.is_divisor(parts, num, rule=rule)

    def check_objective(self, stages: int, *, segments: bool) -> None:
        """Raises InputError where the loss would depend on the number of stages of the mesh.

        The load-balance loss is computed per microbatch (see `PipelineConfig`), and with
        `segments`, where microbatches may differ in padding, so is the z-loss. If one of them has a
        weight and the mesh has stages, the number of microbatches must be given.
        """
        default = self.pipeline.microbatches_on(stages)
        names = ("load_balance_weight", *["router_z_loss_weight"] * segments)
        weighed = [name for name in names if getattr(self.train, name) > 0]
        if weighed and self.pipeline.num_microbatches is None and default > 1:
            name, weight = weighed[0], getattr(self.train, weighed[0])
            raise InputError(
                f"the router's loss, which train.{name}={weight} adds, depends on the number of "
                "microbatches, and pipeline.num_microbatches=None makes that depend on the mesh "
                f"(here it is {default}); set pipeline.num_microbatches={default}, on every mesh"
            )


# With ZeRO-1 every device along `data` needs an equal part of each weight.
_ZERO1 = "of the mesh, as train.shard_optimizer_over_data=True requires (False does not)"

# Sizes of the model and the mesh axes over which arrays of that size are sharded (see
# `sharding.Layout`). The vocabulary may have any size, see `Layout.for_vocabulary`.
MODEL_DIVISORS = {
    "embed_dim": ("fsdp", "expert"),
    "kv_lora_rank": ("fsdp", "expert"),
    "q_lora_rank": ("fsdp", "expert"),
    "mlp_dim": ("tensor",),
    "dense_mlp_dim": ("tensor",),
    "num_heads": ("tensor",),
    "num_kv_heads": ("tensor",),
    "num_experts": ("expert",),
}

SECTIONS = {"model": ModelConfig, "pipeline": PipelineConfig, "train": TrainConfig}


def to_dict(config: Config) -> dict[str, dict[str, object]]:
    """The config as nested dictionaries of plain values, ready for JSON."""
    return dataclasses.asdict(config)
