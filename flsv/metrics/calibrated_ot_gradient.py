"""CalibratedOTGradient: the share of each client's samples that are not suspicious.

Li et al., "Data Valuation and Detections in Federated Learning" (FedBary), CVPR 2024, section 4.3, equation 11.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flsv.core import Client, map_clients
from flsv.metrics.base import latest
from flsv.metrics.wasserstein_contribution import WassersteinContribution
from flsv.valuation import Valuation, keep_pictures


class CalibratedOTGradient(WassersteinContribution):
    r"""The share of a client's samples that are not suspicious.

    The calibrated gradient g_l of a client's sample l is the rate at which the Wasserstein distance between the
    client's and the server's data grows if the sample gets more weight: *positive means harmful*.

    .. math::
        g_l = f_l - \frac{1}{m - 1} \sum_{j \ne l} f_j

    with m the number of the client's samples, and f_l the dual potential of sample l in the optimal transport to the
    points that the server has sent. A client's gradients sum to 0, so their mean carries no information. The client's
    contribution is therefore 1 minus the share of its flagged samples, so that more is better. The gradients stay at
    the client, which reads them by ``client.ask(flsv.valuation.sample_values)``, and so does a picture of the most
    harmful images. The client sends only the number of flagged samples and a histogram, which ``flsv value`` draws.

    The inputs of ``update``, and all arguments that are not listed here, are those of :class:`WassersteinContribution`.
    ``compute`` returns ``[num_clients]`` in [0, 1], NaN for clients that never took part. ``diagnostics`` returns the
    distances and the shares of flagged samples.

    When not to use it:
        For payment: it counts samples that look unlike the server's samples, among them rare correct samples. With few
        samples per client, where it flags nearly as many correct as wrong samples.

    Args:
        rule: the rule by which samples are flagged, see :func:`flsv.valuation.flag_samples`. ``"positive"`` is the
            paper's rule, which flags about half of a clean client's samples.
        pictures: the number of images in each client's picture of harmful samples; 0: no picture.

    Example:
        >>> from flsv.valuation import clients_of, sample_values, server_of
        >>> x = torch.randn(300, 8, generator=torch.Generator().manual_seed(0))
        >>> y = torch.zeros(100, dtype=torch.long)
        >>> bad = x[100:200].clone()
        >>> bad[:20] += 9
        >>> clients = clients_of([(x[:100], y), (bad, y)])
        >>> metric = CalibratedOTGradient(num_clients=2, features="pixels")
        >>> metric.update(torch.arange(2), clients, server_of(x[200:], y))
        >>> metric.compute()[1]
        tensor(0.8000)
        >>> clients[1].ask(sample_values).flagged.nonzero().max()
        tensor(19)
    """

    unit = "share of samples not flagged"
    sign = "from 0 to 1, more is better: 1 where no sample is suspicious."
    to_pay_by = False
    plot_upper_bound = 1.0
    judges = True

    flagged: Tensor

    def __init__(
        self,
        num_clients: int | None = None,
        rule: str = "outlier",
        pictures: int = 16,
        options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.pictures = pictures
        super().__init__(num_clients, options=dict(rule=rule, **(options or {})), **kwargs)

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        super().init_states(num_clients, num_classes)
        self.add_state("flagged", torch.full((num_clients,), float("nan")), dist_reduce_fx=latest)

    def _take(self, clients: Sequence[Client], valuation: Valuation) -> None:
        super()._take(clients, valuation)
        self.flagged = self.flagged.clone()
        self.flagged[list(valuation.clients)] = valuation.flagged_shares.to(self.flagged)
        map_clients(clients, lambda client: client.ask(keep_pictures, self.pictures))

    def compute(self) -> Tensor:
        """Compute 1 minus each client's share of flagged samples, ``[num_clients]``; NaN for clients that never took
        part."""
        return 1 - self.flagged

    def diagnostics(self) -> dict[str, Tensor]:
        """Return ``distance``, each client's last Wasserstein distance as in :class:`WassersteinContribution`, and
        ``flagged``, its share of flagged samples, both ``[num_clients]``."""
        return {**super().diagnostics(), "flagged": self.flagged.clone()}
