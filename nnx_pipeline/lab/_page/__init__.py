"""Reports as one self-contained HTML page, which needs no network and no script.

A page follows the reader's choice of light or dark, and fits a phone as well as paper.
"""

from nnx_pipeline.lab._page.document import measurement_page, outcomes_page

__all__ = ["measurement_page", "outcomes_page"]
