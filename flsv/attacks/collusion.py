"""Attacks by several clients together, who look at what is about to be sent.

ALittleIsEnough: colluders who stay within the spread of the honest updates.

Baruch, Baruch and Goldberg, "A Little Is Enough: Circumventing Defenses For Distributed Learning", NeurIPS 2019,
Algorithm 3. Workers send gradients there and clients send updates here, which point the other way.

InnerProductManipulation: colluders who send the opposite of what the cohort has learnt, as long as nobody is called
too long for.

Xie, Koyejo and Gupta, "Fall of Empires: Breaking Byzantine-tolerant SGD by Inner Product Manipulation", UAI 2019,
section 4: all attackers send -epsilon times the mean of the honest updates, so that its inner product with what the
server makes of all is negative. Here the length is the cohort's, in medians, since that is what servers judge.

MinMax: colluders who are no farther from any honest update than the honest ones are from each other.

Shejwalkar and Houmansadr, "Manipulating the Byzantine: Optimizing Model Poisoning Attacks and Defenses for Federated
Learning", NDSS 2021, section IV-C (Min-Max).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any, Literal

import torch
from torch import Tensor

from flsv.data.corruption import ClientChoice
from flsv.uploads import Upload, UploadContext
from flsv.utilities.declared import Positive
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import generator_for

Knowledge = Literal["colluders", "all"]


class Collusion(ClientChoice, Upload):
    """Base class: when the cohort has trained, its colluders agree on what they send. Subclasses override
    :meth:`collude`.

    Colluders do not keep to the federation's clipping, noise or compression: an attack of this kind comes last among
    the uploads, and what it makes is sent as it is. It is simulated where the cohort's updates are: in one process or
    on ranks, and where everybody starts from the global model; with sites or a personalizer it is refused.

    Args:
        clients: whom it concerns, see :class:`flsv.data.ClientChoice`.
        fraction: likewise.
        seed: seed of the choice of clients and of what is drawn.
        knows: whose honest updates they look at: their own (``"colluders"``), or the whole cohort's (``"all"``), as
            where they listen in.

    Raises:
        ConfigurationError: arguments out of range.

    Example:
        >>> class Silent(Collusion):
        ...     def collude(self, updates, colluders, cohort, generator):
        ...         return torch.zeros_like(updates[0])
        >>> Silent(clients=[1, 2]).sent([0, 1, 4], torch.ones(3, 2), 5, 0)
        {1: tensor([0., 0.])}
    """

    place = 3

    def __init__(
        self,
        clients: list[int] | None = None,
        fraction: float | None = None,
        seed: int | None = None,
        knows: Knowledge = "colluders",
    ) -> None:
        super().__init__(clients, fraction, seed)
        self.knows = knows

    @abstractmethod
    def collude(self, updates: Tensor, colluders: int, cohort: int, generator: torch.Generator) -> Tensor:
        """The update ``[P]`` that every colluder sends, or ``[colluders, P]``, one for each.

        Args:
            updates: the honest updates that they know, floating-point ``[j, P]``, without buffers; not to be changed in
                place.
            colluders: how many of them are in the cohort, at least one.
            cohort: how many clients are.
            generator: CPU generator that depends on ``seed`` and the round.
        """

    def apply(self, update: Tensor, context: UploadContext) -> Tensor:
        """``update [P]`` itself: what is sent is known when the whole cohort has trained."""
        return update

    def sent(self, cohort: Sequence[int], updates: Tensor, num_clients: int, round_index: int) -> dict[int, Tensor]:
        """What the colluders of a cohort send.

        Args:
            cohort: the clients of the round, by number.
            updates: ``[k, P]``, what they have ready.
            num_clients: clients of the federation.
            round_index: the round, from 0.

        Returns:
            Colluder to ``[P]``.

        Raises:
            ConfigurationError: :meth:`collude` gives another shape.
        """
        chosen = set(self.chosen(num_clients))
        rows = [row for row, client in enumerate(cohort) if client in chosen]
        if not rows:
            return {}
        known = updates if self.knows == "all" else updates[rows]
        generator = generator_for(self.seed, "collusion", round_index)
        made = self.collude(known, len(rows), len(cohort), generator)
        shapes = [updates.shape[1:], updates[rows].shape]
        if made.shape not in shapes:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            raise ConfigurationError(f"{self!r} made {list(made.shape)}; expected {expected}.")
        made = made.expand(len(rows), -1)
        return {cohort[row]: update for row, update in zip(rows, made)}


def check_collusion(uploads: Sequence[Upload], personalizer: Any) -> None:
    """Check that colluders can look at each other's updates.

    Args:
        uploads: of the loop.
        personalizer: of the loop; None where everybody starts from the global model.

    Raises:
        ConfigurationError: clients start from models of their own.
    """
    for each in uploads:
        if isinstance(each, Collusion) and personalizer is not None:
            raise ConfigurationError(
                f"FederatedLoop(uploads=[{each!r}], personalizer={personalizer!r}): colluders compare updates where "
                "everybody starts from the global model. Leave one of them out."
            )


class ALittleIsEnough(Collusion):
    """All colluders send mean - z std of the updates that they know, entry by entry.

    With k clients and m colluders, s = floor(k / 2 + 1) - m honest clients are needed for a majority; z is the largest
    number for which so many honest ones are expected to lie farther from the mean: Phi(z) = (k - m - s) / (k - m). With
    a majority of colluders (s <= 0) nothing bounds z: it is the one of s = 1. A colluder who knows nothing but its own
    update has no spread, and sends it.

    Args:
        z: standard deviations from the mean; None: the paper's, by the cohort.
        clients: whom it concerns, see :class:`flsv.data.ClientChoice`.
        fraction: likewise.
        seed: seed of the choice of clients.
        knows: see :class:`flsv.attacks.Collusion`; the paper's know their own updates only.

    Raises:
        ConfigurationError: an argument out of range.

    Example:
        >>> attack = ALittleIsEnough(z=1.0)
        >>> attack.collude(torch.tensor([[1.0, 0.0], [3.0, 0.0]]), 2, 5, torch.Generator())
        tensor([1., 0.])
    """

    def __init__(
        self,
        z: float | None = None,
        clients: list[int] | None = None,
        fraction: float | None = None,
        seed: int | None = None,
        knows: Knowledge = "colluders",
    ) -> None:
        super().__init__(clients, fraction, seed, knows)
        self.z = z

    def collude(self, updates: Tensor, colluders: int, cohort: int, generator: torch.Generator) -> Tensor:
        z = largest_z(cohort, colluders) if self.z is None else self.z
        return updates.mean(0) - z * updates.std(0, correction=0)


def largest_z(cohort: int, colluders: int) -> float:
    """The paper's z_max for a cohort of k clients with m colluders.

    Example:
        >>> round(largest_z(50, 24), 2)  # the paper's example has s = 2 of 26
        1.43
    """
    honest = cohort - colluders
    supporters = max(1, cohort // 2 + 1 - colluders)
    # Nobody honest is left, or all of them are needed: there is no such number.
    return NormalDist().inv_cdf((honest - supporters) / honest) if honest > supporters else 0.0


class InnerProductManipulation(Collusion):
    """All colluders send -c median |d| mean / |mean|, of the updates d that they know.

    With equal weights the model goes backwards as soon as c m > (k - m) |mean| / median |d|, of m colluders in a cohort
    of k: two of eight reach it with c = 3 at most. A metric of how well an update agrees with the aggregate then pays
    the colluders, and nobody else.

    Args:
        length: c. By default just under the five medians from which :class:`flsv.filters.OutlierFilter` looks closer.
        clients: whom it concerns, see :class:`flsv.data.ClientChoice`.
        fraction: likewise.
        seed: seed of the choice of clients.
        knows: see :class:`flsv.attacks.Collusion`.

    Raises:
        ConfigurationError: a length that is not above 0.

    Example:
        >>> attack = InnerProductManipulation(length=2.0)
        >>> attack.collude(torch.tensor([[3.0, 4.0], [3.0, 4.0], [6.0, 8.0]]), 1, 3, torch.Generator())
        tensor([-6., -8.])
    """

    def __init__(
        self,
        length: Positive = 4.9,
        clients: list[int] | None = None,
        fraction: float | None = None,
        seed: int | None = None,
        knows: Knowledge = "all",
    ) -> None:
        super().__init__(clients, fraction, seed, knows)
        self.length = length

    def collude(self, updates: Tensor, colluders: int, cohort: int, generator: torch.Generator) -> Tensor:
        known = updates.double()
        mean, lengths = known.mean(0), torch.linalg.vector_norm(known, dim=1)
        tiny = torch.finfo(mean.dtype).tiny  # a mean of 0 has no opposite
        return (mean * (-self.length * lengths.quantile(0.5) / mean.norm().clamp_min(tiny))).to(updates)


Direction = Literal["unit", "std", "sign"]


class MinMax(Collusion):
    """All colluders send mean + gamma p with the largest gamma for which max_i |mean + gamma p - d_i| is at most
    max_ij |d_i - d_j|, over the updates d that they know.

    The paper searches for gamma by halving steps. Here it is exact: each |mean + gamma p - d_i|^2 is a parabola in
    gamma, and gamma the least of their larger crossings of the bound.

    Args:
        direction: p: ``"unit"``, -mean / |mean|; ``"std"``, minus the standard deviation of each entry; ``"sign"``,
            minus the mean's signs.
        clients: whom it concerns, see :class:`flsv.data.ClientChoice`.
        fraction: likewise.
        seed: seed of the choice of clients.
        knows: see :class:`flsv.attacks.Collusion`; the paper's strongest know all updates.

    Raises:
        ConfigurationError: an argument out of range.

    Example:
        >>> attack = MinMax()
        >>> attack.collude(torch.tensor([[1.0, 0.0], [3.0, 0.0]]), 1, 5, torch.Generator())
        tensor([1., 0.])
    """

    def __init__(
        self,
        direction: Direction = "unit",
        clients: list[int] | None = None,
        fraction: float | None = None,
        seed: int | None = None,
        knows: Knowledge = "all",
    ) -> None:
        super().__init__(clients, fraction, seed, knows)
        self.direction = direction

    def collude(self, updates: Tensor, colluders: int, cohort: int, generator: torch.Generator) -> Tensor:
        known = updates.double()
        mean = known.mean(0)
        if self.direction == "std":
            towards = -known.std(0, correction=0)
        elif self.direction == "sign":
            towards = -mean.sign()
        else:
            towards = -mean / mean.norm().clamp_min(torch.finfo(mean.dtype).tiny)
        square = towards @ towards
        if square == 0:  # all are 0, or alike
            return mean.to(updates)
        away = mean - known
        bound = torch.cdist(known, known, compute_mode="donot_use_mm_for_euclid_dist").max().square()
        slope, room = away @ towards, (bound - away.square().sum(1)).clamp_min(0)
        gamma = ((-slope + (slope.square() + square * room).sqrt()) / square).min()
        return (mean + gamma * towards).to(updates)
