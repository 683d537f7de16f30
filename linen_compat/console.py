"""The script `linen-compat`: Ctrl-C is answered before anything large is imported."""

from nnx_pipeline import ending


def main() -> None:
    """Runs the command line of this process."""
    ending.answer("linen-compat")
    from linen_compat import cli

    cli.main()
