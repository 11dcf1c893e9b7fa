"""Sites with tables read them by one data dictionary, and give what one process gives."""

from dataclasses import replace
from functools import partial

import lightning as L
import pytest
import torch

from flsv.data import (
    FederatedDataModule,
    IIDPartitioner,
    OneClient,
)
from flsv.privacy import GaussianPrivacy
from flsv.results.record import read_record
from flsv.sites import (
    Directory,
    Packet,
    Site,
    agreement,
)
from flsv.tables import Column, Dictionary
from helpers import refused, warns
from helpers.hospitals import (
    DICTIONARY,
    FEATURES,
    TABLES,
    VAL,
    fit_in_one_process,
    make_data,
    make_module,
    merged_dictionary,
)
from helpers.sites import (
    ADDRESSES,
    NAMES,
    OSAKA_ADDRESS,
    SitesInProcess,
    assert_same_runs,
    make_shapfed_loop,
)

MERGED = merged_dictionary()


class Hospitals(SitesInProcess):
    """Sites with tables, and what the server has asked and was told."""

    num_classes = 2

    def __init__(
        self,
        folder,
        tables=TABLES,
        make=make_shapfed_loop,
        dictionary=MERGED,
        partitioners=(),
    ):
        self.tables = list(tables.values())
        self.dictionary = dictionary
        self.partitioners = partitioners
        self.requests: list[Packet] = []
        self.replies: list[Packet] = []
        super().__init__(folder, make, make_module)
        self.transport.on_reply = self._note

    def make_site(self, client):
        options = {"dictionary": self.dictionary}
        if self.partitioners:
            options["partitioner"] = self.partitioners[client]
        make_site_data = partial(make_data, self.tables[client], **options)
        return Site(make_module, make_site_data, self.make, self.tmp / NAMES[client])

    def _note(self, address, packet, reply):
        self.requests.append(packet)
        self.replies.append(reply)
        return reply


def server_data(dictionary=MERGED):
    return make_data(VAL, val=VAL, dictionary=dictionary)


@pytest.mark.slow
def test_sites_give_the_weights_and_values_of_one_process(tmp_path):
    """With the dictionary that is merged of the sites' dictionaries, to the bit."""
    fit = partial(fit_in_one_process, clients=TABLES, val=VAL, pos_label="yes")
    local, _ = fit(tmp_path / "local", dictionary=MERGED)
    sites = Hospitals(tmp_path / "sites")
    remote = sites.fit(rounds=2, server_data=server_data())

    assert_same_runs(remote, local)
    assert {packet.kind for packet in sites.requests} == {"handshake", "train"}
    for folder in ("sites", "local"):
        record = read_record(tmp_path / folder / "run.json")
        dictionary = Dictionary.from_file(tmp_path / folder / "dictionary.yaml")
        assert dictionary.hash in str(record["settings"])
        assert record["dictionary"] == dictionary.to_plain()


class CountedClient(OneClient):
    """Site's partitioner, which counts its calls."""

    num_calls = 0

    def partition(self, *arguments):
        self.num_calls += 1
        return super().partition(*arguments)


def test_data_are_set_up_once_at_each_site(tmp_path):
    partitioners = [CountedClient() for _ in TABLES]
    federation = Hospitals(tmp_path, partitioners=partitioners)
    federation.fit(rounds=2, server_data=server_data())

    assert [partitioner.num_calls for partitioner in partitioners] == [1, 1, 1]


WITHOUT_CATEGORIES = replace(MERGED, columns={**MERGED.columns, "ward": Column(kind="categories")})


@pytest.mark.parametrize(
    ("dictionary", "reason"),
    [
        (None, "the meaning of some columns of its table is not clear"),
        (DICTIONARY, "its table has no data"),
        (WITHOUT_CATEGORIES, ".*categories of 'ward' are missing.* merge again"),
    ],
)
def test_site_without_a_complete_dictionary_is_refused(tmp_path, dictionary, reason):
    federation = Hospitals(tmp_path, dictionary=dictionary)
    with refused(f"Boston' cannot take part: {reason}"):
        federation.directory()
    assert "patient" not in str([reply.plain for reply in federation.replies])


def test_site_with_data_of_several_clients_is_refused(tmp_path):
    federation = Hospitals(tmp_path, partitioners=[IIDPartitioner(2)] * 3)
    with refused("Boston' cannot take part: its data module has 2 clients"):
        federation.directory()


def make_private_loop():
    return make_shapfed_loop(uploads=[GaussianPrivacy(clip=1.0, noise_multiplier=1.0)])


@pytest.mark.parametrize("make", [make_shapfed_loop, make_private_loop])
def test_sites_tell_sizes_and_the_hash_of_their_dictionary_alone(tmp_path, make):
    federation = Hospitals(tmp_path, make=make)
    directory = federation.directory()

    assert {packet.kind for packet in federation.requests} == {"handshake"}
    for reply in federation.replies:
        assert reply.plain == {
            "sizes": reply.plain["sizes"],
            "contents": reply.plain["contents"],  # a hash that is keyed by the site's secret
            "dictionary": MERGED.hash,
            "class_names": None,  # which the dictionary has
            "message": reply.plain["message"],
        }
        assert reply.plain["sizes"].keys() == {"train", "val", "test"}
        assert not reply.tensors
    assert directory.dictionary_hash == MERGED.hash


