"""Options of another type, and a data set's columns of several names."""

import pandas as pd
import pytest
import torch
from torch.utils.data import TensorDataset

from flsv.data import FederatedDataModule, Files, Loader, Splits
from flsv.errors import ConfigurationError


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"splits": None}, r"FederatedDataModule\(splits=None\): expected flsv.data.Splits\(...\); leave it out"),
        ({"splits": {"seed": 1}}, "expected flsv.data.Splits"),
        ({"files": None}, "expected flsv.data.Files"),
        ({"loader": Splits()}, "expected flsv.data.Loader"),
        ({"columns": ["task"], "labels": "y"}, "expected flsv.data.Columns"),
        ({"batch_size": "16"}, r"FederatedDataModule\(batch_size='16'\): expected a whole number of at least 1"),
    ],
)
def test_a_group_of_options_that_is_none(given, message):
    with pytest.raises(ConfigurationError, match=message):
        FederatedDataModule("digits", **given)


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (Splits, {"server_val": "0.1"}),
        (Splits, {"client_val": None}),
        (Splits, {"max_samples": 2.5}),
        (Splits, {"drop_flagged": "yes"}),
        (Splits, {"seed": "x"}),
        (Files, {"download": "no"}),
        (Loader, {"eval_batch_size": "8"}),
        (Loader, {"num_workers": -1}),
        (Loader, {"drop_last": "no"}),
        (Loader, {"preload": None}),
        (Loader, {"on_device": 1}),
    ],
)
def test_an_option_of_another_type(kind, given):
    (name,) = given
    with pytest.raises(ConfigurationError, match=rf"{kind.__name__}\({name}=.*\): expected "):
        kind(**given)


def test_groups_by_name_where_the_data_have_others_and_validation_data_are_given():
    data = TensorDataset(torch.zeros(40, 2), torch.arange(40) % 2)
    data.groups, data.ward = [0, 1] * 20, ["a"] * 10 + ["b"] * 30
    for val in (None, (torch.zeros(4, 2), [0, 1, 0, 1])):
        dealt = FederatedDataModule(data, groups="ward", val=val, splits=Splits(server_val=0.0))
        dealt.setup("fit")
        assert dealt.client_names == ("a", "b")
        assert dealt.num_samples.tolist() == [10, 30]


def test_the_callers_table_stays_as_it_is():
    frame = pd.DataFrame(
        {
            " age ": [30.0, None, 50.0] * 10,
            "sex": pd.Categorical(["f", "m", None] * 10),
            "smokes": [True, False, None] * 10,
            "ward": ["a"] * 10 + ["b"] * 20,
            "ill": ["no", "yes", None] * 10,
        },
        index=range(100, 130),
    )
    before = frame.copy(deep=True)
    for given in ({"source": frame}, {"clients": {"a": frame, "b": frame.iloc[:12]}}):
        groups = "ward" if "source" in given else None
        data = FederatedDataModule(**given, labels="ill", groups=groups)
        data.setup("fit")
        next(iter(data.client_loader(0)))[0].fill_(7.0)
        pd.testing.assert_frame_equal(frame, before)
