"""A proxy game: the model of a coalition is a ridge regression on fixed features, fitted to its clients' samples.

Retraining a federation for every coalition costs many fits. A ridge regression on fixed features only needs two sums
over each client's samples (:mod:`flsv.functional.ridge`). The clients send these once; a coalition's model then costs
an addition and the solution of linear equations. There are two kinds of features, the inputs of the present model's
last linear layer and the samples' inputs, both projected on the principal axes of the server's validation samples. A
coalition's utility is the mean over both kinds.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from flsv.core import Client, LocalData, NoAnswer, map_clients
from flsv.functional.ridge import principal_axes, ridge_statistics, ridge_weights, with_constant
from flsv.games.output_metric import OutputMetric
from flsv.games.performance import ModelScore, is_logged
from flsv.games.scores import Scores, score_batch
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import isolated_rngs
from flsv.valuation.features.base import head_inputs

#: ``"model"``: the inputs of the model's last linear layer; ``"inputs"``: the samples' inputs; ``"both"``: the mean.
FeatureKind = Literal["both", "model", "inputs"]
#: Largest numbers of validation samples for the principal axes, of coalitions at once, and of outputs at once.
MOST_FOR_AXES, COALITIONS, CHUNK = 500, 256, 4_000_000
Statistics = list[tuple[Tensor, Tensor]]


def linear_statistics(
    local: LocalData,
    axes: Sequence[tuple[Tensor, Tensor]],
    vector: Tensor | None,
    head: str | None,
    classes: int,
    kinds: FeatureKind,
) -> Statistics:
    """Compute the sums over a client's training samples that ridge regressions need. The server runs this at the client
    by :meth:`flsv.core.Client.ask`.

    Args:
        local: the client's data.
        axes: for each kind of features, the mean ``[d]`` and the r principal axes ``[r, d]`` to project on.
        vector: ``[P]``, the model whose features are used; None: only the inputs are used.
        head: name of the layer whose inputs are features; None: the last linear layer.
        classes: M, the number of classes; 0: the targets are numbers.
        kinds: the kinds of features.

    Returns:
        For each kind of features, with the r projected features and a constant in phi, the sums of phi phi^T, float64
        ``[r + 1, r + 1]``, and of phi y^T, ``[r + 1, M]``; see :func:`flsv.functional.ridge.ridge_statistics`. An empty
        list if the client has no training samples.
    """
    if not int(local.class_counts.sum()):
        return []
    with isolated_rngs(0, "linear statistics"):  # a loader draws random numbers, of which training must know nothing
        x, y = local.samples()
    targets = _targets(y, classes).cpu()
    features = _features(local, x, vector, head, kinds)
    return [
        ridge_statistics((each - mean.to(each)) @ of_kind.to(each).T, targets)
        for each, (mean, of_kind) in zip(features, axes)
    ]


def _features(local: LocalData, x: Tensor, vector: Tensor | None, head: str | None, kinds: FeatureKind) -> list[Tensor]:
    """Compute the features of m samples ``x``: one tensor per kind in ``kinds`` (with ``"both"`` the model's features
    first, then the inputs), each float64 ``[m, d]`` on the CPU, with a d of its own."""
    found = []
    if kinds != "inputs":
        assert vector is not None
        found.append(head_inputs(local.module(vector.to(x.device)), x, head))
    if kinds != "model":
        found.append(x.flatten(1))
    return [each.cpu().double() for each in found]


def _targets(y: Tensor, classes: int) -> Tensor:
    """Convert labels ``[m]`` of M classes to one-hot rows ``[m, M]``; reshape numbers (``classes`` is 0) to
    ``[m, M]``."""
    return F.one_hot(y.long(), classes).double() if classes else y.reshape(len(y), -1).double()


@dataclass(frozen=True)
class ProxyOptions:
    """Options of a proxy game.

    Args:
        measure: the performance measure, see :mod:`flsv.games.performance`. In place of a logged value with
            ``mode="min"`` the linear models' own loss is used: mean squared error for numbers, cross-entropy for
            classes.
        kinds: the kinds of features.
        head: name of the layer whose inputs are features; None: the last linear layer.
        components: the largest number of features of a kind.
        penalty: the ridge penalty, in units of the features' total variance.
        num_classes: M, the number of classes; None: the number of classes of the server's data.
    """

    measure: str | ModelScore
    kinds: FeatureKind
    head: str | None
    components: int
    penalty: float
    num_classes: int | None = None


def _check_options(options: ProxyOptions, x: Tensor, classes: int) -> None:
    """Raise ConfigurationError unless linear models of the inputs ``x`` can be fitted, and have the performance."""
    if options.kinds != "model" and not x.is_floating_point():
        raise ConfigurationError(
            f'ProxyShapley(features="{options.kinds}"): linear models of inputs of type {x.dtype} say nothing. '
            'Choose features="model".'
        )
    if is_logged(options.measure) and getattr(options.measure, "mode", "") != "min":
        raise ConfigurationError(
            f"ProxyShapley(performance={options.measure!r}): a linear model logs nothing. Choose a loss with "
            'mode="min", which stands for the linear models\' own, "accuracy", or a torchmetrics metric.'
        )
    if not classes and not isinstance(options.measure, ModelScore):
        raise ConfigurationError(
            f"ProxyShapley(performance={options.measure!r}): the targets are numbers. Choose the loss that the "
            'module logs, performance="val_loss" with mode="min", or a torchmetrics metric.'
        )


class ProxyServer:
    """The server's side of a proxy game: the features of the server's validation samples, and the features' principal
    axes, on which the clients' features are projected, too.

    Args:
        server: the server's validation data.
        vector: ``[P]``, the model whose features are used.
        options: the game's options.

    Raises:
        ConfigurationError: the validation batches are not pairs of tensors, the model has no such layer, the inputs
            are not numbers that can be multiplied, or the performance cannot be computed from predictions.
    """

    def __init__(self, server: LocalData, vector: Tensor, options: ProxyOptions) -> None:
        self.options = options
        with isolated_rngs(0, "proxy validation"):
            x, self._y = server.samples("val")
        self.classes = 0 if self._y.is_floating_point() else options.num_classes or server.num_classes
        _check_options(options, x, self.classes)
        self.vector = None if options.kinds == "inputs" else vector
        try:
            features = _features(server, x, self.vector, options.head, options.kinds)
        except ConfigurationError as error:
            raise ConfigurationError(
                f'ProxyShapley: {error} Its arguments are head=... and features="inputs", which needs no layer.'
            ) from error
        step = -(-len(x) // MOST_FOR_AXES)
        self.axes = [principal_axes(_finite(each[::step]), options.components) for each in features]
        self._phi = [with_constant((each - mean) @ axes.T) for each, (mean, axes) in zip(features, self.axes)]
        self._y = self._y.cpu()
        self._targets = _targets(self._y, self.classes)
        zeros = self._targets.new_zeros(1, *self._targets.shape)
        self.nobody = self._score(zeros)[0]
        if self.classes and options.measure in ("accuracy", "balanced_accuracy", "per_class_accuracy"):
            self.nobody = torch.full_like(self.nobody, 1 / self.classes)  # equal outputs: a guess

    def ask(self, clients: Sequence[Client], most: Tensor | None = None) -> ProxyGame:
        """Ask clients for their :func:`linear_statistics`, and return the game whose players are the clients that
        answer. A warning names each client that does not.

        Args:
            clients: the clients to ask.
            most: int64 ``[n]``, the number of training samples of each of all n clients. If a client's statistics are
                sums over more samples, they are scaled down to this number. None: they are never scaled.
        """
        sent = self.axes, self.vector
        how = partial(linear_statistics, head=self.options.head, classes=self.classes, kinds=self.options.kinds)

        def asked(client: Client) -> Statistics | None:
            try:
                return self._checked(client, client.ask(how, *sent))
            except NoAnswer as why:
                warnings.warn(f"{why} The proxy game is played without it.", stacklevel=2)
                return None

        answers = map_clients(clients, asked)
        players = [client.id for client, answer in zip(clients, answers) if answer is not None]
        sums: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in self.axes]
        for client, answer in zip(clients, answers):
            for kind, (gram, moments) in enumerate(answer or ()):
                told = float(gram[-1, -1])
                factor = 1.0 if most is None or told <= most[client.id] else float(most[client.id]) / told
                sums[kind][0].append(factor * gram)
                sums[kind][1].append(factor * moments)
        stacked = [(torch.stack(gram), torch.stack(moments)) for gram, moments in sums if gram]
        return ProxyGame(self, players, stacked)

    def _checked(self, client: Client, answer: Any) -> Statistics:
        """Return a client's ``answer``, or zeros if it is empty because the client has no samples; raise ``NoAnswer``
        if its shape is wrong."""
        outputs = self._targets.shape[1]
        shapes = [((len(axes) + 1, len(axes) + 1), (len(axes) + 1, outputs)) for _, axes in self.axes]
        if answer == []:
            return [(torch.zeros(gram).double(), torch.zeros(moments).double()) for gram, moments in shapes]
        try:
            if [tuple(tuple(part.shape) for part in pair) for pair in answer] != shapes:
                raise ValueError("other shapes")
            return [(gram.double().cpu(), moments.double().cpu()) for gram, moments in answer]
        except (AttributeError, TypeError, ValueError) as error:
            raise NoAnswer(
                f"client {client.id} was asked for statistics of its samples, and its answer cannot be one."
            ) from error

    def utility(self, weights: Sequence[Tensor]) -> Tensor:
        """Compute the utilities of K coalitions, each the mean over the kinds of features: ``[K]``, or by class
        ``[K, M]``.

        Args:
            weights: for each kind of features, the coalitions' linear models ``[K, r + 1, M]``.
        """
        rows = max(1, CHUNK // self._targets.numel())
        found = [
            torch.cat([self._score(phi @ part) for part in each.split(rows)]) for phi, each in zip(self._phi, weights)
        ]
        return torch.stack(found).mean(0)

    def _score(self, outputs: Tensor) -> Tensor:
        """Return the utilities of K models from their outputs ``[K, V, M]`` for V validation samples: ``[K]``, or by
        class ``[K, M]``.
        """
        measure = self.options.measure
        if is_logged(measure):
            if not self.classes:
                return -(outputs - self._targets).square().mean((1, 2))
            measure = "negative_loss"
        if isinstance(measure, str):
            correct, losses = score_batch(outputs, self._y)
            support = self._y.bincount(minlength=self.classes)
            return Scores({"correct": correct, "loss": losses / len(self._y)}, support).value(measure)
        values = []
        for each in outputs:
            assert not isinstance(measure.of, str)
            of_one = OutputMetric(measure.of, "ProxyShapley", each.device, gives_logits=True)
            of_one.update(each, self._y)
            values.append(of_one.value())
        return measure.utility(torch.tensor(values, dtype=torch.float64))


class ProxyGame:
    """Coalition game in which a coalition's model is a linear model, fitted to its clients' samples.

    Args:
        server: the server's side of the game.
        players: the ids of the k clients that have answered.
        sums: for each kind of features, with r features and a constant in phi, the clients' sums of phi phi^T, float64
            ``[k, r + 1, r + 1]``, and of phi y^T, ``[k, r + 1, M]``.
    """

    def __init__(self, server: ProxyServer, players: list[int], sums: list[tuple[Tensor, Tensor]]) -> None:
        self.server, self.players, self.sums = server, players, sums

    def __call__(self, masks: Tensor) -> Tensor:
        """Compute the utilities of K coalitions ``masks``, bool ``[K, k]``: float64 ``[K]``, or by class ``[K, M]``."""
        return torch.cat([self._utilities(some) for some in masks.split(COALITIONS)])

    def weights(self, masks: Tensor) -> list[Tensor]:
        """Fit the linear models of K coalitions ``masks``, bool ``[K, k]``; return ``[K, r + 1, M]`` for each kind of
        features.
        """
        some, penalty = masks.double(), self.server.options.penalty
        return [ridge_weights(torch.tensordot(some, g, 1), torch.tensordot(some, b, 1), penalty) for g, b in self.sums]

    def _utilities(self, masks: Tensor) -> Tensor:
        found = self.server.utility(self.weights(masks))
        found[~masks.any(1)] = self.server.nobody
        return found


def _finite(x: Tensor) -> Tensor:
    return x[x.isfinite().all(1)]
