"""ClassSpecificShapley: momentum, absent clients, torchmetrics' own ways of using a metric."""

import warnings
from functools import partial
from pathlib import Path

import lightning as L
import pytest
import torch
from torch.utils.data import TensorDataset

from flsv import ClassifierClient, FederatedDataModule, FederatedLoop, Reporting
from flsv.data import IIDPartitioner, Splits
from flsv.errors import ConfigurationError
from flsv.functional import class_specific_shapley, participant_weights
from flsv.metrics import ClassSpecificShapley

ROUNDS = [([0, 1, 3], 0), ([1, 3], 1), ([0, 1], 2), ([3], 3)]


def heads(seed: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(k, 2, 4, generator=generator), torch.randn(2, 4, generator=generator)


def feed(metric: ClassSpecificShapley, rounds: list[tuple[list[int], int]] = ROUNDS) -> ClassSpecificShapley:
    for ids, seed in rounds:
        metric.update(torch.tensor(ids), *heads(seed, len(ids)))
    return metric


def expected(rounds: list[tuple[list[int], int]] = ROUNDS, momentum: float = 0.9) -> torch.Tensor:
    value = torch.full((5, 2), float("nan"))
    for ids, seed in rounds:
        now = class_specific_shapley(*heads(seed, len(ids)))
        for row, i in enumerate(ids):
            value[i] = now[row] if value[i].isnan().all() else momentum * value[i] + (1 - momentum) * now[row]
    return value


def metric(**kwargs: object) -> ClassSpecificShapley:
    return ClassSpecificShapley(num_clients=5, num_classes=2, **kwargs)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_running_value_is_algorithm_1(momentum: float) -> None:
    got = feed(metric(momentum=momentum)).compute()
    torch.testing.assert_close(got, expected(momentum=momentum), equal_nan=True)
    assert got[[2, 4]].isnan().all()  # never seen


def test_one_number_per_client_is_a_cosine_like_its_parts() -> None:
    live = feed(metric())
    overall = live.per_client(live.compute())
    torch.testing.assert_close(overall, expected().mean(-1), equal_nan=True)
    torch.testing.assert_close((1 + overall) / 2, participant_weights(expected())[0], equal_nan=True)  # eq. 6
    against = ClassSpecificShapley(num_clients=2, num_classes=2)
    against.update(torch.tensor([0, 1]), torch.tensor([-1.0, 1.0]).view(2, 1, 1).expand(2, 2, 3), torch.ones(2, 3))
    assert against.per_client(against.compute()).tolist() == pytest.approx([-1, 1])
    assert "from -1 to 1" in against.guide().lines()["sign"]


def test_two_classes_are_one_number_and_it_is_said(tmp_path: Path) -> None:
    data = FederatedDataModule(
        TensorDataset(torch.randn(60, 4, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 2),
        IIDPartitioner(3),
        splits=Splits(client_test=0),
    )
    loop = FederatedLoop(metrics={"cssv": ClassSpecificShapley()}, seed=0, reporting=Reporting(table=False))
    module = ClassifierClient("mlp", {"hidden": [4]}, optimizer=partial(torch.optim.SGD, lr=0.1))
    trainer = L.Trainer(
        max_epochs=2, callbacks=[loop], default_root_dir=tmp_path, accelerator="cpu", enable_progress_bar=False
    )
    with pytest.warns(UserWarning, match="two classes both have the same number") as caught:
        trainer.fit(module, data)
    assert len([w for w in caught if "two classes" in str(w.message)]) == 1
    found = loop.contributions["cssv"].by_class
    torch.testing.assert_close(found[:, 0], found[:, 1], atol=1e-4, rtol=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ClassSpecificShapley().bind(3, 3)


def test_weighed_by_samples_two_halves_come_to_the_whole_and_cosines_stay() -> None:
    whole, server = heads(0, 1)
    rest = heads(1, 2)[0]
    one, two = metric(weighting="samples"), metric(weighting="samples")
    one.update(torch.tensor([0, 1, 2]), torch.cat([whole, rest]), server, torch.tensor([40, 10, 20]))
    two.update(torch.tensor([0, 1, 2, 3]), torch.cat([whole, rest, whole]), server, torch.tensor([20, 10, 20, 20]))
    plain = metric()
    plain.update(torch.tensor([0, 1, 2]), torch.cat([whole, rest]), server)
    torch.testing.assert_close(one.compute(), plain.compute(), equal_nan=True)
    paid, split = one.per_client(one.compute()), two.per_client(two.compute())
    torch.testing.assert_close(split[0] + split[3], paid[0])
    torch.testing.assert_close(paid[:3], plain.per_client(plain.compute())[:3] * torch.tensor([40.0, 10.0, 20.0]))
    assert paid[3:].isnan().all()


def test_weighed_by_samples_over_rounds_and_in_the_interval() -> None:
    def fed(rounds: list[tuple[list[int], int]]) -> ClassSpecificShapley:
        result = metric(weighting="samples", momentum=0.5)
        for ids, seed in rounds:
            result.update(torch.tensor(ids), *heads(seed, len(ids)), torch.tensor(ids) + 10 * (seed + 1))
        return result

    found = fed(ROUNDS)
    torch.testing.assert_close(found.compute(), expected(momentum=0.5), equal_nan=True)
    # Client 1 had 11, 21 and 31 samples.
    mean = expected(momentum=0.5).mean(-1)
    torch.testing.assert_close(found.per_client(found.compute())[1], mean[1] * (0.25 * 11 + 0.25 * 21 + 0.5 * 31))
    ends = found.intervals()
    assert ends is not None
    middle = (ends[0] + ends[1]) / 2
    known = ~ends[0].isnan()
    assert known.any()
    torch.testing.assert_close(middle[known], found.per_client(found.compute())[known])  # no bound of cosines


def test_weighting_is_refused_where_it_cannot_be() -> None:
    with pytest.raises(ConfigurationError, match="weighting='size'.: expected"):
        metric(weighting="size")
    with pytest.raises(ValueError, match=r"expects num_samples \[k=2\], got None"):
        metric(weighting="samples").update(torch.tensor([0, 1]), *heads(0, 2))
