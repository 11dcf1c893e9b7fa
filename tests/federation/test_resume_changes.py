"""What is different on resume is used, or refused by name; nothing in between."""

import warnings
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from flsv.aggregation import FedAvg, ShapFedWA
from flsv.attacks import FreeRider
from flsv.data import ClosedSetLabelNoise
from flsv.federation import FederatedLoop
from flsv.metrics import ClassSpecificShapley
from flsv.privacy import GaussianPrivacy
from flsv.utilities.errors import VersionWarning
from flsv.utilities.formats import CHECKPOINT_FORMAT, package_versions
from helpers import refused, warns
from helpers.data import toy_data
from helpers.fits import fit, fit_and_save, plain_trainer, trainer_for
from helpers.models import Plain, adam, make_sgd, network


def make_loop(**changes):
    return FederatedLoop(
        **{
            "aggregator": FedAvg(),
            "metrics": {"m": ClassSpecificShapley()},
            "seed": 3,
            **changes,
        }
    )


def fit_first(folder, module=None, data=None, rounds=2, **changes):
    """Fit, and return the path of the last checkpoint."""
    return fit_and_save(make_loop(**changes), folder / "first", module, data, rounds)


@pytest.fixture(scope="module")
def saved_checkpoint(tmp_path_factory):
    return fit_first(tmp_path_factory.mktemp("saved"))


def resume_fit(path, folder, module=None, data=None, rounds=3, **changes):
    return fit(make_loop(**changes), folder, module, data, rounds, path)


def test_changed_label_in_the_same_data_is_refused_on_resume(tmp_path):
    """All options are the same: only the hashes tell, and whose they are."""
    data = toy_data()
    changed_data = toy_data()
    data.setup("fit")
    sample = int(data.client_indices(1)[0])
    _, labels = changed_data.source[0].tensors
    labels[sample] = (labels[sample] + 1) % 3
    path = fit_first(tmp_path, data=data)

    with refused(r"federation: other samples.*\[1\]\. Resume"):
        resume_fit(path, tmp_path / "second", data=changed_data)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"data": toy_data((1, 4, 2))},
            "another federation: .*data.partitioner is SizePartitioner",
        ),
        ({"data": toy_data(seed=1)}, r"data.splits.seed is 1 and was 0.*\[0, 1, 2\]"),
        (
            {"data": toy_data(corruptions=[ClosedSetLabelNoise(fraction=0.4)])},
            "another federation: .*was None",
        ),
        ({"module": Plain(optimizer=adam)}, "started with SGD.*resumed.*Adam"),
        ({"seed": 4}, "seed is 4, but the run was started with 3"),
        ({"aggregator": ShapFedWA("m")}, r"ShapFedWA\(metric='m', .* and was FedAvg"),
        ({"share": ["!norm"]}, r"federation.share is \['!norm'\] and was 'all'"),
        ({"metrics": {"m": ClassSpecificShapley(momentum=0.5)}}, "momentum=0.5.* and was"),
        ({"metrics": {}}, r"federation.metrics.m is None and was "),
        ({"uploads": [FreeRider(clients=[1])]}, r"uploads is \[FreeRider.* and was \[\]"),
    ],
)
def test_resuming_another_federation_is_refused(saved_checkpoint, tmp_path, changes, message):
    with refused(message):
        resume_fit(saved_checkpoint, tmp_path, **changes)
    assert not (tmp_path / "contributions.csv").exists()


@pytest.mark.slow
def test_resume_with_fewer_rounds_than_already_run_is_refused(saved_checkpoint, tmp_path):
    with refused("after round 2, but max_epochs=1"):
        resume_fit(saved_checkpoint, tmp_path, rounds=1)
    with warns("2 rounds.*already. Raise max_epochs"):
        resume_fit(saved_checkpoint, tmp_path, rounds=2)


@pytest.mark.slow
def test_resume_with_a_larger_privacy_budget_is_allowed_and_with_another_clip_refused(tmp_path):
    make_module = partial(Plain, network(batch_norm=False))
    privacy = GaussianPrivacy(clip=1.0, noise_multiplier=2.0, max_epsilon=5.0)
    with_larger_budget = GaussianPrivacy(clip=1.0, noise_multiplier=2.0, max_epsilon=8.0)
    with_other_clip = GaussianPrivacy(clip=2.0, noise_multiplier=2.0, max_epsilon=5.0)
    path = fit_first(tmp_path, make_module(), uploads=[privacy])

    resume_fit(path, tmp_path / "budget", make_module(), uploads=[with_larger_budget])

    with refused("federation.uploads is .*clip=2.0.* and.*clip=1.0"):
        resume_fit(path, tmp_path / "clip", make_module(), uploads=[with_other_clip])


