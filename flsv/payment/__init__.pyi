from .allocation import allocate as allocate
from .page import write_report as write_report
from .shares import Budget as Budget
