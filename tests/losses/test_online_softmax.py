"""The softmax over many classes in one pass: against the matrix of all logits, in value, gradient, error and memory."""

from __future__ import annotations

import contextlib
import copy
import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainkit.checkpoint import safe_load
from trainkit.interfaces import DatasetInfo, StepContext
from trainkit.losses import online_softmax
from trainkit.losses.distillation import Centres
from trainkit.losses.margin import MarginHead, class_head, margin_loss
from trainkit.losses.margin_specs import AdaFace, ArcFace, CosFace, NoMargin
from trainkit.losses.online_softmax import MarginTerms, margin_terms
from trainkit.models.face_backbones import WithHead
from trainkit.models.network_specs import IResNetSpec
from trainkit.speed.flops import Counter
from trainkit.tasks.adadistill import AdaDistill, Teacher
from trainkit.tasks.embed import Embed, batch_accuracy

B, C, D = 12, 101, 16
MARGINS = [ArcFace(m=0.45), CosFace(m=0.35), AdaFace(m=0.4), ArcFace(m=0.2, scale=3.0), CosFace(scale=300.0)]


@pytest.fixture(autouse=True)
def any_size(monkeypatch):
    """Every head takes the one pass, in portions of 9 classes."""
    monkeypatch.setattr(online_softmax, "LARGE", 1)
    monkeypatch.setitem(online_softmax.PORTION, "cpu", 9 * B)


def drawn(kind: str, dtype: torch.dtype = torch.float64, classes: int = C, size: int = B, dim: int = D):
    """Embeddings, centres and labels. Easy samples lie beside their centres, hard ones opposite."""
    draw = torch.Generator().manual_seed(1)
    x, centre = (torch.randn(n, dim, generator=draw, dtype=torch.float64) for n in (size, classes))
    label = torch.randint(classes, (size,), generator=draw)
    label[:3] = torch.tensor([0, classes - 1, 0])  # the ends, and one that occurs twice
    towards = {"easy": 2.0, "random": 0.0, "hard": -2.0}[kind]
    x = x + towards * centre[label] / centre[label].norm(dim=1, keepdim=True) * math.sqrt(dim)
    return x.to(dtype).requires_grad_(), (centre * (0.5 + torch.rand(classes, 1, generator=draw))).to(dtype), label


def written_out(x: Tensor, centre: Tensor, label: Tensor, margin, quality: Tensor, ramp: float = 1.0) -> Tensor:
    """The loss of each sample from the matrix of all logits, through angles."""
    cosine = (x / x.norm(dim=1, keepdim=True)) @ (centre / centre.norm(dim=1, keepdim=True)).T
    own, m = cosine.gather(1, label[:, None])[:, 0], margin.m * ramp
    angle = own.clamp(-1 + 1e-3, 1 - 1e-3).acos() if margin.name == "adaface" else own.clamp(-1, 1).acos()
    if margin.name == "arcface":
        lowered = torch.where(angle + m < math.pi, (angle + m).cos(), own - m * math.sin(m))
    elif margin.name == "cosface":
        lowered = own - m
    else:
        lowered = (angle - m * quality).clamp(1e-3, math.pi - 1e-3).cos() - m - m * quality
    ahead = margin.scale * (cosine - lowered[:, None])
    # Over the other classes: exact for small losses too, which -log softmax is not.
    return ahead.exp().masked_fill(F.one_hot(label, len(centre)).bool(), 0.0).sum(1).log1p()


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


# Value and gradient


def relative_to_the_greatest(monkeypatch, whether: bool) -> None:
    """Exponentials of logits less the greatest so far, as where the scale is large, which that of a test seldom is."""
    if whether:
        monkeypatch.setattr(online_softmax, "_bounded", lambda scale, centre: False)


