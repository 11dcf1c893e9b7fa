"""Coalitions of clients that keep a part of the model: each has the score of a plain loop of its members, in which
every client has its own part."""

import copy
import itertools
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from flsv import FederatedLoop, Reporting
from flsv.data import FederatedDataModule
from flsv.metrics import PartialFederatedShapley, ShadowShapley
from flsv.retraining.retrained_utility import RetrainedUtility
from flsv.sampling import FixedCohort
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import generator_for
from helpers.data import CLASSES, FEATURES, toy_data
from helpers.fits import fit, make_checkpoint_callback, trainer_for
from helpers.recorded import Recorded
from helpers.sites import ServerData, SitesInProcess

SEED, ROUNDS, RATE = 5, 3, 0.1
COALITIONS = [members for size in range(4) for members in itertools.combinations(range(3), size)]
entropy = nn.functional.cross_entropy


class Weighs(L.LightningModule):
    """Weighs classes in training by its client's own samples, of all rounds."""

    def __init__(self, zero: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Linear(FEATURES, 8)
        self.head = nn.Linear(8, CLASSES)
        self.register_buffer("_class_weight", torch.ones(CLASSES))

        if zero:  # hides what lies before it
            nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        counts = torch.bincount(y, minlength=CLASSES) + 1.0
        self._class_weight.mul_(0.9).add_(0.1 * counts.sum() / counts)
        return entropy(self(x), y, self._class_weight)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self(batch[0])
        self.log("val_loss", entropy(logits, batch[1], self._class_weight))
        self.log("val_acc", (logits.argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), RATE)


def train_by_hand(
    data: FederatedDataModule, private: str, members: tuple[int, ...]
) -> tuple[Weighs, list[dict[str, Tensor]]]:
    """The global model, and each client's part."""
    server = Weighs()
    names = [name for name in server.state_dict() if name.startswith(private)]
    parts = [{name: server.state_dict()[name].clone() for name in names} for _ in range(3)]

    for r in range(ROUNDS if members else 0):
        states = []
        for i in members:
            client = copy.deepcopy(server)
            client.load_state_dict({**client.state_dict(), **parts[i]})
            optimizer = torch.optim.SGD(client.parameters(), RATE)
            for batch in data.client_loader(
                i, "train", generator=generator_for(SEED, "shuffle", r, i, 0)
            ):
                optimizer.zero_grad()
                client.training_step(batch, 0).backward()
                optimizer.step()
            states.append(client.state_dict())
            parts[i] = {name: states[-1][name].clone() for name in names}
        samples = [int(data.num_samples[i]) for i in members]
        for name, value in server.state_dict().items():
            if name in names:
                continue
            mean = 0.0
            for count, state in zip(samples, states):
                mean = mean + count / sum(samples) * state[name]
            value.copy_(mean)

    return server, parts


@torch.no_grad()
def score_model(model: Weighs, batches: Any, performance: str) -> float:
    x, y = (torch.cat(part) for part in zip(*batches))
    logits = model(x)
    if "acc" in performance:
        return float((logits.argmax(1) == y).double().mean())
    return -float(entropy(logits, y))


def make_loop(private: str, **metrics: Any) -> FederatedLoop:
    return FederatedLoop(
        metrics=metrics,
        share=[f"!{private}*"],
        seed=SEED,
        reporting=Reporting(table=False),
    )


ON_SERVER = {"server_val": 0.3, "client_test": 0.0}
AT_CLIENTS = {"server_val": 0.0, "client_val": 0.4, "client_test": 0.0}


def make_data(splits: dict[str, float]) -> FederatedDataModule:
    data = toy_data((4, 2, 3), **splits)
    data.setup("fit")
    return data


@pytest.mark.filterwarnings("ignore:.*(stay at their clients|no validation)")
@pytest.mark.parametrize("performance", ["negative_loss", "val_acc"])
def test_part_that_the_servers_score_does_not_depend_on_stays_at_the_clients(
    tmp_path: Path, performance: str
) -> None:
    metric = Recorded(
        coalitions="all",
        performance=performance,
        mode="max" if performance == "val_acc" else None,
        every=1,
    )
    loop = make_loop("_class_weight", shadow=metric)
    data = make_data(ON_SERVER)
    module = Weighs()
    fit(loop, tmp_path, module, data, ROUNDS)
    metric_of_run: Any = loop.metrics["shadow"]
    utilities = metric_of_run.game.tolist()
    for members, value in zip(metric_of_run.members, utilities):
        server, parts = train_by_hand(data, "_class_weight", members)
        expected = score_model(server, data.val_dataloader(), performance)
        assert value == pytest.approx(expected, abs=1e-6), members
        for client, part in enumerate(parts):
            is_trained = (part["_class_weight"] != 1).any()
            assert is_trained == (client in members)

    assert sorted(metric_of_run.members) == sorted(COALITIONS)
    assert len(set(utilities)) > 4

    plain = Weighs()
    fit(make_loop("_class_weight"), tmp_path, plain, make_data(ON_SERVER), ROUNDS)

    for name, value in module.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name])