@pytest.mark.slow
def test_checkpoint_that_lacks_an_entry_of_the_federation_is_refused(saved_checkpoint, tmp_path):
    path = tmp_path / "spoiled.ckpt"
    checkpoint = torch.load(saved_checkpoint, weights_only=True)
    (key,) = [key for key in checkpoint["callbacks"] if key.startswith("FederatedLoop")]
    federation = checkpoint["callbacks"][key]

    for missing in sorted(federation):
        remaining = {name: value for name, value in federation.items() if name != missing}
        checkpoint["callbacks"][key] = remaining
        torch.save(checkpoint, path)
        with refused(f"'{missing}' is missing|in format None"):
            resume_fit(path, tmp_path)


@pytest.mark.slow
def test_checkpoint_saved_within_a_round_asks_for_no_callback_of_flsv(tmp_path):
    saving = ModelCheckpoint(tmp_path / "steps", every_n_train_steps=2, save_top_k=-1)

    fit(make_loop(), tmp_path, callbacks=[saving], enable_checkpointing=True)

    paths = list((tmp_path / "steps").glob("*.ckpt"))
    assert len(paths) > 1
    for path in paths:
        keys = torch.load(path, weights_only=True)["callbacks"].keys()
        # A key is the name of a class, followed in braces by settings.
        class_names = {key.partition("{")[0] for key in keys}
        assert class_names == {"FederatedLoop", "ModelCheckpoint"}


def test_checkpoint_with_a_damaged_byte_of_a_weight_is_refused(saved_checkpoint, tmp_path):
    path = tmp_path / "spoiled.ckpt"
    checkpoint = torch.load(saved_checkpoint, weights_only=True)
    weight = next(iter(checkpoint["state_dict"].values()))
    content = bytearray(saved_checkpoint.read_bytes())
    position = content.index(weight.numpy().tobytes())
    content[position + 1] ^= 255
    path.write_bytes(content)

    with refused("cannot be read.*checkpoint:.*damaged"):
        resume_fit(path, tmp_path)


def test_validating_on_possible_training_samples_warns(saved_checkpoint, tmp_path):
    trainer = trainer_for(make_loop(), tmp_path)

    def validate(data):
        trainer.validate(Plain(), datamodule=data, ckpt_path=saved_checkpoint)

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*may have been trained on some.*")
        validate(toy_data())

    with warns("may have been trained on some of the samples"):
        validate(toy_data(seed=5))


# ---- what can be changed is used


@pytest.fixture(scope="module")
def resumed_unchanged(saved_checkpoint, tmp_path_factory):
    """The module of a run that was resumed with the settings that it began with."""
    return resume_fit(saved_checkpoint, tmp_path_factory.mktemp("unchanged"))


def load_saved_parameters(path, module):
    state = torch.load(path, weights_only=True)["state_dict"]
    return {name: state[name] for name, _ in module.named_parameters()}


@pytest.mark.parametrize(
    "changes",
    [
        {"module": Plain(optimizer=make_sgd(lr=0.0, momentum=0.9))},
        {"aggregator": FedAvg(server_lr=1e-12)},
    ],
    ids=["client", "server"],
)
def test_learning_rate_of_zero_given_on_resume_is_used(
    saved_checkpoint, resumed_unchanged, tmp_path, changes
):
    """The model then stays the saved one, which the unchanged rate moves."""
    saved_parameters = load_saved_parameters(saved_checkpoint, resumed_unchanged)
    unmoved = resume_fit(saved_checkpoint, tmp_path, **changes)

    torch.testing.assert_close(dict(unmoved.named_parameters()), saved_parameters)
    for name, parameter in resumed_unchanged.named_parameters():
        assert not torch.equal(parameter, saved_parameters[name])


