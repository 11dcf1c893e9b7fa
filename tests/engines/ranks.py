"""What ranks run, and the processes that run it, forks of the tests' process, which have a hard end."""

import importlib
import logging
import os
import runpy
import signal
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from engines.federations_on_ranks import RANK_CASES, RankCase, make_five_clients, shapfed_wa
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn
from torch.distributed.launcher.api import LaunchConfig
from torch.utils.data import TensorDataset

from flsv import Reporting
from flsv.aggregation import FedAvg
from flsv.core.ranks import ranks_of
from flsv.data import FederatedDataModule, SizePartitioner
from flsv.engines.ranks import meet
from flsv.federation import FederatedLoop
from flsv.metrics import ClassSpecificShapley, ShadowShapley
from flsv.retraining import price
from flsv.retraining.price import PriceList
from helpers.data import toy_data, toy_sets
from helpers.fits import plain_trainer
from helpers.forked import Forked
from helpers.models import Plain
from helpers.ports import free_ports

# Fits import these late, and ranks, which are forked, would each import them.
for module_name in ("joblib", "ot", "torch.utils.tensorboard", "torch._functorch.vmap"):
    importlib.import_module(module_name)

#: For the ranks that a rank starts.
IMPORT_PATH = os.pathsep.join(path for path in sys.path if path)
#: The agent of torchrun, on processes that need not import everything again.
AGENT = LaunchConfig(
    min_nodes=1,
    max_nodes=1,
    nproc_per_node=2,
    max_restarts=1,
    rdzv_backend="c10d",
    rdzv_endpoint="localhost:0",
    start_method="fork",
    monitor_interval=0.1,
)


class EndsARank(Callback):
    """One rank ends in the second round, once: by SIGKILL, or by an exception. A mark in the run's folder says that it
    has happened."""

    def __init__(self, folder, rank, kill):
        self.mark = folder / "ended"
        self.rank = rank
        self.kill = kill

    def on_train_batch_start(self, trainer, *args):
        is_second_round = trainer.current_epoch >= 1
        is_this_rank = ranks_of(trainer).rank == self.rank
        if is_second_round and is_this_rank and not self.mark.exists():
            self.mark.touch()
            self.end()

    def end(self):
        if self.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("bad sample at this site")


class StopsARank(Callback):
    """A rank stops in the middle of a round."""

    def on_train_batch_end(self, trainer, *args):
        trainer.should_stop = ranks_of(trainer).rank == 1 and trainer.current_epoch == 1


