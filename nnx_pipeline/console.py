"""The script `nnx-pipeline`: Ctrl-C is answered before anything large is imported."""

from nnx_pipeline import ending


def main() -> None:
    """Runs the command line of this process."""
    ending.answer("nnx-pipeline")
    from nnx_pipeline import cli

    cli.main()
