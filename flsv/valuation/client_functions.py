"""Functions that run at the clients during a valuation by optimal transport."""
# Only these functions read samples. The server receives exactly the return values: counts, interpolants and distances.
# Features and values of single samples stay in the client's memory.

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

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
from flsv.functional.transport.potentials import Part
from flsv.utilities.csv_files import save_csv
from flsv.utilities.declared import checked
from flsv.utilities.seeding import generator_for

Covariance = Literal["diag", "full", "none"]
Embed = Callable[[LocalData, Tensor], Tensor]

#: Names of the rules by which samples are flagged, see :func:`flag_samples`.
Rule = Literal["outlier", "positive"]


class ValuationOptions(Protocol):
    """Options of :class:`flsv.valuation.FedBary` that its clients read."""

    label_weight: float
    covariance: Covariance
    p: float
    calibration: Literal["class", "client"]
    rule: Rule
    blur: float
    part: Part
    chunk: int
    allow_reconstruction: bool


@dataclass(frozen=True)
class FirstResponse:
    """Counts of samples, broken samples, features and dimensions, sent by a client at a valuation's start."""

    samples: int
    broken: int
    features: int = 0
    dim: int = 0


@dataclass(frozen=True)
class SampleValues:
    """Values of a client's m training samples, in the order of ``local.samples()``. They stay at the client.

    The client's memory has them under this class as the key.

    Args:
        gradients: ``[m]``, calibrated gradients in squared feature units, positive for harmful samples. Inf for a
            sample that is not finite.
        flagged: bool ``[m]``, True for flagged samples.
        why: m texts, the reason for each sample's value. An empty tuple if there are no reasons.
    """

    gradients: Tensor
    flagged: Tensor
    why: tuple[str, ...] = ()


@dataclass(frozen=True)
class _ClientState:
    """State that a client keeps during a valuation, on the CPU."""

    x: Tensor
    y: Tensor
    is_finite: Tensor
    statistics: ClassStatistics
    transport_client: TransportClient
    device: torch.device


def embed_labels(x: Tensor, y: Tensor, valuer: ValuationOptions) -> tuple[Tensor, ClassStatistics]:
    """Append coordinates that represent the labels to the samples' features. Also return the classes' statistics."""
    statistics = class_statistics(x, y, covariance=valuer.covariance)
    if valuer.label_weight == 0:
        return x, statistics
    points = label_embedding(
        x, y, covariance=valuer.covariance, label_weight=valuer.label_weight, statistics=statistics
    )
    return points, statistics


def enter(local: LocalData, key: Any, embed: Embed, valuer: ValuationOptions) -> FirstResponse:
    """Compute the features of a client's samples, and store them in the client's memory under ``key``."""
    if local.class_counts.sum() == 0:
        return FirstResponse(samples=0, broken=0)
    x, y = local.samples()
    device_features = embed(local, x).detach().float()
    features = device_features.cpu()
    is_finite = features.isfinite().all(1)
    num_broken = int((~is_finite).sum())
    if num_broken == len(is_finite):
        local.memory[SampleValues] = _values_of_broken(num_broken)
        return FirstResponse(samples=0, broken=num_broken)

    client_state = _client_state(features, y.cpu(), is_finite, device_features.device, valuer)
    local.memory[key] = client_state
    return FirstResponse(
        samples=len(client_state.x),
        broken=num_broken,
        features=features.shape[1],
        dim=client_state.transport_client.dim,
    )


def _values_of_broken(count: int) -> SampleValues:
    return SampleValues(
        gradients=torch.full((count,), torch.inf),
        flagged=torch.ones(count, dtype=torch.bool),
        why=(REASON_OF_NOT_FINITE,) * count,
    )


def _client_state(
    features: Tensor,
    y: Tensor,
    is_finite: Tensor,
    device: torch.device,
    valuer: ValuationOptions,
) -> _ClientState:
    finite_features = features[is_finite]
    finite_y = y[is_finite]
    points, statistics = embed_labels(finite_features, finite_y, valuer)
    transport_client = TransportClient(
        points, p=valuer.p, allow_reconstruction=valuer.allow_reconstruction
    )
    if device.type == "mps":  # Apple's GPUs lack float64, in which samples are valued
        device = torch.device("cpu")
    return _ClientState(
        x=finite_features,
        y=finite_y,
        is_finite=is_finite,
        statistics=statistics,
        transport_client=transport_client,
        device=device,
    )


def respond(local: LocalData, key: Any, gamma: Tensor) -> tuple[Tensor, Tensor]:
    """Compute, at the client, interpolants between its data and the server's points ``gamma``, and their distance."""
    client_state: _ClientState = local.memory[key]
    return client_state.transport_client.respond(gamma)


