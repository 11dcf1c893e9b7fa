"""Names of a run's files and what stands in them, for those who read them without torch."""

CONTRIBUTIONS = "contributions.csv"
RECORD = "run.json"
RETRAINED = "retrained.csv"
#: Of the layout of ``run.json``.
VERSION = 1
#: What the intervals of metrics are of.
MEANING = (
    "90 % of the spread over the run's rounds, or of the estimator's sampling error where that is larger: not of what "
    "another seed, other participants or another validation set would change"
)
