"""ProxyShapley: scikit-learn's models of every coalition's pooled samples, on one process, ranks and sites."""

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.linear_model import Ridge
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAUROC

from flsv import FederatedDataModule, FederatedLoop
from flsv.core import Client, LocalData
from flsv.data import SizePartitioner
from flsv.functional.shapley.enumeration import all_coalitions, shapley_of_table
from flsv.games.proxy_game import ProxyOptions, ProxyServer
from flsv.metrics import ProxyShapley
from flsv.models import RegressorClient
from flsv.privacy import GaussianPrivacy
from flsv.sampling import UniformSampler
from flsv.utilities.errors import ConfigurationError
from flsv.valuation import clients_of, server_of
from helpers.data import toy_data
from helpers.fits import fit
from helpers.models import Plain

PENALTY, COMPONENTS = 0.7, 3
LOSS: dict[str, Any] = {"features": "inputs", "performance": "val_loss", "mode": "min"}


def regressions(*sizes: int) -> tuple[list[Client], LocalData]:
    """Clients with so many samples of five numbers and a target, and a server."""
    draw = torch.Generator().manual_seed(0)
    none = torch.zeros(1, dtype=torch.long)

    def local(name: str, size: int) -> LocalData:
        batch = torch.randn(size, 5, generator=draw), torch.randn(size, generator=draw)
        return LocalData(name, lambda split: [batch], none + size, none, guarded=name != "server")

    return [Client(i, local(str(i), size)) for i, size in enumerate(sizes)], local("server", 30)


def kinds_of(module: Plain, batches: Any) -> tuple[list[np.ndarray], np.ndarray]:
    """What the last layer is given, and the inputs; and the labels."""
    x, y = (torch.cat(parts) for parts in zip(*batches))
    with torch.no_grad():
        return [module.net[:-1].eval()(x).double().numpy(), x.flatten(1).double().numpy()], y.numpy()


def by_scikit_learn(module: Plain, data: FederatedDataModule) -> Tensor:
    """Balanced accuracies of all coalitions of three clients, each fitted to its pooled samples."""
    valued, truth = kinds_of(module, data.val_dataloader())
    parts = [kinds_of(module, data.client_loader(i, shuffle=False)) for i in range(3)]
    utilities = []
    for mask in all_coalitions(3):
        members = mask.nonzero().flatten().tolist()
        games = []
        for kind in range(2):
            axes = PCA(COMPONENTS, svd_solver="full").fit(valued[kind])
            scale = np.sqrt(axes.explained_variance_.sum() * (len(truth) - 1) / len(truth))
            if not members:
                games.append(1 / 3)
                continue
            x = np.concatenate([axes.transform(parts[i][0][kind]) for i in members]) / scale
            y = np.concatenate([parts[i][1] for i in members])
            model = Ridge(alpha=PENALTY).fit(x, np.eye(3)[y])
            told = model.predict(axes.transform(valued[kind]) / scale).argmax(1)
            games.append(np.mean([(told[truth == c] == c).mean() for c in range(3)]))
        utilities.append(np.mean(games))
    return torch.tensor(utilities)


def test_proxy_values_equal_scikit_learns_on_pooled_samples(tmp_path: Path) -> None:
    """Of the final model, in a loop in which two of three clients take part in a round."""
    module, data = Plain(), toy_data()
    metric = ProxyShapley(performance="balanced_accuracy", penalty=PENALTY, components=COMPONENTS)
    loop = FederatedLoop(metrics={"proxy": metric}, sampler=UniformSampler(2), seed=0)
    fit(loop, tmp_path, module, data)
    loop.space.write(module, loop.run.state.model())
    wanted = shapley_of_table(by_scikit_learn(module, data)[:, None])[:, 0]
    torch.testing.assert_close(metric.values[:, 0].double(), wanted, rtol=1e-5, atol=1e-6)
    assert metric.evaluations == 8


