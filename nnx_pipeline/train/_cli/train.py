"""The command `train` and its options; what it does is imported when it runs."""

from __future__ import annotations

import sys

import click

from nnx_pipeline.lab._cli import options
from nnx_pipeline.lab._cli.options import COUNT, bundled
from nnx_pipeline.lab._cli.values import Chosen
from nnx_pipeline.train._cli.hosts import Hosts
from nnx_pipeline.train._cli.saving import Folder, Run, Texts

NUMBER = click.IntRange(0, 999_999)


@click.command(
    "train",
    short_help="Train a model, and go on after a stop.",
    epilog="Example: nnx-pipeline train --model tiny --set model.vocab_size=256 --steps 300 "
    "--data README.md --checkpoint-dir run --save-every 100",
)
@options.config_options()
@bundled(
    "hosts",
    Hosts,
    options.mesh_option(of_functions=False),
    options.dcn_option,
    options.run_option,
    click.option(
        "--distributed",
        is_flag=True,
        help="Train in several processes, with this command in each of them. JAX asks the cluster "
        "for the coordinator and the numbers.",
    ),
    click.option(
        "--coordinator",
        metavar="HOST:PORT",
        help="Where process 0 can be reached, with a port that is free there.",
    ),
    click.option(
        "--num-processes", type=COUNT, metavar="N", help="How many processes train together."
    ),
    click.option(
        "--process-id",
        type=NUMBER,
        metavar="N",
        help="The number of this process, from 0.",
    ),
    click.option(
        "--restart",
        type=NUMBER,
        default=0,
        metavar="N",
        help="Go on after the newest step in --checkpoint-dir, if there is one, and begin again up "
        "to N times where a process was lost.",
    ),
)
@bundled(
    "run",
    Run,
    click.option(
        "--steps",
        type=COUNT,
        required=True,
        help="Training steps, counted from the beginning also with --resume.",
    ),
    click.option(
        "--seed",
        type=click.IntRange(0, 2**32 - 1),
        default=0,
        show_default=True,
        help="Seed of the initial values and of the sequences.",
    ),
    click.option(
        "--eval-every",
        type=COUNT,
        metavar="N",
        help="Compute the loss on the held-out text every N steps, and not at saves and at the end "
        "alone.",
    ),
    click.option(
        "--metrics",
        metavar="FILE",
        help="Write a line of JSON for each step and each loss on the held-out text; with --resume "
        "lines are added.",
    ),
    click.option(
        "--tensorboard",
        metavar="DIR",
        help="Write the same numbers into a new event file in this folder, for TensorBoard.",
    ),
    click.option(
        "--profile",
        metavar="FIRST..LAST:DIR",
        help="Trace these steps with JAX's profiler into DIR, which TensorBoard and XProf read.",
    ),
)
@bundled(
    "texts",
    Texts,
    click.option(
        "--data",
        "files",
        multiple=True,
        metavar="FILE",
        help="Train on a text file, on the `text` of each line of a .jsonl, or on tokens: a .npy, "
        "or FILE.bin:uint16 or :uint32; may be repeated. The last tenth of each is held out. "
        "Without it sequences are generated.",
    ),
    click.option(
        "--tokenizer",
        metavar="FILE",
        help="A tokenizer.json or its folder, by which texts become tokens. Without it tokens are "
        "bytes.",
    ),
    click.option(
        "--end-token",
        metavar="ID",
        help="The token that ends each document, or `none` where documents run on into each other. "
        "By default 0 with bytes, and the eos_token_id beside the tokenizer.",
    ),
)
@bundled(
    "folder",
    Folder,
    click.option(
        "--checkpoint-dir",
        "name",
        metavar="DIR",
        help="Save the model, the optimizer's state, the step and the config in this new folder.",
    ),
    click.option(
        "--save-every",
        "every",
        type=COUNT,
        metavar="N",
        help="Save every N steps, and not at the end alone.",
    ),
    click.option(
        "--save-in-background",
        "in_background",
        is_flag=True,
        help="Train on while a step is saved, from a copy in the memory of the host.",
    ),
    click.option(
        "--keep",
        type=COUNT,
        metavar="N",
        help="Keep the N newest saved steps, and remove older ones after each save. Without it all "
        "are kept.",
    ),
    click.option(
        "--keep-every",
        type=COUNT,
        metavar="N",
        help="With --keep, keep the steps that are multiples of N too.",
    ),
    click.option(
        "--resume",
        is_flag=True,
        help="Go on after the newest step in --checkpoint-dir. The mesh, options of the pipeline "
        "and, by --set, train.learning_rate may be others than before.",
    ),
)
@options.json_option
def train_command(
    chosen: Chosen, hosts: Hosts, run: Run, texts: Texts, folder: Folder, json_path: str | None
) -> None:
    """Train a model on generated sequences that follow a rule it can learn, or on texts.

    Of texts the loss on the held-out part is given, in nats per token and per byte. Where tokens
    are bytes it stands beside that of a bigram model, which knows of each byte how often every
    other one follows it.
    """
    config = options.chosen_config(chosen)
    config.check_mesh(hosts.mesh_config)
    hosts.check()
    from nnx_pipeline.train._cli import watching

    if hosts.joins and not watching.is_watched():
        sys.exit(watching.watch(hosts, folder.name))
    with hosts.joined():
        from nnx_pipeline.config.config import to_dict
        from nnx_pipeline.lab._report.output import check_outputs
        from nnx_pipeline.train._cli import board, profiling, training

        if hosts.leads:
            check_outputs(json=json_path, metrics=run.metrics)
            board.check_board(run.tensorboard)
        profiling.check_profile(run.profile, run.steps)
        trained = training.train_and_save(config, chosen, hosts, run, texts, folder)
        if hosts.leads:
            mesh = hosts.mesh_config
            about: dict[str, object] = {"mesh": mesh.sizes(), "config": to_dict(config)}
            about |= {"steps": run.steps, "checkpoint": folder.name}
            training.report(trained, f"{chosen.model} on {mesh}", about, json_path)
