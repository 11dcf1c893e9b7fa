"""Names of a run's files, for those who read them without torch."""

CONTRIBUTIONS = "contributions.csv"
RECORD = "run.json"
#: Of the layout of ``run.json``.
VERSION = 1
