"""Updates that nobody should average: found in their own round, named, and said once."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from toys import Plain, fit, network, toy_data, trainer_for, vector

from flsv.attacks import Attack
from flsv.errors import ConfigurationError
from flsv.loop import FederatedLoop
from flsv.metrics import ClassSpecificShapley, CosineGradientShapley
from flsv.report import open_run
from flsv.server.update_watch import UpdateWatch


class Huge(Attack):
    """Sends an update with one huge entry, in one round."""

    def __init__(self, size: float = 1e30, round_index: int = 1, clients: list[int] | None = None) -> None:
        super().__init__(clients or [1])
        self.size, self.round_index = size, round_index

    def attack(self, update: Tensor, round_index: int, generator: torch.Generator) -> Tensor:
        update = update.clone()
        if round_index == self.round_index:
            update[3] = self.size
        return update


def watched(loop: FederatedLoop, folder: Path, rounds: int = 2, **kwargs: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(loop, folder, data=toy_data((4, 3, 4, 3)), rounds=rounds, **kwargs)
    return [str(w.message) for w in caught if "update" in str(w.message) or "NaN" in str(w.message)]


@pytest.mark.parametrize("size", [1e4, 1e18, 1e30, 3e38])
def test_a_huge_update_is_named_in_its_round(tmp_path: Path, size: float) -> None:
    (said,) = watched(FederatedLoop(attacks=[Huge(size)], seed=1), tmp_path)
    assert said.startswith("client 1 sent an update far larger than the cohort's in round 1 (norm ")
    assert "exclude_outliers" in said


@pytest.mark.parametrize("size", [1e4, 1e30, 3e38])
def test_excluded_the_round_goes_on_without_it(tmp_path: Path, size: float) -> None:
    metrics = {"cssv": ClassSpecificShapley(), "cgsv": CosineGradientShapley()}
    loop = FederatedLoop(metrics=metrics, attacks=[Huge(size, 0)], exclude_outliers=True, seed=1)
    logger = TensorBoardLogger(tmp_path, name="", version="run")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = fit(loop, tmp_path, data=toy_data((4, 3, 4, 3)), rounds=1, logger=logger)
    assert [str(w.message) for w in caught if "left out of the round" in str(w.message)]
    assert vector(module).abs().max() < 100
    assert loop.participations.tolist() == [1, 0, 1, 1]
    for value in (loop.weights, loop.contributions["cgsv"], loop.contributions["cssv"][:, 0]):
        assert value is not None
        assert value.isnan().tolist() == [False, True, False, False]
    rows = [line.split(",") for line in (tmp_path / "run" / "contributions.csv").read_text().splitlines()]
    norms = {int(row[2]): float(row[4]) for row in rows if row[1] == "update_norm"}
    assert norms[1] == pytest.approx(size, rel=1e-5)
    assert max(norms[0], norms[2], norms[3]) < 100
    seen = EventAccumulator(str(tmp_path / "run/clients/1")).Reload()
    assert seen.Scalars("update_norm")[0].value == pytest.approx(size, rel=1e-5)


def test_who_suffers_from_it_is_not_blamed_alone(tmp_path: Path) -> None:
    """In the round after an update of 1e30 everybody returns NaN: the message leads back to whose it was."""
    blamed = r"round 2: every client .* further back: client 1 sent an update far larger"
    with pytest.raises(RuntimeError, match=blamed):
        watched(FederatedLoop(attacks=[Huge()], seed=1), tmp_path, rounds=3)


def test_switched_off(tmp_path: Path) -> None:
    assert watched(FederatedLoop(attacks=[Huge(1e4)], outlier_threshold=None, seed=1), tmp_path) == []
    assert "update_norm,1" in (tmp_path / "contributions.csv").read_text()


def test_honest_clients_of_different_sizes_raise_no_alarm(tmp_path: Path) -> None:
    data = toy_data((20, 1, 3, 9, 1), client_test_fraction=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(FederatedLoop(seed=1), tmp_path, Plain(network(batch_norm=False)), data, rounds=5)
    assert not [w for w in caught if "far larger" in str(w.message)]


def said_by(watch: UpdateWatch, *args: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        watch.judge(*args)
    return [str(w.message) for w in caught]


def test_one_line_names_everybody() -> None:
    norms = torch.tensor([1.0, 1.1, 1e30, 0.9, 1e9]).double()
    (line,) = said_by(UpdateWatch(3.5, exclude=False), 7, [8, 5], [0, 1, 2, 3, 4], norms)
    assert "\n" not in line
    assert "clients 8, 5 returned a model with NaN or infinite entries in round 7" in line
    assert "clients 2, 4 sent an update far larger than the cohort's in round 7 (norm 1e+30, 1e+09; median 1.1)" in line


def test_two_thousand_rounds_are_not_two_thousand_lines() -> None:
    watch, lines = UpdateWatch(3.5, exclude=True), []
    norms = torch.tensor([1.0, 1.1, 1e30]).double()
    for index in range(2000):
        lines += said_by(watch, index, [3], [0, 1, 2], norms)
    assert len(lines) == 4  # the 1st, 10th, 100th and 1000th time
    assert "client 3 (1000 times)" in lines[-1]
    with pytest.warns(UserWarning, match=r"client 3 \(2000 times\) returned .* client 2 \(2000 times\) sent"):
        watch.finish()
    assert "client 4 returned" in said_by(watch, 2000, [4], [0], norms[:1])[0]  # somebody else is news


def test_nothing_left_to_say_at_the_end() -> None:
    watch = UpdateWatch(3.5, exclude=False)
    said_by(watch, 0, [3], [0], torch.ones(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch.finish()


@pytest.mark.parametrize("wrong", [{"outlier_threshold": 0}, {"outlier_threshold": None, "exclude_outliers": True}])
def test_arguments(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="outlier_threshold"):
        FederatedLoop(**wrong)


class Sybil(Attack):
    """What its clients send differs by little, from the second round on."""

    def attack(self, update: Tensor, round_index: int, generator: torch.Generator) -> Tensor:
        if round_index == 0:
            return update
        common = torch.randn(len(update), generator=torch.Generator().manual_seed(round_index))
        return update.norm() * (common + 0.1 * torch.randn(len(update), generator=generator)) / len(update) ** 0.5


def of_copies(folder: Path, loop: FederatedLoop, rounds: int = 3, **kwargs: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(loop, folder, data=toy_data((4, 3, 4, 3, 4)), rounds=rounds, **kwargs)
    return [str(w.message) for w in caught if "one another's" in str(w.message)]


def test_copies_are_named_and_only_the_first_stays(tmp_path: Path) -> None:
    loop = FederatedLoop(
        attacks=[Sybil([3, 1])], metrics={"cgsv": CosineGradientShapley()}, exclude_copies=True, seed=1
    )
    said = of_copies(tmp_path, loop)
    assert said[0].startswith("clients 1, 3 sent updates that are one another's but for little in round 1 (similarity")
    assert "only client 1 stays in the round" in said[0]
    assert loop.participations.tolist() == [3, 3, 3, 1, 3]
    assert loop.noticed == {"not_finite": {}, "large": {}, "copy": {1: 2, 3: 2}}
    assert loop.copies == [3]
    assert len(said) == 2  # in its round, and at the end


def test_copies_are_said_only_and_nobody_is_compared_unasked(tmp_path: Path) -> None:
    loop = FederatedLoop(attacks=[Sybil([3, 1])], copy_threshold=0.7, seed=1)
    said = of_copies(tmp_path / "said", loop)
    assert "for want of exclude_copies=True" in said[0]
    assert loop.participations.tolist() == [3] * 5
    silent = FederatedLoop(attacks=[Sybil([3, 1])], seed=1)
    assert of_copies(tmp_path / "silent", silent) == []
    assert silent.state.likeness is None
    assert silent.copies == []


def test_a_copy_has_nothing_to_be_paid_by_in_the_loop_and_in_the_folder(tmp_path: Path) -> None:
    loop = FederatedLoop(attacks=[Sybil([3, 1])], metrics={"cgsv": CosineGradientShapley()}, copy_threshold=0.7, seed=1)
    of_copies(tmp_path / "said", loop)
    assert (loop.copies, loop.unpaid) == ([3], [])  # nobody is left out
    assert loop.payable["cgsv"].isfinite().all()
    assert torch.equal(loop.payable["cgsv"], loop.contributions["cgsv"].double())

    left_out = loop.replace(metrics={"cgsv": CosineGradientShapley()}, exclude_copies=True)
    of_copies(tmp_path / "left_out", left_out)
    assert left_out.unpaid == [3]
    assert left_out.contributions["cgsv"].isfinite().all()
    assert left_out.payable["cgsv"].isnan().tolist() == [False, False, False, True, False]
    (folder,) = (path.parent for path in (tmp_path / "left_out").rglob("contributions.csv"))
    run = open_run(folder)
    assert run.unpaid == (3,)
    assert any(row.client == 3 and row.metric == "cgsv" for row in run.rows)
    assert [value != value for value in run.final("cgsv")] == [False, False, False, True, False]
    assert run.final("update_norm")[3] == run.final("update_norm")[3]  # what it sent is no pay


def test_the_folder_of_a_killed_run_says_who_is_a_copy(tmp_path: Path) -> None:
    class Killed(L.Callback):
        def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            if trainer.current_epoch == 2:
                raise OSError("the power is gone")

    loop = FederatedLoop(attacks=[Sybil([3, 1])], exclude_copies=True, seed=1)
    with pytest.raises(OSError, match="the power"):
        of_copies(tmp_path, loop, callbacks=[Killed()])
    (folder,) = (path.parent for path in tmp_path.rglob("contributions.csv"))
    run = open_run(folder)
    assert (run.ended, run.unpaid) == (False, (3,))


def test_honest_clients_are_no_copies(tmp_path: Path) -> None:
    loop = FederatedLoop(exclude_copies=True, seed=1)
    assert of_copies(tmp_path, loop, rounds=4) == []
    assert loop.participations.tolist() == [4] * 5


def test_who_was_found_stays_found_in_a_resumed_run(tmp_path: Path) -> None:
    class Once(Sybil):
        def attack(self, update: Tensor, round_index: int, generator: torch.Generator) -> Tensor:
            return super().attack(update, round_index, generator) if round_index == 1 else update

    def loop() -> FederatedLoop:
        return FederatedLoop(attacks=[Once([3, 1])], exclude_copies=True, seed=1)

    whole = fit(first := loop(), tmp_path / "whole", data=toy_data((4, 3, 4, 3, 4)), rounds=4)
    assert first.participations.tolist() == [4, 4, 4, 1, 4]
    trainer = trainer_for(loop(), tmp_path / "part", 2)
    trainer.fit(Plain(), toy_data((4, 3, 4, 3, 4)))
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    later = loop()
    resumed = fit(later, tmp_path / "rest", data=toy_data((4, 3, 4, 3, 4)), rounds=4, ckpt_path=tmp_path / "two.ckpt")
    assert later.participations.tolist() == [4, 4, 4, 1, 4]
    assert torch.equal(vector(resumed), vector(whole))
    assert first.state.likeness is not None
    assert later.state.likeness is not None
    assert torch.equal(first.state.likeness, later.state.likeness)


def grams(similar: float, k: int = 6) -> Tensor:
    """Products of updates of which the first two are alike by so much, and the others by nothing."""
    gram = torch.eye(k, dtype=torch.float64)
    gram[0, 1] = gram[1, 0] = similar
    return gram


def gapped(rounds: list[Tensor], **kwargs: Any) -> UpdateWatch:
    watch = UpdateWatch(None, False, exclude_copies=True, copy_gap=0.45, num_clients=6, **kwargs)
    for index, gram in enumerate(rounds):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            watch.judge(index, [], list(range(6)), torch.ones(6), gram)
    return watch


def test_who_stands_apart_in_the_first_rounds_is_a_copy_below_the_threshold() -> None:
    apart, near = grams(0.6), grams(0.2)
    assert gapped([apart]).times["sent updates that are one another's but for little", 1] == 1
    assert not gapped([near]).times
    # Found in the first round, it stays found; after the third nobody is found any more.
    assert gapped([apart, near, near, near]).times["sent updates that are one another's but for little", 1] == 4
    assert not gapped([near, near, near, *[apart] * 6]).times
    assert (
        not UpdateWatch(None, False, copy_threshold=0.7, num_clients=6)
        .judge(0, [], list(range(6)), torch.ones(6), apart)
        .logical_not()
        .any()
    )


def test_an_outlier_stays_out_of_a_round_with_copies() -> None:
    watch = UpdateWatch(3.5, True, copy_threshold=0.7, exclude_copies=True, num_clients=6)
    norms = torch.ones(6, dtype=torch.float64)
    norms[5] = 1e6
    with pytest.warns(UserWarning, match=r"client 5 .* far larger .*clients 0, 1 .* only client 0 stays"):
        keep = watch.judge(0, [], list(range(6)), norms, grams(0.99))
    assert keep.tolist() == [True, False, True, True, True, False]


def test_what_an_older_checkpoint_has_not_counted_is_not_judged_by_the_gap() -> None:
    older = gapped([grams(0.2)]).likeness
    assert older is not None
    assert older.shape == (4, 6, 6)
    assert not gapped([grams(0.9)], likeness=older[:3]).times
    assert gapped([grams(0.99)] * 2, likeness=older).times


def test_the_gap_is_judged_only_where_it_is_asked_for() -> None:
    loop = FederatedLoop(exclude_copies=True)
    assert (loop.copy_threshold, loop.copy_gap) == (0.7, None)
    loop = FederatedLoop(exclude_copies=True, copy_gap=0.6)
    assert (loop.copy_threshold, loop.copy_gap) == (None, 0.6)
    assert (FederatedLoop().copy_threshold, FederatedLoop().copy_gap) == (None, None)


@pytest.mark.parametrize("threshold", [0, 1.1, float("nan")])
def test_a_similarity_out_of_range(threshold: float) -> None:
    with pytest.raises(ConfigurationError, match="copy_threshold"):
        FederatedLoop(copy_threshold=threshold)
