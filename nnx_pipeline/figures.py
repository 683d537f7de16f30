"""Saving figures as PNG or SVG; matplotlib is imported only when a figure is asked for."""

import io
from pathlib import Path
from typing import TYPE_CHECKING

from nnx_pipeline.errors import InputError
from nnx_pipeline.files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = (".png", ".svg")


def check_picture(path: str | None, option: str = "--picture") -> None:
    """Raises InputError if no picture can be written to `path`; to be called before any work.

    - `path`: must end in `.png` or `.svg`, and needs matplotlib; None for no picture.
    - `option`: the command-line option that the error message names.
    """
    if path is None:
        return
    if Path(path).suffix.lower() not in KINDS:
        raise InputError(f"{option} {path}: the name of a picture must end in {' or '.join(KINDS)}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"{option} {path} needs matplotlib ({error}); pip install 'nnx-pipeline[report]'"
        ) from error


def save_figure(figure: "Figure", path: str) -> None:
    """Writes a figure as PNG or SVG: the whole file or nothing.

    - `figure`: a figure of Matplotlib.
    - `path`: the file; its suffix, `.png` or `.svg`, decides the format.
    """
    import matplotlib

    kind = Path(path).suffix.lower().removeprefix(".")
    # Text stays text in an SVG, in place of outlines, and the same figure gives the same bytes: no
    # random ids, no date.
    options = matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "nnx-pipeline"})
    metadata = {"Date": None} if kind == "svg" else None
    drawn = io.BytesIO()
    with options:
        figure.savefig(drawn, format=kind, dpi=150, metadata=metadata)
    write_whole(path, drawn.getvalue())


def ink_on(colour: str) -> str:
    """Black or white, whichever has the higher contrast on `colour` by the WCAG formula.

    - `colour`: a background such as `#1f77b4`.

    WCAG are the Web Content Accessibility Guidelines.
    """
    channels = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    weights = (0.2126, 0.7152, 0.0722)
    luminance = sum(w * c**2.2 for w, c in zip(weights, channels, strict=True))
    # At a luminance of sqrt(1.05 · 0.05) - 0.05 = 0.18 both have the same contrast.
    return "white" if luminance < 0.18 else "black"
