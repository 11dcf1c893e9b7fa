"""What a snapshot restores of a layer whose tables a client has replaced, not changed."""

import pytest
from torch import nn

from flsv.federation import FederatedLoop
from flsv.training.module_snapshot import ModuleSnapshot
from helpers.fits import fit
from helpers.models import Plain


@pytest.mark.parametrize(
    "table_name",
    [
        "_forward_hooks",
        "_backward_hooks",
        "_forward_pre_hooks",
        "_buffers",
        "_parameters",
        "_modules",
        "_non_persistent_buffers_set",
    ],
)
def test_restore_brings_back_a_layers_table_that_was_assigned_anew(table_name):
    layer = nn.Sequential(nn.BatchNorm1d(2))
    layer.register_parameter("scale", nn.Parameter(layer[0].weight.detach() * 2))
    layer.register_buffer("shift", layer[0].bias.detach() * 3, persistent=False)
    table = vars(layer)[table_name]
    content = table.copy()
    snapshot = ModuleSnapshot(layer)

    vars(layer)[table_name] = type(table)()
    snapshot.restore()

    assert vars(layer)[table_name] is table
    assert table == content


class ReplacesHooks(Plain):
    """Its clients tell how many hooks they find, and assign a table with one hook."""

    def __init__(self, tell_number_of_hooks):
        super().__init__()
        self.tell_number_of_hooks = tell_number_of_hooks

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 0:
            self.tell_number_of_hooks(len(self.net._forward_hooks))
            self.net._forward_hooks = {0: lambda layer, inputs, output: 2 * output}


@pytest.mark.slow
def test_hooks_that_a_client_assigns_are_not_the_next_clients(tmp_path):
    numbers_of_hooks = []
    module = ReplacesHooks(numbers_of_hooks.append)

    fit(FederatedLoop(seed=1), tmp_path, module, rounds=1)

    num_clients = 3
    assert numbers_of_hooks == [0] * num_clients
