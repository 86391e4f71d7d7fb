"""The head that LAION's aesthetic predictor and ImageReward publish."""

from torch import Tensor, nn


class ScoreHead(nn.Module):
    """Five linear layers without activations, from features [B, D] to scores [B].

    The numbers of the layers are those of the published files, where dropout took the others.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = (width, 1024, 128, 64, 16, 1)
        self.layers = nn.ModuleDict(
            {str(number): nn.Linear(sizes[i], sizes[i + 1]) for i, number in enumerate((0, 2, 4, 6, 7))}
        )

    def forward(self, features: Tensor) -> Tensor:
        """Score features [B, D]; returns [B]."""
        for layer in self.layers.values():
            features = layer(features)
        return features[:, 0]
