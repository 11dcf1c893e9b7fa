"""Attacks of one client by itself.

SignFlip reverses the sign of updates.

The "sign-flipping" attack of Li et al., "RSA: Byzantine-Robust Stochastic Aggregation Methods for Distributed Learning
from Heterogeneous Datasets", AAAI 2019.

Scaling multiplies updates by a factor.

Boosting by a factor is how one client replaces the global model by its own: Bagdasaryan et al., "How To Backdoor
Federated Learning", AISTATS 2020. With equal weights the factor that does it is the size of the cohort.

FreeRider: clients that return the global model, or noise, without training.

Lin, Du, Liu, "Free-riders in Federated Learning: Attacks and Defenses", arXiv:1911.12560, 2019. ShapFed (IJCAI 2024,
section 4.3) names both kinds: those who return the model unchanged, and those who send random updates without computing
anything. ShapleyFL's failing hospitals (KDD 2023, section 6.1) send random gradients, too.

GradientPoisoning: random multiplicative noise on every entry of the update.

Sun et al., "ShapleyFL: Robust Federated Learning Based on Shapley Value", KDD 2023, appendix B.3, "Malicious client
with gradient poisoning": a becomes a (1 + b) with b ~ U[-0.5, 0.5]. The authors' code multiplies the client's *weights*
by 1 + N(0, s^2) instead, which is far stronger; flsv follows the paper.

FalseReports tells false numbers about a client's own training and about models that it is asked to evaluate.

A loss, or a model's score on a client's own validation samples, is whatever the client says. Metrics made of them pay
for the answer: FedCE's estimates (Jiang et al., CVPR 2023) pay whoever says that the others' model does badly at its
place.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Gt
from torch import Tensor

from flsv.data.corruption import ClientChoice
from flsv.uploads import Upload, UploadContext
from flsv.utilities.declared import Positive
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import generator_for


class Attack(ClientChoice, Upload):
    """Base class: some clients send a different update than the one they trained. Subclasses override :meth:`attack`.

    Which clients, nobody but tests and figures knows: the server sees vectors. With the same ``fraction`` and ``seed``
    an attack and a :class:`flsv.data.Corruption` concern the same clients.

    Args:
        clients: whom it concerns, see :class:`flsv.data.ClientChoice`.
        fraction: likewise.
        seed: seed of the choice of clients and of all noise; None: ``seed_everything``'s.

    Raises:
        ConfigurationError: arguments out of range.

    Example:
        >>> class Shy(Attack):
        ...     def attack(self, update, context, generator):
        ...         return update / 10
        >>> context = UploadContext(client=1, num_clients=3, num_parameters=2, round_index=0)
        >>> Shy(clients=[1]).apply(torch.ones(2), context)
        tensor([0.1000, 0.1000])
    """

    place = 0
    #: Whether the client trains at all. The buffers (BatchNorm's statistics) of one that does not stay as they were.
    trains: bool = True

    @abstractmethod
    def attack(self, update: Tensor, context: UploadContext, generator: torch.Generator) -> Tensor:
        """The update that the client sends instead of ``update``.

        Args:
            update: the client's parameters after training minus those it started from, floating-point ``[P]``, on any
                device; not to be changed in place. Buffers are no part of it: a running variance that is flipped or
                scaled turns negative, and the model into NaN, which is another attack.
            context: the client and the round; what it started from, ``start``, and what it keeps between rounds,
                ``state``.
            generator: CPU generator that depends on ``seed``, the round and the client.
        """

    def apply(self, update: Tensor, context: UploadContext) -> Tensor:
        """``update [P]`` as it leaves: itself where the attack does not concern the client.

        Raises:
            ConfigurationError: the attack changes the update's shape.

        Example:
            >>> from flsv.attacks import SignFlip
            >>> SignFlip().apply(torch.ones(3), UploadContext(client=0, num_clients=2, num_parameters=2, round_index=0))
            tensor([-1., -1.,  1.])
        """
        if context.client not in self.chosen(context.num_clients):
            return update
        parameters, buffers = update[: context.num_parameters], update[context.num_parameters :]
        # The position tells two attacks of one seed apart.
        generator = generator_for(self.seed, "attack", context.position, context.round_index, context.client)
        sent = self.attack(parameters, context, generator)
        if sent.shape != parameters.shape:
            raise ConfigurationError(
                f"{self!r} made {list(sent.shape)} out of an update {list(parameters.shape)}; it has to keep the shape."
            )
        return torch.cat([sent.to(update), buffers if self.trains else torch.zeros_like(buffers)])


class SignFlip(Attack):
    """Multiplies the update by ``-scale``: a step that increases the client's own loss.

    Args:
        scale: above 0; 1 leaves the norm as it is.
        clients: whom it concerns, see :class:`flsv.data.ClientChoice`.
        fraction: likewise.
        seed: seed of the choice of clients.

    Raises:
        ConfigurationError: a scale that is not positive and finite.

    Example:
        >>> SignFlip().attack(torch.tensor([1.0, -2.0]), None, torch.Generator())
        tensor([-1.,  2.])
    """

    def __init__(
        self,
        scale: Positive = 1.0,
        clients: list[int] | None = None,
        fraction: float | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(clients, fraction, seed)
        self.scale = scale

    def attack(self, update: Tensor, context: UploadContext, generator: torch.Generator) -> Tensor:
        return update * -self.scale


class Scaling(Attack):
    """Multiplies the update by ``factor``.

    Args:
        factor: above 1 it gives the client more weight than the server does.
        clients: whom it concerns, see :class:`flsv.data.ClientChoice`.
        fraction: likewise.
        seed: seed of the choice of clients.

    Raises:
        ConfigurationError: a factor that is not finite.

    Example:
        >>> Scaling(factor=3.0).attack(torch.tensor([1.0, -2.0]), None, torch.Generator())
        tensor([ 3., -6.])
    """

    def __init__(
        self,
        factor: float = 10.0,
        clients: list[int] | None = None,
        fraction: float | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(clients, fraction, seed)
        self.factor = factor

    def attack(self, update: Tensor, context: UploadContext, generator: torch.Generator) -> Tensor:
        return update * self.factor


class FreeRider(Attack):
    """Returns the received model, or that model plus random noise that looks like an update.

    Args:
        mode: ``"zero"`` sends no change at all; ``"noise"`` a random direction, every one equally likely.
        scale: norm of the noise, in units of the norm of the update that the client would have sent had it trained
            (a real free-rider would guess it from how far the global model moves). Above 0; only for ``"noise"``.
        clients: whom it concerns, see :class:`flsv.data.ClientChoice`.
        fraction: likewise.
        seed: seed of the choice of clients and of the noise.

    Raises:
        ConfigurationError: another mode, or a scale that is not positive and finite.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> FreeRider().attack(torch.ones(4), None, generator)
        tensor([0., 0., 0., 0.])
        >>> round(float(FreeRider("noise", scale=0.5).attack(torch.ones(4), None, generator).norm()), 4)
        1.0
    """

    trains = False

    def __init__(
        self,
        mode: Literal["zero", "noise"] = "zero",
        scale: Annotated[float, Gt(0), "For no update at all take mode='zero'."] = 1.0,
        clients: list[int] | None = None,
        fraction: float | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(clients, fraction, seed)
        self.mode = mode
        self.scale = scale

    def attack(self, update: Tensor, context: UploadContext, generator: torch.Generator) -> Tensor:
        if self.mode == "zero":
            return torch.zeros_like(update)
        noise = torch.randn(len(update), generator=generator).to(update)
        return noise * (self.scale * update.norm() / noise.norm())


class GradientPoisoning(Attack):
    """Multiplies each entry of the update by 1 + b, with b drawn independently from U[low, high].

    On average the update is scaled by 1 + (low + high) / 2, which is 1 by default: what is left is noise of
    (high - low) / sqrt(12) = 29 % of the update's own norm.

    Args:
        low: least b.
        high: largest b, above ``low``.
        clients: whom it concerns, see :class:`flsv.data.ClientChoice`.
        fraction: likewise.
        seed: seed of the choice of clients and of the noise.

    Raises:
        ConfigurationError: ``low`` not below ``high``, or not finite.

    Example:
        >>> sent = GradientPoisoning().attack(torch.ones(1000), None, torch.Generator().manual_seed(0))
        >>> bool(sent.min() >= 0.5), bool(sent.max() <= 1.5), round(float(sent.mean()), 1)
        (True, True, 1.0)
    """

    rules: ClassVar = ((lambda a: a.low < a.high, "expected high={high} to be above low={low}."),)

    def __init__(
        self,
        low: float = -0.5,
        high: float = 0.5,
        clients: list[int] | None = None,
        fraction: float | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(clients, fraction, seed)
        self.low = low
        self.high = high

    def attack(self, update: Tensor, context: UploadContext, generator: torch.Generator) -> Tensor:
        noise = torch.rand(len(update), generator=generator) * (self.high - self.low) + self.low
        return update * (1 + noise.to(update))


class FalseReports(Attack):
    """Reports made-up numbers and sends an honest update.

    Args:
        loss: told as its mean training loss; None: the true one. It is logged, and what
            :class:`flsv.benchmark.TrainingLoss` is made of.
        score: told as the score of the others' model on its validation samples, see
            :class:`flsv.metrics.ContributionEstimation` (FedCE).
        clients: whom it concerns, see :class:`flsv.data.ClientChoice`.
        fraction: likewise.
        seed: seed of the choice of clients.

    Raises:
        ConfigurationError: nothing that is false; a number that is not finite.

    Example:
        >>> FalseReports(loss=0.1, clients=[0]).tell("loss", 2.3, UploadContext(0, 2, num_parameters=2, round_index=0))
        0.1
    """

    rules: ClassVar = ((lambda a: a.loss is not None or a.score is not None, "nothing is false. Give loss or score."),)

    def __init__(
        self,
        loss: float | None = None,
        score: float | None = None,
        clients: list[int] | None = None,
        fraction: float | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(clients, fraction, seed)
        self.loss = loss
        self.score = score

    def apply(self, update: Tensor, context: UploadContext) -> Tensor:
        return update

    def attack(self, update: Tensor, context: UploadContext, generator: torch.Generator) -> Tensor:
        """The update itself."""
        return update

    def tell(self, name: str, value: float, context: UploadContext) -> float:
        said: float | None = {"loss": self.loss, "score": self.score}.get(name)
        return value if said is None or context.client not in self.chosen(context.num_clients) else said
