"""The kernel for products in bfloat16: its arithmetic in an interpreter, what it compiles to, when it is believed."""

from __future__ import annotations

import copy
import logging
import math
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from runs import ROOT

from trainkit.losses import online_softmax
from trainkit.losses.distillation import Centres
from trainkit.losses.margin import ArcFace, margin_loss
from trainkit.losses.online_softmax import margin_terms

B, C, D = 33, 129, 64


def drawn(size: int = B, classes: int = C, dim: int = D):
    """Embeddings and centres of length 1, and labels that include both ends."""
    draw = torch.Generator().manual_seed(3)
    x, centre = (F.normalize(torch.randn(n, dim, generator=draw)) for n in (size, classes))
    label = torch.randint(classes, (size,), generator=draw)
    label[:2] = torch.tensor([0, classes - 1])
    return x, centre, label


def written_out(x, centre, label, scale):
    """What the pass computes, from the matrix, in float64."""
    logit = scale * x.double() @ centre.double().T
    logit[torch.arange(len(x)), label] = -math.inf
    most = logit.amax(1)
    return most, (logit.logsumexp(1) - most), scale * logit.softmax(1) @ centre.double()


INTERPRETED = """
import torch
from tests.losses.test_fused_softmax_kernel import drawn, written_out
from trainkit.losses.fused_softmax_kernel import distance, passed

for dtype, parts, scale, near in (  # 129 classes in tiles of 16: of 100 parts the last is one class, a sample's own
    (torch.float32, 1, 64.0, 1e-5),
    (torch.float32, 3, 500.0, 1e-4),
    (torch.float32, 100, 64.0, 1e-5),
    (torch.float16, 3, 64.0, 1e-4),
):
    x, centre, label = drawn()
    x, centre = x.to(dtype), centre.to(dtype)
    found = passed(x, centre, label, scale, parts, (16, 16, 4, 1))
    assert all(t.dtype == torch.float32 for t in found)
    off = distance(tuple(t.double() for t in found), written_out(x, centre, label, scale))
    assert off < near, (dtype, parts, scale, off)
"""


def test_the_kernel_computes_what_the_matrix_gives():
    # In a process of its own: whether kernels are interpreted is settled when they are read. Not in bfloat16, which
    # this interpreter gets wrong.
    major, minor = map(int, pytest.importorskip("triton").__version__.split(".")[:2])
    if (major, minor) < (3, 8):
        pytest.skip("the interpreter of this Triton does not go with numpy 2.4")
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernel_compiles_and_its_tiles_fit(capability):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from trainkit.losses import fused_softmax_kernel

    memory = {80: 163 * 1024, 90: 227 * 1024}[capability]  # of a block, of the A100 and H100
    most = (memory, memory, 99 * 1024)  # the last is for desktops
    pointers = {"x": "*bf16", "centre": "*bf16", "label": "*i64", "most": "*fp32", "total": "*fp32", "mean": "*fp32"}
    numbers = {"factor": "fp32", "B": "i32", "C": "i32", "share": "i32"}
    whole = {(place,): [["tt.divisibility", 16]] for place in (0, 1, 2, 3, 4, 5, 7)}  # as tensors and batches are
    for (rows, columns, warps, stages), room in zip(fused_softmax_kernel.TILES, most, strict=True):
        fixed = {"D": 512, "ROWS": rows, "COLUMNS": columns}
        source = ASTSource(
            fn=fused_softmax_kernel._kernel,
            signature=pointers | numbers | dict.fromkeys(fixed, "constexpr"),
            constexprs=fixed,
            attrs=whole,
        )
        options = {"num_warps": warps, "num_stages": stages}
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert made.metadata.shared <= room
        assert any(word in made.asm["ptx"] for word in ("wgmma", "mma.sync"))  # products on tensor cores
        assert "cp.async" in made.asm["ptx"]  # the next centres come while these are multiplied


# Belief


@pytest.fixture
def kernel(monkeypatch):
    """The kernel's module, with a kernel that computes the plain version's numbers, and counts."""
    pytest.importorskip("triton")
    from trainkit.losses import fused_softmax_kernel

    calls: list[tuple] = []

    def passed(x, centre, label, scale, parts, tile):
        calls.append(tile)
        return tuple(t.float() for t in written_out(x, centre, label, scale))

    monkeypatch.setattr(fused_softmax_kernel, "passed", passed)
    fused_softmax_kernel.calls = calls
    yield fused_softmax_kernel
    del fused_softmax_kernel.calls


def given(kernel, change=lambda plain: plain):
    """A batch, and what the plain version has of it."""
    x, centre, label = drawn()
    return x, centre, label, 64.0, change(tuple(t.float() for t in written_out(x, centre, label, 64.0)))