def test_nothing_that_a_curious_server_tries_tells_of_a_column(tmp_path):
    """By unknown kinds of messages, other ids and functions, and by dictionaries of the server's choice."""
    plain = MERGED.to_plain()
    other_dictionary = {**plain, "columns": {"ward": {"categories": ["rare"]}}}
    attempts = [
        Packet("summary", {"client": 0}),
        Packet("handshake", {"client": 1, "dictionary": other_dictionary}),
        Packet("query", {"client": 0, "function": "flsv.tables.inference:infer", "arguments": {}}),
    ]
    federation = Hospitals(tmp_path)
    federation.directory()
    site = federation.transport.sites[ADDRESSES[0]]
    (usual_reply, *_) = federation.replies
    facts = agreement(make_module(), federation.make())
    settings = {"agreement": facts, "clients": len(NAMES), "message": usual_reply.plain["message"]}

    for attempt in attempts:
        packet = replace(attempt, plain={**attempt.plain, **settings})
        reply = site.respond(packet)
        assert not reply.tensors
        if (
            reply.kind == "handshake"
        ):  # as another client it has the same samples, under another name
            assert {**reply.plain, "contents": usual_reply.plain["contents"]} == usual_reply.plain
        else:
            assert reply.kind not in ("result", "agreed", "tested")
            assert "ward" not in str(reply.plain)


def test_site_compares_its_table_with_the_dictionary_in_its_own_log(tmp_path):
    """A dictionary of January, and a table of June."""
    lyon = TABLES["Lyon"].assign(age=TABLES["Lyon"]["age"] * 0.2)
    federation = Hospitals(tmp_path, {**TABLES, "Lyon": lyon})
    with warns("The tables may contain errors.*0.196 times"):
        federation.directory()

    assert "0.196" not in str([reply.plain for reply in federation.replies])


def lyon_lacks_a_column(lyon):
    return lyon.drop(columns="age")


def lyon_has_a_text_among_numbers(lyon):
    ages = lyon["age"].astype(str)
    ages.iloc[3] = "Mrs Smith"
    return lyon.assign(age=ages)


def lyon_has_another_class(lyon):
    deaths = lyon["died"].astype(object)
    deaths.iloc[3] = "Mrs Smith"
    return lyon.assign(died=deaths)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lyon_lacks_a_column, r"has no column 'age', which is named in the data dictionary"),
        (lyon_has_a_text_among_numbers, r"does not fit .* in 'age' \(.*numbers from"),
        (lyon_has_another_class, r"does not fit .* in 'died' \(one of 2 classes: no, yes\)"),
    ],
)
def test_site_names_a_column_that_does_not_fit_and_no_value(tmp_path, change, words, caplog):
    federation = Hospitals(tmp_path, {**TABLES, "Lyon": change(TABLES["Lyon"])})
    with refused(f"site 'Lyon' cannot take part: its table {words}"):
        federation.directory()

    assert "Smith" not in str([reply.plain for reply in federation.replies])
    has_cell = change is not lyon_lacks_a_column
    assert ("Mrs Smith" in caplog.text) == has_cell


class Arrays(L.LightningDataModule):
    def train_dataloader(self):
        samples = torch.utils.data.TensorDataset(torch.zeros(9, FEATURES), torch.arange(9) % 2)
        return torch.utils.data.DataLoader(samples, batch_size=3, shuffle=True)

    val_dataloader = train_dataloader


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    "make_server_data",
    [
        pytest.param(lambda: server_data(replace(MERGED, excluded={})), id="another dictionary"),
        pytest.param(lambda: server_data(DICTIONARY), id="an inferred dictionary"),
        pytest.param(
            lambda: FederatedDataModule(VAL, labels="died", dictionary=DICTIONARY, val=VAL),
            id="no OneClient",
        ),
        pytest.param(Arrays, id="arrays"),
    ],
)
def test_server_without_the_dictionary_of_the_sites_is_refused(tmp_path, make_server_data):
    message = f"The data dictionaries differ: the sites: {MERGED.hash}; the server: "
    with refused(message):
        Hospitals(tmp_path).fit(server_data=make_server_data())


def test_sites_of_which_some_have_no_table_are_named(tmp_path):
    federation = Hospitals(tmp_path)
    federation.transport.sites[OSAKA_ADDRESS] = Site(
        make_module, Arrays, make_shapfed_loop, tmp_path / "arrays"
    )

    message = f"The data dictionaries differ: Boston, Lyon: {MERGED.hash}; Osaka: none"
    with refused(message):
        federation.directory()


def test_num_classes_of_the_server_beside_a_dictionary_of_others_is_refused(tmp_path):
    federation = Hospitals(tmp_path)
    directory = Directory(
        federation.transport,
        NAMES,
        agreement(make_module(), make_shapfed_loop()),
        tmp_path / "book.json",
        wait=0.2,
        run_size={"rounds": 2, "classes": 7},
    )
    with refused(
        f"num_classes=7, but the site's data dictionary {MERGED.hash} has 2 classes in 'died'. Give"
    ):
        directory.gather()
