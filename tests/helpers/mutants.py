"""Mutants: parts with one fault in their formula. Each is a part's file in which one text is replaced."""

import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from flsv.testing.checks import Case, checks_of
from flsv.testing.metric import MetricCase
from flsv.testing.samplers import SamplerCase
from flsv.testing.strategies import AggregatorCase, ClientAlgorithmCase


@dataclass(frozen=True)
class Mutant:
    """One fault of one part.

    Args:
        name: the fault, in words.
        text: a text of the part's file, which is there once.
        replacement: the text that takes its place.
        caught_by: the check that finds it.
        module: the module that has the text. None: that of the part.
    """

    name: str
    text: str
    replacement: str
    caught_by: str
    module: str | None = None


@dataclass(frozen=True)
class MutatedPart:
    """A part, by its class, and its mutants."""

    kind: type[Case]
    module: str
    class_name: str
    mutants: tuple[Mutant, ...]

    def case(self, mutant: Mutant | None = None) -> Any:
        """The checks' case of a mutant, or of the part without a fault."""
        if mutant is None:
            part_module = import_module(self.module)
        else:
            part_module = self._module_with(mutant)
        part_class = getattr(part_module, self.class_name)
        return self.kind(part_class())

    def _module_with(self, mutant: Mutant) -> ModuleType:
        mutated = mutated_module(mutant.module or self.module, mutant)
        if mutant.module is None:
            return mutated
        # The part's module, with the mutated functions in place of those that it imports.
        part_module = mutated_module(self.module, None)
        for name, function in vars(mutated).items():
            if callable(function) and name in vars(part_module):
                setattr(part_module, name, function)
        return part_module