def test_it_is_believed_from_the_batch_on_in_which_it_agreed(kernel):
    fused = kernel.Fused()
    *batch, plain = given(kernel)
    assert fused(*batch, None) is None and not kernel.calls  # the plain version is asked first
    assert fused(*batch, plain) is not None and fused(*batch, None) is not None
    assert kernel.calls == [kernel.TILES[0]] * 3
    assert fused(batch[0][:5], batch[1], batch[2][:5], 64.0, None) is None  # another shape is proved again


def off_by_a_centre(plain):
    return plain[0], plain[1], plain[2].roll(1, 0)


def not_a_number(plain):
    return plain[0], plain[1].clone().fill_(math.nan), plain[2]


@pytest.mark.parametrize("change", [off_by_a_centre, not_a_number])
def test_a_kernel_that_disagrees_is_left_out_and_said_once(kernel, caplog, change):
    fused = kernel.Fused()
    *batch, plain = given(kernel, change)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert fused(*batch, plain) is None and fused(*batch, None) is None
    assert [r.message for r in caplog.records if "it is off by" in r.message and "plain version stays" in r.message]
    assert len(caplog.records) == 1


def test_tiles_that_do_not_fit_give_way_to_smaller_ones(kernel, monkeypatch):
    whole = kernel.passed

    def full(x, centre, label, scale, parts, tile):
        if tile == kernel.TILES[0]:
            raise RuntimeError("out of resource: shared memory\nRequired: 131072")
        return whole(x, centre, label, scale, parts, tile)

    monkeypatch.setattr(kernel, "passed", full)
    fused = kernel.Fused()
    *batch, plain = given(kernel)
    assert fused(*batch, plain) is not None and set(kernel.calls) == {kernel.TILES[1]}


def test_the_loss_asks_the_kernel_with_the_plain_version_until_it_has_it(monkeypatch):
    asked = []

    def fused(x, centre, label, scale, plain=None):
        asked.append((x.dtype, plain is not None))
        return tuple(t.float() for t in written_out(x, centre, label, scale)) if len(asked) > 3 else None

    monkeypatch.setattr(online_softmax, "_fused", fused)
    x, centre, label = drawn()
    grads = []
    for _ in range(3):
        leaf = x.clone().requires_grad_()
        found = margin_terms(leaf, centre.bfloat16(), label, 64.0, unit=True)
        found.others.sum().backward()
        grads.append(leaf.grad)
    assert asked == [(torch.bfloat16, known) for known in (False, True, False, True, False)]
    torch.testing.assert_close(grads[2], grads[0], rtol=1e-4, atol=1e-4)
    margin_terms(x, centre, label, 64.0, unit=True)  # float32 asks nobody
    assert len(asked) == 5


# Rounding


def test_products_in_bfloat16_are_those_of_rounded_numbers():
    x, centre, label = drawn(dim=512)
    found = margin_terms(x.clone().requires_grad_(), centre.bfloat16(), label, 64.0, unit=True)
    rounded = x.bfloat16().double(), centre.bfloat16().double(), label
    most, others, _ = written_out(*rounded, 64.0)
    torch.testing.assert_close(found.nearest.double(), most / 64, rtol=0, atol=1e-6)
    torch.testing.assert_close(found.others.double(), others, rtol=0, atol=2e-5)
    target = (rounded[0] * rounded[1][label]).sum(1)
    torch.testing.assert_close(found.target.double(), target, rtol=0, atol=1e-6)
    assert not torch.equal(found.nearest, margin_terms(x, centre, label, 64.0, unit=True).nearest)


def losses(size: int, classes: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Loss and gradient of a batch, rounded and not."""
    x, weight, label = drawn(size, classes, 512)
    centres = Centres(classes, 512)
    centres.weight.copy_(weight)
    out, grads = [], []
    for products in (None, torch.bfloat16):
        leaf = x.clone().requires_grad_()
        loss = margin_loss(centres.scores(leaf, label, 64.0, products), label, ArcFace(m=0.45))[0] / size
        loss.backward()
        out.append(loss.detach())
        grads.append(leaf.grad)
    return out, grads


def test_what_rounding_does_to_loss_and_gradient(monkeypatch):
    monkeypatch.setattr(online_softmax, "LARGE", 1)
    (loss, rounded), (grad, other) = losses(64, 2000)
    assert 0 < abs(rounded - loss) < 1e-4 * loss
    assert 1e-4 < (other - grad).norm() / grad.norm() < 6.6e-3


def test_rounded_centres_follow_those_that_move(monkeypatch):
    monkeypatch.setattr(online_softmax, "LARGE", 1)
    x, weight, label = drawn()
    centres = Centres(C, D)
    centres.weight.copy_(weight)
    half = centres.unit(torch.bfloat16)
    centres.update(label, x, x.roll(1, 0))
    assert centres.unit(torch.bfloat16) is half  # rows alone were computed again
    assert torch.equal(half, F.normalize(centres.weight).bfloat16())
    assert centres.unit().dtype == torch.float32 and copy.deepcopy(centres).unit().dtype == torch.float32