@pytest.mark.parametrize("changes", [{"local_epochs": 2}, {"data": toy_data(batch_size=4)}])
def test_local_epochs_and_batch_size_given_on_resume_are_used(
    saved_checkpoint, resumed_unchanged, tmp_path, changes
):
    resumed = resume_fit(saved_checkpoint, tmp_path, **changes)

    assert resumed.trainer.global_step > resumed_unchanged.trainer.global_step


@pytest.mark.fast_rows
@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_learning_rate_that_a_scheduler_sets_cannot_be_changed_on_resume(tmp_path, interval):
    scheduler = partial(torch.optim.lr_scheduler.StepLR, step_size=1)

    def make_module(lr):
        return Plain(optimizer=make_sgd(lr), scheduler=scheduler, interval=interval)

    path = fit_first(tmp_path, make_module(lr=0.1))
    resume_fit(path, tmp_path / "same", make_module(lr=0.1))

    with refused("changed on resume.*lr is 0.2.*0.1.*StepLR"):
        resume_fit(path, tmp_path / "other", make_module(lr=0.2))


# ---- the module


class SavesNameOfActivation(Plain):
    def __init__(self, network):
        activation = getattr(torch.nn, network)()
        super().__init__(torch.nn.Sequential(torch.nn.Linear(6, 3), activation))
        self.save_hyperparameters("network")


def test_resume_with_another_network_of_the_same_shapes_is_refused(tmp_path):
    path = fit_first(tmp_path, SavesNameOfActivation("ReLU"), rounds=1)
    trainer = trainer_for(make_loop(), tmp_path / "another")
    for run_stage in (trainer.fit, trainer.test):
        with refused("network is 'Tanh' and.*'ReLU'"):
            run_stage(SavesNameOfActivation("Tanh"), datamodule=toy_data(), ckpt_path=path)


def test_checkpoint_without_a_federation_or_of_weights_only_is_refused(tmp_path):
    trainer = plain_trainer(tmp_path, rounds=1)
    trainer.fit(Plain(), toy_data())
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)

    with refused("plain.ckpt.*was not saved.*FederatedLoop"):
        resume_fit(tmp_path / "plain.ckpt", tmp_path / "a")
    with refused("weights.ckpt cannot be resumed.*only weights"):
        resume_fit(tmp_path / "weights.ckpt", tmp_path / "b")

    trainer_for(make_loop(), tmp_path / "c").test(
        Plain(), toy_data(), ckpt_path=tmp_path / "weights.ckpt"
    )


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({}, "in format None, .*with an older flsv"),
        ({"versions": {"flsv": "1.2.0"}}, r"flsv 1\.2\.0 in format None, .*with flsv 1\.2\.0"),
        (
            {"format": CHECKPOINT_FORMAT + 1, "versions": {"flsv": "2.9.0"}},
            rf"in format {CHECKPOINT_FORMAT + 1}, .*: install flsv 2\.9\.0",
        ),
    ],
)
def test_checkpoint_of_another_format_is_refused(written, message):
    state = {"round_index": 2, "seed": 1, **written}
    with refused(message):
        make_loop().check_state(state)


def test_resume_by_another_version_has_a_warning_and_ends_in_the_same_model(
    saved_checkpoint, resumed_unchanged, tmp_path
):
    """As when flsv was upgraded between the two."""
    checkpoint = torch.load(saved_checkpoint, weights_only=True)
    federation_state = checkpoint["callbacks"]["FederatedLoop"]

    assert federation_state["versions"] == package_versions()

    federation_state["versions"]["flsv"] = "1.9.9"
    older = tmp_path / "older.ckpt"
    torch.save(checkpoint, older)

    with pytest.warns(VersionWarning, match=r"was 1\.9\.9\): from here on"):
        upgraded = resume_fit(older, tmp_path / "upgraded")

    for name, tensor in resumed_unchanged.state_dict().items():
        assert torch.equal(tensor, upgraded.state_dict()[name]), name


def test_resume_of_an_unseeded_attack_under_another_global_seed_is_refused(tmp_path, monkeypatch):
    """``seed_everything`` draws its clients, also where the federation has a seed of its own."""
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    path = fit_first(tmp_path, uploads=[FreeRider("zero", fraction=0.4)])
    monkeypatch.setenv("PL_GLOBAL_SEED", "2")

    with refused(r"federation\.uploads is .*seed=2.* and.*seed=1"):
        resume_fit(path, tmp_path, uploads=[FreeRider("zero", fraction=0.4)])