@pytest.mark.parametrize("kind", ["easy", "random", "hard"])
@pytest.mark.parametrize("margin", MARGINS, ids=str)
@pytest.mark.parametrize("running", [False, True])
def test_loss_and_gradients_are_those_of_the_whole_matrix(monkeypatch, running, margin, kind):
    relative_to_the_greatest(monkeypatch, running)
    x, centre, label = drawn(kind)
    centre.requires_grad_()
    quality = torch.linspace(-1, 1, B, dtype=torch.float64)
    each = torch.linspace(0.5, 2, C, dtype=torch.float64)
    for ramp, weight in ((1.0, None), (0.3, each)):
        losses = written_out(x, centre, label, margin, quality, ramp)
        expected = losses.sum() if weight is None else (losses * weight[label]).sum()
        expected_grads = torch.autograd.grad(expected, (x, centre))
        head = MarginHead(C, D, margin.scale).double()
        head.weight.data.copy_(centre.detach())
        total, divisor = margin_loss(head(x, label), label, margin, quality, ramp, weight)
        grads = torch.autograd.grad(total, (x, head.weight))
        centres = Centres(C, D).double()
        centres.weight.copy_(centre.detach())
        frozen, _ = margin_loss(centres.scores(x, label, margin.scale), label, margin, quality, ramp, weight)
        assert float(divisor) == pytest.approx(B if weight is None else float(weight[label].sum()))
        for found in (total, frozen):
            assert found.item() == pytest.approx(expected.item(), rel=1e-12)
        for found, other in zip(
            (*grads, *torch.autograd.grad(frozen, x)), (*expected_grads, expected_grads[0]), strict=True
        ):
            assert relative(found, other) < 1e-12


@pytest.mark.parametrize("classes", [1, 2, 3, 9, 50])
def test_any_number_of_classes_in_a_portion_gives_the_same(monkeypatch, classes):
    x, centre, label = drawn("random")
    expected = written_out(x, centre, label, ArcFace(), x).sum()
    monkeypatch.setitem(online_softmax.PORTION, "cpu", classes * B + 1)
    head = MarginHead(C, D).double()
    head.weight.data.copy_(centre)
    total, _ = margin_loss(head(x, label), label, ArcFace())
    assert total.item() == pytest.approx(expected.item(), rel=1e-12)


def test_terms_of_slices_of_the_classes_are_combined_to_those_of_all():
    """Each slice as a process would hold it: labels by their place in the slice, outside where the class is not."""
    x, centre, label = drawn("random")
    x = F.normalize(x.detach()).requires_grad_()
    centre.requires_grad_()
    whole = margin_terms(x, centre, label, 64.0)
    starts = (0, 40, 41, 90)
    parts = [
        margin_terms(x, centre[a:b], label - a, 64.0) for a, b in zip(starts, (*starts[1:], C), strict=True) if b > a
    ]
    target, nearest = sum(p.target for p in parts), torch.stack([p.nearest for p in parts]).amax(0)
    # A slice that holds a sample's class alone has no other class: its sum is empty.
    others = torch.logsumexp(torch.stack([p.others + 64.0 * (p.nearest - nearest) for p in parts]), 0)
    for found, expected in ((target, whole.target), (nearest, whole.nearest), (others, whole.others)):
        torch.testing.assert_close(found, expected)
    pull = torch.linspace(0.5, 1.5, B, dtype=torch.float64)
    grads = [torch.autograd.grad(((t * pull) - 3 * o * pull).sum(), (x, centre), retain_graph=True)
             for t, o in ((target, others), (whole.target, whole.others))]  # fmt: skip
    for found, expected in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected)


def test_gradients_by_differences():
    x, centre, label = drawn("random", classes=5, size=4, dim=3)

    def total(x, centre):
        # `nearest` hands on no gradient: that of ln sum exp of the logits is all in `others`.
        found = margin_terms(F.normalize(x), centre, label, 4.0)
        return found.others + 4.0 * found.nearest, found.target

    assert torch.autograd.gradcheck(total, (x, centre.requires_grad_()))


def test_a_batch_of_one_class_of_two_and_samples_at_the_ends_of_the_scale():
    x, centre, _ = drawn("random", torch.float32, classes=2, size=3)
    for label in (torch.tensor([0, 0, 0]), torch.tensor([1, 0, 1])):
        for scale in (1e-3, 1e4):
            found = margin_terms(F.normalize(x), centre, label, scale)
            expected = F.normalize(x) @ F.normalize(centre).T
            torch.testing.assert_close(found.target, expected.gather(1, label[:, None])[:, 0])
            torch.testing.assert_close(found.nearest, expected.gather(1, 1 - label[:, None])[:, 0])
            torch.testing.assert_close(found.others, torch.zeros(3), rtol=0, atol=2.5e-7)  # ln of a ratio rounded twice