def value_samples(
    local: LocalData, key: Any, points: Tensor, valuer: ValuationOptions, seed: int
) -> int:
    """Value a client's samples against the server's ``points``, and store the values at the client.

    Return the number of flagged samples, including all samples that are not finite. ``key`` is the key of the client's
    state, stored by :func:`enter`.
    """
    client_state: _ClientState = local.memory[key]
    is_finite = client_state.is_finite
    finite_gradients = _sample_gradients(client_state, points, valuer, seed)
    classes = None
    if valuer.calibration == "class":  # samples are compared within their class
        classes = client_state.y
        finite_gradients = calibrated_by_class(finite_gradients, classes)

    gradients = torch.full(is_finite.shape, torch.inf)
    gradients[is_finite] = finite_gradients
    is_flagged = ~is_finite
    is_flagged[is_finite] = flag_samples(finite_gradients, valuer.rule, classes)
    reasons = _reasons(finite_gradients, is_finite, classes=classes, rule=valuer.rule)
    local.memory[SampleValues] = SampleValues(gradients, is_flagged, reasons)
    return int(is_flagged.sum())


def _sample_gradients(
    client_state: _ClientState, points: Tensor, valuer: ValuationOptions, seed: int
) -> Tensor:
    """Compute the gradients ``[m]`` of a client's finite samples, in random parts of at most ``valuer.chunk``."""
    device = client_state.device
    points = points.to(device)
    statistics = client_state.statistics.to(device)
    count = len(client_state.x)
    num_parts = math.ceil(count / valuer.chunk)
    order = torch.randperm(count, generator=generator_for(seed, "parts"))
    gradients = torch.empty(count)
    for rows in order.chunk(num_parts):
        y = None
        part: Part = "features"
        if valuer.label_weight > 0:
            y = client_state.y[rows].to(device)
            part = valuer.part
        part_gradients = client_values(
            client_state.x[rows].to(device),
            y,
            points,
            part=part,
            blur=valuer.blur,
            covariance=valuer.covariance,
            label_weight=valuer.label_weight,
            statistics=statistics,
        )
        gradients[rows] = part_gradients.cpu()
    return gradients


REASON_OF_NOT_FINITE = "not finite: the sample or its features are NaN or infinite"


def _reasons(
    gradients: Tensor, is_finite: Tensor, classes: Tensor | None, rule: str
) -> tuple[str, ...]:
    """Return the reason for each sample's value as a text. The ``gradients`` are those of the finite samples."""
    reasons = [REASON_OF_NOT_FINITE] * len(is_finite)
    finite_rows = is_finite.nonzero().flatten().tolist()
    for row, reason in zip(finite_rows, _reasons_of_finite(gradients, classes, rule)):
        reasons[row] = reason
    return tuple(reasons)


def _reasons_of_finite(
    gradients: Tensor,
    classes: Tensor | None,
    rule: str,
) -> list[str]:
    peers = "the client's samples" if classes is None else "its class"
    if rule == "outlier" and len(gradients) >= MIN_SAMPLES:
        return [
            f"{deviation:.1f} deviations above the center of {peers}"
            for deviation in deviations(gradients, classes).tolist()
        ]
    reason = (
        f"more weight on it would move the client away from the target ({peers} as the measure)"
    )
    return [reason] * len(gradients)


def calibrated_by_class(gradients: Tensor, y: Tensor) -> Tensor:
    """Subtract from each gradient the mean of the other gradients of its class.

    Example:
        >>> calibrated_by_class(torch.tensor([1.0, 3.0, 9.0, 9.0]), torch.tensor([0, 0, 1, 1]))
        tensor([-2.,  2.,  0.,  0.])
    """
    calibrated = torch.empty_like(gradients)
    for label in y.unique():
        is_member = y == label
        calibrated[is_member] = calibrated_gradient(gradients[is_member])
    return calibrated


def sample_values(local: LocalData) -> SampleValues:
    """Return the values of a client's samples from its latest valuation. Only the client itself may call this."""
    return local.memory[SampleValues]


FLAGGED_FILE = "flagged.csv"


