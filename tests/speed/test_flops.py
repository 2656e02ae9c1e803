"""Operations are counted as a loop over them would, and peaks of GPUs are those of their data sheets."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trainkit.speed import flops


def counted(act) -> int:
    with flops.Counter() as counter:
        act()
    return counter.total


def products(shape_in, weight, stride, padding, groups):
    """Multiplications of a convolution in two dimensions, padding included, counted one by one."""
    out = [(side + 2 * padding - k) // stride + 1 for side, k in zip(shape_in[2:], weight.shape[2:], strict=True)]
    many = 0
    for _, c_out in itertools.product(range(shape_in[0]), range(weight.shape[0])):
        first = c_out // (weight.shape[0] // groups) * weight.shape[1]
        assert first + weight.shape[1] <= shape_in[1]
        many += out[0] * out[1] * weight.shape[1] * weight.shape[2] * weight.shape[3]
    return many


@settings(deadline=None, max_examples=25)
@given(st.sampled_from([1, 2, 4]), st.integers(1, 2), st.integers(1, 3), st.integers(0, 1), st.integers(1, 3))
def test_a_convolution_and_its_gradients_take_two_operations_for_each_product(groups, batch, kernel, padding, wide):
    x = torch.randn(batch, 4, 6, 7, requires_grad=True)
    conv = nn.Conv2d(4, 4 * wide, kernel, padding=padding, groups=groups)
    once = 2 * products(x.shape, conv.weight, 1, padding, groups)
    assert counted(lambda: conv(x)) == once
    # One gradient for the input, one for the weights.
    assert counted(lambda: conv(x).sum().backward()) == 3 * once
    assert counted(lambda: conv(x.detach()).sum().backward()) == 2 * once


def test_a_transposed_convolution_takes_as_many_as_the_one_it_turns_round():
    x = torch.randn(2, 6, 5, 5, requires_grad=True)
    conv = nn.ConvTranspose2d(6, 4, 3, stride=2, groups=2)
    once = 2 * 2 * 25 * 6 * (4 // 2) * 9
    assert counted(lambda: conv(x)) == once
    assert counted(lambda: conv(x).sum().backward()) == 3 * once


def test_products_of_matrices_also_where_nothing_is_kept_for_gradients():
    linear, x = nn.Linear(5, 7), torch.randn(3, 5)

    def silent():
        with torch.inference_mode():
            linear(x)

    assert counted(lambda: linear(x)) == counted(silent) == 2 * 3 * 5 * 7
    assert counted(lambda: torch.bmm(torch.randn(4, 3, 5), torch.randn(4, 5, 2))) == 2 * 4 * 3 * 5 * 2
    assert counted(lambda: torch.randn(9, 9).relu().sum()) == 0


def test_attention_on_a_cpu_is_counted():
    query = torch.randn(2, 3, 10, 8, requires_grad=True)
    other = torch.randn(2, 3, 12, 8, requires_grad=True)
    once = 2 * (2 * 3 * 10 * 12 * 8)  # scores, and their product with the values
    assert counted(lambda: F.scaled_dot_product_attention(query, other, other)) == 2 * once
    back = counted(lambda: F.scaled_dot_product_attention(query, other, other).sum().backward()) - 2 * once
    # Scores once more, then gradients of values, weights, queries and keys.
    assert back == 5 * once


def test_a_training_of_a_depthwise_network_is_counted_as_by_hand():
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Flatten(), nn.Linear(8 * 16, 5))
    x = torch.randn(4, 3, 4, 4)
    by_hand = 4 * 2 * (2 * 16 * 3 * 8 + 3 * 16 * 8 * 9 + 3 * 8 * 16 * 5)  # the images themselves need no gradient
    assert counted(lambda: net(x).sum().backward()) == by_hand


def test_a_processor_is_measured_by_a_product(monkeypatch):
    monkeypatch.setattr(flops, "_product", lambda a, b: 2 * len(a) ** 3 / 50e9)  # 50 GFLOP/s
    most, source = flops.peak(torch.device("cpu"), "no", seconds=0.01)
    assert most == pytest.approx(50e9)
    assert "timed float32 matrix product of 512 x 512 on" in source


def test_the_product_that_is_timed_is_no_faster_than_numpy_says():
    most, _ = flops.peak(torch.device("cpu"), "no", seconds=0.05)
    a = np.full((256, 256), 1e-3, np.float32)
    assert np.allclose((a @ a)[0, 0], 256e-6)
    assert 1e8 < most < 1e13
