"""Predictions at single points, where a coarse map is least sure: point refinement of segmentations (PointRend).

Kirillov et al., CVPR 2020, arXiv 1912.08193, as published for semantic segmentation. Training uses the points with the
smallest margin between the two best classes among three times as many random ones, and a quarter of uniform points. At
inference the coarse map is doubled repeatedly, and each time the least certain points are predicted again. Points may
also be drawn near the boundaries of the labels, by distance maps.

Points are (x, y) in [0, 1]: pixel i of w has its centre at (i + 1/2) / w, whatever the size of the map. All shapes are
static, so the host never waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainkit.models.segmentation_specs import PointSpec
from trainkit.tensors import at_least_float32, wide

COARSE_STRIDE = 4
"""Logits finer than this are pooled to it, so that there is something to refine."""
_UNIT = 1 << 16
"""Weights of pixels are integers in units of 1 over this: integer sums do not depend on the order of addition."""


class PointHead(nn.Module):
    """A perceptron that is applied to each point: fine features and coarse logits in, logits out."""

    def __init__(self, spec: PointSpec, fine_channels: int, classes: int):
        super().__init__()
        widths = [fine_channels + classes] + [spec.channels] * (spec.layers - 1)
        layers = [nn.Conv1d(width, spec.channels, 1) for width in widths]
        self.layers = nn.ModuleList(layers)
        self.predict = nn.Conv1d(spec.channels, classes, 1)
        for layer in layers:
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        nn.init.normal_(self.predict.weight, std=0.001)
        for layer in (*layers, self.predict):
            nn.init.constant_(layer.get_parameter("bias"), 0)

    def forward(self, fine: Tensor, coarse: Tensor) -> Tensor:
        """Features (B, F, N) and coarse logits (B, C, N) at points to their logits (B, C, N)."""
        x = torch.cat([fine, coarse], 1)
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.predict(x)


def sample(maps: Tensor, points: Tensor) -> Tensor:
    """Bilinear values (B, C, N), float32 at least, of maps (B, C, H, W) at points (B, N, 2).

    Beyond the centres of the outermost pixels their values are extended; the published code fades to zero there, where
    pixels of finer maps lie. Not `grid_sample`, which has no deterministic gradient on a GPU.
    """
    height, width = maps.shape[2:]
    # Multiply by plain numbers: in a tensor, dynamic sides of an export would become constants of its example.
    x = (points[:, :, 0] * width - 0.5).clamp(0, width - 1)
    y = (points[:, :, 1] * height - 0.5).clamp(0, height - 1)
    left, upper = x.floor(), y.floor()
    across, down = x - left, y - upper
    left, upper = left.long(), upper.long()
    right, lower = (left + 1).clamp_max(width - 1), (upper + 1).clamp_max(height - 1)
    # All four corners in one gather: each separate gather would have a gradient of the size of the maps.
    index = torch.stack([row * width + column for row in (upper, lower) for column in (left, right)], 1)
    share = torch.stack([a * b for a in (1 - down, down) for b in (1 - across, across)], 1)
    kind = torch.promote_types(maps.dtype, torch.float32)
    corners = maps.flatten(2).gather(2, index.flatten(1)[:, None].expand(-1, maps.shape[1], -1))
    return (corners.unflatten(2, (4, -1)).to(kind) * share[:, None].to(kind)).sum(2)


def uncertainty(logits: Tensor) -> Tensor:
    """Second-best minus best of logits (B, C, ...) over the classes: (B, ...), at most 0; 0 for a tie."""
    best, which = logits.max(1, keepdim=True)
    second = logits.scatter(1, which, float("-inf")).amax(1, keepdim=True)
    return (second - best)[:, 0]


def points_near_boundaries(distance: Tensor, count: int, sigma: float) -> Tensor:
    """Points (B, count, 2) drawn independently, in proportion to exp(-d^2 / (2 sigma^2)) of their pixel's distance d.

    `distance` is (B, h, w) in pixels. The place of a point within its pixel is uniform. Each pixel has a weight of at
    least 1 in 65,537 of the largest possible one, so a map without a boundary gives uniform points.
    """
    height, width = distance.shape[1:]
    weight = torch.exp(-distance.flatten(1).float().square() / (2 * sigma**2))
    until = (weight * _UNIT).round().long().add(1).cumsum(1)
    total = until[:, -1:]
    chance = torch.rand(len(distance), count, device=distance.device, dtype=wide(distance.device))
    # The first pixel whose sum is above the number drawn; float64 holds these integers exactly up to 2^53.
    pixel = torch.searchsorted(until, (chance * total).long().clamp_max(total - 1), right=True)
    corner = torch.stack([pixel % width, pixel // width], 2)
    within = torch.rand(len(distance), count, 2, device=distance.device)
    # Created on the device: copying a list there would block.
    sides = torch.stack([within.new_full((), width), within.new_full((), height)])
    return (corner + within) / sides


@torch.no_grad()
def choose_points(logits: Tensor, spec: PointSpec, distance: Tensor | None = None) -> Tensor:
    """Points (B, spec.points, 2) for training, by coarse logits (B, C, h, w) and optional distances (B, H, W).

    First those near boundaries, then the least certain, then uniform ones; from torch's global generator.
    """
    near, unsure, anywhere = spec.parts
    count, device, chosen = len(logits), logits.device, []
    if near:
        if distance is None:
            raise ValueError("points near boundaries need distances")
        chosen.append(points_near_boundaries(distance, near, spec.sigma))
    if unsure:
        candidates = torch.rand(count, max(unsure, int(spec.points * spec.oversample)), 2, device=device)
        best = uncertainty(sample(logits, candidates)).topk(unsure, 1).indices
        chosen.append(candidates.gather(1, best[:, :, None].expand(-1, -1, 2)))
    chosen.append(torch.rand(count, anywhere, 2, device=device))
    return torch.cat(chosen, 1)


def pooled(logits: Tensor, stride: int) -> Tensor:
    """Logits (B, C, h, w) at `stride`, averaged over squares to stride 4 where they are finer."""
    return logits if stride >= COARSE_STRIDE else F.avg_pool2d(logits, COARSE_STRIDE // stride)


def refine(head: nn.Module, coarse: Tensor, fine: Tensor, size: tuple[int, int], spec: PointSpec) -> Tensor:
    """Coarse logits (B, C, h, w) to (B, C, *size), doubled repeatedly; the least certain points are predicted again.

    `fine` (B, F, h', w') and `coarse` are the inputs of the head at each point, in all steps. Logits are float32 or
    wider: in half precision every doubling would round them, and the margins between classes, again.
    """
    logits, done = at_least_float32(coarse), 0
    while (logits.shape[2] * 2 <= size[0] and logits.shape[3] * 2 <= size[1]) and done != spec.steps:
        logits = F.interpolate(logits, scale_factor=2.0, mode="bilinear", align_corners=False)
        logits, done = _predict_anew(head, logits, coarse, fine, spec.subdivide), done + 1
    if tuple(logits.shape[2:]) != tuple(size):
        logits = F.interpolate(logits, size=size, mode="bilinear", align_corners=False)
    return logits


def _predict_anew(head: nn.Module, logits: Tensor, coarse: Tensor, fine: Tensor, count: int) -> Tensor:
    height, width = logits.shape[2:]
    chosen = uncertainty(logits).flatten(1).topk(min(count, height * width), 1).indices
    points = pixel_centres(chosen, height, width)
    found = head(sample(fine, points), sample(coarse, points)).to(logits.dtype)
    index = chosen[:, None].expand(-1, logits.shape[1], -1)
    return logits.flatten(2).scatter(2, index, found).unflatten(2, (height, width))


def pixel_centres(index: Tensor, height: int, width: int) -> Tensor:
    """Centres (B, N, 2) of the pixels with these numbers (B, N), counted row by row."""
    x, y = (index % width).float() + 0.5, (index // width).float() + 0.5
    return torch.stack([x / width, y / height], 2)
