"""The same federations on one, two and three ranks."""

import signal
from dataclasses import replace

import pytest
import torch
from engines import ranks
from engines.federations_on_ranks import RANK_CASES
from engines.ranks import AGENT, Group
from rows import names_of_rows
from torch.distributed.launcher.api import elastic_launch

from flsv.engines.ranks import FederatedStrategy, meet
from flsv.federation import FederatedLoop
from helpers import refused
from helpers.fits import fit, state_vector
from helpers.forked import Forked
from helpers.ports import free_ports
from helpers.runs import find_differences

#: Clients' state, values of samples, a cohort smaller than the ranks, and a rank without an update.
ON_THREE = (
    "scaffold",
    "values_of_samples",
    "module_with_state",
    "two_clients",
    "rank_without_a_finite_update",
)
#: A table of contributions, and Lightning's own log.
WRITTEN_ON_TWO = ("adam_with_three_steps_a_round", "pfedsv")


@pytest.fixture(scope="module")
def rank_runs(request, tmp_path_factory):
    """A folder for each number of ranks, with a folder for each federation that is compared."""
    on_two = names_of_rows(request, test_two_ranks_equal_one_process_bitwise)
    on_three = names_of_rows(request, test_three_ranks_equal_one_process_bitwise)
    names_by_size = {2: {*on_two, *WRITTEN_ON_TWO}, 3: {*on_three, "scaffold"}}
    names_by_size[1] = {*names_by_size[2], *names_by_size[3], "persistent_optimizers"}

    root = tmp_path_factory.mktemp("ranks")
    groups = []
    for size, names in names_by_size.items():
        folder = root / str(size)
        groups.append(Group(ranks.run_all, folder, sorted(names), size=size, folder=folder))

    for group in groups:
        group.done()
    return root


@pytest.mark.by_turn
@pytest.mark.slow
@pytest.mark.parametrize("name", RANK_CASES)
def test_two_ranks_equal_one_process_bitwise(rank_runs, name):
    assert find_differences(rank_runs / "1" / name, rank_runs / "2" / name) == []


@pytest.mark.by_turn
@pytest.mark.slow
@pytest.mark.parametrize("name", ON_THREE)
def test_three_ranks_equal_one_process_bitwise(rank_runs, name):
    assert find_differences(rank_runs / "1" / name, rank_runs / "3" / name) == []


@pytest.mark.slow
def test_ranks_exchange_values_and_rows_and_fail_if_out_of_step(tmp_path):
    Group(ranks.exchange_everything, size=3, folder=tmp_path).done()


def list_files_of_runs(folder):
    """The files that federations have written below a folder. The tests' own file output.txt is none of them."""
    names = []
    for path in folder.rglob("*"):
        if not path.is_file() or path.name == "output.txt":
            continue
        relative_path = path.relative_to(folder)
        if "events" in path.name:
            # The name of this file contains a number of the process.
            relative_path = relative_path.parent
        names.append(str(relative_path))
    return sorted(names)


def files_of_same_runs(files, others):
    names = {file.split("/")[0] for file in others}
    return [file for file in files if file.split("/")[0] in names]


@pytest.mark.slow
def test_only_rank_zero_writes(rank_runs):
    files_of_one = list_files_of_runs(rank_runs / "1")
    files_of_two = list_files_of_runs(rank_runs / "2")
    files_of_three = list_files_of_runs(rank_runs / "3")

    assert files_of_two == files_of_same_runs(files_of_one, files_of_two)
    assert files_of_three == files_of_same_runs(files_of_one, files_of_three)
    assert {f"{WRITTEN_ON_TWO[0]}/version_0", "pfedsv/contributions.csv"} <= set(files_of_two)
    assert "scaffold/last.ckpt" in files_of_three


