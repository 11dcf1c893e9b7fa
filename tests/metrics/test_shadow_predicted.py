"""ShadowShapley's predicted values: from outputs of plain fits of each client alone, by hand."""

import copy
from functools import partial
from pathlib import Path

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torchmetrics.regression import MeanSquaredError

from flsv import FederatedLoop, Reporting
from flsv.aggregation import FedAvg
from flsv.data import FederatedDataModule, Splits
from flsv.functional import predicted_shapley
from flsv.functional.intervals import one_seed_stderr, prediction_stderr
from flsv.metrics import ShadowShapley
from flsv.sampling import FixedCohort
from flsv.scores.likelihood import MeanLogLikelihood
from flsv.values.coalition_files import read_untrained
from flsv.values.query import NUM_RECENT_ROUNDS
from helpers import make_generator, warns
from helpers.coalitions_by_hand import SEED, make_shadow_loop, make_three_clients
from helpers.data import CLASSES, FEATURES
from helpers.fits import assert_resumes, fit, make_checkpoint_callback
from helpers.models import Plain, network

ROUNDS, CLIENTS, TOKENS = 3, 3, 12
SILENT = Reporting(table=False, figures=0, files=False)


class Regression(L.LightningModule):
    """It predicts one number for each sample."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 8),
            nn.Tanh(),
            nn.Linear(8, 1),
        )

    def forward(self, x):
        return self.net(x).squeeze(-1)

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return nn.functional.mse_loss(self(inputs), targets)

    def validation_step(self, batch, batch_idx):
        self.log("val_mean", self(batch[0]).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def make_regression_data() -> FederatedDataModule:
    draw = make_generator(2)
    x = torch.randn(160, FEATURES, generator=draw)
    noise = torch.randn(160, generator=draw)
    product = 0.5 * x[:, 1] * x[:, 2]
    y = x[:, 0] + product + 0.1 * noise

    sizes = [60, 30, 70]
    inputs = x.split(sizes)
    targets = y.split(sizes)
    sets = {}
    for client, name in enumerate("abc"):
        sets[name] = torch.utils.data.TensorDataset(inputs[client], targets[client])

    splits = Splits(server_val=0.3)
    return FederatedDataModule(clients=sets, batch_size=8, splits=splits)


class Adapted(L.LightningModule):
    """A frozen transformer of tokens with an adapter that starts at zero."""

    def __init__(self, seed: int = 1):
        super().__init__()
        torch.manual_seed(seed)
        layer = nn.TransformerEncoderLayer(
            d_model=8,
            nhead=2,
            dim_feedforward=16,
            dropout=0,
            batch_first=True,
        )
        embedding = nn.Embedding(TOKENS, 8)
        head = nn.Linear(8, TOKENS)
        self.frozen = nn.ModuleList([embedding, layer, head])
        self.frozen.requires_grad_(False)
        self.adapter = nn.Linear(8, 8, bias=False)
        nn.init.zeros_(self.adapter.weight)

    def forward(self, tokens):
        embed, layer, head = self.frozen
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden = layer(embed(tokens), src_mask=mask)
        logits = head(hidden + self.adapter(hidden))
        log_probabilities = logits[:, :-1].log_softmax(-1)
        next_tokens = tokens[:, 1:, None]
        return log_probabilities.gather(-1, next_tokens).squeeze(-1)

    def training_step(self, batch, batch_idx):
        return -self(batch[0]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.adapter.parameters(), lr=0.5)


def make_text_data() -> FederatedDataModule:
    draw = make_generator(3)
    sets = {}
    clients = [
        ("a", 0, 20),
        ("b", 4, 12),
        ("c", 8, 16),
    ]
    for name, low, count in clients:
        size = (count, 6)
        tokens = torch.randint(low, TOKENS, size, generator=draw)
        targets = tokens[:, 1:]
        sets[name] = torch.utils.data.TensorDataset(tokens, targets)

    splits = Splits(server_val=0.3)
    return FederatedDataModule(clients=sets, batch_size=4, splits=splits, labels=False)


def negative_losses(out: Tensor, y: Tensor) -> Tensor:
    losses = [nn.functional.cross_entropy(logits, y) for logits in out]
    return -torch.stack(losses).double()


def recalls(out: Tensor, y: Tensor) -> Tensor:
    hits = hits_of(out, y)
    by_class = []
    for label in range(CLASSES):
        hits_of_class = hits[:, y == label]
        by_class.append(hits_of_class.mean(-1))
    return torch.stack(by_class, 1)


def hits_of(out: Tensor, y: Tensor) -> Tensor:
    return (out.argmax(-1) == y).double()


#: Options of the metric, and the utility of outputs [c, V, ...] in the form that is predicted.
OF_CLASSES = [
    (
        {},
        lambda out, y: hits_of(out, y).mean(-1),
    ),
    ({"performance": "negative_loss"}, negative_losses),
    ({"per_class": True}, recalls),
]
LIKELIHOOD = (
    {"performance": MeanLogLikelihood()},
    lambda out, y: out.log_softmax(-1)[..., 1].mean((1, 2)).double(),
)
ERROR = ({"performance": MeanSquaredError()}, lambda out, y: -(out - y).square().mean(-1).double())
#: A module, its data, such measures, and whether outputs are logits.
CASES = {
    "classes": (
        lambda: Plain(network(batch_norm=False)),
        make_three_clients,
        OF_CLASSES,
        True,
    ),
    "labels' log-probabilities": (Adapted, make_text_data, [LIKELIHOOD], True),
    "a regression": (Regression, make_regression_data, [ERROR], False),
}


def outputs_of(module, x: Tensor) -> Tensor:
    with torch.no_grad():
        out = copy.deepcopy(module).eval()(x)

    if isinstance(module, Adapted):
        complement = (1 - out.exp()).log()
        return torch.stack([complement, out], -1)

    return out


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    ("name", "uniform"),
    [
        *((name, False) for name in CASES),
        ("classes", True),
    ],
)
def test_predicted_values_are_those_of_plain_fits_of_each_client(tmp_path, name, uniform):
    make, make_data, measures, logits = CASES[name]
    aggregator = FedAvg("uniform" if uniform else "samples")
    module = make()
    dealt = make_data()
    dealt.setup("fit")
    inputs, targets = zip(*dealt.val_dataloader())
    x = torch.cat(inputs)
    y = torch.cat(targets)
    empty = torch.zeros(1, CLIENTS)
    grand = torch.ones(1, CLIENTS)
    trained = torch.cat(
        [
            empty,
            grand,
            torch.eye(CLIENTS),
        ]
    ).bool()
    outputs = [outputs_of(module, x)]
    coalitions = [[0, 1, 2], [0], [1], [2]]
    for members in coalitions:
        alone = FederatedLoop(
            sampler=FixedCohort(members),
            aggregator=aggregator,
            seed=SEED,
            reporting=SILENT,
        )
        client_module = fit(
            alone,
            tmp_path,
            copy.deepcopy(module),
            make_data(),
            ROUNDS,
        )
        outputs.append(outputs_of(client_module, x))

    stacked = torch.stack(outputs)
    weights = torch.ones(CLIENTS) if uniform else dealt.num_samples

    metrics = {}
    for number, (options, _) in enumerate(measures):
        metrics[str(number)] = ShadowShapley(**options)

    federation = FederatedLoop(
        metrics=metrics,
        aggregator=aggregator,
        seed=SEED,
    )
    fit(federation, tmp_path, module, make_data(), ROUNDS)

    for number, (_, score) in enumerate(measures):
        utility = partial(lambda outputs, score: score(outputs, y), score=score)
        expected = predicted_shapley(
            trained,
            utility(stacked),
            stacked,
            weights,
            utility,
            logits=logits,
        ).values
        metric = federation.metrics[str(number)]
        assert_close(
            metric.compute().double(),
            expected,
            rtol=1e-4,
            atol=1e-5,
        )
        assert (metric.errors > 0).all()


@pytest.mark.slow
def test_predicted_values_have_curves_intervals_and_resume_bitwise(tmp_path):
    whole = assert_resumes(
        lambda: make_shadow_loop(ShadowShapley()), tmp_path, Plain, make_three_clients
    )
    curve = whole.history().query("metric == 'shadow'")

    assert (
        curve["round"].nunique() == NUM_RECENT_ROUNDS
    )  # of 4: scoring would cost more than training
    assert len(curve.query("round == 3")) == CLIENTS

    metric = whole.metrics["shadow"]
    low, high = metric.intervals()

    assert (low < high).all()
    assert int(metric.evaluations) == NUM_RECENT_ROUNDS * (CLIENTS + 2)

    # Predictions of several rounds do not follow each other: their spread over rounds is no error.
    fit_errors = prediction_stderr(torch.tensor(metric.evidence["disagreement"]))
    untrained = read_untrained(tmp_path / "whole" / "coalitions")["accuracy"]
    values = metric.values.flatten()
    stderr = one_seed_stderr(values, fit_errors, untrained[:, 0])
    assert_close(metric.errors.flatten(), stderr.to(metric.errors))


@pytest.mark.slow
def test_coalitions_with_frozen_weights_have_no_values_if_a_resumed_run_has_others(tmp_path):
    def run(rounds: int, seed: int, path: Path | None = None, **options) -> Tensor:
        metric = ShadowShapley(performance=MeanLogLikelihood(), every=1)
        loop = FederatedLoop(
            metrics={"shadow": metric},
            share="trainable",
            seed=SEED,
            reporting=SILENT,
        )
        data = make_text_data()
        fit(loop, tmp_path, Adapted(seed), data, rounds, path, **options)
        return loop.contributions["shadow"]

    whole = run(2, seed=1)
    saving = make_checkpoint_callback(tmp_path)
    run(1, seed=1, callbacks=[saving], enable_checkpointing=True)
    path = tmp_path / "checkpoints/last.ckpt"

    resumed = run(2, seed=1, path=path)
    with warns("do not start from the initial weights of the run"):
        with_other_frozen_weights = run(2, seed=2, path=path)

    assert torch.equal(resumed, whole)
    assert with_other_frozen_weights.isnan().all()
