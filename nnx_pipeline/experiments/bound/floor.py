"""The floor of a training step: what any program for it must hold, and how long it must take."""

from nnx_pipeline.config.config import Config
from nnx_pipeline.experiments.bound._expected import expected
from nnx_pipeline.experiments.bound._moments import moments
from nnx_pipeline.experiments.bound._sizes import Sizes, bytes_of, on_mesh
from nnx_pipeline.lab._timing.devices import Device, device_of
from nnx_pipeline.lab.attribution._floor import Floor, LeastTime, Term
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.mesh import MeshConfig
from nnx_pipeline.train._useful import bubble_share, flops_outside_layers, peak_of, useful_flops


def floor(config: Config, mesh: MeshConfig | str, platform: Platform | str | None = None) -> Floor:
    """The bytes per device that a training step must hold at its peak, and its least time.

    - `config`: of model, pipeline and training; the floor lists the options that it ignores.
    - `mesh`: the size of each mesh axis, or a text such as `stage=4,fsdp=2`.
    - `platform`: the device whose peak gives the time, for which the layers choose how many experts
      they compute at a time, and whose compiler's heap is expected. None leaves out the time and
      what is expected, and the layers choose as for a TPU. Only for a TPU v5p is a heap expected.

    Nothing is compiled and no device is needed. An array counts wherever it is held: a TPU may keep
    some of them in its on-chip memory, which is no part of a heap. Raises InputError when config
    and mesh do not fit together.
    """
    mesh = MeshConfig.parse(mesh) if isinstance(mesh, str) else mesh
    platform = Platform.parse(platform) if isinstance(platform, str) else platform
    unknown = _unknown(config, mesh)
    device = device_of(platform.kind, platform.target) if platform else None
    with on_mesh(config, mesh, platform.backend if platform else "tpu") as sizes:
        least = () if unknown else moments(sizes)
        on_chip = device.on_chip if device else None
        return Floor(
            arguments=_arguments(sizes),
            moments=least,
            expected=() if on_chip is None else expected(sizes, least, on_chip),
            time=_least_time(config, mesh, device),
            knows=_knows(sizes),
            unknown=unknown,
        )


def _arguments(sizes: Sizes) -> tuple[Term, ...]:
    """What a step reads and gives back in place: state and batch, exact from their shardings."""
    train = sizes.config.train
    dtype = "param_dtype" if train.master_dtype is None else "master_dtype"
    held = "2 moments" if train.master_dtype is None else "(2 moments + 1 copy)"
    state = f"{held} × weights × bytes of {dtype}"
    if train.accumulate_steps > 1:
        state += ", and weights × 4 bytes of accumulated gradients"
    parts = (
        ("parameters", sizes.state.model, "weights, as they are sharded, × bytes of param_dtype"),
        ("optimizer state", sizes.state.optimizer, state),
        ("batch", sizes.batch, "3 arrays (tokens, targets, weights) × tokens × 4 bytes"),
    )
    return tuple(
        Term(name=name, bytes=bytes_of(tree), formula=formula, role="argument")
        for name, tree, formula in parts
    )


def _least_time(config: Config, mesh: MeshConfig, device: Device | None) -> LeastTime | None:
    rate = peak_of(config.model, device)
    if rate is None:
        return None
    return LeastTime(
        useful_flops=useful_flops(config, mesh),
        outside_flops=flops_outside_layers(config, mesh),
        peak_flops=rate,
        bubble_share=bubble_share(config, mesh),
    )


def _knows(sizes: Sizes) -> tuple[str, ...]:
    """The parts of a config that the terms of its floor stand for."""
    config, pipeline = sizes.config, sizes.config.pipeline
    loop = f"schedule={pipeline.schedule}" if sizes.in_loop else "no pipeline"
    return (
        "state and batch",
        loop,
        f"fsdp_gather={pipeline.fsdp_gather}",
        f"remat={pipeline.remat}",
        f"attention={sizes.config.model.attention}",
        "experts on all tokens" if config.model.num_experts > 1 else "dense MLP",
        "loss in chunks",
        "gradients of all weights",
    )


def _unknown(config: Config, mesh: MeshConfig) -> tuple[str, ...]:
    """Why the heap is not known: one sentence for each option that no term stands for."""
    model, pipeline, train = config.model, config.pipeline, config.train
    several = config.layers_per_stage(mesh.stage) > 1
    options = {
        f"pipeline.sharding={pipeline.sharding} leaves shardings to the compiler": (
            pipeline.sharding != "explicit"
        ),
        f"what pipeline.remat={pipeline.remat} keeps is not counted": pipeline.remat != "full",
        "inputs of layers are computed again with pipeline.save_decoder_layer_input=False": (
            several and not pipeline.save_decoder_layer_input
        ),
        "two repeats of gathered weights with pipeline.fsdp_gather=prefetch are not counted": (
            pipeline.prefetches
        ),
        "the buffers of pipeline.forwarding_delay=2 are not counted": (
            pipeline.forwarding_delay != 1
        ),
        f"the copies that pipeline.shift={pipeline.shift} makes are not counted": (
            mesh.stage > 1 and pipeline.shift != "ppermute"
        ),
        f"what model.attention={model.attention} holds is not counted": (
            model.attention != "dot_product"
        ),
        f"what model.quantization={model.quantization} holds is not counted": (
            model.quantization is not None
        ),
        f"the one-hot rows of model.embedding={model.embedding} are not counted": (
            model.embedding != "gather"
        ),
        f"what model.experts={model.experts} holds is not counted": (
            model.num_experts > 1 and model.experts != "dense"
        ),
        f"what model.num_dense_layers={model.num_dense_layers} hold is not counted": (
            model.num_dense_layers > 0
        ),
        f"the latent vectors of model.kv_lora_rank={model.kv_lora_rank} are not counted": (
            model.kv_lora_rank is not None
        ),
        f"what model.num_shared_experts={model.num_shared_experts} hold is not counted": (
            model.num_shared_experts > 0
        ),
        f"the masks of model.dropout_rate={model.dropout_rate} are not counted": (
            model.dropout_rate > 0
        ),
        "the gradient of the router's loss is not counted": (
            model.num_experts > 1
            and (train.load_balance_weight > 0 or train.router_z_loss_weight > 0)
        ),
    }
    return tuple(reason for reason, applies in options.items() if applies)
