"""Sites without tables train together only if a number stands for the same class everywhere."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from flsv.data import FederatedDataModule, OneClient, Splits
from flsv.sites import Site
from helpers import refused
from helpers.data import HuggingFace, Items, set_up_data
from helpers.sites import NAMES, SitesInProcess, data_at_sites, make_mlp_module, make_shapfed_loop

WELL_FIRST = ("well", "ill")
ILL_FIRST = ("ill", "well")
WORDS = ["well", "ill"] * 10
TOKENS = [[1, 2]] * len(WORDS)
NO_VALIDATION = Splits(server_val=0)


def make_hugging_face(names):
    """Texts as tokens, of which every second one is ill."""
    columns = {
        "tokens": TOKENS,
        "label": [names.index(word) for word in WORDS],
    }
    feature = SimpleNamespace(names=names)
    return HuggingFace(columns, label=feature)


def make_folders(names):
    """Images of the classes ``names``, as in folders of these names."""
    image = torch.zeros(1, 8, 8)
    index_of_name = {}
    samples = []
    for index, name in enumerate(names):
        index_of_name[name] = index
        samples += [(image, index)] * 10
    return Items(samples, class_to_idx=index_of_name)


def make_tokens_data(names):
    return FederatedDataModule(
        make_hugging_face(names),
        labels="label",
        splits=NO_VALIDATION,
        partitioner=OneClient(),
    )


def make_folders_data(names):
    return FederatedDataModule(
        make_folders(names),
        splits=NO_VALIDATION,
        partitioner=OneClient(),
    )


class SitesWithNames(SitesInProcess):
    """Each site has the names of its classes in an order of its own."""

    def __init__(self, folder, orders, make_data=make_tokens_data):
        self.orders = orders
        self.make_data = make_data
        super().__init__(folder, make_shapfed_loop)

    def make_site(self, client):
        order = self.orders[client]
        make_data = partial(self.make_data, order)
        folder = self.tmp / NAMES[client]
        return Site(make_mlp_module, make_data, self.make_loop, folder)


@pytest.mark.parametrize(
    ("make_data", "orders"),
    [
        (make_tokens_data, (WELL_FIRST, ILL_FIRST, WELL_FIRST)),
        (make_folders_data, (WELL_FIRST, ILL_FIRST, WELL_FIRST)),
        (make_folders_data, (("cat", "dog"), ("dog",), ("cat", "dog"))),
    ],
    ids=["features", "folders", "a missing folder"],
)
def test_sites_whose_numbers_stand_for_other_classes_are_refused(tmp_path, make_data, orders):
    remote = SitesWithNames(tmp_path, orders, make_data)

    with refused("names of the classes, or their order, differ: Boston, Osaka: .*; Lyon: "):
        remote.directory()


def test_site_without_names_joins_sites_with_the_same_names(tmp_path):
    numbers = ("0", "1")
    orders = (WELL_FIRST, numbers, WELL_FIRST)
    remote = SitesWithNames(tmp_path, orders, make_folders_data)

    assert remote.directory().class_names_hash is not None


def test_server_whose_numbers_stand_for_other_classes_is_refused(tmp_path):
    remote = SitesWithNames(tmp_path, [WELL_FIRST] * 3)
    set_up = partial(data_at_sites, remote.directory(), num_classes=2)

    set_up(server_data=make_tokens_data(WELL_FIRST)).setup()
    with refused("differ: the sites: .*; the server: "):
        set_up(server_data=make_tokens_data(ILL_FIRST)).setup()


def test_words_as_labels_of_texts_are_refused_with_the_way_to_number_them():
    texts = HuggingFace({"tokens": TOKENS, "label": WORDS})

    with refused(r"Words get numbers by dataset.class_encode_column\('label'\)"):
        set_up_data(texts, labels="label", splits=NO_VALIDATION)
