"""Three federations on scikit-learn's digits whose models have a closed form: distances to the members' class means."""

from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import Tensor

NUM_CLASSES = 10
#: Samples that clients have, and those by which models are scored.
NUM_TRAINING = 1000
NUM_SAMPLES = 1300
#: The number of clients of each federation.
FEDERATIONS = {"one_class": 4, "sizes": 5, "two_classes": 6}
#: The logit of a class that no member has.
UNKNOWN = -20.0


@dataclass(frozen=True, eq=False)
class ClosedFederation:
    """Sizes of clients, and the outputs of any coalition's model."""

    num_clients: int
    samples: Tensor
    labels: Tensor
    owners: Tensor

    @property
    def sizes(self) -> Tensor:
        """Numbers of samples, ``[n]``."""
        return torch.bincount(self.owners, minlength=self.num_clients)

    def outputs(self, mask: Tensor) -> Tensor:
        """The logits ``[V, M]`` of a coalition's model for the samples that nobody has."""
        is_used = mask[self.owners]
        samples = self.samples[:NUM_TRAINING][is_used]
        labels = self.labels[:NUM_TRAINING][is_used]
        validation = self.samples[NUM_TRAINING:]
        logits = torch.full((len(validation), NUM_CLASSES), UNKNOWN).double()
        for label in labels.unique():
            mean = samples[labels == label].mean(0)
            logits[:, label] = -(validation - mean).square().sum(1)
        return logits

    def score(self, outputs: Tensor) -> Tensor:
        """The negative mean losses ``[c]`` of outputs ``[c, V, M]``."""
        log_probabilities = outputs.double().log_softmax(-1)
        labels = self.labels[NUM_TRAINING:].expand(len(outputs), -1)
        of_labels = log_probabilities.gather(2, labels[..., None])
        return of_labels.mean((1, 2))


def make_federation(name: str) -> ClosedFederation:
    """Deal the digits to the clients."""
    num_clients = FEDERATIONS[name]
    samples, labels = load_digits(return_X_y=True)
    labels = torch.tensor(labels[:NUM_SAMPLES])
    numbers = torch.arange(NUM_TRAINING)
    training_labels = labels[:NUM_TRAINING]
    if name == "one_class":
        owners = training_labels % num_clients
    elif name == "sizes":
        bounds = torch.tensor([60, 160, 310, 580])
        owners = torch.bucketize(numbers, bounds, right=True)
    else:
        owners = (training_labels + 3 * (numbers % 2)) % num_clients
    return ClosedFederation(
        num_clients,
        samples=torch.tensor(samples[:NUM_SAMPLES]) / 16,
        labels=labels,
        owners=owners,
    )