def output_of_failed_ranks(ended, failed_ranks):
    """What these ranks have printed. All of them must have ended with an error."""
    processes = [ended[rank] for rank in failed_ranks]
    output = "\n".join(process.output[-3000:] for process in processes)
    assert {process.code for process in processes} == {1}, output
    return output


@pytest.mark.slow
def test_killed_rank_ends_all_ranks_and_the_run_resumes(rank_runs, tmp_path):
    folder = tmp_path / "run"
    killed_rank = 0  # through whose store the ranks have met
    arguments = (ranks.run_and_kill, folder, "scaffold", killed_rank)

    ended = Group(*arguments, size=3, folder=tmp_path / "killed").wait()
    assert ended[killed_rank].code == -signal.SIGKILL
    assert output_of_failed_ranks(ended, (1, 2)).count("another rank has ended") >= 2

    Group(*arguments, size=1, folder=tmp_path / "resumed").done()
    assert find_differences(rank_runs / "1/scaffold", folder) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "changes", "message"),
    [
        (
            ranks.change_rank_1,
            [ranks.with_other_samples],
            "have different data: the samples or labels of clients [0, 1, 2, 3, 4] and the server's validation",
        ),
        (ranks.change_rank_1, [ranks.with_other_settings], "federation.aggregator is"),
        (ranks.limit_time, [], "max_time (a Timer) would stop a rank within a round"),
        (
            ranks.run_without_a_federation,
            [],
            "needs a FederatedLoop among the trainer's callbacks",
        ),
        (
            ranks.disagree,
            [],
            "round 1: ranks 0 and 1 have computed different values of the global model",
        ),
    ],
)
def test_ranks_with_different_or_unusable_settings_are_refused(
    tmp_path, function, changes, message
):
    ended = Group(function, tmp_path / "run", *changes, size=2, folder=tmp_path).wait()

    assert message in output_of_failed_ranks(ended, (0, 1))
    assert not list(tmp_path.rglob("*.ckpt"))


@pytest.mark.slow
def test_ranks_without_a_seed_use_the_seed_of_rank_zero(tmp_path):
    Group(ranks.run_without_a_seed, tmp_path / "run", size=2, folder=tmp_path).done()

    assert (tmp_path / "run/last.ckpt").is_file()


@pytest.mark.slow
def test_ranks_that_train_groups_of_coalitions_equal_one_process_bitwise(tmp_path):
    for size in (1, 2):
        folder = tmp_path / str(size)
        Group(ranks.train_groups_of_coalitions, folder / "run", size=size, folder=folder).done()

    assert find_differences(tmp_path / "1/run", tmp_path / "2/run") == []


def assert_resumed_run_equals_that_of_one_process(rank_runs, folder, name, size):
    """Go on from last.ckpt to the end."""
    Group(ranks.run_one, folder, name, size=size, folder=folder / "resumed").done()

    differences = find_differences(rank_runs / "1" / name, folder)
    # What ModelCheckpoint keeps of the files that it has written is not compared.
    assert [line for line in differences if "ModelCheckpoint" not in line] == []


@pytest.mark.slow
def test_checkpoint_in_the_middle_of_a_round_describes_its_start_on_all_ranks(rank_runs, tmp_path):
    folder = tmp_path / "run"
    Group(ranks.save_within, folder, "scaffold", size=2, folder=tmp_path).done()
    (folder / "within.ckpt").rename(folder / "last.ckpt")

    assert_resumed_run_equals_that_of_one_process(rank_runs, folder, "scaffold", size=3)


@pytest.mark.slow
def test_checkpoint_on_an_exception_describes_the_rounds_start_on_all_ranks(rank_runs, tmp_path):
    folder = tmp_path / "run"
    name = "persistent_optimizers"
    ended = Group(ranks.save_on_exception, folder, name, size=3, folder=tmp_path).wait()
    assert "bad sample at this site" in output_of_failed_ranks(ended, (0, 1, 2))

    (checkpoint,) = (folder / "failed").glob("*.ckpt")
    checkpoint.rename(folder / "last.ckpt")

    assert_resumed_run_equals_that_of_one_process(rank_runs, folder, name, size=2)