def test_no_sum_of_exponentials_leaves_the_numbers():
    """All other centres at the embedding, opposite to it, and at a scale that only the greatest logit can bound."""
    label = torch.zeros(2, dtype=torch.long)
    classes = 20_000
    for scale, bounded in ((64.0, True), (75.0, True), (80.0, False), (1e4, False)):
        for sign in (1.0, -1.0):
            x = F.normalize(torch.arange(1.0, 65.0)[None]).repeat(2, 1).requires_grad_()
            centre = (sign * x.detach()[:1]).repeat(classes, 1)
            assert online_softmax._bounded(scale, centre) == bounded
            found = margin_terms(x, centre, label, scale, unit=True)
            (grad,) = torch.autograd.grad(found.others.sum(), x)
            torch.testing.assert_close(found.others, torch.full((2,), math.log(classes - 1)), rtol=1e-5, atol=0)
            torch.testing.assert_close(found.nearest, torch.full((2,), sign))
            assert relative(grad, scale * centre[:2]) < 3e-4  # 20,000 terms in float32: 1.4e-4 on an AMD EPYC


@pytest.mark.parametrize("kind", ["easy", "random", "hard"])
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("running", [False, True])
def test_the_error_in_float32_is_that_of_the_plain_chain(monkeypatch, running, kind, trained):
    """Normwise, against float64: at most 1.5 times that of the chain that keeps all logits."""
    relative_to_the_greatest(monkeypatch, running)
    errors = []
    margin, classes, size = ArcFace(), 3000, 64
    exact_x, exact_centre, label = drawn(kind, classes=classes, size=size, dim=128)
    exact_centre = exact_centre.float().double().requires_grad_(trained)
    exact_x = exact_x.detach().float().double().requires_grad_()
    wanted = (exact_x, exact_centre) if trained else (exact_x,)
    losses = written_out(exact_x, exact_centre, label, margin, exact_x)
    exact = [losses.sum().detach(), *torch.autograd.grad(losses.sum(), wanted)]
    monkeypatch.setitem(online_softmax.PORTION, "cpu", 256 * size)
    for limit in (1, 10**9):
        monkeypatch.setattr(online_softmax, "LARGE", limit)
        x = exact_x.detach().float().requires_grad_()
        module = MarginHead(classes, 128) if trained else Centres(classes, 128)
        module.weight.data.copy_(exact_centre.detach())
        scores = module(x, label) if trained else module.scores(x, label, margin.scale)
        assert isinstance(scores, MarginTerms) == (limit == 1)
        total, _ = margin_loss(scores, label, margin)
        grads = torch.autograd.grad(total, (x, module.weight) if trained else (x,))
        errors.append([relative(a, b) for a, b in zip((total.detach(), *grads), exact, strict=True)])
    for mine, plain in zip(*errors, strict=True):
        assert mine <= max(1.5 * plain, 1e-7)  # below is the rounding of a single number


# Memory


class Seen(TorchDispatchMode):
    """What operations ran, the elements of the largest tensor, and how many rows were measured for their length."""

    def __init__(self) -> None:
        super().__init__()
        self.names, self.elements, self.rows = set(), 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.names.add(func.overloadpacket.__name__)
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x._base is None:
                self.elements = max(self.elements, x.numel())
        if "vector_norm" in str(func):
            self.rows += len(args[0])
        return out


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_no_tensor_is_as_large_as_the_matrix_and_the_number_of_classes_changes_nothing(trained):
    """Seen in what is made forwards and backwards: portions, embeddings, and of trained centres their gradient."""
    found = {}
    for classes in (40, 400):
        x, _, label = drawn("random", torch.float32, classes=classes, dim=4)
        module = MarginHead(classes, 4) if trained else Centres(classes, 4)
        if not trained:
            module.unit()
        with Seen() as seen, Counter() as counter:
            score = module(x, label) if trained else module.scores(x, label, 64.0)
            total, _ = margin_loss(score, label, ArcFace())
            batch_accuracy(score, label)
            total.backward()
        found[classes] = seen.elements
        # Two products forwards; of trained centres two more, of which one is the first again.
        assert counter.total == pytest.approx((8 if trained else 4) * B * classes * 4, rel=0.05, abs=8 * classes)
        assert not seen.names & {"_local_scalar_dense", "nonzero", "masked_select"}, "a device would be waited for"
    assert found == ({40: 40 * 4, 400: 400 * 4} if trained else {40: 9 * B, 400: 9 * B})


# Centres of length 1


def test_the_centres_are_normalised_once_and_after_that_those_that_were_moved():
    centres, x = Centres(50, D), torch.randn(6, D)
    with Seen() as seen:
        first = centres.unit()
    assert seen.rows == 50 and torch.equal(first, F.normalize(centres.weight))
    centres.update(torch.tensor([3, 9, 3, 49, 0, 9]), x, x.flip(0))
    with Seen() as seen:
        assert centres.unit() is first
    assert seen.rows == 0 and torch.equal(first, F.normalize(centres.weight))
    with Seen() as seen:
        centres.update(torch.tensor([1, 2]), x[:2], x[2:4])
    assert seen.rows < 50
    assert set(centres.state_dict()) == {"weight"}


