"""The models that `thinwire compare` trains. Each takes inputs and targets and returns the mean loss."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn


class _Layer(nn.Module):
    """Attention, then two linear maps, each after a norm and beside the residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        widened: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + widened


class Gpt(nn.Module):
    """GPT-2 in small, on bytes: learned positions, norms first, the head tied to the embedding.

    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> model = Gpt(layers=1, width=32, heads=2)
    >>> sequences = torch.randint(256, (2, 17))
    >>> 5.0 < model(sequences[:, :-1], sequences[:, 1:]).item() < 6.0  # about ln 256
    True
    """

    def __init__(self, *, layers: int = 4, width: int = 256, heads: int = 4, context: int = 128) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.layers = nn.Sequential(*(_Layer(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(inputs) + self.position.weight[: inputs.shape[1]]
        logits = F.linear(self.norm(self.layers(x)), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Mlp(nn.Module):
    """Two wide hidden layers: many parameters, little work for each."""

    def __init__(self, inputs: int, *, width: int = 1024, classes: int = 10) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes)
        )

    def logits(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.layers(inputs.flatten(1))
        return found

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(inputs), targets)


class Cnn(nn.Module):
    """Three convolutions and a wide linear layer, for images of 28 or 32 pixels a side."""

    def __init__(self, channels: int, side: int, *, classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(channels, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        )
        self.head = nn.Sequential(nn.Linear(64 * (side // 8) ** 2, 512), nn.ReLU(), nn.Linear(512, classes))

    def logits(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.head(self.features(inputs).flatten(1))
        return found

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(inputs), targets)