def write_flagged(
    local: LocalData, folder: Path, indices: Tensor, class_names: Sequence[str] | None = None
) -> None:
    """Write a client's flagged samples to ``flagged.csv`` in its folder.

    This function runs at the client (``client.request(write_flagged, ...)``). Nothing is sent to the server. The
    columns are the sample's ``index`` in the data set, its ``label`` (the class's name or number), its ``score`` (the
    calibrated gradient in squared feature units, empty if it is not finite) and ``why``. The most harmful samples come
    first. Without flagged samples the file has only the header. No file is written before the samples are valued.

    Args:
        local: the client's own data.
        folder: the client's own folder, which is created if it does not exist.
        indices: int64 ``[m]``, indices of the client's training samples in the data set, in the order in which the
            client reads them.
        class_names: names of the M classes. None: the file has numbers.
    """
    values: SampleValues | None = local.memory.get(SampleValues)
    if values is None or len(values.why) != len(values.gradients):  # not valued, or without reasons
        return
    _x, y = local.samples()
    labels = y.tolist()
    rows: list[tuple[object, ...]] = [("index", "label", "score", "why")]
    most_harmful_first = values.gradients.argsort(descending=True, stable=True)
    for position in most_harmful_first.tolist():
        if not values.flagged[position]:
            continue
        label = labels[position]
        if class_names is not None:
            label = class_names[label]
        gradient = values.gradients[position].item()
        score = f"{gradient:.6g}" if gradient < math.inf else ""
        rows.append((int(indices[position]), label, score, values.why[position]))
    folder.mkdir(parents=True, exist_ok=True)
    save_csv(folder / FLAGGED_FILE, rows)


def leave(local: LocalData, key: Any) -> None:
    """Delete the state that the client stored under ``key``."""
    local.memory.pop(key, None)


#: Samples are flagged from this distance above the center on, in deviations.
MIN_DEVIATIONS = 4.5
#: Of fewer samples none is flagged.
MIN_SAMPLES = 3


@checked
def flag_samples(gradients: Tensor, rule: Rule = "outlier", y: Tensor | None = None) -> Tensor:
    """Flag samples by their calibrated gradients.

    ``"positive"`` is the rule of Li et al. (FedBary, CVPR 2024, section 4.3) and flags gradients above 0. Calibrated
    gradients sum to 0, so this rule flags about half of the samples of a client without bad samples. The paper's "as
    many positive gradients as noisy samples" holds only for a large share of strong noise.

    ``"outlier"`` assumes that at least half of the samples are good. The center c is the median of the gradients in the
    shortest interval that contains half of them. The deviation s is 1.4826 times the median distance from c of the
    gradients at or below c. The rule flags gradients above both c + 4.5 s and 0. Bad samples have large gradients and
    so affect neither c nor s. With ``y`` there is a center for each class, and one deviation for all classes. Fewer
    than three samples are never flagged.

    Args:
        gradients: ``[m]``, finite numbers, positive for harmful samples.
        rule: ``"outlier"`` or ``"positive"``.
        y: ``[m]``, the samples' classes, if gradients were calibrated by class. Else None.

    Returns:
        bool ``[m]``, True for flagged samples.

    Raises:
        ConfigurationError: the rule is unknown.

    Example:
        >>> flag_samples(torch.tensor([-2.0, -1.0, -1.5, 0.5, 9.0, -1.2, -1.7]))
        tensor([False, False, False,  True,  True, False, False])
    """
    is_harmful = gradients > 0
    if rule == "positive":
        return is_harmful
    if len(gradients) < MIN_SAMPLES:
        return torch.zeros_like(is_harmful)
    distances, deviation = _distances_from_center(gradients, y)
    is_far = distances > MIN_DEVIATIONS * deviation
    return is_far & is_harmful


def deviations(gradients: Tensor, y: Tensor | None = None) -> Tensor:
    """Compute how many deviations each gradient is above its center, see :func:`flag_samples`."""
    distances, deviation = _distances_from_center(gradients, y)
    return torch.where(distances == 0, distances, distances / deviation)


#: A normal number's standard deviation is 1.4826 times its median distance from the mean, 1 / 0.6745.
DEVIATION_PER_MEDIAN_DISTANCE = 1.4826


def _distances_from_center(gradients: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute each gradient minus the center (of its class) ``[m]``, and the gradients' common deviation ``[]``."""
    if y is None:
        distances = gradients - _center(gradients)  # negative below the center
    else:
        distances = gradients.clone()
        for label in y.unique():
            is_member = y == label
            distances[is_member] -= _center(gradients[is_member])
    # Only gradients up to the center, above which harmful samples are.
    lower_distances = distances[distances <= 0]
    # Of an even number torch's median is the lower of the two in the middle, so the median comes before the sign.
    median_distance = -(lower_distances.median())
    return distances, DEVIATION_PER_MEDIAN_DISTANCE * median_distance


def _center(values: Tensor) -> Tensor:
    """Compute the median of the shortest interval that contains half of the values."""
    # The median of the shortest interval that holds half of the values: few large values do not move it.
    ascending = values.sort().values
    half = len(ascending) // 2 + 1
    intervals = ascending.unfold(0, half, 1)  # [intervals, half]: each half of neighbours
    widths = intervals[:, -1] - intervals[:, 0]
    shortest = widths.argmin()
    return intervals[shortest].median()
