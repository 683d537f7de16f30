"""Reports as one self-contained page: no network, no script, light and dark, phone and paper."""

from nnx_pipeline.lab.page.document import measurement_page, outcomes_page

__all__ = ["measurement_page", "outcomes_page"]
