"""Modules and data of libraries of forecasting, EEG, tables, uncertainty and spikes, by the library's name."""

from functools import partial

import lightning as L
import torch
from compat.libraries import (
    BATCH_SIZE,
    NUM_TRAINING,
    NUM_VALIDATION,
    Loaded,
    Samples,
    Wrapped,
    load,
)
from torch import nn
from torch.utils.data import TensorDataset

from helpers import make_generator
from helpers.models import sgd
from zoo.program import Program, make_stripes

INPUT_LENGTH, OUTPUT_LENGTH = 8, 4


def make_waves(n, generator):
    """Noisy waves ``[n, INPUT_LENGTH + OUTPUT_LENGTH]`` of three frequencies."""
    times = torch.arange(INPUT_LENGTH + OUTPUT_LENGTH)
    frequencies = torch.arange(n)[:, None] % 3 + 1.0
    noise = torch.randn(n, len(times), generator=generator)
    waves = torch.sin(0.4 * frequencies * times) + 0.1 * noise
    return waves.numpy()


# ---- darts: a linear model of a series' trend and remainder


def make_windows(n, generator):
    from darts.utils.data.torch_datasets.utils import TorchTrainingSample

    windows = []
    for wave in make_waves(n, generator)[:, :, None]:
        window = TorchTrainingSample(
            past_target=wave[:INPUT_LENGTH], future_target=wave[INPUT_LENGTH:]
        )
        windows.append(window)
    return Samples(windows)


def make_windows_data():
    from darts.utils.data.torch_datasets.utils import _batch_collate_fn_train

    return load(make_windows, collate_fn=_batch_collate_fn_train)


def make_windows_module():
    from darts.models import DLinearModel

    torch.manual_seed(0)
    model = DLinearModel(INPUT_LENGTH, OUTPUT_LENGTH, kernel_size=3, optimizer_kwargs={"lr": 0.01})
    model.train_sample = make_windows(1, make_generator())[0]
    return model._init_model()


# ---- neuralforecast: windows of each series, drawn at random in the step


def make_panel(n, generator):
    import pandas as pd
    from neuralforecast.tsdataset import TimeSeriesDataset

    tables = []
    for number, wave in enumerate(make_waves(n, generator)):
        days = pd.date_range("2026-01-01", periods=len(wave))
        tables.append(pd.DataFrame({"unique_id": number, "ds": days, "y": wave}))
    dataset, *_ = TimeSeriesDataset.from_df(pd.concat(tables))
    return dataset


def make_panel_data():
    from neuralforecast.tsdataset import TimeSeriesLoader

    return load(make_panel, make_loader=TimeSeriesLoader)


def make_panel_module():
    from neuralforecast.models import MLP

    module = MLP(
        h=2,
        input_size=4,
        num_layers=1,
        hidden_size=8,
        max_steps=100,
        windows_batch_size=16,
    )
    module.val_size = OUTPUT_LENGTH
    return module


# ---- braindecode: a network of EEG, with weights of limited norm


def make_recordings(n, generator):
    y = torch.arange(n) % 3
    times = torch.arange(64)
    waves = torch.sin(0.2 * (y[:, None] + 1) * times)
    noise = torch.randn(n, 4, len(times), generator=generator)
    return TensorDataset(waves[:, None] + 0.5 * noise, y)


class Classified(Wrapped):
    """A library's network of classes with the loss of its outputs."""

    def loss(self, batch):
        x, y = batch
        return nn.functional.cross_entropy(self.network(x), y)


def make_recordings_module():
    from braindecode.models import EEGNet

    torch.manual_seed(0)
    return Classified(EEGNet(n_chans=4, n_outputs=3, n_times=64))


# ---- torch-uncertainty: the library's own routine, with its metrics and its stored optimizer


def make_routine():
    from torch_uncertainty.routines import ClassificationRoutine

    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 8),
        nn.Dropout(0.2),
        nn.Linear(8, 3),
    )
    return ClassificationRoutine(
        network,
        num_classes=3,
        loss=nn.CrossEntropyLoss(),
        optim_recipe=lambda model: sgd(model.parameters()),
    )


# ---- pytorch-tabular: its data sets, embeddings of categories