def test_proxy_model_weights_of_every_coalition_equal_scikit_learns_ridge() -> None:
    clients, server = regressions(4, 9, 2)
    sets = [client.ask(LocalData.samples) for client in clients]
    options = ProxyOptions(ProxyShapley(**LOSS).measured_by, "inputs", None, 3, PENALTY)
    game = ProxyServer(server, torch.empty(0), options).ask(clients)
    masks, ((mean, axes),) = all_coalitions(3)[1:], game.server.axes
    for mask, weights in zip(masks, game.weights(masks)[0]):
        x, y = (torch.cat(part) for part in zip(*(sets[i] for i in mask.nonzero().flatten().tolist())))
        reference = Ridge(alpha=PENALTY).fit(((x.double() - mean) @ axes.T).numpy(), y.double().numpy())
        np.testing.assert_allclose(weights[:-1, 0], reference.coef_, rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(weights[-1, 0], reference.intercept_, rtol=1e-6, atol=1e-9)
    xv, yv = server.samples("val")
    told = ((xv.double() - mean) @ axes.T) @ weights[:-1, 0] + weights[-1, 0]
    torch.testing.assert_close(game(masks)[-1], -(told - yv.double()).square().mean())
    torch.testing.assert_close(game(~masks[-1:])[0], -yv.double().square().mean())  # nobody's outputs are 0


def test_proxy_shapley_is_computed_every_n_rounds_and_at_the_end(tmp_path: Path) -> None:
    seen: dict[Any, list[bool]] = {}
    for every in (None, 2, 1):
        metric = ProxyShapley(every=every)
        rows = [bool(value.isfinite().all()) for value in history(metric, tmp_path / str(every), rounds=3)]
        seen[every] = [*rows, int(metric.evaluations) // 8]
    assert seen == {None: [False, False, True, 1], 2: [False, True, True, 2], 1: [True, True, True, 3]}


def history(metric: ProxyShapley, folder: Path, rounds: int) -> list[Tensor]:
    """The values after each round."""

    class Watch(L.Callback):
        def on_train_epoch_end(self, *hook: Any) -> None:
            found.append(metric.compute().clone())

    found: list[Tensor] = []
    loop = FederatedLoop(metrics={"proxy": metric}, seed=0)
    fit(loop, folder, rounds=rounds, callbacks=[Watch()])
    return found


def test_proxy_shapley_does_not_change_the_trained_model(tmp_path: Path) -> None:
    ends = []
    for metrics in ({}, {"proxy": ProxyShapley(every=1)}):
        loop = FederatedLoop(metrics=metrics, seed=0)
        fit(loop, tmp_path / str(len(ends)))
        ends.append(loop.run.state.model())
    assert torch.equal(*ends)


def test_proxy_accuracy_is_the_share_weighted_mean_over_classes() -> None:
    draw = torch.Generator().manual_seed(1)
    y = torch.arange(60) % 3
    x = torch.randn(60, 4, generator=draw) + y[:, None]
    clients, server = clients_of([(x[i::3][:9], y[i::3][:9]) for i in range(3)]), server_of(x[27:], y[27:])
    by_class = ProxyShapley(3, num_classes=3, features="inputs")
    whole = ProxyShapley(3, features="inputs")
    for metric in (by_class, whole):
        metric.update(torch.arange(3), clients, server, torch.empty(0))
    shares = y[27:].bincount() / len(y[27:])
    torch.testing.assert_close(by_class.compute() @ shares, whole.compute())


def test_proxy_values_of_many_clients_are_sampled_with_standard_errors() -> None:
    clients, server = regressions(*[4] * 9)
    found = {}
    for budget in (4096, 200):
        metric = ProxyShapley(9, **LOSS, budget=budget)
        generator = torch.Generator().manual_seed(0)
        metric.update(torch.arange(9), clients, server, torch.empty(0), generator=generator)
        found[budget] = metric
    assert "stderr" not in found[4096].diagnostics()
    errors = found[200].diagnostics()["stderr"]
    assert found[200].evaluations <= 200
    assert ((found[200].compute() - found[4096].compute()).abs() <= 4 * errors).all()
    assert (errors > 0).all()


def test_proxy_values_by_auroc_equal_those_by_torchmetrics_auroc() -> None:
    draw = torch.Generator().manual_seed(3)
    y = torch.arange(40) % 2
    x = torch.randn(40, 3, generator=draw) + 0.3 * y[:, None]
    clients, server = clients_of([(x[:8], y[:8]), (x[8:20], y[8:20])]), server_of(x[20:], y[20:])
    found = []
    for performance in ("auroc", MulticlassAUROC(2, average="macro")):
        metric = ProxyShapley(2, features="inputs", performance=performance)
        metric.update(torch.arange(2), clients, server, torch.empty(0))
        found.append(metric.compute())
    torch.testing.assert_close(*found)  # of two classes, both are the area of class 1


def test_false_sample_counts_do_not_change_proxy_values() -> None:
    class Boasting(Client):
        def ask(self, *question: Any, **more: Any) -> Any:
            return [tuple(5 * part for part in pair) for pair in super().ask(*question, **more)]

    honest, server = regressions(6, 6, 6)
    boasting = [Boasting(each.id, each._Client__data) for each in honest[:1]]  # type: ignore[attr-defined]
    found = []
    for clients in (honest, [*boasting, *honest[1:]]):
        metric = ProxyShapley(3, **LOSS)
        metric.check(torch.tensor([6, 6, 6]))
        metric.update(torch.arange(3), clients, server, torch.empty(0))
        found.append(metric.compute())
    torch.testing.assert_close(*found)


class Inputs(L.LightningModule):
    """A module without a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Conv1d(1, 3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.flatten(1)[:, None, :4]).squeeze(-1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


REFUSED = {
    "no layer": (ProxyShapley(), Inputs, {}, r'no linear layer.*features="inputs"'),
    "no layer of this name": (ProxyShapley(head="last"), Plain, {}, "head='last' is not a layer"),
    "a logged value of which more is better": (
        ProxyShapley(performance="val_acc", mode="max"), Plain, {}, "a linear model logs nothing"
    ),
    "private updates": (
        ProxyShapley(), Plain, {"uploads": [GaussianPrivacy(clip=1.0, noise_multiplier=1.0)]}, "beside their updates"
    ),
    "few coalitions": (ProxyShapley(budget=5), Plain, {}, "one pair of orders of 3 clients needs 6"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_proxy_shapley_with_unusable_settings_is_refused(tmp_path: Path, case: str) -> None:
    metric, make, options, words = REFUSED[case]
    loop = FederatedLoop(metrics={"proxy": metric}, seed=0, **options)
    with pytest.raises(ConfigurationError, match=words):
        fit(loop, tmp_path, make())
    assert loop.round_index == 0


def test_proxy_values_of_a_module_without_a_linear_layer_come_from_its_inputs(tmp_path: Path) -> None:
    metric = ProxyShapley(features="inputs")
    fit(FederatedLoop(metrics={"proxy": metric}, seed=0), tmp_path, Inputs())
    assert metric.compute().isfinite().all()


class Numbers(L.LightningDataModule):
    """A regression."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(5)
        x = torch.randn(90, 4, generator=draw)
        self.sets = TensorDataset(x[:60], x[:60].sum(1)), TensorDataset(x[60:], x[60:].sum(1))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.sets[0], batch_size=10, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.sets[1], batch_size=30)


def test_proxy_shapley_of_a_regression_grows_with_the_clients_samples(tmp_path: Path) -> None:
    metric = ProxyShapley(performance="val_loss", mode="min")
    data = FederatedDataModule(Numbers(), SizePartitioner([1, 2, 3]))
    module = RegressorClient(optimizer=partial(torch.optim.SGD, lr=0.05))
    fit(FederatedLoop(metrics={"proxy": metric}, seed=0), tmp_path, module, data)
    assert all(less < more for less, more in pairwise(metric.compute().tolist()))
    with pytest.raises(ConfigurationError, match="the targets are numbers"):
        ProxyServer(
            server_of(torch.ones(3, 2), torch.ones(3)), torch.empty(0), ProxyOptions("accuracy", "inputs", None, 2, 1.0)
        )