class SavesWithinARound(Callback):
    """Saves in the middle of the second round."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.current_epoch == 1 and batch_idx == 1:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "within.ckpt")


def make_trainer(folder, case, callbacks):
    variables = os.environ
    size = int(variables.get("RANKS") or variables["WORLD_SIZE"])  # the second is of torchrun
    nodes = int(variables.get("NODES", 1))
    checkpoint = ModelCheckpoint(
        folder,
        save_last=True,
        monitor=case.monitor,
        save_top_k=0 if case.monitor is None else 1,
        enable_version_counter=False,
    )
    return plain_trainer(
        folder,
        case.rounds,
        logger=TensorBoardLogger(folder, name="") if case.logs else False,
        enable_checkpointing=True,
        callbacks=[*callbacks, checkpoint],
        devices=size // nodes,
        num_nodes=nodes,
        strategy="federated",
        **case.trainer_options,
    )


def fit(folder, case, *callbacks):
    """Start it, or go on from its last checkpoint. Return its loop."""
    folder.mkdir(parents=True, exist_ok=True)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    torch.set_num_threads(1)

    quiet_loop = case.loop.replace(reporting=Reporting(table=False))
    trainer = make_trainer(folder, case, [quiet_loop, *callbacks])
    last_checkpoint = folder / "last.ckpt"
    is_resumed = last_checkpoint.exists()
    trainer.fit(case.module, case.data, ckpt_path=last_checkpoint if is_resumed else None)

    if trainer.is_global_zero:
        metrics = sorted(trainer.callback_metrics.items())
        lines = [f"{name}: {float(value)!r}" for name, value in metrics]
        (folder / "metrics.txt").write_text("\n".join(lines))
    return quiet_loop


def run_all(folder, names):
    """One federation after the other, in one group of ranks."""
    for name in names:
        run_one(folder / name, name)


def run_one(folder, name):
    fit(folder, RANK_CASES[name]())


def run_and_kill(folder, name, killed_rank):
    """A federation of which one rank is killed in its second round; or, where one has been, what is left of it."""
    fit(folder, RANK_CASES[name](), EndsARank(folder, killed_rank, kill=True))


def save_within(folder, name):
    fit(folder, RANK_CASES[name](), SavesWithinARound())


def save_on_exception(folder, name):
    """A checkpoint of the round in which rank 1 fails."""
    failure = EndsARank(folder, rank=1, kill=False)
    fit(folder, RANK_CASES[name](), failure, OnExceptionCheckpoint(folder / "failed"))


def stop_within(folder):
    fit(folder, shapfed_wa(), StopsARank())


def make_data_with_shift(shift):
    train, test = toy_sets()
    x, y = train.tensors
    shifted_train = TensorDataset(x + shift, y)
    return FederatedDataModule(
        (shifted_train, test), SizePartitioner([4, 2, 3, 3, 2]), batch_size=8
    )


def with_other_samples(case):
    return case._replace(data=make_data_with_shift(1.0))


def with_other_settings(case):
    metric = ClassSpecificShapley(momentum=0.1)
    other_loop = case.loop.replace(aggregator=FedAvg(), metrics={"cssv": metric})
    return case._replace(loop=other_loop)


def change_rank_1(folder, change):
    """Rank 1 has another federation than rank 0."""
    case = shapfed_wa()._replace(data=make_data_with_shift(0.0))
    if int(os.environ["LOCAL_RANK"]) == 1:
        case = change(case)
    fit(folder, case)


def limit_time(folder):
    """Every rank would stop by its own clock."""
    fit(folder, shapfed_wa()._replace(trainer_options={"max_time": "00:01:00:00"}))


def run_without_a_seed(folder):
    """Every rank would draw its own weights and seed."""
    torch.seed()
    module = Plain(nn.Sequential(nn.Linear(6, 3)))
    loop = FederatedLoop(metrics={"shadow": ShadowShapley(coalitions="singles")})
    fitted_loop = fit(folder, RankCase(loop, module, toy_data(), rounds=1))
    assert fitted_loop.contributions["shadow"].isfinite().all()


def train_groups_of_coalitions(folder):
    """Each rank trains groups of coalitions, those of a group at once."""
    price.MAX_ELEMENTS_OF_GROUP = 1  # a group for each coalition
    PriceList.at_once = lambda prices, masks: 0.0
    loop = FederatedLoop(metrics={"shadow": ShadowShapley(coalitions="leave-one-out")}, seed=3)
    fit(folder, RankCase(loop, Plain(), toy_data()))


class AddsItsOwnNumber(FedAvg):
    """Depends on a number that every rank draws for itself."""

    def aggregate(self, round, contributions):
        vector, weights = super().aggregate(round, contributions)
        return vector + int.from_bytes(os.urandom(2), "little"), weights


def disagree(folder):
    """Ranks that do not come to the same global model."""
    loop = FederatedLoop(AddsItsOwnNumber(), seed=3)
    fit(folder, RankCase(loop, Plain(), make_five_clients()))


def run_without_a_federation(folder):
    """A trainer without a FederatedLoop."""
    case = shapfed_wa()
    make_trainer(folder, case, callbacks=[]).fit(case.module, case.data)


def run_script(path, *words):
    """A user's script, as torchrun starts it."""
    sys.argv = [path, *words]
    runpy.run_path(path, run_name="__main__")