@pytest.mark.slow
def test_two_hosts_equal_one_process_bitwise(rank_runs, tmp_path):
    name = "persistent_optimizers"
    folder = tmp_path / "run"
    Group(ranks.run_one, folder, name, size=2, folder=tmp_path, nodes=True).done()

    assert find_differences(rank_runs / "1" / name, folder) == []


@pytest.mark.slow
def test_torchrun_restarts_a_killed_run_from_its_checkpoint(rank_runs, tmp_path):
    folder = tmp_path / "run"
    start_ranks = elastic_launch(AGENT, ranks.run_and_kill)
    killed_rank = 1

    start_ranks(folder, "scaffold", killed_rank)

    assert (folder / "ended").exists()
    assert find_differences(rank_runs / "1/scaffold", folder) == []


SWEEP = """
import sys
import lightning as L
from flsv import ClassifierClient, FederatedDataModule, FederatedLoop
from flsv.data import DirichletPartitioner

for seed in range(2):
    L.seed_everything(seed)
    data = FederatedDataModule("digits", DirichletPartitioner(4, alpha=0.5))
    loop = FederatedLoop(seed=seed)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    options |= {"max_epochs": 1, "limit_train_batches": 2, "strategy": "federated", "devices": int(sys.argv[1])}
    trainer = L.Trainer(callbacks=[loop], **options)
    trainer.fit(ClassifierClient("softmax", num_classes=10, input_shape=(1, 8, 8)), data)
    if trainer.is_global_zero:
        with open(sys.argv[2], "a") as file:
            print(seed, loop.state.model().double().sum().item(), file=file)
"""


@pytest.mark.slow
def test_script_that_sweeps_seeds_on_two_ranks_equals_one_process(tmp_path):
    script = tmp_path / "sweep.py"
    script.write_text(SWEEP)
    for num_ranks in (1, 2):
        file_of_sums = tmp_path / f"on_{num_ranks}"
        agent = replace(AGENT, nproc_per_node=num_ranks)
        start_ranks = elastic_launch(agent, ranks.run_script)
        start_ranks(str(script), str(num_ranks), str(file_of_sums))

    sums_of_one = (tmp_path / "on_1").read_text()
    num_seeds = 2
    assert len(sums_of_one.splitlines()) == num_seeds
    assert (tmp_path / "on_2").read_text() == sums_of_one


def test_strategy_federated_with_one_device_equals_the_default(tmp_path):
    by_default = fit(FederatedLoop(seed=1), tmp_path / "one")
    by_strategy = fit(FederatedLoop(seed=1), tmp_path / "two", strategy="federated", devices=1)

    assert torch.equal(state_vector(by_strategy), state_vector(by_default))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1], ids=["server of the store", "client of the store"])
def test_rank_that_waits_for_another_one_is_refused_after_the_timeout(rank, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_ports(1)[0]))

    with refused(f"rank {rank} of 2 has"):
        meet(rank, 2, torch.device("cpu"), start_timeout=0.5)


@pytest.mark.slow
def test_rank_that_stops_within_a_round_ends_all_ranks(tmp_path):
    ended = Group(ranks.stop_within, tmp_path / "run", size=2, folder=tmp_path).wait()

    assert "rank 1 of 2 stops: its round 2 ended before the last batch" in ended[1].output
    assert "another rank has ended" in output_of_failed_ranks(ended, [0])


def test_rank_whose_parent_script_has_ended_exits_with_an_error(tmp_path):
    no_process = 2**22
    variables = {"LOCAL_RANK": "1", "FLSV_RANKS_PARENT": str(no_process)}

    status, output = Forked(tmp_path, FederatedStrategy, **variables).wait()

    assert status == 1, output
    assert "has already ended" in output
