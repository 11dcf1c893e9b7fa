"""A metric whose intervals are no multiples of standard errors."""

from dataclasses import replace

from flsv.metrics import CumulativeShapley


class Bootstrapped(CumulativeShapley):
    """Values whose intervals are skewed, as those of a bootstrap."""

    to_pay_by = False

    def result(self):
        values = super().result()
        ends = values.overall - 0.01, values.overall + 0.03
        return replace(values, ends=ends)
