"""Reports of finished runs, read from the runs' folders: values as tables, and an HTML page with shares of a budget.
Nothing in this package runs within a fit."""

from flsv.report.page import write_report
from flsv.report.reading import Run, open_run, read_run
from flsv.report.shares import Budget

__all__ = ["Budget", "Run", "open_run", "read_run", "write_report"]