def test_a_few_rows_have_the_bits_that_they_have_among_all():
    """So a run that was resumed, whose centres are all normalised anew, goes on with those of one that was not."""
    weight = torch.randn(3000, 512)
    for rows in (1, 3, 64, 128):
        picked = torch.randint(3000, (rows,))
        assert torch.equal(F.normalize(weight[picked]), F.normalize(weight)[picked])


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.load_state_dict({"weight": torch.ones(50, D)}),
        lambda c: c.weight.copy_(torch.ones(50, D)),
        lambda c: c.weight[7].neg_(),
        lambda c: c.double(),
        lambda c: setattr(c, "weight", torch.ones(50, D)),
    ],
)
@pytest.mark.parametrize("update", [False, True])
def test_a_weight_that_anything_else_changes_is_normalised_anew(change, update):
    centres, x = Centres(50, D), torch.randn(2, D)
    centres.unit()
    change(centres)
    if update:
        centres.update(torch.tensor([1, 2]), x, x.flip(0))
    assert torch.equal(centres.unit(), F.normalize(centres.weight))
    twin = copy.deepcopy(centres)
    twin.weight.neg_()
    assert torch.equal(twin.unit(), -centres.unit())


# In the tasks


def at() -> StepContext:
    return StepContext(3, 0, 0.5, lambda x: x.detach(), contextlib.nullcontext)


META = DatasetInfo(7, (3, 16, 16), "toy")
NET = IResNetSpec(name="iresnet18", embedding=8, width=0.0625)


def pictures() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {"image": torch.randn(9, 3, 16, 16, generator=draw), "label": torch.arange(9) % 7}


@pytest.mark.parametrize("margin", [*MARGINS[:3], ArcFace(ramp_epochs=6), NoMargin()], ids=str)
def test_embed_learns_the_same_with_and_without_the_matrix(monkeypatch, margin):
    found = []
    for limit in (1, 10**9):
        monkeypatch.setattr(online_softmax, "LARGE", limit)
        torch.manual_seed(0)
        task = Embed(net=NET, margin=margin, class_weights={"b": 3.0})
        networks = task.build(DatasetInfo(7, (3, 16, 16), "toy", class_names=tuple("abcdefg")), {}, 0)
        loss = task.loss(networks.model, networks, pictures(), at())
        loss.sum.backward()
        grads = torch.cat([p.grad.flatten() for p in networks.model.parameters() if p.requires_grad])
        found.append((loss.sum.item(), float(loss.weight), float(loss.logs["accuracy"]), grads))
    (total, weight, accuracy, grads), plain = found
    assert (total, weight, accuracy) == (pytest.approx(plain[0], rel=1e-5), plain[1], plain[2])
    assert relative(grads, plain[3]) < 1e-4


@pytest.mark.parametrize("method", ["adadistill", "aml"])
@pytest.mark.parametrize("margin", MARGINS[:3], ids=str)
def test_adadistill_learns_the_same_with_and_without_the_matrix(monkeypatch, tmp_path, margin, method):
    torch.manual_seed(5)
    safe_load.write_tensors(tmp_path / "teacher.safetensors", Embed(net=NET).build(META, {}, 0).model.state_dict())
    teacher = Teacher(net=NET, weights=str(tmp_path / "teacher.safetensors"))
    found = []
    for limit in (1, 10**9):
        monkeypatch.setattr(online_softmax, "LARGE", limit)
        torch.manual_seed(0)
        task = AdaDistill(student=NET, teacher=teacher, margin=margin, method=method, cache_teacher=False)
        networks = task.build(META, {"teacher": tmp_path / "teacher.safetensors"}, 0)
        losses = []
        for _ in range(2):  # the second batch meets centres that were moved
            loss = task.loss(networks.model, networks, pictures(), at())
            loss.sum.backward()
            losses += [loss.sum.item(), float(loss.logs["accuracy"])]
        grads = torch.cat([p.grad.flatten() for p in networks.model.parameters() if p.requires_grad])
        found.append((losses, grads, networks.memory.centres.weight))
    (losses, grads, centres), plain = found
    assert losses == pytest.approx(plain[0], rel=1e-5) and torch.equal(centres, plain[2])
    assert relative(grads, plain[1]) < 1e-4