def mean_score_by_hand(data: FederatedDataModule, private: str, members: tuple[int, ...]) -> float:
    """The clients' mean score, each of the global model with its part: the initial one if it is no member."""
    server, parts = train_by_hand(data, private, members)
    total = 0.0
    num_samples = 0
    for client in range(3):
        model = copy.deepcopy(server)
        model.load_state_dict({**model.state_dict(), **parts[client]})
        score = score_model(model, data.client_loader(client, "val"), "negative_loss")
        size = len(data.client_indices(client, "val"))
        total += size * score
        num_samples += size
    return total / num_samples


@pytest.mark.filterwarnings("ignore:.*(stay at their clients|no validation|has changed)")
@pytest.mark.parametrize(
    ("private", "resumed"),
    [
        ("head", False),
        ("head", True),
        ("_class_weight", False),
    ],
)
def test_clients_evaluate_a_coalition_with_the_private_part_trained_in_it(
    tmp_path: Path, private: str, resumed: bool
) -> None:
    def make_judged_loop() -> FederatedLoop:
        metric = Recorded(coalitions="all", performance="negative_loss", judges="clients")
        return make_loop(private, shadow=metric)

    data = make_data(AT_CLIENTS)
    checkpoint = None
    if resumed:
        fit(
            make_judged_loop(),
            tmp_path,
            Weighs(),
            data,
            2,
            enable_checkpointing=True,
            callbacks=[make_checkpoint_callback(tmp_path)],
        )
        checkpoint = tmp_path / "checkpoints/last.ckpt"

    loop = make_judged_loop()
    fit(loop, tmp_path, Weighs(), data, ROUNDS, ckpt_path=checkpoint)

    metric: Any = loop.metrics["shadow"]
    scores = [mean_score_by_hand(data, private, members) for members in metric.members]
    gain = scores[1] - scores[0]  # of all clients over nobody
    expected = torch.tensor(scores).double()
    torch.testing.assert_close(metric.game, expected, rtol=0, atol=1e-6)
    assert float(metric.compute().sum()) == pytest.approx(gain, abs=1e-5)


@pytest.mark.filterwarnings("ignore:.*(stay at their clients|no validation)")
def test_clients_that_keep_a_part_predict_no_outputs(tmp_path: Path) -> None:
    """Outputs of a coalition's model at a client need the part that the client had in that training."""
    metric = Recorded(judges="clients")
    loop = make_loop("head", shadow=metric)
    fit(loop, tmp_path, Weighs(), make_data(AT_CLIENTS), ROUNDS)
    metric_of_run: Any = loop.metrics["shadow"]

    assert metric_of_run.members == [(), (0, 1, 2), (0,), (1,), (2,)]
    assert metric_of_run.trained is None
    assert metric_of_run.compute().isfinite().all()


@pytest.mark.filterwarnings("ignore:.*(stay at their clients|no validation)")
@pytest.mark.parametrize(
    ("private", "options", "zero"),
    [
        ("head", {}, False),
        ("body", {}, True),
        ("_class_weight", {"performance": "val_loss", "mode": "min"}, False),
    ],
)
def test_server_score_that_depends_on_a_private_part_is_refused(
    tmp_path: Path, private: str, options: dict[str, Any], zero: bool
) -> None:
    with pytest.raises(
        ConfigurationError,
        match=f"'shadow' scores .* the score depends: of '{private}.*judges=.clients",
    ):
        fit(
            make_loop(private, shadow=ShadowShapley(**options)),
            tmp_path,
            Weighs(zero),
            make_data(ON_SERVER),
        )

    metric = ShadowShapley(**options)
    loop = make_loop(private, shadow=metric, other=PartialFederatedShapley())

    with pytest.raises(
        ConfigurationError,
        match=r"metrics \['other'\] evaluate models .* the server has no whole mod",
    ):
        fit(loop, tmp_path, Weighs(), make_data(ON_SERVER))


def test_retrained_utility_allows_private_parts_without_effect_on_its_score(tmp_path: Path) -> None:
    data = make_data(ON_SERVER)

    def trainer(cohort: FixedCohort) -> L.Trainer:
        return trainer_for(make_loop("_class_weight").replace(sampler=cohort), tmp_path, ROUNDS)

    utility = RetrainedUtility(trainer, Weighs(), data, "negative_loss")
    masks = torch.tensor([[True, False, True], [False, True, False]])

    with pytest.warns(UserWarning, match="stay at their clients"):
        utilities = utility(masks)

    expected = []
    for members in ((0, 2), (1,)):
        server, _ = train_by_hand(data, "_class_weight", members)
        expected.append(score_model(server, data.val_dataloader(), "loss"))

    torch.testing.assert_close(utilities, torch.tensor(expected).double(), rtol=0, atol=1e-6)


def test_sites_that_keep_a_part_train_no_coalitions(tmp_path: Path) -> None:
    def loop() -> FederatedLoop:
        return FederatedLoop(metrics={"shadow": ShadowShapley()}, share=["!head"], seed=SEED)

    with pytest.raises(
        ConfigurationError, match="others stay at the sites. Share all that is trained"
    ):
        SitesInProcess(tmp_path, loop).fit(server_data=ServerData())
