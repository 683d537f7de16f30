"""The command `nnx-pipeline`: the commands of the lab, and those that entry points add to them."""

import importlib
import os

# Without this the compilers warn that there is no accelerator; their errors are still printed.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from importlib.metadata import entry_points

import click

from nnx_pipeline.lab._cli import commands
from nnx_pipeline.lab._cli.support import main_of

ADDED = "nnx_pipeline.commands"  # entry points: commands that other packages and folders have
CHECKPOINTS = "nnx_pipeline.checkpoints"  # entry points of what brings `linen-compat`
FIRST = "nnx-pipeline measure tiny --mesh stage=4,fsdp=2"
OLD = {"compile": "measure", "ab": "compare"}  # names that go on working

MEASURING = (
    commands.measure_command,
    commands.compare_command,
    commands.memory_command,
    commands.lint_command,
    commands.platforms_command,
)
# In files of their own, which other commands need not import.
APART = {"bisect": "searching", "explain": "explaining", "fit": "searching"}


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*self.commands, *APART, *entry_points(group=ADDED).names})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        cmd_name = OLD.get(cmd_name, cmd_name)
        if module := APART.get(cmd_name):
            found = importlib.import_module(f"{__package__}.{module}")
            self.add_command(getattr(found, f"{cmd_name}_command"))
        if cmd_name not in self.commands:
            entries = entry_points(group=ADDED)
            # Where no command has the name, Click suggests one of those that are loaded.
            for entry in entries.select(name=cmd_name) or entries:
                self.add_command(entry.load(), entry.name)
        return self.commands.get(cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        names = self.list_commands(ctx)
        measuring = [*(str(command.name) for command in MEASURING), *APART]
        groups = {"Measure a program": measuring}
        groups["Train a model"] = [name for name in names if name not in measuring]
        for title, names in groups.items():
            loaded = {name: self.get_command(ctx, name) for name in names}
            rows = [(name, one.get_short_help_str()) for name, one in loaded.items() if one]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)
        if entry_points(group=CHECKPOINTS):
            with formatter.section("Checkpoints"):
                formatter.write_dl([("linen-compat", "Inspect, check and convert them.")])


@click.group(
    cls=_Commands,
    commands=MEASURING,
    epilog=f"Begin with: {FIRST}",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="nnx-pipeline")
def cli() -> None:
    """Pipelined Mixtral-class models in Flax NNX, and what they cost, without an accelerator."""


main = main_of(cli, "nnx-pipeline")
if __name__ == "__main__":
    main()
