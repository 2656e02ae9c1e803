"""Count the floating-point operations of a step, and time the peak of a device.

Counted are products of matrices, convolutions and attention, each multiplication with its addition as two; what goes
element by element is left out, as usual where a share of a device's peak is given.
"""

from __future__ import annotations

import math
import time

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from trainkit.tensors import synchronize

aten = torch.ops.aten
Shape = torch.Size
"""Of a tensor, in whose place torch gives formulas its shape."""


def _convolution_backward(grad: Shape, x: Shape, weight: Shape, *rest: object, out_shape: object = None) -> int:
    """Each of the two gradients takes as many as the convolution itself; groups are in the shape of the weights."""
    _bias, _stride, _padding, _dilation, transposed, _output_padding, _groups, mask = rest
    where = x if transposed else grad
    forward = 2 * x[0] * math.prod(where[2:]) * math.prod(weight)
    if not isinstance(mask, list | tuple):
        raise TypeError("torch gives a mask of the gradients that are asked for")
    return forward * (bool(mask[0]) + bool(mask[1]))


def _attention(query: Shape, key: Shape, value: Shape, *_: object, **__: object) -> int:
    return int(sdpa_flop_count(query, key, value))


def _attention_backward(grad: Shape, query: Shape, key: Shape, value: Shape, *_: object, **__: object) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))


class Counter(FlopCounterMode):
    """Counts the operations of what runs beneath it; `total` so far. Not for compiled code, which it cannot see into.

    Formulas are those of torch but for two: there the gradient of the weights of a convolution in groups is counted as
    if it had none (a depthwise one as often as it has channels), and attention on a CPU not at all.
    """

    def __init__(self) -> None:
        own = {
            aten.convolution_backward: _convolution_backward,
            aten._scaled_dot_product_flash_attention_for_cpu: _attention,
            aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
        }
        super().__init__(display=False, custom_mapping=own)

    @property
    def total(self) -> int:
        """Operations so far."""
        return int(self.get_total_flops())


def peak(device: torch.device, precision: str, seconds: float = 0.3) -> tuple[float, str]:
    """Time square products of matrices; return operations a second at their fastest, and that in words.

    `precision` is that of the run (`no`, `bf16`, `fp16`). This is what a large product reaches with the threads and
    settings of this process, and not what the data sheet promises.
    """
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    side, best = 128, 0.0
    # Long enough that what goes beside the product does not count, short enough to fit between two neighbours.
    while best < 1e-3 and side < 8192:
        side *= 2
        a, b = (torch.full((side, side), 1e-3, dtype=dtype, device=device) for _ in range(2))
        best = min(_product(a, b) for _ in range(3))
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends:
        best = min(best, _product(a, b))
    kind = str(dtype).removeprefix("torch.")
    threads = torch.get_num_threads()
    by = f" on {threads} thread{'s' * (threads > 1)}" if device.type == "cpu" else ""
    return 2 * side**3 / best, f"a timed {kind} matrix product of {side} x {side}{by}"


def _product(a: torch.Tensor, b: torch.Tensor) -> float:
    began = time.perf_counter()
    torch.mm(a, b)
    synchronize(a.device)
    return time.perf_counter() - began