def make_table_parts():
    """Return the library's model of a table, and its data module."""
    import pandas as pd
    from pytorch_tabular import TabularModel
    from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
    from pytorch_tabular.models import CategoryEmbeddingModelConfig

    num_rows = NUM_TRAINING + NUM_VALIDATION
    numbers = torch.randn(num_rows, 2, generator=make_generator()).numpy()
    rows = pd.DataFrame({"age": numbers[:, 0], "pressure": numbers[:, 1]})
    rows["ward"] = [("north", "south", "east")[row % 3] for row in range(num_rows)]
    rows["ill"] = (rows["age"] + rows["pressure"] > 0).astype(int)

    model = TabularModel(
        data_config=DataConfig(
            target=["ill"], continuous_cols=["age", "pressure"], categorical_cols=["ward"]
        ),
        model_config=CategoryEmbeddingModelConfig(
            task="classification", layers="8", dropout=0.1, learning_rate=0.01
        ),
        optimizer_config=OptimizerConfig(),
        trainer_config=TrainerConfig(batch_size=BATCH_SIZE, progress_bar="none"),
        verbose=False,
    )
    train = rows[:NUM_TRAINING]
    val = rows[NUM_TRAINING:]
    return model, model.prepare_dataloader(train, val, seed=0)


def make_table_data():
    _, data = make_table_parts()
    train = data.train_dataloader().dataset
    val = data.val_dataloader().dataset
    return Loaded(train, val)


def make_table_module():
    model, data = make_table_parts()
    torch.manual_seed(0)
    return model.prepare_model(data)


# ---- GPyTorch: a Gaussian process with learned inducing points


def make_curve(n, generator):
    x = torch.rand(n, 1, generator=generator)
    noise = 0.1 * torch.randn(n, generator=generator)
    return TensorDataset(x, torch.sin(6 * x[:, 0]) + noise)


class GaussianProcess(L.LightningModule):
    def __init__(self):
        import gpytorch

        super().__init__()
        points = torch.linspace(0, 1, 5)[:, None]

        class Process(gpytorch.models.ApproximateGP):
            def __init__(self):
                distribution = gpytorch.variational.CholeskyVariationalDistribution(len(points))
                strategy = gpytorch.variational.VariationalStrategy(
                    self, points, distribution, learn_inducing_locations=True
                )
                super().__init__(strategy)
                self.mean_module = gpytorch.means.ConstantMean()
                self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

            def forward(self, x):
                mean = self.mean_module(x)
                covariance = self.covar_module(x)
                return gpytorch.distributions.MultivariateNormal(mean, covariance)

        self.process = Process()
        self.likelihood = gpytorch.likelihoods.GaussianLikelihood()
        self.bound = gpytorch.mlls.VariationalELBO(
            self.likelihood, self.process, num_data=NUM_TRAINING
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        return -self.bound(self.process(x), y)

    def on_train_batch_end(self, *_):
        self.process.variational_strategy._clear_cache()  # its graph cannot be copied

    def validation_step(self, batch, batch_idx):
        x, y = batch
        error = nn.functional.mse_loss(self.process(x).mean, y)
        self.log("val_loss", error, batch_size=len(y))

    def configure_optimizers(self):
        return sgd(self.parameters())


# ---- snnTorch: spiking neurons with a learned decay


class Spiking(Wrapped):
    def __init__(self):
        import snntorch

        torch.manual_seed(0)
        super().__init__(nn.Linear(64, 8))
        self.neurons = snntorch.Leaky(beta=0.9, learn_beta=True)
        self.head = nn.Linear(8, 3)

    def loss(self, batch):
        x, y = batch
        current = self.network(x.flatten(1))
        membrane = self.neurons.reset_mem()
        outputs = torch.zeros(len(y), 3)
        for _ in range(4):
            spikes, membrane = self.neurons(current, membrane)
            outputs = outputs + self.head(spikes)
        self.neurons.mem = torch.zeros(0)  # its graph cannot be copied
        return nn.functional.cross_entropy(outputs, y)


PROGRAMS = {
    "darts": Program(make_windows_module, make_windows_data),
    "neuralforecast": Program(make_panel_module, make_panel_data, logged="ptl/val_loss"),
    "braindecode": Program(make_recordings_module, partial(load, make_recordings)),
    "torch_uncertainty": Program(make_routine, partial(load, make_stripes), logged="val/cls/NLL"),
    "pytorch_tabular": Program(make_table_module, make_table_data, logged="valid_loss"),
    "gpytorch": Program(GaussianProcess, partial(load, make_curve)),
    "snntorch": Program(Spiking, partial(load, make_stripes)),
}
