"""Reading a run after the fact: as tables, and as a page to hand out."""

from flsv.report.frames import current_frame, read_run
from flsv.report.page.writing import pay, write_report
from flsv.report.reading import Run, open_run

__all__ = ["Run", "current_frame", "open_run", "pay", "read_run", "write_report"]