def run_command(*words):
    """``python -m flsv``, which can start the other ranks itself."""
    sys.argv = ["flsv", *words]
    try:
        runpy.run_module("flsv", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if ended.code:
            raise


def exchange_everything():
    """All that ranks exchange, in the order in which every rank does it."""
    rank = int(os.environ["LOCAL_RANK"])
    size = int(os.environ["RANKS"])
    ranks = meet(rank, size, torch.device("cpu"))

    assert meet(rank, size, torch.device("cpu")) is ranks
    assert not torch.distributed.is_initialized()

    exchange_values(ranks, rank)
    exchange_rows(ranks, rank)
    fail_out_of_step(ranks, rank, size)


def make_value(rank):
    """A view of a larger tensor, an empty tensor of another type, a truth value and a text."""
    larger_tensor = torch.arange(1000.0).view(10, 100)
    return {
        "view": larger_tensor[rank, :3],
        "empty": torch.empty((2, 0), dtype=torch.bfloat16),
        "is rank 1": torch.tensor(rank == 1),
        "text": f"rank {rank}",
    }


def exchange_values(ranks, rank):
    value = make_value(rank)

    values_of_ranks = ranks.all_gather(value, "everything")
    for sender, received in enumerate(values_of_ranks):
        assert_value_of(sender, received)
    assert_value_of(1, ranks.broadcast(1, value, "one"))


def assert_value_of(sender, received):
    expected = make_value(sender)
    assert received["text"] == expected["text"]
    for name in ("view", "empty", "is rank 1"):
        torch.testing.assert_close(received[name], expected[name], rtol=0, atol=0)


def exchange_rows(ranks, rank):
    """Every rank fills its rows with its number, and receives each row from the sender of its place."""
    senders = [2, 0, 1, 0]
    matrix = torch.full((len(senders), 300_000), float(rank))

    ranks.broadcast_rows(matrix, senders, "long rows")

    for row, sender in zip(matrix, senders):
        assert (row == sender).all()


def fail_out_of_step(ranks, rank, size):
    """Rank 0 exchanges something else than the others, after which nobody exchanges anything."""
    subject = "that" if rank == 0 else "this"
    with pytest.raises(RuntimeError, match=r"ranks are out of step|another rank has ended"):
        ranks.all_gather(None, subject)
    with pytest.raises(RuntimeError, match=f"{rank} of {size}.*cannot exchange"):
        ranks.all_gather(None, "one more")


class Ended(NamedTuple):
    """How a rank ended: its exit code, and what it printed."""

    code: int | None
    output: str


def place_on_one_host(rank):
    return {"NODES": "1", "NODE_RANK": "0", "LOCAL_RANK": str(rank)}


def place_on_own_host(rank, size):
    return {"NODES": str(size), "NODE_RANK": str(rank), "LOCAL_RANK": "0"}


class Group:
    """Processes that are the ranks of one federation and call the same function; with ``nodes`` every rank is a host of
    its own."""

    def __init__(self, function, *arguments, size, folder, nodes=False):
        (port,) = free_ports(1)
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANKS": str(size)}
        self.processes = []
        for rank in range(size):
            of_host = place_on_own_host(rank, size) if nodes else place_on_one_host(rank)
            variables = {**common, **of_host}
            process = Forked(folder / f"rank{rank}", function, *arguments, **variables)
            self.processes.append(process)

    def wait(self, seconds=900.0):
        """Return how all have ended. Who has not by then, on however busy a machine, is killed; its code is None."""
        ended = []
        for process in self.processes:
            code, output = process.wait(seconds)
            if code is None:
                os.killpg(process.pid, signal.SIGKILL)
            ended.append(Ended(code, output))
        return ended

    def done(self):
        """Wait until all have ended, and assert that they have ended well."""
        ended = self.wait()
        outputs = [rank.output[-3000:] for rank in ended]
        assert {rank.code for rank in ended} == {0}, "\n".join(outputs)