def mutated_module(name: str, mutant: Mutant | None) -> ModuleType:
    """A module of its own from another one's code, in which a mutant's text is replaced."""
    path = Path(str(import_module(name).__file__))
    code = path.read_text()
    if mutant is not None:
        assert code.count(mutant.text) == 1, (
            f"{path}: {mutant.text!r} {code.count(mutant.text)} times"
        )
        code = code.replace(mutant.text, mutant.replacement)

    module = ModuleType(f"mutant_of_{name.replace('.', '_')}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # where pickle looks for its classes
    exec(compile(code, str(path), "exec"), vars(module))
    return module


def failing_checks(case: Any) -> list[str]:
    """Names of the checks that a part does not pass."""
    names = []
    for check in checks_of(case):
        try:
            check()
        except AssertionError:
            names.append(check.check.__name__)
    return names


GRADIENT_AGREEMENT = MutatedPart(
    MetricCase,
    "flsv.metrics.gradient_agreement",
    "GradientAgreement",
    (
        Mutant(
            "wrong sign",
            "descents = -weights *",
            "descents = weights *",
            caught_by="wrong_labels_are_worth_less",
        ),
        Mutant(
            "a state that is no state",
            'self.add_state("samples", unknown_numbers, dist_reduce_fx=latest)',
            "self.samples = unknown_numbers",
            caught_by="resumes_in_a_fit",
        ),
        Mutant(
            "the sum of all rounds where one round's is meant",
            "mean_abs_descent.expand(k)",
            "(self.total_cohort_descent + mean_abs_descent).expand(k)",
            caught_by="parts_merge",
        ),
        Mutant(
            "normalized over the wrong axis",
            "totals = quantities.nansum(1, keepdim=True)",
            "totals = quantities.nansum(0, keepdim=True).expand(2, -1)",
            module="flsv.functional.gradient_agreement",
            caught_by="shares_sum_to_one",
        ),
        Mutant(
            "not normalized",
            "shares = quantities / _one_for_zero(totals)",
            "shares = quantities",
            module="flsv.functional.gradient_agreement",
            caught_by="values_are_in_bounds",
        ),
        Mutant(
            "an update's position in place of its client",
            "self.cosine = self.cosine.index_add(0, client_ids, cosines)",
            "self.cosine = self.cosine.index_add(0, client_ids, cosines.cumsum(0))",
            caught_by="equal_clients_are_equal",
        ),
    ),
)

CGSV = MutatedPart(
    MetricCase,
    "flsv.metrics.cosine_gradient_shapley",
    "CosineGradientShapley",
    (
        Mutant(
            "wrong sign",
            "previous_reputation, phi, alpha=self.alpha",
            "previous_reputation, -phi, alpha=self.alpha",
            caught_by="wrong_labels_are_worth_less",
        ),
        Mutant(
            "products in place of cosines",
            "return cosines(matrix.dot(weighted_sum), norms, norm_of_sum)",
            "return matrix.dot(weighted_sum)",
            caught_by="length_does_not_count",
        ),
        Mutant(
            "not divided by the update's length",
            "lengths = norms * norm\n",
            "lengths = norms * 0 + norm\n",
            module="flsv.functional.cgsv",
            caught_by="length_does_not_count",
        ),
        Mutant(
            "not normalized",
            "return self.reputation / self.reputation.nansum()",
            "return self.reputation.clone()",
            caught_by="shares_sum_to_one",
        ),
        Mutant(
            "normalized by the number of clients",
            "return self.reputation / self.reputation.nansum()",
            "return self.reputation / len(self.reputation)",
            caught_by="other_clients_do_not_count",
        ),
        Mutant(
            "the largest reputation in place of the smallest",
            "updated = updated.clamp_min(floor)",
            "updated = updated.clamp_max(floor)",
            module="flsv.functional.cgsv",
            caught_by="still_is_a_number",
        ),
        Mutant(
            "reputations of the wrong clients",
            "self.reputation[client_ids] = scaled_reputation",
            "self.reputation[: len(client_ids)] = scaled_reputation",
            caught_by="clients_permuted",
        ),
        Mutant(
            "a state that is no state",
            'self.add_state("reputation", no_values, dist_reduce_fx=None)',
            "self.reputation = no_values",
            caught_by="resumes_in_a_fit",
        ),
    ),
)

VALIDATION_GAIN = MutatedPart(
    MetricCase,
    "helpers.outsiders",
    "ValidationGain",
    (
        Mutant(
            "wrong sign",
            "fall = loss_before - loss_after",
            "fall = loss_after - loss_before",
            caught_by="wrong_labels_are_worth_less",
        ),
        Mutant(
            "the loss, no difference",
            "fall = loss_before - loss_after",
            "fall = -loss_after",
            caught_by="no_samples_are_worth_nothing",
        ),
        Mutant(
            "measured in the wrong place",
            "client_models = round.client_vectors",
            "client_models = round.client_vectors.mean(0).expand_as(round.client_vectors)",
            caught_by="wrong_labels_are_worth_less",
        ),
        Mutant(
            "divided by the clients",
            "return self.falls / self.counts",
            "return self.falls / self.counts / len(self.counts)",
            caught_by="other_clients_do_not_count",
        ),
        Mutant(
            "one round late",
            "self.falls = self.falls.index_add(0, client_ids, fall)",
            "self.falls = self.falls.index_add(0, client_ids, self.last_fall[client_ids].nan_to_num())",
            caught_by="wrong_labels_are_worth_less",
        ),
        Mutant(
            "never counts again",
            "self.counts = self.counts.index_add(0, client_ids, one_round)",
            "self.counts[client_ids] = 1",
            caught_by="forward_counts_once",
        ),
        Mutant(
            "the cohort's mean subtracted",
            "fall = loss_before - loss_after",
            "fall = loss_before - loss_after\n        fall = fall - fall.mean()",
            caught_by="no_samples_are_worth_nothing",
        ),
        Mutant(
            "the wrong column",
            "loss_after = losses[:, 1]",
            "loss_after = losses[:, -2]",
            caught_by="wrong_labels_are_worth_less",
        ),
    ),
)

CENTERED_CLIPPING = MutatedPart(
    AggregatorCase,
    "flsv.contrib.centered_clipping",
    "CenteredClipping",
    (
        Mutant(
            "clips the short ones",
            "(self.radius / lengths).clamp(max=1)",
            "(self.radius / lengths).clamp(min=1)",
            caught_by="updates_may_be_zero",
        ),
        Mutant(
            "never clips",
            "(self.radius / lengths).clamp(max=1)",
            "(self.radius / lengths).clamp(min=1, max=1)",
            caught_by="attack_moves_little",
        ),
        Mutant(
            "weights not of samples",
            "round.num_samples.double() / round.num_samples.sum()",
            "round.num_samples.double() / round.num_samples.max()",
            caught_by="common_model_is_kept",
        ),
        Mutant(
            "state not saved", 'saved = ("_center",)', "saved = ()", caught_by="resumes_in_a_fit"
        ),
        Mutant(
            "wrong sign of the step",
            "vector[:num_parameters] = model",
            "vector[:num_parameters] = 2 * round.global_vector[:num_parameters] - model",
            caught_by="common_model_is_kept",
        ),
    ),
)

FEDCM = MutatedPart(
    ClientAlgorithmCase,
    "flsv.contrib.fedcm",
    "FedCM",
    (
        Mutant(
            "wrong sign of the direction",
            "self._direction = -displacement",
            "self._direction = displacement",
            caught_by="learns",
        ),
        Mutant(
            "weights exchanged",
            "torch._foreach_mul_(gradients, self.alpha)",
            "torch._foreach_mul_(gradients, -self.alpha)",
            caught_by="learns",
        ),
        Mutant(
            "direction not divided by the rates",
            "-displacement / mean_lr_sum",
            "-displacement",
            caught_by="learns",
        ),
        Mutant(
            "state not saved", 'saved = ("_direction",)', "saved = ()", caught_by="resumes_in_a_fit"
        ),
    ),
)

LEAST_SERVED = MutatedPart(
    SamplerCase,
    "helpers.outsiders",
    "LeastServed",
    (
        Mutant(
            "state not saved", 'saved = ("_counts",)', "saved = ()", caught_by="resumes_in_a_fit"
        ),
        Mutant(
            "the most served",
            "cohort = keys.argsort()[: self.cohort_size]",
            "cohort = keys.argsort(descending=True)[: self.cohort_size]",
            caught_by="probabilities_are_true",
        ),
        Mutant(
            "never counts",
            "counts[round.client_ids] += 1",
            "counts[round.client_ids] += 0",
            caught_by="state_changes",
        ),
        Mutant(
            "not sorted",
            "return cohort.sort().values",
            "return cohort",
            caught_by="draws_a_cohort",
        ),
        Mutant(
            "global generator",
            "torch.rand(num_clients, generator=generator)",
            "torch.rand(num_clients)",
            caught_by="draws_a_cohort",
        ),
        Mutant(
            "one place too few",
            "num_places = self.cohort_size - are_certain.sum()",
            "num_places = self.cohort_size - 1 - are_certain.sum()",
            caught_by="probabilities_are_true",
        ),
        Mutant(
            "probabilities of the wrong clients",
            "are_certain = self._counts < highest_count",
            "are_certain = self._counts > highest_count",
            caught_by="probabilities_are_true",
        ),
    ),
)

MUTATED_PARTS = (GRADIENT_AGREEMENT, CGSV, VALIDATION_GAIN, CENTERED_CLIPPING, FEDCM, LEAST_SERVED)
