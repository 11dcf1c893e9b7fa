"""Names of clients: out of keys, folders and groups, merged ones, and those that are none."""

import pytest
import torch

from flsv.data.groups import client_called, names_of_parts, plain_names
from flsv.errors import ConfigurationError


def test_names_as_they_are_and_on_one_line():
    assert plain_names(["St. Mary's", "a/b", "Größe 漢字 🐺", "two\nlines\t"], "site") == (
        *("St. Mary's", "a/b", "Größe 漢字 🐺", "two lines"),
    )


def test_a_number_is_no_name():
    assert plain_names([3, "0042", "-1.5"], "school") == ("school 3", "school 0042", "school -1.5")
    assert plain_names(["1", "2"], "site") == ("site 1", "site 2")
    assert plain_names([0, 1, 2], "group") == ("0", "1", "2")  # these are the clients' numbers
    assert plain_names([0, 1, 2], "school") == ("school 0", "school 1", "school 2")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["a", " "], "called 'a', ' ': names need a character"),
        (["a", "\u200b"], "names need a character"),
        ([1, "1"], "called 1, '1': .* and differ"),
        (["a b", "a  b"], "called 'a b', 'a  b': .* and differ"),
    ],
)
def test_refused(values, message):
    with pytest.raises(ConfigurationError, match=message):
        plain_names(values, "site")


def test_clients_of_several_groups():
    groups = torch.arange(8).repeat(2)
    parts = [torch.tensor([0, 8]), torch.tensor([1, 2]), torch.tensor([3, 4, 5]), torch.tensor([6, 7, 14, 9, 10])]
    names = ("a", "b", "c", "d", "e", "f", "g", "h")
    assert names_of_parts(parts, groups, names) == ("a", "b + c", "d + e + f", "b + c + g + 1 more")
    # A group that is called as another two are together.
    assert names_of_parts([torch.tensor([0]), torch.tensor([1, 2])], groups, ("b + c", "b", "c")) == (
        *("b + c", "b + c (1)"),
    )


def test_numbers_of_groups_that_are_not_the_clients():
    groups = torch.arange(3)
    numbers = ("0", "1", "2")
    assert names_of_parts([torch.tensor([i]) for i in range(3)], groups, numbers) == numbers
    assert names_of_parts([torch.tensor([1]), torch.tensor([0, 2])], groups, numbers) == ("group 1", "0 + 2")


def test_in_a_sentence():
    assert client_called(2) == "client 2"
    assert client_called(0, ("Lyon",), "Client") == "Client 0 ('Lyon')"
    assert client_called(5, ("Lyon",)) == "client 5"
