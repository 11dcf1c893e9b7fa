from .page import write_report as write_report
from .reading import Run as Run, open_run as open_run, read_run as read_run
from .shares import Budget as Budget
