"""ShadowShapley's predicted values: from outputs of plain fits of each client alone, by hand."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import TensorDataset
from torchmetrics.regression import MeanSquaredError

from flsv import FederatedLoop, Reporting
from flsv.aggregation import FedAvg
from flsv.data import FederatedDataModule, Splits
from flsv.functional import few_coalitions, predicted_shapley
from flsv.functional.intervals import one_seed_stderr, prediction_stderr, t_quantile
from flsv.metrics import ShadowShapley
from flsv.sampling import FixedCohort
from flsv.scores.likelihood import MeanLogLikelihood
from flsv.values.coalition_files import read_untrained
from flsv.values.query import NUM_RECENT_ROUNDS
from helpers import make_generator, warns
from helpers.coalitions_by_hand import SEED, make_shadow_loop, make_three_clients
from helpers.data import CLASSES, FEATURES
from helpers.fits import all_samples, assert_resumes, fit, make_checkpoint_callback
from helpers.models import Plain, network

ROUNDS, CLIENTS, TOKENS = 3, 3, 12
SILENT = Reporting(table=False, figures=0, files=False)


class Regression(L.LightningModule):
    """It predicts one number for each sample."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))

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
    generator = make_generator(2)
    x = torch.randn(160, FEATURES, generator=generator)
    noise = torch.randn(160, generator=generator)
    y = x[:, 0] + 0.5 * x[:, 1] * x[:, 2] + 0.1 * noise

    sizes = [60, 30, 70]
    clients = list(zip(x.split(sizes), y.split(sizes)))
    return FederatedDataModule(clients=clients, batch_size=8, splits=Splits(server_val=0.3))


