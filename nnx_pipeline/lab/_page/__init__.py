"""Reports as one HTML page, light or dark, for a phone or paper, without network."""

from nnx_pipeline.lab._page.document import measurement_page, outcomes_page, sweep_page

__all__ = ["measurement_page", "outcomes_page", "sweep_page"]
