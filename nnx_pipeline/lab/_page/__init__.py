"""Reports as one HTML page, light or dark, for a phone or paper, without network or script."""

from nnx_pipeline.lab._page.document import measurement_page, outcomes_page

__all__ = ["measurement_page", "outcomes_page"]
