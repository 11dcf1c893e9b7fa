"""Reading a run after the fact: as tables, as a page to hand out, and as a payment."""

from flsv.report.page import release, write_report
from flsv.report.payment import Payment, Terms, pay
from flsv.report.reading import Run, open_run, read_run

__all__ = ["Payment", "Run", "Terms", "open_run", "pay", "read_run", "release", "write_report"]
