"""Which test replays which part by hand, under what. One line for each; a part without a line fails here.

Resuming to the bit is a check of flsv.testing that every part passes (tests/testing/test_parts.py); the cases of
test_replay.py are compared with the plain loop after resuming, too.
"""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from pathlib import Path

import pytest
from replay.test_replay import CASES

from flsv import aggregation, attacks, privacy, uploads
from flsv.clients import algorithms

TESTS = Path(__file__).parents[1]


@dataclass(frozen=True)
class By:
    """A test, and under what it replays a federation: of ``function`` ones only what the part computes is."""

    test: str
    partial: bool = True
    unequal: bool = True
    attack: bool = False


def function(test: str) -> By:
    return By(test, partial=False, unequal=False)


HERE = By("replay/test_replay.py::test_as_by_hand", attack=True)
SERVER_OPTIMIZER = By("aggregation/test_server_optimizer.py::test_same_global_model_as_by_hand")
COMPRESSION = By("uploads/test_compression.py::test_same_global_model_as_by_hand")
FEDBUFF = By("aggregation/test_fedbuff.py::test_same_global_model_as_by_hand")
FEDDYN = By("clients/algorithms/test_variates.py::test_same_models_and_states_as_by_hand")

TABLE: dict[str, By] = {
    **dict.fromkeys(CASES, HERE),
    "FedAvgM": SERVER_OPTIMIZER,
    "FedAdam": SERVER_OPTIMIZER,
    "FedYogi": SERVER_OPTIMIZER,
    "ServerOptimizer": function("aggregation/test_server_optimizer.py::test_any_torch_optimizer_will_do"),
    "FedBuff": FEDBUFF,
    "StaleStarts": FEDBUFF,
    "FedNova": By("aggregation/test_fednova.py::test_same_models_as_by_hand"),
    "SCAFFOLD": By("clients/algorithms/test_variates.py::test_same_models_and_states_as_by_hand"),
    "FedDyn": FEDDYN,
    "FedDynServer": FEDDYN,
    "Ditto": By("clients/algorithms/test_ditto.py::test_same_models_as_by_hand"),
    "FedRep": By("clients/algorithms/test_fedrep.py::test_same_models_and_heads_as_by_hand"),
    "PerFedAvg": By("clients/algorithms/test_per_fedavg.py::test_first_order_as_by_hand"),
    "InRunValues": function("metrics/test_in_run_shapley.py::test_every_samples_value_by_hand"),
    "TopK": COMPRESSION,
    "Quantized": COMPRESSION,
    "SignFlip": HERE,
    "InnerProductManipulation": HERE,
    "GradientPoisoning": function(
        "attacks/test_attacks.py::test_gradient_poisoning_multiplies_every_entry_by_its_own_uniform_factor"
    ),
    "Alignment": function("attacks/test_alignment.py::test_half_way_between_the_own_direction_and_the_servers"),
    "HeadAlignment": function(
        "attacks/test_head_alignment.py::test_rows_are_the_servers_at_their_own_length_and_all_else_stays"
    ),
    "FalseReports": function("attacks/test_false_reports.py::test_the_loss_is_what_it_says_and_nothing_else_changes"),
}
#: What cannot be used without a subclass, and what is no part of a federation.
BASES = {
    "Aggregator", "Attack", "ClientAlgorithm", "ClientContext", "Collusion", "Compression", "Upload",
    "UploadContext",
}  # fmt: skip


def test_every_part_has_a_line() -> None:
    parts = {
        name
        for room in (aggregation, attacks, privacy, uploads, algorithms)
        for name in room.__all__
        if inspect.isclass(getattr(room, name))
    }
    assert parts - BASES == TABLE.keys()


@pytest.mark.parametrize("name", TABLE)
def test_its_test_is_there(name: str) -> None:
    by = TABLE[name]
    file, _, test = by.test.partition("::")
    source = (TESTS / file).read_text()
    assert test in {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}
    # A cohort that is drawn, and clients of several sizes.
    if by.partial and by is not HERE:
        assert "cohort(" in source or "sharing_by_hand(" in source
    if by.unequal and by is not HERE:
        assert any(each in source for each in ("unequal_data(", "toy_data(", "sharing_by_hand("))
