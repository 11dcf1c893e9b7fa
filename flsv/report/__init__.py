"""Reports of runs: values as tables, and an HTML page with shares of a budget."""

from flsv.report.page import write_report
from flsv.report.reading import Run, open_run, read_run
from flsv.report.shares import Budget

__all__ = ["Budget", "Run", "open_run", "read_run", "write_report"]
