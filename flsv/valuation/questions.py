"""Functions that run at the clients during a valuation by optimal transport; only these functions read samples.

The first argument of each function that the server asks a client to run is the client's data. The server receives
exactly the return value: counts, interpolants and distances, and a summary of the samples' values (the number of
flagged samples and a histogram). Features and the values of single samples stay in the client's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from flsv.core import LocalData
from flsv.functional import (
    ClassStatistics,
    TransportClient,
    calibrated_gradient,
    class_statistics,
    client_values,
    label_embedding,
)
from flsv.functional.transport.fedbary import Part
from flsv.utilities.declared import checked
from flsv.utilities.seeding import generator_for

Covariance = Literal["diag", "full", "none"]
Embed = Callable[[LocalData, Tensor], Tensor]
BINS = 40

#: Names of the rules by which samples are flagged, see :func:`flag_samples`.
Rule = Literal["outlier", "positive"]


@dataclass(frozen=True)
class Labels:
    """Options of a point's label coordinates: ``covariance`` and, here called ``weight``, ``label_weight`` of
    :func:`flsv.functional.label_embedding`."""

    covariance: Covariance
    weight: float


@dataclass(frozen=True)
class Judging:
    """Options with which clients value their samples; see the arguments of the same names of
    :class:`flsv.valuation.FedBary`."""

    blur: float
    scaling: float
    part: Part
    chunk: int
    calibration: str
    rule: Rule


@dataclass(frozen=True)
class FirstAnswer:
    """Four numbers that a client sends at the start of a valuation.

    Args:
        samples: number of training samples that take part.
        broken: number of training samples that do not take part, because they or their features are not finite.
        features: d, the number of features of a sample; 0 for a client without finite samples.
        dim: d', the number of coordinates of a point, that is features and label coordinates; 0 as for ``features``.
    """

    samples: int
    broken: int
    features: int = 0
    dim: int = 0


@dataclass(frozen=True)
class Verdict:
    """Summary of the calibrated gradients of a client's samples, which the client sends to the server.

    Args:
        flagged: number of flagged samples, including all samples that are not finite.
        edges: ``[BINS + 1]``, edges of the histogram of the finite gradients, in squared feature units.
        counts: int64 ``[BINS]``, number of samples in each bin.
    """

    flagged: int
    edges: Tensor
    counts: Tensor


@dataclass(frozen=True)
class SampleValues:
    """Values of a client's m training samples, in the order of ``local.samples()``; they stay at the client.

    Args:
        gradients: ``[m]``, calibrated gradients in squared feature units, positive for harmful samples; inf for a
            sample that is not finite.
        flagged: bool ``[m]``, True for flagged samples.
        why: m texts, the reason for each sample's value; an empty tuple if there are no reasons.
    """

    gradients: Tensor
    flagged: Tensor
    why: tuple[str, ...] = ()


@dataclass(frozen=True)
class _ClientState:
    """State of a client during a valuation; tensors are on the CPU.

    Args:
        x: ``[m, d]``, features of the client's m finite samples.
        y: ``[m]``, classes of the finite samples.
        whole: bool, one entry per sample of the client, True if the sample is finite.
        statistics: mean and covariance of each class.
        role: the client's side of the protocol, which answers the server's points.
        device: device on which features were computed, and on which samples are valued.
    """

    x: Tensor
    y: Tensor
    whole: Tensor
    statistics: ClassStatistics
    role: TransportClient
    device: torch.device


def embed_labels(x: Tensor, y: Tensor, labels: Labels) -> tuple[Tensor, ClassStatistics]:
    """Compute points by appending label coordinates to the features of samples.

    Args:
        x: features ``[m, d]``.
        y: classes ``[m]``.
        labels: options of the label coordinates; with weight 0 none are appended.

    Returns:
        The points ``[m, d']``, and the statistics of the classes.
    """
    statistics = class_statistics(x, y, covariance=labels.covariance)
    if labels.weight == 0:
        return x, statistics
    points = label_embedding(x, y, covariance=labels.covariance, label_weight=labels.weight, statistics=statistics)
    return points, statistics


def enter(
    local: LocalData, key: Any, embed: Embed, labels: Labels, t: float, p: float, allow_reconstruction: bool = False
) -> FirstAnswer:
    """Prepare a client for a valuation: compute the features of its training samples and store them in its memory.

    Args:
        local: the client's data.
        key: key under which the client stores the state of this valuation in its memory.
        embed: computes the features ``[m, d]`` of samples ``[m, ...]``, called as ``embed(local, samples)``.
        labels: options of the label term.
        t: position of the interpolants between the client's samples (0) and the server's points (1).
        p: exponent of the Wasserstein distance.
        allow_reconstruction: whether to answer so many points that the server could reconstruct samples.

    Returns:
        The numbers of the client's samples and features. Without finite samples nothing is stored under ``key``.
    """
    if not int(local.class_counts.sum()):
        return FirstAnswer(0, 0)
    x, y = local.samples()
    found = embed(local, x).detach().float()
    # Samples are valued in float64, which Apple's GPUs lack.
    device = torch.device("cpu") if found.device.type == "mps" else found.device
    features, y = found.cpu(), y.cpu()
    whole = features.isfinite().all(1)
    broken = int((~whole).sum())
    if broken == len(whole):
        nothing = torch.full((broken,), torch.inf)
        local.memory[SampleValues] = SampleValues(nothing, ~whole, (NOT_FINITE,) * broken)
        return FirstAnswer(0, broken)
    points, statistics = embed_labels(features[whole], y[whole], labels)
    role = TransportClient(points, t=t, p=p, allow_reconstruction=allow_reconstruction)
    local.memory[key] = _ClientState(features[whole], y[whole], whole, statistics, role, device)
    return FirstAnswer(int(whole.sum()), broken, features.shape[1], role.dim)


def answer(local: LocalData, key: Any, gamma: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the points ``[S, d']`` that interpolate between the client's samples and the server's points, and the
    Wasserstein distance between the samples and the server's points.

    Args:
        local: the client's data.
        key: key of this valuation in the client's memory, see :func:`enter`.
        gamma: the server's points ``[S, d']``.
    """
    return local.memory[key].role.answer(gamma)


def judge(local: LocalData, key: Any, points: Tensor, labels: Labels, how: Judging, seed: int) -> Verdict:
    """Value the client's samples against the server's points, store the values at the client and return their summary.

    Samples are valued in random subsets of at most ``how.chunk`` samples, because the costs form a matrix of samples by
    samples.

    Args:
        local: the client's data.
        key: key of this valuation in the client's memory, see :func:`enter`.
        points: points ``[S, d']`` from the server, between the client's samples and the target.
        labels: options of the label term.
        how: options of the valuation of samples.
        seed: seed of the random subsets.
    """
    held: _ClientState = local.memory[key]
    values = torch.empty(len(held.x))
    x, y, points = (tensor.to(held.device) for tensor in (held.x, held.y, points))
    statistics = held.statistics.to(held.device)
    order = torch.randperm(len(held.x), generator=generator_for(seed, "parts"))
    for rows in order.chunk(-(-len(order) // how.chunk)):
        there = rows.to(held.device)
        values[rows] = client_values(
            x[there],
            y[there] if labels.weight > 0 else None,
            points,
            part=how.part if labels.weight > 0 else "features",
            blur=how.blur,
            scaling=how.scaling,
            covariance=labels.covariance,
            label_weight=labels.weight,
            statistics=statistics,
        ).cpu()
    peers = held.y if how.calibration == "class" else None
    if peers is not None:
        values = calibrated_by_class(values, peers)
    gradients = torch.full(held.whole.shape, torch.inf)
    gradients[held.whole] = values
    flagged = ~held.whole
    flagged[held.whole] = flag_samples(values, how.rule, peers)
    local.memory[SampleValues] = SampleValues(gradients, flagged, _reasons(values, held.whole, peers, how.rule))
    counts, edges = torch.histogram(values, BINS)
    return Verdict(int(flagged.sum()), edges, counts.long())


NOT_FINITE = "not finite: the sample or its features are NaN or infinite"


def _reasons(values: Tensor, whole: Tensor, y: Tensor | None, rule: str) -> tuple[str, ...]:
    """Return a text for each of the client's n samples with the reason for its value, in the order of
    ``local.samples()``.

    A sample that is not finite gets the text ``NOT_FINITE``.

    Args:
        values: calibrated gradients ``[m]`` of the m finite samples.
        whole: bool ``[n]``, one entry per sample of the client, True for its m finite samples.
        y: classes ``[m]`` of the finite samples, if each was compared with its class; None: each was compared with all
            of the client's samples.
        rule: name of the rule by which samples are flagged, ``"outlier"`` or ``"positive"``.
    """
    peers = "the client's samples" if y is None else "its class"
    reasons = [NOT_FINITE] * len(whole)
    texts = [f"more weight on it would move the client away from the target ({peers} as the measure)"] * len(values)
    if rule == "outlier" and len(values) > 2:
        texts = [f"{number:.1f} deviations above the center of {peers}" for number in deviations(values, y).tolist()]
    for place, text in zip(whole.nonzero().flatten().tolist(), texts):
        reasons[place] = text
    return tuple(reasons)


def calibrated_by_class(gradients: Tensor, y: Tensor) -> Tensor:
    """Calibrate gradients within each class: subtract from each the mean gradient of the other samples of its class.

    This is equation 11 of FedBary (CVPR 2024) with a sum over the sample's class instead of over all samples. The
    result for a sample is the rate at which the distance grows if the sample gets more weight and the other samples of
    its class get less. The results sum to 0 in each class. (Without this, a gradient also depends on how often the
    sample's class occurs at the client and in the target, which hides wrong labels.)

    Args:
        gradients: ``[m]``, potentials or gradients, up to a constant in each class.
        y: ``[m]``, the samples' classes.

    Example:
        >>> calibrated_by_class(torch.tensor([1.0, 3.0, 9.0, 9.0]), torch.tensor([0, 0, 1, 1]))
        tensor([-2.,  2.,  0.,  0.])
    """
    result = torch.empty_like(gradients)
    for label in y.unique():
        result[y == label] = calibrated_gradient(gradients[y == label])
    return result


def sample_values(local: LocalData) -> SampleValues:
    """Return the values of a client's samples from its latest valuation; only the client itself calls this function, as
    the server would receive the result."""
    return local.memory[SampleValues]


def leave(local: LocalData, key: Any) -> None:
    """Delete the state, with the samples' features, that the client stored under ``key`` for a valuation."""
    local.memory.pop(key, None)


DEVIATIONS = 4.5


@checked
def flag_samples(gradients: Tensor, rule: Rule = "outlier", y: Tensor | None = None) -> Tensor:
    """Flag samples by their calibrated gradients.

    ``"positive"`` is the rule of Li et al. (FedBary, CVPR 2024, section 4.3) and flags gradients above 0. Calibrated
    gradients sum to 0, so this rule flags about half of the samples of a client without bad samples; the paper's "as
    many positive gradients as noisy samples" holds only for a large share of strong noise.

    ``"outlier"`` assumes that at least half of the samples are good. The center c is the median of the gradients in the
    shortest interval that contains half of them; the deviation s is 1.4826 times the median distance from c of the
    gradients at or below c. The rule flags gradients above both c + 4.5 s and 0. Bad samples have large gradients and
    so affect neither c nor s. With ``y`` there is a center for each class, and one deviation for all classes. Fewer
    than three samples are never flagged.

    Args:
        gradients: ``[m]``, finite numbers, positive for harmful samples.
        rule: ``"outlier"`` or ``"positive"``.
        y: ``[m]``, the samples' classes, if gradients were calibrated by class; else None.

    Returns:
        bool ``[m]``, True for flagged samples.

    Raises:
        ConfigurationError: the rule is unknown.

    Example:
        >>> flag_samples(torch.tensor([-2.0, -1.0, -1.5, 0.5, 9.0, -1.2, -1.7]))
        tensor([False, False, False,  True,  True, False, False])
    """
    if rule == "positive" or len(gradients) < 3:
        return gradients > 0 if rule == "positive" else torch.zeros_like(gradients, dtype=torch.bool)
    above, deviation = _above_center(gradients, y)
    return (above > DEVIATIONS * deviation) & (gradients > 0)


def deviations(gradients: Tensor, y: Tensor | None = None) -> Tensor:
    """Compute by how many deviations s each gradient is above its center c, with c and s as in the rule ``"outlier"``
    of :func:`flag_samples`.

    The rule flags a sample if the result is above 4.5 and the gradient above 0.

    Args:
        gradients: ``[m]``, finite numbers.
        y: ``[m]``, the samples' classes, for one center per class; None: one center for all samples.

    Returns:
        ``[m]``, (gradient - c) / s, negative below the center. If s is 0, it is 0 at the center and infinite elsewhere.

    Example:
        >>> deviations(torch.tensor([-2.0, -1.0, -1.5, 0.5, 9.0])).round(decimals=1)
        tensor([-0.7000,  0.7000,  0.0000,  2.7000, 14.2000])
    """
    above, deviation = _above_center(gradients, y)
    return torch.where(above == 0, above, above / deviation)


def _above_center(gradients: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute each gradient minus its center, ``[m]``, and the deviation, ``[]``, see :func:`flag_samples`.

    For normal gradients the deviation is about their standard deviation. Harmful samples, which are above the center,
    hardly change it.

    Args:
        gradients: ``[m]``, finite numbers.
        y: ``[m]``, the samples' classes, for one center per class; None: one center for all samples.
    """
    above = gradients.clone()
    for label in [None] if y is None else y.unique():
        members = torch.ones_like(gradients, dtype=torch.bool) if y is None or label is None else y == label
        above[members] -= _center(gradients[members])
    return above, 1.4826 * -above[above <= 0].median()


def _center(values: Tensor) -> Tensor:
    """Compute the median of the values in the shortest interval that contains half of the values."""
    ordered = values.sort().values
    half = len(ordered) // 2 + 1
    first = int((ordered[half - 1 :] - ordered[: len(ordered) - half + 1]).argmin())
    return ordered[first : first + half].median()
