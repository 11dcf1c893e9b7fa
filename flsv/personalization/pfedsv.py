"""pFedSV: each client downloads relevant models and averages them with weights from their Shapley values.

Wu et al., "Rethinking Personalized Client Collaboration in Federated Learning", IEEE Transactions on Mobile Computing,
2024, Algorithms 1 and 2 and equations 4, 6 and 7. Section V-A for the shared feature extractor. Departures:

- In Algorithm 2, line 4, the condition "p(l) <= j" has to be p(l) < p(j). Otherwise every marginal contribution is 0.
- The paper's R permutations of the set S of players (models) cost R(|S| - 1) + 2 evaluations. Here values of coalitions
  are stored, so that this budget suffices for more permutations (in antithetic pairs) and, for up to 7 players at R =
  3|S|, for all coalitions, which gives the exact value instead of an estimate.
- The weight of a client's own model is computed as in :func:`flsv.functional.personalized_weights`.
- With U(empty) = 0 every model with some accuracy has a positive value: a model that knows one of a client's two
  classes has a value of about a quarter even if it harms the mixture. With ``safeguard`` a client does not use such a
  mixture.
- For partial participation, which the paper does not treat, the server stores the last model that each client sent,
  which can be downloaded while the client is outside the cohort.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Generator, Tensor

from flsv.core import (
    Client,
    FederationState,
    Instruction,
    LocalData,
    Numbers,
    RespondingClient,
    Round,
    declare_response,
)
from flsv.core.parameter_space import ParameterSpace
from flsv.core.strategy import Contributions, FederationInfo
from flsv.functional import permutation_shapley
from flsv.functional.common_columns import keep_common
from flsv.functional.pfedsv import Explore, SelfWeight, personalized_weights, top_k_download
from flsv.personalization.base import OWN_MODEL, Personalized, Starts
from flsv.personalization.upload_keeper import UploadKeeper, check_validation, request_model_values
from flsv.utilities.declared import Count
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.host_copies import on_host
from flsv.utilities.seeding import generator_for

#: Number of permutations of the models, per model, by which their Shapley values are estimated.
PERMUTATIONS_PER_MODEL = 3
#: The largest amount by which a Shapley value of accuracies may leave [-1, 1].
ROUNDING = 1e-9
_MAX_CHUNK_SIZE = 2**26  # number of elements of the coalition models in memory at the same time


def _expected_values(
    client: RespondingClient, downloads: Sequence[Tensor], extractor: Tensor | None, **settings: Any
) -> Numbers:
    """Return the type, shape and range of Shapley values of accuracies, the client's own model first."""
    # The signature is that of `collaborate`, whose response is checked. Values are differences of two accuracies.
    num_models = 1 + len(downloads)  # the client's own model, then the downloads
    return Numbers(torch.float64, shape=(num_models,), lowest=-1 - ROUNDING, highest=1 + ROUNDING)


def collaborate(
    local: LocalData,
    downloads: Sequence[Tensor],
    extractor: Tensor | None,
    *,
    personal: Tensor | None,
    num_parameters: int,
    self_weight: SelfWeight,
    safeguard: bool,
    generator: Generator,
) -> Tensor:
    """Mix a client's own and the downloaded models by their Shapley values, at the client. Store the mixture there, and
    return the values. If only the elements in the mask ``personal`` are mixed, the others are those of ``extractor``.
    """
    assert local.model is not None
    # The mask `personal`, bool [P], has the Q elements that are mixed. None: all elements, and Q = P.
    base = local.model
    if personal is not None and extractor is not None:
        base = _with_extractor(base, extractor, personal)
    own_elements = select_personal(local.model, personal)
    models = torch.stack([own_elements, *downloads])  # [s, Q]
    game = _MixtureGame(local, models=models, base=base, personal=personal)
    values = game.values(generator)

    num_mixed = num_parameters  # without buffers
    if personal is not None:
        num_mixed = int(personal[:num_parameters].sum())
    differences = models - models[0]  # to the client's own model
    distances = differences[:, :num_mixed].norm(dim=1)
    weights = personalized_weights(values, distances.to(values), own=0, self_weight=self_weight)
    mixed_model = keep_common(weights.to(models) @ models, models)

    if safeguard:
        mixed_model = _own_unless_better(models[0], mixed_model, game.evaluate)
    local.state[OWN_MODEL] = insert_personal(mixed_model, base, personal)
    return values


