"""What leaves a private site follows from its noised update and public settings: no field of a response tells more."""

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from itertools import cycle
from types import MappingProxyType

import lightning as L
import pytest
import torch
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flsv import ClassifierClient, FederatedDataModule
from flsv.aggregation import FedAvg
from flsv.contrib import InRunValues
from flsv.core import Instruction
from flsv.data import OneClient, Splits
from flsv.engines.engine import shared_space
from flsv.personalization import IFCA, FedFomo, PFedSV, Standalone
from flsv.privacy import GaussianPrivacy
from flsv.sampling import PowerOfChoice
from flsv.sites import Packet, Site, site as site_module
from flsv.sites.messages import instruction_packet, pack, update_packet
from flsv.sites.requests import REQUESTED_FUNCTIONS
from flsv.training.algorithms import SCAFFOLD, Ditto, FedDyn, FedDynServer, PerFedAvg
from flsv.uploads import TopK
from helpers import make_generator, refused
from helpers.sites import make_shapfed_loop

SAMPLES = 40
RUN = "0" * 16
#: Pixels at which a module of the sites' own fails, or skips a step, as code may at some samples.
FAILS = 77.0
SKIPS = 88.0


class ModuleThatFailsOrSkipsByPixel(ClassifierClient):
    def training_step(self, batch, batch_idx):
        images, _labels = batch
        if (images == FAILS).any():
            raise ValueError(f"a sample of {FAILS}")
        if (images == SKIPS).any():
            return None
        return super().training_step(batch, batch_idx)


def make_module(module_class=ModuleThatFailsOrSkipsByPixel):
    torch.manual_seed(7)
    return module_class("mlp", num_classes=10, input_shape=(1, 8, 8))


