"""A model of the shapes of ResNet-50 (He et al., arXiv 1512.03385; stride in the 3x3 convolution):
25.6 million parameters in 161 tensors. Knows nothing of workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

CLASSES = 1000
EXPANSION = 4
"""A block's last convolution has so many times the channels of its others."""
STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
"""Channels, blocks, and the stride of the first of them."""


def normed(n_in: int, n_out: int, size: int, stride: int = 1) -> list[Any]:
    """Return a convolution and its batch normalisation."""
    pad = size // 2
    convolution = nn.Conv2d(n_in, n_out, size, stride=stride, padding=pad, bias=False)
    # No running statistics: buffers that travel now and then are no part of a backward pass.
    return [convolution, nn.BatchNorm2d(n_out, track_running_stats=False)]


class Bottleneck(nn.Module):  # type: ignore[misc]
    """Three convolutions around which the input is added."""

    def __init__(self, n_in: int, width: int, stride: int) -> None:
        super().__init__()
        n_out = EXPANSION * width
        self.main = nn.Sequential(
            *normed(n_in, width, 1),
            nn.ReLU(inplace=True),
            *normed(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *normed(width, n_out, 1),
        )
        alike = n_in == n_out and stride == 1
        self.short = nn.Identity() if alike else nn.Sequential(*normed(n_in, n_out, 1, stride))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Any) -> Any:
        """Compute the block; `x`: (batch, channels, height, width)."""
        return self.relu(self.main(x) + self.short(x))


def resnet(stages: Sequence[tuple[int, int, int]] = STAGES, classes: int = CLASSES) -> Any:
    """Return the model: images (batch, 3, side, side), float32, to logits (batch, classes)."""
    first = stages[0][0]
    layers = [*normed(3, first, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)]
    n_in = first
    for width, blocks, stride in stages:
        for at in range(blocks):
            layers.append(Bottleneck(n_in, width, stride if at == 0 else 1))
            n_in = EXPANSION * width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(n_in, classes)]
    return nn.Sequential(*layers)