def _with_extractor(model: Tensor, extractor: Tensor, personal: Tensor) -> Tensor:
    """Copy a model ``[P]``, and replace the elements outside the mask ``personal`` by those of ``extractor``."""
    new_model = model.clone()
    new_model[~personal.to(model.device)] = extractor
    return new_model


@dataclass
class _MixtureGame:
    """Game at a client whose players are s ``models [s, Q]``. A mixture of them replaces the elements of ``base [P]``
    in the mask ``personal``.
    """

    local: LocalData
    models: Tensor
    base: Tensor
    personal: Tensor | None

    @property
    def models_per_chunk(self) -> int:
        return max(_MAX_CHUNK_SIZE // len(self.base), 1)

    def evaluate(self, mixtures: Tensor) -> Tensor:
        """Compute the accuracies ``[c]`` of mixtures ``[c, Q]``."""
        accuracies = []
        for mixtures_of_chunk in mixtures.split(self.models_per_chunk):
            vectors = insert_personal(mixtures_of_chunk, self.base, self.personal)
            accuracies.append(self.local.evaluate(vectors).value("accuracy"))
        return torch.cat(accuracies)

    def utility(self, masks: Tensor) -> Tensor:
        """Compute the accuracies ``[c]`` of coalitions' mean models, 0 for the empty one. Masks are ``[c, s]``."""
        utilities = torch.zeros(len(masks), dtype=torch.float64)
        coalitions_with_members = masks.any(1).nonzero().flatten()
        for rows in coalitions_with_members.split(self.models_per_chunk):
            members = masks[rows]
            shares = members / members.sum(1, keepdim=True)
            mean_models = shares.to(self.models) @ self.models
            utilities[rows] = self.evaluate(mean_models)
        return utilities

    def values(self, generator: Generator) -> Tensor:
        num_models = len(self.models)
        num_permutations = PERMUTATIONS_PER_MODEL * num_models
        budget = num_permutations * (num_models - 1) + 2  # with the empty and the grand coalition
        estimate = permutation_shapley(self.utility, num_models, budget=budget, generator=generator)
        return estimate.values


def _own_unless_better(
    client_model: Tensor, mixed_model: Tensor, evaluate: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the mixture, or the client's own model if that is more accurate."""
    accuracies = evaluate(torch.stack([client_model, mixed_model]))
    accuracy, mixed_accuracy = accuracies.tolist()
    if mixed_accuracy >= accuracy:
        return mixed_model
    return client_model.clone()


declare_response(collaborate, _expected_values, numbers=lambda clients, classes: clients)


def select_personal(vector: Tensor, personal: Tensor | None) -> Tensor:
    """Return the elements ``[Q]`` of a vector ``[P]`` in the mask ``personal``, or all if it is None."""
    if personal is None:
        return vector
    return vector[personal.to(vector.device)]


def insert_personal(elements: Tensor, base: Tensor, personal: Tensor | None) -> Tensor:
    """Replace the elements of the vector ``base [P]`` in the mask ``personal [P]`` by ``elements [..., Q]``. Return
    vectors ``[..., P]``. Without a mask these are ``elements``.
    """
    if personal is None:
        return elements
    vectors = base.expand(*elements.shape[:-1], -1).clone()
    vectors[..., personal.to(base.device)] = elements
    return vectors


def layer_mask(space: ParameterSpace, layers: Sequence[str] | None = None) -> Tensor:
    """Return a mask, bool ``[P]``, of the elements of the named layers, by default the classifier head."""
    if layers is None:
        layers = [_head_of(space)]
    prefixes = [f"{layer}." for layer in layers]
    unknown_layers = []
    for layer, prefix in zip(layers, prefixes):
        is_known = any(name.startswith(prefix) for name in space.names)
        if not is_known:
            unknown_layers.append(layer)
    if unknown_layers or not layers:
        raise ConfigurationError(
            f"classifier={list(layers)}: the module has no layers {unknown_layers} with parameters. Name layers as in "
            "module.named_modules()."
        )

    masks_of_tensors = []
    for name, shape in zip(space.names, space.shapes):
        is_in_layers = name.startswith(tuple(prefixes))
        masks_of_tensors.append(torch.full((math.prod(shape),), is_in_layers))
    return torch.cat(masks_of_tensors)


def _head_of(space: ParameterSpace) -> str:
    """Return the name of the classifier, or raise ConfigurationError if there is none."""
    if space.head is not None:
        return space.head.name
    raise ConfigurationError(
        f"the module has no classifier head, since {space.why_no_head}. Name the layers: classifier=[...]."
    )


class PFedSV(UploadKeeper):
    """Personalizer in which clients mix their own and downloaded models. A client starts from sum_j w_j x_j.

    Downloads are chosen by the client's relevance scores (:func:`flsv.functional.top_k_download`). The utility U(X) of
    a set X of models is the accuracy of their plain mean on the client's own validation split, with U(empty) = 0. The
    Shapley values of this game determine the weights w_j (:func:`flsv.functional.personalized_weights`). As
    ``round.peer_values`` they are also the scores that :class:`flsv.metrics.DomainRelevance` averages. If no download
    helps, a client keeps the model that it has trained, without the privacy noise of the model that it sends.

    In its first round a client starts from the initial model of the run. The exception is ``mode="extractor"``, where
    only the classifier is personalized and all other layers are those of the new global model (with FedAvg as in the
    paper).

    Args:
        metric: name of a :class:`flsv.metrics.DomainRelevance` among the loop's metrics.
        k: number of downloads per round, as long as there are clients whose models the client has never evaluated.
            Later it downloads all models with a positive score.
        self_weight: distance assigned to the client's own model in equation 6: ``"mean"``, ``"min"``, ``"exclude"``, or
            a number, see :func:`flsv.functional.personalized_weights`.
        mode: ``"model"``: whole models are downloaded. ``"extractor"``: classifiers are downloaded, and all clients
            share one extractor.
        explore: ``"score"``: models that the client has never evaluated have the score 0. ``"unvisited"``: they come
            first.
        classifier: names of the classifier's layers for ``mode="extractor"``, as in ``module.named_modules()``. By
            default the head.
        safeguard: whether a client keeps its own model if the mixture is less accurate on its validation split. Not in
            the paper.

    Raises:
        ConfigurationError: at construction: an argument is out of range. Before the first round: a client has no
            validation samples, or the classifier does not exist.

    Example:
        >>> PFedSV(k=3)
        PFedSV(k=3)
    """

    gives_peer_values = True
    saved = ("_uploads", "_initial", "_cohort")
    sends = ("extractor",)

    metric_shape = ("n", "n")

    evaluates = True
    needs: Sequence[str] = ("clients",)

    rules: ClassVar = (
        (
            lambda a: a.classifier is None or a.mode == "extractor",
            'classifier has an effect with mode="extractor" only. Remove it, or set this mode.',
        ),
    )

    def __init__(
        self,
        metric: str = "relevance",
        k: Count = 5,
        self_weight: SelfWeight = "mean",
        mode: Literal["model", "extractor"] = "model",
        explore: Explore = "score",
        classifier: list[str] | None = None,
        safeguard: bool = False,
    ) -> None:
        super().__init__()
        self.metric: str = metric
        self.k = k
        self.self_weight = self_weight
        self.mode = mode
        self.explore = explore
        self.classifier = classifier
        self.safeguard = safeguard
        self._initial = torch.zeros(0)  # the run's initial model
        self._cohort: list[int] = []  # of the last round

    def set_up(self, federation: FederationInfo) -> None:
        check_validation(self, federation)
        self._num_clients = federation.num_clients
        # None: all elements of a model's vector are personal.
        self._is_personal: Tensor | None = None
        if self.mode == "extractor":
            self._is_personal = layer_mask(federation.space, self.classifier)

    def begin(self, federation: FederationInfo) -> None:
        self._initial = federation.global_vector.clone()
        self._uploads = {}
        self._cohort = []

    def start(self, client: int, state: FederationState) -> Tensor | None:
        if client in self._uploads:
            return None  # the client has stored its own mixture
        model = state.model()
        initial_elements = select_personal(self._initial.to(model), self._is_personal)
        return insert_personal(initial_elements, model, self._is_personal)

    def send(self, client: int, start: Tensor | None, state: FederationState) -> dict[str, Tensor]:
        if self._is_personal is None:
            return {}
        if start is not None:  # the client receives a whole model
            return {}
        # The client received the extractor after the previous round's aggregation.
        if client in self._cohort:
            return {}
        model = state.model()
        is_shared = ~self._is_personal.to(model.device)
        return {"extractor": model[is_shared]}

    def receive(self, local: LocalData, instruction: Instruction) -> Tensor:
        model = super().receive(local, instruction)
        if "extractor" not in instruction.tensors:
            return model

        # The elements that are not personal come from the global model.
        assert self._is_personal is not None
        return _with_extractor(model, instruction.tensors["extractor"], self._is_personal)

    def personalize(
        self, round: Round, contributions: Contributions, models: Starts
    ) -> Personalized:
        assert round.server_vector is not None
        select_elements = partial(select_personal, personal=self._is_personal)
        previous_uploads = self.store_uploads(round, select_elements)
        value_peers = partial(
            self._value_peers,
            round=round,
            relevance=self._relevance(contributions),
            extractor=self._extractor(round.server_vector),
        )
        self._cohort = on_host(round.client_ids)  # for `send` in the next round
        shape = (len(round), self._num_clients)
        no_values = torch.full(shape, float("nan"), device=round.client_vectors.device)
        peer_values = self.collect_values(
            no_values, round, request_values=value_peers, previous_uploads=previous_uploads
        )
        return Personalized(peer_values=peer_values)

    def _extractor(self, server_vector: Tensor) -> Tensor | None:
        """Return the elements of the new model that are not personal, None if all of them are."""
        if self._is_personal is None:
            return None
        return server_vector[~self._is_personal.to(server_vector.device)]

    def _value_peers(
        self, client: Client, round: Round, relevance: Tensor, extractor: Tensor | None
    ) -> tuple[list[int], Tensor | None]:
        # relevance [n, n] has a score for every pair of clients.
        generator = generator_for(round.seed, "pfedsv", round.round_index, client.id)
        has_upload = torch.zeros(self._num_clients, dtype=torch.bool)
        has_upload[list(self._uploads)] = True
        chosen_peers = top_k_download(
            relevance[client.id],
            has_upload,
            own=client.id,
            k=self.k,
            explore=self.explore,
            generator=generator,
        )

        peers = chosen_peers.tolist()
        # The models are moved to the device and dtype of the round's models.
        models = [self._uploads[peer].to(round.client_vectors) for peer in peers]
        compute = self.client_function(round.space.num_parameters)
        values = request_model_values(client, compute, models, extractor, generator=generator)
        return peers, values

    def client_function(self, num_parameters: int) -> Callable[..., Tensor]:
        """Return :func:`collaborate` with bound arguments that clients know from the configuration. These do not count
        as traffic.

        Args:
            num_parameters: number of elements at the beginning of a whole model that are parameters.
        """
        return partial(
            collaborate,
            personal=self._is_personal,
            num_parameters=num_parameters,
            self_weight=self.self_weight,
            safeguard=self.safeguard,
        )

    def _relevance(self, contributions: Contributions) -> Tensor:
        shape = (self._num_clients, self._num_clients)
        relevance = contributions.get(self.metric)
        if relevance is None:  # before the metric's first round
            relevance = torch.full(shape, float("nan"))
        if relevance.shape != shape:
            raise ConfigurationError(
                f"{self!r} needs a metric with a score for every pair of clients, {list(shape)}, but the values of "
                f"{self.metric!r} have shape {list(relevance.shape)}. Name a flsv.metrics.DomainRelevance."
            )
        return relevance.cpu()
