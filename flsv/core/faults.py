"""Kinds of faults of clients' updates, by the names that filters note them under and results show."""

NOT_FINITE = "not_finite"
LARGE = "large"
COPY = "copy"
