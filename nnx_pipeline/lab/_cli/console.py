"""The script `nnx-pipeline`, which handles Ctrl-C before it imports anything large."""

from nnx_pipeline.lab import _ending as ending


def main() -> None:
    ending.answer("nnx-pipeline")
    # Imported only now, so that Ctrl-C is handled during the import too.
    from nnx_pipeline.lab._cli import main as cli

    cli.main()
