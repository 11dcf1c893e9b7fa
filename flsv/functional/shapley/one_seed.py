r"""How far the values of one seed's coalitions are from those of many seeds: intervals of what was trained once.

One training per coalition shows no spread between seeds. What one seed knows of its error is what the coalitions leave
open (a fit's standard error e_i) and what untrained models differ by: U(nobody) is a part of every value, its deviation
s_0 moves each of n values by s_0 / n. What initial weights and batches do besides was measured: over the federations of
``flsv.benchmark``'s tuning set that are trained whole, the values of a seed deviate from the mean of other seeds by 2 %
of all that is paid (the sum G of the values above 0; 2.5 % where s_0 is not known and in it). So

    deviation_i = ( e_i^2 + (s_0 / n)^2 + (0.02 G)^2 )^(1/2).

1.645 of these hold the other seeds' values in 0.89 of the cases on that set, and in 0.87 of fits to few coalitions of
eight to twenty clients, where the fit's standard error alone holds 0.67 (``docs/results/retrain.md``). The 2 % are an
average: federations have 0.3 to 6 %, so that an interval of two seeds or more, which are the federation's own, is to be
preferred wherever it can be paid for.
"""

from __future__ import annotations

from torch import Tensor

#: Of what is paid, a value's deviation from one seed to another: beside that of the untrained models, and with it.
SEED_DEVIATION, WITH_UNTRAINED = 0.02, 0.025


def one_seed_stderr(values: Tensor, stderr: Tensor, untrained: Tensor | None = None) -> Tensor:
    """Compute by how much values of one seed deviate from those of many, float64 ``[n]`` or ``[n, M]``.

    Args:
        values: ``[n]`` or ``[n, M]``, a game per column.
        stderr: of the same shape, what the coalitions that were trained leave open; 0 where all were.
        untrained: ``[R]`` or ``[R, M]``, utilities of R models with other initial weights, two at least, whose mean is
            U(nobody); None: U(nobody) is that of one model.

    Example:
        >>> import torch
        >>> values = torch.tensor([0.3, 0.5, 0.2, -0.1])
        >>> one_seed_stderr(values, torch.zeros(4))
        tensor([0.0250, 0.0250, 0.0250, 0.0250], dtype=torch.float64)
        >>> one_seed_stderr(values, torch.zeros(4), untrained=torch.tensor([0.08, 0.12, 0.10]))
        tensor([0.0206, 0.0206, 0.0206, 0.0206], dtype=torch.float64)
    """
    values, stderr = values.double(), stderr.double()
    paid = values.clamp_min(0).sum(0)
    if untrained is None:
        return (stderr.square() + (WITH_UNTRAINED * paid).square()).sqrt()
    start = untrained.double().std(0) / len(values)
    return (stderr.square() + start.square() + (SEED_DEVIATION * paid).square()).sqrt()
