"""`online_softmax` of embeddings and centres in bfloat16 as one Triton kernel. B batch, C classes.

A program has a block of samples and a part of the classes, and reads that part's centres once: cosines, running
maximum, sum and mean stay on the chip (Dao et al. 2022, arXiv 2205.14135, with centres for keys and values). The parts
are put together afterwards, without atomic additions: the same input gives the same bits on the same device.

Nothing here was run on a GPU yet. It was compiled for compute capabilities 8.0 and 9.0, and its arithmetic is tested in
Triton's interpreter; that is why the first batch of each shape is computed twice, and why it is not believed until it
agrees with the plain version.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_log = logging.getLogger(__name__)

TILES = ((64, 64, 8, 2), (64, 32, 8, 2), (32, 16, 4, 2))
"""Samples and classes of a tile, warps, stages, tried in this order. At D 512 they take 136 to 192, 100 to 128 and 49
KB of shared memory: the first is for an A100 or H100, the last for GPUs for desktops. Compiled for 9.0 the first takes
236 registers a thread and spills none."""
NEAR = 2.0**-7
"""How far from the plain version the kernel may be: the weights of the mean are rounded to 8 bits."""
_NONE = tl.constexpr(-1.0e30)


@triton.jit
def _kernel(
    x, centre, label, most, total, mean, factor, B, C, share, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, D)
    here = rows < B
    x_RD = tl.load(x + rows[:, None] * D + dims[None, :], mask=here[:, None], other=0.0)
    own_R = tl.load(label + rows, mask=here, other=-1)
    most_R = tl.full([ROWS], _NONE, tl.float32)
    sum_R = tl.zeros([ROWS], tl.float32)
    mean_RD = tl.zeros([ROWS, D], tl.float32)
    first = tl.program_id(1) * share
    last = tl.minimum(first + share, C)
    for start in range(first, last, COLUMNS):
        classes = start + tl.arange(0, COLUMNS)
        there = classes < last
        at = centre + classes[:, None].to(tl.int64) * D + dims[None, :]
        centre_cD = tl.load(at, mask=there[:, None], other=0.0)
        rival = there[None, :] & (classes[None, :] != own_R[:, None])
        logit_Rc = tl.where(rival, tl.dot(x_RD, tl.trans(centre_cD)) * factor, _NONE)
        more_R = tl.maximum(most_R, tl.max(logit_Rc, 1))
        fade_R = tl.exp2(most_R - more_R)
        # Where no class is a rival yet, the greatest is that of none, and exp2(0) would count it.
        p_Rc = tl.where(rival, tl.exp2(logit_Rc - more_R[:, None]), 0.0)
        sum_R = sum_R * fade_R + tl.sum(p_Rc, 1)
        mean_RD = mean_RD * fade_R[:, None] + tl.dot(p_Rc.to(centre_cD.dtype), centre_cD)
        most_R = more_R
    to = tl.program_id(1) * B + rows
    tl.store(most + to, most_R, mask=here)
    tl.store(total + to, sum_R, mask=here)
    tl.store(mean + to[:, None].to(tl.int64) * D + dims[None, :], mean_RD, mask=here[:, None])


def passed(
    x_BD: Tensor, centre_CD: Tensor, label_B: Tensor, scale: float, parts: int, tile: tuple[int, int, int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Greatest logit of another class (B,), `MarginTerms.others`, and `scale` x the mean centre (B, D) of it.

    A logit is `scale` x the product of `x` and centre, which are of one type and contiguous, with D a power of two of
    16 or more. The results are in float32.
    """
    (B, D), C = x_BD.shape, len(centre_CD)
    rows, columns, warps, stages = tile
    share = triton.cdiv(triton.cdiv(C, parts), columns) * columns
    parts = triton.cdiv(C, share)
    most_PB = torch.empty(parts, B, device=x_BD.device)
    sum_PB = torch.empty_like(most_PB)
    mean_PBD = torch.empty(parts, B, D, device=x_BD.device)
    launch: Any = _kernel[triton.cdiv(B, rows), parts]  # the last two of its arguments are in no signature
    launch(
        *(x_BD, centre_CD, label_B, most_PB, sum_PB, mean_PBD, scale / math.log(2), B, C, share),
        D=D,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=warps,
        num_stages=stages,
    )
    most_B = most_PB.amax(0)
    weight_PB = torch.exp2(most_PB - most_B)
    sum_B = (sum_PB * weight_PB).sum(0)
    mean_BD = torch.einsum("pb,pbd->bd", weight_PB, mean_PBD).mul_(scale / sum_B[:, None])
    return most_B * math.log(2), sum_B.log(), mean_BD


class Fused:
    """The kernel, as far as it is believed: for each device and shape from the first batch on that it agreed in."""

    def __init__(self) -> None:
        self.tiles: dict[tuple, tuple[int, int, int, int] | None] = {}

    def __call__(
        self,
        x_BD: Tensor,
        centre_CD: Tensor,
        label_B: Tensor,
        scale: float,
        plain: tuple[Tensor, Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """`passed`; None where `plain`, the same of the plain version, is needed first, or where it is not believed."""
        shape = (x_BD.device, len(x_BD), *centre_CD.shape)
        if shape not in self.tiles:
            if plain is None:
                return None
            self.tiles[shape] = self._proved(x_BD, centre_CD, label_B, scale, plain)
        tile = self.tiles[shape]
        return None if tile is None else passed(x_BD, centre_CD, label_B, scale, self._parts(x_BD, tile), tile)

    def _proved(
        self, x_BD: Tensor, centre_CD: Tensor, label_B: Tensor, scale: float, plain: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[int, int, int, int] | None:
        why = ""
        for tile in TILES:
            try:
                found = passed(x_BD, centre_CD, label_B, scale, self._parts(x_BD, tile), tile)
                off = distance(found, plain)
            except Exception as error:  # of the compiler, the driver or the launch: the plain version is always there
                why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
                continue
            if off <= NEAR:
                return tile
            why = f"it is off by {off:.2g}"
        _log.warning("the fused kernel for products in bfloat16 is left out, the plain version stays: %s", why)
        return None

    @staticmethod
    def _parts(x_BD: Tensor, tile: tuple[int, int, int, int]) -> int:
        """Parts of the classes: a program for each multiprocessor."""
        many = torch.cuda.get_device_properties(x_BD.device).multi_processor_count if x_BD.is_cuda else 2
        return max(1, many // triton.cdiv(len(x_BD), tile[0]))


def distance(found: tuple[Tensor, Tensor, Tensor], plain: tuple[Tensor, Tensor, Tensor]) -> float:
    """The greatest of: difference of the greatest logits and of ln of the sums, normwise difference of the means."""
    (most, others, mean), (most_B, others_B, mean_BD) = found, plain
    off = [(most - most_B).abs().max(), (most + others - most_B - others_B).abs().max()]
    off = torch.stack([*off, (mean - mean_BD).norm() / mean_BD.norm()]).max()
    return math.inf if off.isnan() else float(off)
