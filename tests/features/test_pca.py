"""Principal components against scikit-learn, on the server's samples and by moments."""

from __future__ import annotations

import pytest
import torch
from sklearn.decomposition import PCA as SklearnPCA

from flsv.errors import ConfigurationError
from flsv.features import PCA, Moments
from flsv.valuation import clients_of


def draw(samples: int, seed: int = 0) -> torch.Tensor:
    x = torch.randn(samples, 1, 4, 5, generator=torch.Generator().manual_seed(seed))
    return x * torch.linspace(0.1, 3, 20).view(1, 1, 4, 5) + 2


def reference(fit: torch.Tensor, x: torch.Tensor, components: int) -> torch.Tensor:
    fitted = SklearnPCA(components, svd_solver="full").fit(fit.flatten(1).double().numpy())
    return torch.from_numpy(fitted.transform(x.flatten(1).double().numpy()))


def up_to_sign(mine: torch.Tensor, theirs: torch.Tensor) -> None:
    assert mine.shape == theirs.shape
    torch.testing.assert_close(mine.double().abs(), theirs.abs(), atol=1e-4, rtol=1e-4)
    # One sign per component.
    torch.testing.assert_close((mine.double() * theirs).sign().mean(0).abs(), torch.ones(mine.shape[1]).double())


def sets(x: torch.Tensor, *sizes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(part, torch.zeros(len(part), dtype=torch.long)) for part in x.split(sizes)]


def test_on_the_servers_samples_it_is_scikit_learns() -> None:
    pca = PCA(4)
    pca.fit(draw(60), [])
    up_to_sign(pca(draw(30, 1)), reference(draw(60), draw(30, 1), 4))


def test_without_them_moments_give_the_pooled_components() -> None:
    x = draw(90)
    pca = PCA(4)
    pca.fit(None, clients_of(sets(x, 50, 0, 39, 1)))
    up_to_sign(pca(draw(30, 1)), reference(x, draw(30, 1), 4))


def test_clients_answer_with_moments_only() -> None:
    crossed = []

    class Watched:
        def __init__(self, client):
            self.client = client

        def __getattr__(self, name):
            return getattr(self.client, name)

        def ask(self, question, *args):
            crossed.append(self.client.ask(question, *args))
            return crossed[-1]

    PCA(2).fit(None, [Watched(client) for client in clients_of(sets(draw(40), 25, 15))])  # type: ignore[list-item]
    assert [(part.count, part.total.shape, part.square.shape) for part in crossed] == [
        (25, (20,), (20, 20)),
        (15, (20,), (20, 20)),
    ]
    PCA(2).fit(draw(30), [Watched(client) for client in clients_of(sets(draw(40), 25, 15))])  # type: ignore[list-item]
    assert len(crossed) == 2  # the server's own samples were enough


def test_rows_that_are_not_finite_are_left_out_of_the_fit_and_stay_apart() -> None:
    x = draw(60)
    broken = x.clone()
    broken[7, 0, 0, 0] = float("nan")
    keep = torch.arange(60) != 7
    for fit in (lambda pca: pca.fit(broken, []), lambda pca: pca.fit(None, clients_of(sets(broken, 60)))):
        pca, clean = PCA(3), PCA(3)
        fit(pca)
        clean.fit(x[keep], [])
        torch.testing.assert_close(pca(broken)[keep], clean(x)[keep], atol=1e-3, rtol=1e-3)
        assert pca(broken)[7].isnan().all()


def test_wrong_use() -> None:
    with pytest.raises(ConfigurationError, match="components=0"):
        PCA(0)
    with pytest.raises(RuntimeError, match="not fitted"):
        PCA()(draw(2))
    with pytest.raises(ConfigurationError, match="nothing to be fitted on"):
        PCA().fit(None, clients_of(sets(draw(0), 0)))
    with pytest.raises(ConfigurationError, match="with 20 and with 6 numbers"):
        PCA().fit(None, clients_of([*sets(draw(3), 3), (torch.zeros(2, 6), torch.zeros(2).long())]))
    pca = PCA(2)
    pca.fit(draw(20), [])
    with pytest.raises(ConfigurationError, match="of 20 numbers, and got 6"):
        pca(torch.zeros(3, 6))


def test_moments_add_up() -> None:
    x = draw(30).flatten(1)
    whole, parts = Moments.of(x), Moments.of(x[:11]) + Moments.of(x[11:])
    assert parts.count == whole.count == 30
    torch.testing.assert_close(parts.covariance(), whole.covariance())
    torch.testing.assert_close(whole.covariance(), torch.cov(x.double().T, correction=0))
