"""What is computed from a private client's samples reaches no part of the server but in the noised update."""

import torch

from flsv.core import Client, LocalData
from flsv.sites.federation import RemoteClient
from helpers import refused


def class_counts_of(local):
    return local.class_counts.clone()


def test_no_kind_of_client_overrides_the_door():
    assert "request" in vars(Client)
    assert "request" not in vars(RemoteClient)


def test_a_private_client_responds_only_to_functions_that_return_nothing_by_their_type():
    class_counts = torch.tensor([1, 2])
    data = LocalData("client 0", lambda split: [], class_counts, class_counts)
    client = Client(0, data, is_private=True)
    counts_at_client = []

    def look(local) -> None:
        counts_at_client.append(local.class_counts)
        return local.class_counts

    with refused("'class_counts_of'.*only its noised update"):
        client.request(class_counts_of)
    with refused("'<lambda>'"):
        client.request(lambda local: local.class_counts)

    assert client.request(look) is None
    assert len(counts_at_client) == 1
