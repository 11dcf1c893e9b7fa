"""Names of clients: out of keys, folders and groups, merged ones, and those that are none."""

import torch

from flsv.data.groups import names_of_parts, plain_names


def test_a_number_is_no_name():
    assert plain_names([3, "0042", "-1.5"], "school") == ("school 3", "school 0042", "school -1.5")
    assert plain_names(["1", "2"], "site") == ("site 1", "site 2")
    assert plain_names([0, 1, 2], "group") == ("0", "1", "2")  # these are the clients' numbers
    assert plain_names([0, 1, 2], "school") == ("school 0", "school 1", "school 2")


def test_clients_of_several_groups():
    groups = torch.arange(8).repeat(2)
    parts = [torch.tensor([0, 8]), torch.tensor([1, 2]), torch.tensor([3, 4, 5]), torch.tensor([6, 7, 14, 9, 10])]
    names = ("a", "b", "c", "d", "e", "f", "g", "h")
    assert names_of_parts(parts, groups, names) == ("a", "b + c", "d + e + f", "b + c + g + 1 more")
    # A group that is called as another two are together.
    assert names_of_parts([torch.tensor([0]), torch.tensor([1, 2])], groups, ("b + c", "b", "c")) == (
        *("b + c", "b + c (1)"),
    )