def test_a_head_without_labels_or_without_a_margin_gives_all_scores():
    x = torch.randn(5, 8)
    assert MarginHead(6, 8)(x).shape == class_head(NoMargin(), 6, 8)(x, torch.arange(5)).shape == (5, 6)
    assert isinstance(class_head(CosFace(scale=7.0), 6, 8)(x, torch.arange(5)), MarginTerms)
    assert class_head(CosFace(scale=7.0), 6, 8).scale == 7.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32_under_autocast_too(dtype):
    x, head, label = torch.randn(5, 32, dtype=dtype, requires_grad=True), MarginHead(60, 32), torch.arange(5)
    expected, _ = margin_loss(head(x.detach().float(), label), label, ArcFace())
    with torch.autocast("cpu", torch.bfloat16):
        total, _ = margin_loss(head(x, label), label, ArcFace())
        assert torch.equal(total, expected) and total.dtype == torch.float32
        total.backward()
    assert x.grad.dtype == dtype and head.weight.grad.dtype == torch.float32
    x_grad, w_grad = torch.autograd.grad(
        margin_loss(head(y := x.detach().float().requires_grad_(), label), label, ArcFace())[0], (y, head.weight)
    )
    assert torch.equal(x.grad, x_grad.to(dtype)) and torch.equal(head.weight.grad, w_grad)


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["both", "embeddings", "centres"])
def test_a_compiled_network_and_an_accumulated_gradient(trained):
    """Compiled with the network in front. Two micro-batches add up to the gradient of one."""
    torch.manual_seed(0)
    net, image, label = WithHead(nn.Linear(6, D), MarginHead(C, D)), torch.randn(8, 6), torch.arange(8)
    net.net.requires_grad_(trained != "centres")
    net.head.requires_grad_(trained != "embeddings")
    margin_loss(net(image, True, label)[1], label, ArcFace())[0].backward()
    params = [p for p in net.parameters() if p.requires_grad]
    expected = [p.grad.clone() for p in params]
    net.zero_grad()
    net.compile(backend="aot_eager", dynamic=False)
    for rows in (slice(4), slice(4, 8)):
        margin_loss(net(image[rows], True, label[rows])[1], label[rows], ArcFace())[0].backward()
    for p, other in zip(params, expected, strict=True):
        torch.testing.assert_close(p.grad, other, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_the_compiler_is_not_imported_for_a_network_that_is_not_compiled():
    code = (
        "import sys, torch; from trainkit.losses.online_softmax import margin_terms; "
        "margin_terms(torch.eye(3).requires_grad_(), torch.eye(3), torch.arange(3), 2.0); "
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_not_finite_embeddings_give_a_loss_that_is_not_finite():
    x, _, label = drawn("random", torch.float32)
    head = MarginHead(C, D)
    with torch.no_grad():
        x[3, 2] = math.nan
    assert not margin_loss(head(x, label), label, ArcFace())[0].isfinite()


def _rank(rank: int, folder: str, sharded: bool) -> None:
    """One of two processes with half of the samples each."""
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    online_softmax.LARGE, online_softmax.PORTION["cpu"] = 1, 30
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    net, image, label = WithHead(nn.Linear(6, D), MarginHead(C, D)), torch.randn(8, 6), torch.arange(8)
    both = fully_shard(net) if sharded else nn.parallel.DistributedDataParallel(net)
    rows = slice(4 * rank, 4 * rank + 4)
    for _ in range(2):  # the second forward waits for every gradient of the first
        net.zero_grad()
        margin_loss(both(image[rows], True, label[rows])[1], label[rows], ArcFace())[0].backward()
    grads = [p.grad.full_tensor() if sharded else p.grad for p in net.parameters()]
    torch.save([2 * grad for grad in grads], f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_two_processes_have_the_mean_of_their_gradients(tmp_path, sharded):
    torch.multiprocessing.spawn(_rank, (str(tmp_path), sharded), nprocs=2)
    torch.manual_seed(0)
    net, image, label = WithHead(nn.Linear(6, D), MarginHead(C, D)), torch.randn(8, 6), torch.arange(8)
    margin_loss(net(image, True, label)[1], label, ArcFace())[0].backward()
    for rank in range(2):
        for p, found in zip(net.parameters(), torch.load(tmp_path / f"{rank}.pt"), strict=True):
            # Sums of eight and of twice four samples differ in float32, by 1.7e-4 of an element that others dwarf.
            torch.testing.assert_close(found, p.grad, rtol=1e-4, atol=1e-5 * float(p.grad.abs().max()))
