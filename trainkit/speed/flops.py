"""Count the floating-point operations of a step, and find the peak of a device.

Counted are products of matrices, convolutions and attention, each multiplication with its addition as two; what goes
element by element is left out, as usual where a share of a device's peak is given.
"""

from __future__ import annotations

import math
import re
import time

import torch
from torch.utils.flop_counter import FlopCounterMode

from trainkit.config.schema import Recipe
from trainkit.distributed.runtime import Runtime
from trainkit.tensors import synchronize

aten = torch.ops.aten

GPUS: tuple[tuple[str, float, float | None, float], ...] = (
    # Pattern in the name, then TFLOP/s without sparsity: fp16 and bf16 with sums in float32, TF32, float32.
    (r"B200\b", 2250, 1100, 75),
    (r"H200 NVL", 835.5, 417.5, 60),
    (r"H200\b", 989.5, 494.5, 67),
    (r"H100 NVL", 835.5, 417.5, 60),
    (r"H100 PCIe", 756, 378, 51),
    (r"H100\b", 989.5, 494.5, 67),
    (r"A100\b", 312, 156, 19.5),
    (r"A40\b", 149.7, 74.8, 37.4),
    (r"A30\b", 165, 82, 10.3),
    (r"A10\b", 125, 62.5, 31.2),
    (r"L40S\b", 362, 183, 91.6),
    (r"L40\b", 181, 90.5, 90.5),
    (r"L4\b", 121, 60, 30.3),
    (r"V100-SXM", 125, None, 15.7),
    (r"V100-PCIE", 112, None, 14),
    (r"\bT4\b", 65, None, 8.1),
    (r"RTX 6000 Ada", 364.2, 182.1, 91.1),
    (r"RTX A6000", 154.8, 77.4, 38.7),
    (r"RTX 3090(?! Ti)", 71, 35.6, 35.6),
    (r"RTX 4090(?! D)", 165.2, 82.6, 82.6),
    (r"RTX 5090(?! D)", 209.5, 104.8, 104.8),
)
"""Peaks that NVIDIA gives: data sheets of the boards, white papers of GA102, AD102 and GB202 for the RTX ones. Where a
sheet gives the rate with sparsity alone, half of it."""


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
    return _products(query, key, value, 1, 1)


def _attention_backward(_grad: Shape, query: Shape, key: Shape, value: Shape, *_: object, **__: object) -> int:
    # The scores again, since they are not kept, and the gradients of scores, queries and keys; of weights and values.
    return _products(query, key, value, 3, 2)


def _products(query: Shape, key: Shape, value: Shape, by_key: int, by_value: int) -> int:
    return 2 * math.prod(query[:-1]) * key[-2] * (by_key * query[-1] + by_value * value[-1])


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


def of_gpu(name: str, precision: str, tf32: bool) -> tuple[float, str] | None:
    """Look up the peak of a GPU by its name, operations a second, and its source; None where it is not in the table.

    `precision` is that of the run (`no`, `bf16`, `fp16`); without one, `tf32` says whether products may use TF32. A
    part of a GPU (MIG) is in no table.
    """
    if "MIG" in name or precision == "fp8":
        return None
    for pattern, half, tensor, single in GPUS:
        if re.search(pattern, name):
            if precision == "bf16" and tensor is None:
                return None  # before Ampere bf16 is emulated
            fast = tensor if tf32 and tensor is not None else single
            word = precision if precision != "no" else "TF32" if fast != single else "float32"
            return 1e12 * (fast if precision == "no" else half), f"the data sheet peak for {word} without sparsity"
    return None


def peak(recipe: Recipe, runtime: Runtime, seconds: float = 0.3) -> tuple[float, str]:
    """Return the operations a second that this process's device can do at most, and the source of the figure.

    A GPU of the table by its data sheet; any other device by a product of matrices that is timed here for `seconds`, in
    the precision of the run and with its threads: what a large product reaches, and not what the silicon could.
    """
    if runtime.device.type == "cuda":
        name = torch.cuda.get_device_name(runtime.device)
        if (known := of_gpu(name, runtime.precision, recipe.device.tf32)) is not None:
            return known
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return timed(runtime.device, half.get(runtime.precision, torch.float32), seconds)


def timed(device: torch.device, dtype: torch.dtype, seconds: float = 0.3) -> tuple[float, str]:
    """Time square products of matrices; return operations a second at their fastest, and that in words."""
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
