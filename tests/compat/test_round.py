"""What a person expects of a round that Lightning knows as an epoch: where it saves, resumes, logs, draws and reads."""

import pytest
import torch
from compat.runs import train_federated
from lightning.pytorch import callbacks as cb
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from flsv import FederatedLoop, Reporting
from flsv.data.loaders import TensorBatches
from helpers.fits import SavesInHooks, plain_trainer
from zoo.program import SEED, Program, Small, make_images

#: Batches of the two clients, see :func:`make_small_program`.
LENGTHS = (3, 4)
ROUNDS = 3


def make_small_program(**options):
    return Program(Small, make_images, clients=(2, 3), **options)


def saved_files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_checkpoints_are_named_and_counted_as_in_a_training_of_one_model(tmp_path):
    """A Trainer alone, with as many batches in an epoch as a round has, saves as many files of the same names."""

    def saving(folder):
        every = [
            {},
            {"monitor": "val_loss", "save_last": True},
            {"every_n_train_steps": 3},
        ]
        return [
            cb.ModelCheckpoint(folder / str(i), "{epoch}-{step}", save_top_k=-1, **how)
            for i, how in enumerate(every)
        ]

    alone_folder = tmp_path / "one"
    federation_folder = tmp_path / "many"
    options = {"enable_checkpointing": True}
    program = make_small_program(callbacks=lambda: saving(federation_folder), trainer=options)
    train_federated(program, tmp_path, ROUNDS)

    x, y = make_images().train.tensors
    batches = [(x[8 * i :][:4], y[8 * i :][:4]) for i in range(5)]
    batches += [(x[:4], y[:4])] * 2

    assert len(batches) == sum(LENGTHS)

    alone = plain_trainer(tmp_path, ROUNDS, callbacks=saving(alone_folder), **options)
    alone.fit(
        Small(),
        DataLoader(batches, batch_size=None),
        make_images().val_dataloader(),
    )

    for name in ("0", "1", "2"):
        assert saved_files(federation_folder / name) == saved_files(alone_folder / name)
    assert len(saved_files(federation_folder / "0")) == ROUNDS


class ChangesWithinARound(Small):
    """Dropout and BatchNorm, Adam, a schedule per step, weights and a rate that a round's beginning changes, and a mean
    in an unsaved buffer."""

    def __init__(self):
        schedule = lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.95)  # noqa: E731
        super().__init__(schedule, optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-2))
        self.register_buffer("mean", torch.zeros(()), persistent=False)

    def training_step(self, batch, batch_idx):
        x, _ = batch
        self.mean = 0.9 * self.mean + 0.1 * x.mean()
        return (1 + self.mean) * super().training_step(batch, batch_idx)

    def on_train_epoch_start(self):
        self.optimizers().param_groups[0]["weight_decay"] += 0.01
        with torch.no_grad():
            self.net[-1].weight.mul_(0.9)


class CountsHooks(cb.Callback):
    """Counts rounds and batches, and shrinks weights when a round begins."""

    def __init__(self):
        self.count = 0

    @torch.no_grad()
    def on_train_epoch_start(self, trainer, pl_module):
        self.count += 1
        next(pl_module.parameters()).mul_(0.9)

    def on_train_batch_end(self, *hook):
        self.count += 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state_dict):
        self.count = state_dict["count"]


OF_BATCHES = (
    "on_train_batch_start",
    "on_before_optimizer_step",
    "on_train_batch_end",
)
OF_ROUNDS = (
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
)


def fit_and_read_model(folder, optimizer_state, callbacks, ckpt_path=None):
    """The parameters, the statistics of BatchNorm, and the count of a callback before or after the loop."""
    loop = FederatedLoop(
        seed=SEED,
        optimizer_state=optimizer_state,
        reporting=Reporting(files=False),
    )
    counts = CountsHooks()
    order = [loop, counts] if optimizer_state == "reset" else [counts, loop]
    trainer = plain_trainer(
        folder,
        ROUNDS,
        callbacks=[*order, *callbacks],
        accumulate_grad_batches=2,
    )
    module = ChangesWithinARound()
    trainer.fit(module, make_small_program().data(), ckpt_path=ckpt_path)
    batch_norm = module.net[2]
    tensors = [
        *module.parameters(),
        batch_norm.running_var,
        torch.tensor([float(counts.count)]),
    ]

    return torch.nn.utils.parameters_to_vector(tensors)


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer_state",
    ["reset", pytest.param("persist", marks=pytest.mark.slow)],
)
def test_fit_resumes_bitwise_from_a_checkpoint_of_every_batch_and_hook(tmp_path, optimizer_state):
    folder = tmp_path / "c"
    saves_in_each_hook = SavesInHooks(folder, *OF_BATCHES, *OF_ROUNDS)
    uninterrupted_model = fit_and_read_model(tmp_path, optimizer_state, [saves_in_each_hook])

    # A callback's counter passes from client to client.
    assert uninterrupted_model[-1] == ROUNDS * (1 + sum(LENGTHS))

    checkpoints = sorted(folder.iterdir())
    num_in_batches = 2 * sum(LENGTHS)
    num_in_steps = 4  # two of each client
    assert len(checkpoints) == num_in_batches + num_in_steps + len(OF_ROUNDS)

    for checkpoint in checkpoints:
        resumed_model = fit_and_read_model(tmp_path, optimizer_state, [], ckpt_path=checkpoint)
        assert torch.equal(resumed_model, uninterrupted_model), checkpoint.name


def test_each_clients_loader_is_started_once_per_round(tmp_path, monkeypatch):
    """Every start of a loader starts its workers."""
    lengths = []
    iterate = TensorBatches.__iter__

    def record_and_iterate(loader):
        lengths.append(len(loader))
        return iterate(loader)

    monkeypatch.setattr(TensorBatches, "__iter__", record_and_iterate)
    program = make_small_program(trainer={"limit_val_batches": 0})

    train_federated(program, tmp_path, ROUNDS)

    assert lengths == [*LENGTHS] * ROUNDS


@pytest.mark.slow
def test_progress_bar_counts_the_batches_of_the_round(tmp_path):
    progress = []

    class Bar(cb.TQDMProgressBar):
        def on_train_batch_end(self, *hook):
            super().on_train_batch_end(*hook)
            progress.append((self.train_progress_bar.n, self.train_progress_bar.total))

    program = make_small_program(
        callbacks=lambda: [Bar()],
        trainer={"enable_progress_bar": True},
    )
    train_federated(program, tmp_path, ROUNDS)

    steps = sum(LENGTHS)
    assert progress == [(step, steps) for step in range(1, steps + 1)] * ROUNDS