class TransformerWithAdapter(L.LightningModule):
    """A frozen transformer of tokens with an adapter that starts at zero."""

    def __init__(self, seed: int = 1):
        super().__init__()
        torch.manual_seed(seed)
        layer = nn.TransformerEncoderLayer(
            d_model=8, nhead=2, dim_feedforward=16, dropout=0, batch_first=True
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
    generator = make_generator(3)
    clients = []
    for lowest_token, num_texts in [(0, 20), (4, 12), (8, 16)]:
        tokens = torch.randint(lowest_token, TOKENS, (num_texts, 6), generator=generator)
        next_tokens = tokens[:, 1:]
        clients.append(TensorDataset(tokens, next_tokens))

    splits = Splits(server_val=0.3)
    return FederatedDataModule(clients=clients, batch_size=4, splits=splits, labels=False)


# Utilities of coalitions' outputs [K, V, ...], in the form in which outputs are predicted.


def accuracies(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs.argmax(-1) == y).double().mean(-1)


def negative_losses(outputs: Tensor, y: Tensor) -> Tensor:
    losses = [nn.functional.cross_entropy(logits, y) for logits in outputs]
    return -torch.stack(losses).double()


def recalls(outputs: Tensor, y: Tensor) -> Tensor:
    by_class = []
    for label in range(CLASSES):
        is_of_class = y == label
        by_class.append(accuracies(outputs[:, is_of_class], y[is_of_class]))
    return torch.stack(by_class, 1)


def log_likelihoods(outputs: Tensor, y: Tensor) -> Tensor:
    return outputs.log_softmax(-1)[..., 1].mean((1, 2)).double()


def negative_errors(outputs: Tensor, y: Tensor) -> Tensor:
    return -(outputs - y).square().mean(-1).double()


@dataclass
class PredictionCase:
    make_module: Callable[[], L.LightningModule]
    make_data: Callable[[], FederatedDataModule]
    #: Options of a metric, and the utilities of outputs and labels by which it values.
    utilities: list[tuple[dict[str, Any], Callable[[Tensor, Tensor], Tensor]]]
    are_logits: bool = True
    weighting: str = "samples"

    def loop(self, **options) -> FederatedLoop:
        return FederatedLoop(aggregator=FedAvg(self.weighting), seed=SEED, **options)

    def weights(self, data: FederatedDataModule) -> Tensor:
        return data.num_samples if self.weighting == "samples" else torch.ones(CLIENTS)

    def outputs_by_fits(self, initial_module, inputs: Tensor, folder: Path) -> Tensor:
        """Outputs of the initial model, of the model of all clients, and of each client's ``[2 + n, V, ...]``."""
        outputs = [outputs_of(initial_module, inputs)]
        for members in [[0, 1, 2], [0], [1], [2]]:
            module = copy.deepcopy(initial_module)
            loop = self.loop(sampler=FixedCohort(members), reporting=SILENT)
            fit(loop, folder, module, self.make_data(), ROUNDS)
            outputs.append(outputs_of(module, inputs))
        return torch.stack(outputs)


OF_CLASSES = PredictionCase(
    partial(Plain, network(batch_norm=False)),
    make_three_clients,
    [
        ({}, accuracies),
        ({"performance": "negative_loss"}, negative_losses),
        ({"per_class": True}, recalls),
    ],
)
OF_TEXTS = PredictionCase(
    TransformerWithAdapter,
    make_text_data,
    [({"performance": MeanLogLikelihood()}, log_likelihoods)],
)
OF_REGRESSION = PredictionCase(
    Regression,
    make_regression_data,
    [({"performance": MeanSquaredError()}, negative_errors)],
    are_logits=False,
)


def outputs_of(module, x: Tensor) -> Tensor:
    with torch.no_grad():
        outputs = copy.deepcopy(module).eval()(x)
    if not isinstance(module, TransformerWithAdapter):
        return outputs
    # A text's log-probability is predicted as that of two classes.
    log_complement = (1 - outputs.exp()).log()
    return torch.stack([log_complement, outputs], -1)


@pytest.mark.by_turn
@pytest.mark.fast_rows
@pytest.mark.parametrize(
    "case", [OF_CLASSES, replace(OF_CLASSES, weighting="uniform"), OF_TEXTS, OF_REGRESSION]
)
def test_predicted_values_are_those_of_plain_fits_of_each_client(case, tmp_path):
    module = case.make_module()
    data = case.make_data()
    data.setup("fit")
    inputs, labels = all_samples(data.val_dataloader())
    outputs = case.outputs_by_fits(module, inputs, tmp_path)

    metrics = {}
    score_by_name = {}
    for number, (options, score) in enumerate(case.utilities):
        metrics[f"shadow {number}"] = ShadowShapley(coalitions="singles", **options)
        score_by_name[f"shadow {number}"] = partial(score, y=labels)
    fit(case.loop(metrics=metrics), tmp_path, module, case.make_data(), ROUNDS)

    for name, metric in metrics.items():
        score = score_by_name[name]
        expected = predicted_shapley(
            few_coalitions(CLIENTS, "singles"),
            score(outputs),
            outputs,
            weights=case.weights(data),
            score=score,
            logits=case.are_logits,
        )
        assert_close(metric.compute().double(), expected.values, rtol=1e-4, atol=1e-5)
        assert (metric.half_widths > 0).all()


@pytest.mark.slow
def test_predicted_values_have_curves_intervals_and_resume_bitwise(tmp_path):
    whole = assert_resumes(
        lambda: make_shadow_loop(ShadowShapley(coalitions="singles")),
        tmp_path,
        Plain,
        make_three_clients,
    )
    curve = whole.history().query("metric == 'shadow'")

    # Scoring all four rounds would cost more than training.
    assert curve["round"].nunique() == NUM_RECENT_ROUNDS
    assert len(curve.query("round == 3")) == CLIENTS
    assert (curve["low_over_seeds"] < curve["high_over_seeds"]).all()

    metric = whole.metrics["shadow"]
    values = metric.result()

    assert (values.low < values.high).all()
    assert int(metric.evaluations) == NUM_RECENT_ROUNDS * (CLIENTS + 2)

    # Predictions of several rounds do not follow each other: their spread over rounds is no error.
    fit_errors = prediction_stderr(torch.tensor(values.evidence["disagreement"]))
    untrained = read_untrained(tmp_path / "whole" / "coalitions")["accuracy"]
    stderr = one_seed_stderr(values.value, fit_errors, untrained[:, 0])
    assert_close(values.half_width, t_quantile(0.9) * stderr.to(values.half_width))


@pytest.mark.slow
def test_run_resumed_with_other_frozen_weights_has_no_values(tmp_path):
    def run(rounds: int, seed_of_frozen: int, **options) -> Tensor:
        metric = ShadowShapley(coalitions="singles", performance=MeanLogLikelihood(), every=1)
        loop = FederatedLoop(
            metrics={"shadow": metric}, share="trainable", seed=SEED, reporting=SILENT
        )
        module = TransformerWithAdapter(seed_of_frozen)
        fit(loop, tmp_path, module, make_text_data(), rounds, **options)
        return loop.contributions["shadow"]

    uninterrupted_values = run(rounds=2, seed_of_frozen=1)
    saving = make_checkpoint_callback(tmp_path)
    run(rounds=1, seed_of_frozen=1, callbacks=[saving], enable_checkpointing=True)
    checkpoint = tmp_path / "checkpoints/last.ckpt"

    resumed_values = run(rounds=2, seed_of_frozen=1, ckpt_path=checkpoint)
    with warns("do not start from the initial weights of the run"):
        values_of_other_weights = run(rounds=2, seed_of_frozen=2, ckpt_path=checkpoint)

    assert torch.equal(resumed_values, uninterrupted_values)
    assert values_of_other_weights.isnan().all()
