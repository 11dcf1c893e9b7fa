"""Reports of finished runs, read from their folders: values as tables, and a page to hand out, with shares of a budget;
nothing that runs within a fit.
"""

from flsv.report.page import write_report
from flsv.report.reading import Run, open_run, read_run
from flsv.report.shares import Budget

__all__ = ["Budget", "Run", "open_run", "read_run", "write_report"]