def make_samples(pixel=0.0, seed=0, label=9, largest_label=9):
    """Samples of which the first has this pixel, a fourth held out for validation and as many for tests."""
    generator = make_generator(seed)
    images = torch.randn(SAMPLES, 1, 8, 8, generator=generator)
    images[:, 0, 0, 0] = pixel
    labels = torch.full((SAMPLES,), label)
    labels[::4] = largest_label

    class SiteData(L.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(TensorDataset(images, labels), batch_size=8, shuffle=True)

    splits = Splits(server_val=0.0, client_val=0.25, client_test=0.25)
    return FederatedDataModule(SiteData(), OneClient(), splits=splits)


#: The data of a site, which its responses must not tell apart.
DATA = {
    "others": partial(make_samples, seed=5),
    "of other classes": partial(make_samples, label=2),
    "of which one overflows": partial(make_samples, pixel=1e38),
    "at which training fails": partial(make_samples, pixel=FAILS),
    "at which steps are left out": partial(make_samples, pixel=SKIPS),
}
#: Settings of federations that private sites take part in.
SETTINGS = {
    "momentum, kept, and compressed": {"optimizer_state": "persist", "compressed": True},
    "local heads": {"share": ["!head"], "local_epochs": 2},
    "Ditto": {"client_algorithm": Ditto(0.1, 0.1)},
    "FedDyn": {"client_algorithm": FedDyn(0.1), "aggregator": FedDynServer()},
    "Per-FedAvg": {"client_algorithm": PerFedAvg(0.05)},
}


def make_private_loop(noise=1.0, compressed=False, **options):
    uploads = [GaussianPrivacy(1.0, noise)]
    if compressed:
        uploads.append(TopK(0.1))
    return make_shapfed_loop(
        **{"uploads": uploads, "aggregator": FedAvg(), "metrics": {}, **options}
    )


def make_training_message(model, index=0, continue_from=None):
    info = {
        "run": RUN,
        "rounds": 3,
        "classes": 10,
        "clients": 3,
        "continue_from": continue_from,
    }
    instruction = Instruction(round_index=index, client_id=0, seed=7, start=model, tensors={})
    return instruction_packet(instruction, info)


def messages_of_server(model, first_state):
    """All that a server may send to a site that has the state of its first training."""
    train_again = partial(make_training_message, index=1, continue_from=first_state)
    second_training = train_again(model)
    arguments, tensors = pack(((), {}))
    functions = {}
    for function in [*REQUESTED_FUNCTIONS, "os:system"]:
        plain = {**second_training.plain, "function": function, "arguments": arguments}
        functions[function] = Packet("query", plain, tensors)

    return {
        "handshake": Packet("handshake", {"client": 0, "clients": 3}),
        "agree": Packet("agree", {"client": 0, "clients": 3, "function": "table_summary"}),
        "test": replace(second_training, kind="test"),
        "again": second_training,
        "a model that overflows": train_again(model * 1e38),
        "a model that is not finite": train_again(model * torch.inf),
        "no model": train_again(None),
        "a state that the site has lost": train_again(model, continue_from="0" * 64),
        **functions,
    }


def collect_responses(folder, data, make_loop, model, recorded_updates):
    """Return all fields of all responses, and of the updates that they were made of.

    A site appends its updates to ``recorded_updates``.
    """
    values = {}
    site = Site(make_module, data, make_loop, folder)
    first_packet = make_training_message(model)
    packets = {
        "first": first_packet,
        **messages_of_server(model, first_packet.digest.hex()),
    }
    for title, packet in packets.items():
        recorded_updates.clear()
        reply = site.respond(packet)

        for field in fields(reply):
            values[f"{title}: {field.name}"] = getattr(reply, field.name)
        for update in recorded_updates:
            for field in fields(update):
                values[f"{title}: update's {field.name}"] = getattr(update, field.name)

    return values


def are_equal(value, expected):
    """Return whether two responses are equal; NaN equals NaN."""
    if isinstance(value, Mapping):
        if value.keys() != expected.keys():
            return False
        return all(are_equal(value[name], expected[name]) for name in value)

    if isinstance(value, Tensor):
        if value.dtype != expected.dtype:
            return False
        return torch.equal(value.nan_to_num(7), expected.nan_to_num(7))

    if value != value:
        return bool(expected != expected)
    return bool(value == expected)


@pytest.fixture
def fixed_noise(monkeypatch):
    """Noised vectors are constant, so that every difference is one that noise does not hide."""

    def make_constant(self, update, context):
        return torch.full_like(update, 0.01)

    monkeypatch.setattr(GaussianPrivacy, "apply", make_constant)


@pytest.mark.by_turn
@pytest.mark.slow
@pytest.mark.usefixtures("fixed_noise")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("settings", SETTINGS)
def test_responses_of_a_private_site_do_not_depend_on_its_data(settings, tmp_path, monkeypatch):
    updates = []

    def record_update(update, *arguments, **options):
        updates.append(update)
        return update_packet(update, *arguments, **options)

    monkeypatch.setattr(site_module, "update_packet", record_update)
    monkeypatch.setattr(site_module, "own_secret", lambda folder: "0" * 64)
    make = partial(make_private_loop, **SETTINGS[settings])
    module = make_module()
    model = shared_space(module, make().config).read(module)

    expected = collect_responses(tmp_path / "expected", make_samples, make, model, updates)
    assert expected["first: kind"] == "update"
    assert expected["again: kind"] == "update"
    assert any(title.endswith("update's vector") for title in expected)

    for number, (name, data) in enumerate(DATA.items()):
        responses = collect_responses(tmp_path / str(number), data, make, model, updates)
        assert responses.keys() == expected.keys(), name
        for title, value in expected.items():
            assert are_equal(responses[title], value), f"{name}: {title}"


@pytest.mark.parametrize(
    "options",
    [
        {"client_algorithm": SCAFFOLD()},
        {"client_algorithm": InRunValues()},
        {"personalizer": IFCA()},
        {"personalizer": FedFomo()},
        {"personalizer": PFedSV("cssv", k=2)},
        {"personalizer": Standalone()},
        {"sampler": PowerOfChoice(2, 3)},
    ],
    ids=lambda options: type(next(iter(options.values()))).__name__,
)
def test_strategy_that_lets_private_clients_tell_more_is_refused(options):
    make_private_loop(noise=0.0, **options)
    with refused(r"GaussianPrivacy\(.*only their noised updates"):
        make_private_loop(**options)


def test_private_site_sends_noise_and_logs_the_cause_when_training_fails(tmp_path, caplog):
    model = shared_space(make_module(), make_private_loop().config).read(make_module())
    site = Site(
        make_module,
        partial(make_samples, pixel=FAILS),
        partial(make_private_loop, optimizer_state="persist"),
        tmp_path,
    )
    first_packet = make_training_message(model)
    lightnings_estimate = L.Trainer.estimated_stepping_batches

    reply = site.respond(first_packet)

    assert reply.kind == "update"
    assert L.Trainer.estimated_stepping_batches is lightnings_estimate

    noise = reply.tensors["vector"] - model
    assert float(noise.std()) == pytest.approx(1.0, rel=0.02)
    assert "The update of this site is noise only" in caplog.text
    assert f"a sample of {FAILS}" in caplog.text

    next_packet = make_training_message(model, 1, first_packet.digest.hex())
    assert site.respond(next_packet).kind == "update"


# ---- whatever happens after a private site has read its data, it sends one kind of message of one size

#: Methods of a LightningModule that a fit calls, beside its hooks.
METHODS = [
    "training_step",
    "forward",
    "backward",
    "configure_optimizers",
    "configure_callbacks",
    "configure_gradient_clipping",
    "optimizer_step",
    "optimizer_zero_grad",
    "lr_scheduler_step",
    "log",
    "state_dict",
]
HOOKS = {*vars(ModelHooks), *vars(DataHooks), *vars(CheckpointHooks)}
OUTCOMES = [*METHODS, *sorted(name for name in HOOKS if not name.startswith("_"))]


class SiteModule(ClassifierClient):
    is_responding = False


def make_class_that_fails(hook, error):
    """Return a module's class whose hook fails while a site responds."""

    class FailingModule(SiteModule):
        pass

    def fail_while_responding(self, *args, **kwargs):
        if SiteModule.is_responding:
            raise error("what a sample says")
        inherited_hook = getattr(super(FailingModule, self), hook)
        return inherited_hook(*args, **kwargs)

    setattr(FailingModule, hook, fail_while_responding)
    return FailingModule


def response_of_site(
    folder,
    module_class=SiteModule,
    make_data=make_samples,
    options=MappingProxyType({}),
    **changed_fields,
):
    """Return what a site responds to the message of a first round with some changed fields."""
    make_own_module = partial(make_module, module_class)
    make_loop = partial(make_private_loop, **options)
    module = make_own_module()
    model = shared_space(module, make_loop().config).read(module)
    packet = make_training_message(model)
    changed_packet = replace(packet, plain={**packet.plain, **changed_fields})
    site = Site(make_own_module, make_data, make_loop, folder)
    SiteModule.is_responding = True
    try:
        return site.respond(changed_packet)
    finally:
        SiteModule.is_responding = False


def assert_same_message(reply, expected):
    assert reply.kind == expected.kind == "update"
    assert are_equal(reply.plain, expected.plain)
    assert are_equal(reply.tensors, expected.tensors)


@pytest.mark.by_turn
@pytest.mark.slow
@pytest.mark.usefixtures("fixed_noise")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", range(5))
def test_error_in_any_hook_leaves_the_message_of_a_private_site_unchanged(tmp_path, first):
    assert {"on_train_epoch_end", "on_fit_end", "teardown", "setup"} <= set(OUTCOMES)
    expected = response_of_site(tmp_path / "expected")
    errors = cycle([ValueError, KeyboardInterrupt, StopIteration])
    for hook, error in zip(OUTCOMES[first::5], errors, strict=False):
        reply = response_of_site(tmp_path / hook, make_class_that_fails(hook, error))
        assert_same_message(reply, expected)


class ModuleThatStopsTraining(SiteModule):
    def training_step(self, batch, batch_idx):
        self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


class ModuleThatReplacesItsNetwork(SiteModule):
    def on_train_batch_end(self, *_):
        self.network = nn.Linear(64, 3)


class ModuleThatTurnsToFloat64(SiteModule):
    def on_train_batch_end(self, *_):
        self.double()


@pytest.mark.fast_rows
@pytest.mark.usefixtures("fixed_noise")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "module_class",
    [ModuleThatStopsTraining, ModuleThatReplacesItsNetwork, ModuleThatTurnsToFloat64],
)
def test_training_without_an_update_leaves_the_message_of_a_private_site_unchanged(
    tmp_path, module_class
):
    options = {"local_epochs": 2, "compressed": True, "optimizer_state": "persist"}
    expected = response_of_site(tmp_path / "expected", options=options)
    reply = response_of_site(tmp_path / "without_update", module_class, options=options)
    assert_same_message(reply, expected)


@pytest.mark.usefixtures("fixed_noise")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("classes", [1, 9, None])
def test_number_of_classes_in_a_message_does_not_find_a_private_sites_labels(tmp_path, classes):
    few_classes = partial(make_samples, label=1, largest_label=2)
    reply = response_of_site(tmp_path / "few", make_data=few_classes, classes=classes)
    expected = response_of_site(tmp_path / "all", classes=classes)
    assert_same_message(reply, expected)


@pytest.mark.usefixtures("fixed_noise")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "fields",
    [{"classes": 0}, {"rounds": 2.5}, {"clients": None}],
    ids=str,
)
def test_impossible_request_is_refused_before_any_privacy_is_spent(tmp_path, fields):
    reply = response_of_site(tmp_path, **fields)
    assert reply.kind == "failed"
    assert "the server's message is not valid" in reply.plain["error"]
    assert not (tmp_path / "privacy.json").exists()
