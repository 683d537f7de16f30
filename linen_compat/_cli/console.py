"""The entry point of `linen-compat`, which handles Ctrl-C before it imports anything large."""

from nnx_pipeline.lab import _ending as ending


def main() -> None:
    ending.answer("linen-compat")
    from linen_compat._cli import main as cli

    cli.main()
