"""fastText: the mean of a text's word vectors, and a linear layer.

Joulin, Grave, Bojanowski, Mikolov, "Bag of Tricks for Efficient Text Classification", EACL 2017, section 2. There,
n-grams are hashed and words have a vocabulary; here words are hashed, and there are no n-grams. The softmax is plain.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from flsv.arguments import check_number
from flsv.errors import ConfigurationError
from flsv.models.shapes import check_num_classes


class FastText(nn.Module):
    """A classifier of texts given as hashed words (:class:`flsv.data.TextData`).

    ==========  ==============  ===================
    layer       output          parameters
    ==========  ==============  ===================
    embedding   words x width   buckets x width
    mean        width
    linear      M               width M + M
    ==========  ==============  ===================

    Word h has the vector number 1 + h mod (buckets - 1); words may share one. The mean is over a text's words; zeros
    are none, and a text without words is the zero vector.

    Args:
        num_classes: M, at least 2.
        input_shape: (words of a text,).
        buckets: how many vectors there are, at least 2.
        width: their length.

    Raises:
        ConfigurationError: fewer than two classes, or an option out of range.

    Example:
        >>> import torch
        >>> FastText(8, (4,), buckets=100, width=16)(torch.tensor([[4122618561, 2587067636, 0, 0]])).shape
        torch.Size([1, 8])
    """

    def __init__(
        self, num_classes: int = 8, input_shape: Sequence[int] = (200,), buckets: int = 4096, width: int = 32
    ) -> None:
        super().__init__()
        check_num_classes("FastText", num_classes)
        check_number("FastText", "buckets", buckets, least=2, whole=True)
        check_number("FastText", "width", width, least=1, whole=True)
        if len(input_shape) != 1:
            raise ConfigurationError(
                f"FastText: input_shape={tuple(input_shape)} is no text's shape. A text is its words' hashes, such as "
                "(200,)."
            )
        self.embedding = nn.Embedding(buckets, width, padding_idx=0)
        self.classifier = nn.Linear(width, num_classes)

    def forward(self, words: Tensor) -> Tensor:
        """Logits ``[B, M]`` of hashes ``[B, words]``."""
        words = words.long()
        there = words > 0
        rows = (words % (self.embedding.num_embeddings - 1) + 1) * there
        # The row of padding is zero, so that the sum is that of the words.
        return self.classifier(self.embedding(rows).sum(1) / there.sum(1, keepdim=True).clamp(min=1))
