"""The face tasks in process: losses against the papers' formulas in plain Python, and who gets a gradient."""

from __future__ import annotations

import contextlib
import math
import re
import threading

import pytest
import torch
from runs import ROOT
from torch import nn

from trainkit.checkpoint import safe_load
from trainkit.config import schema
from trainkit.config.run_request import RunRequest, load
from trainkit.errors import UserError
from trainkit.evaluation_protocols import Pairs
from trainkit.interfaces import DatasetInfo, StepContext
from trainkit.losses.margin_specs import AdaFace, ArcFace, CosFace, NoMargin
from trainkit.models.face_backbones import Pixels
from trainkit.models.network_specs import IResNetSpec, MobileFaceNetSpec
from trainkit.tasks.adadistill import AdaDistill, GeometryMargin, Teacher
from trainkit.tasks.embed import Embed
from trainkit.training import optimizer as optim

CLASSES, SIDE, DIM = 4, 16, 8
META = DatasetInfo(CLASSES, (3, SIDE, SIDE), "toy")
STUDENT = MobileFaceNetSpec(name="mobilefacenet", embedding=DIM, width=0.125)
NET = IResNetSpec(name="iresnet18", embedding=DIM, width=0.0625)
MARGINS = [ArcFace(m=0.45, scale=16.0), CosFace(m=0.35, scale=16.0), AdaFace(m=0.4, scale=16.0)]


def at(progress: float = 0.0, gather=lambda x: x.detach()) -> StepContext:
    return StepContext(0, 0, progress, gather, contextlib.nullcontext)


def batch(size: int = 9, seed: int = 0) -> dict[str, torch.Tensor]:
    """Images of four people: one of them (3) is not in the batch, and the others several times."""
    draw = torch.Generator().manual_seed(seed)
    label = torch.arange(size) % (CLASSES - 1)
    place = torch.randn(CLASSES, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(99))
    return {"image": place[label] + 0.5 * torch.randn(size, 3, SIDE, SIDE, generator=draw), "label": label}


@pytest.fixture(scope="module")
def teacher_file(tmp_path_factory):
    """Weights as a run of task `embed` leaves them: the network under `net.`, its class centres as `head.weight`."""
    torch.manual_seed(5)
    net = Embed(net=NET).build(META, {}, 0).model
    with torch.no_grad():
        net.net(batch(32)["image"])  # batch-norm statistics that are not those of the start
    file = tmp_path_factory.mktemp("teacher") / "model.safetensors"
    safe_load.write_tensors(file, net.state_dict())
    return file


def distil(file, **settings):
    """A task and its parts, the frozen ones as the loop leaves them."""
    torch.manual_seed(0)
    given = {"student": STUDENT, "teacher": Teacher(net=NET, weights=str(file)), "margin": MARGINS[0], **settings}
    task = AdaDistill(**given)
    networks = task.build(META, {"teacher": file}, 0)
    for module in networks.frozen.values():
        module.eval().requires_grad_(False)
    return task, networks


# The formulas, with lists and floats


def unit(row):
    length = math.sqrt(sum(v * v for v in row))
    return [v / length for v in row]


def cos(a, b):
    return sum(x * y for x, y in zip(unit(a), unit(b), strict=True))


def moved(centres, label, student, teacher, alpha):
    """Equations 6 to 8 of the paper: w <- a w + (1 - a) t."""
    new, alphas = [list(row) for row in centres], []
    for y, s, t in zip(label, student, teacher, strict=True):
        w = centres[y]
        a = cos(s, t) * (max(cos(w, t), 1e-6) if alpha == "hard" else 1.0)
        a = min(max(a, 1e-6), 1.0)
        new[y] = [a * v + (1 - a) * u for v, u in zip(w, unit(t), strict=True)]
        alphas.append(a)
    return new, alphas


def spread(values):
    mean = sum(values) / len(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))


def quality(norms, margin):
    """AdaFace, equation 14, from the statistics at the start: mean 20, deviation 100."""
    norms = [min(max(n, 1e-3), 100.0) for n in norms]
    mean = (1 - margin.t_alpha) * 20.0 + margin.t_alpha * sum(norms) / len(norms)
    std = (1 - margin.t_alpha) * 100.0 + margin.t_alpha * spread(norms)
    return [min(max((n - mean) / (std + 1e-3) * margin.h, -1), 1) for n in norms]


def cross_entropy(embeddings, label, centres, margin, qualities):
    """Sum over samples of -log softmax of the scaled cosines, with the margin on the true class."""
    total = 0.0
    for i, (x, y) in enumerate(zip(embeddings, label, strict=True)):
        logits = []
        for j, w in enumerate(centres):
            c = min(max(cos(x, w), -1.0), 1.0)
            if j == y and margin.name == "arcface":
                theta = math.acos(c)
                c = math.cos(theta + margin.m) if theta + margin.m < math.pi else c - margin.m * math.sin(margin.m)
            elif j == y and margin.name == "cosface":
                c -= margin.m
            elif j == y:
                theta = math.acos(min(max(c, -0.999), 0.999)) - margin.m * qualities[i]
                c = math.cos(min(max(theta, 1e-3), math.pi - 1e-3)) - (margin.m + margin.m * qualities[i])
            logits.append(margin.scale * c)
        top = max(logits)
        total += top + math.log(sum(math.exp(v - top) for v in logits)) - logits[y]
    return total


def norms_of(rows):
    return [math.sqrt(sum(v * v for v in row)) for row in rows]


# Embed


@pytest.mark.parametrize("margin", MARGINS, ids=lambda m: m.name)
def test_embed_has_the_loss_of_its_formula_and_trains_network_and_centres(margin):
    torch.manual_seed(0)
    task, given = Embed(net=NET, margin=margin), batch()
    networks = task.build(META, {}, 0)
    loss = task.loss(networks.model, networks, given, at())
    embeddings, label = networks.model(given["image"]).tolist(), given["label"].tolist()
    q = quality(norms_of(embeddings), margin) if margin.name == "adaface" else None
    expected = cross_entropy(embeddings, label, networks.model.head.weight.tolist(), margin, q)
    assert loss.sum.item() == pytest.approx(expected, rel=1e-4) and loss.weight == len(label)
    loss.sum.backward()
    learning = {name: p for name, p in networks.model.named_parameters() if p.requires_grad}
    # InsightFace fixes the scale of the last batch norm at 1: with a margin softmax it has no effect.
    assert set(dict(networks.model.named_parameters())) - set(learning) == {"net.features.weight"}
    assert "head.weight" in learning and all(p.grad.isfinite().all() for p in learning.values())
    nearest = [
        max(range(CLASSES), key=lambda j, x=x: cos(x, networks.model.head.weight[j].tolist())) for x in embeddings
    ]
    assert float(loss.logs["accuracy"]) == pytest.approx(sum(a == b for a, b in zip(nearest, label, strict=True)) / 9)


# AdaDistill, one batch by hand


@pytest.mark.parametrize("margin", MARGINS, ids=lambda m: m.name)
@pytest.mark.parametrize("alpha", ["hard", "plain"])
def test_adadistill_has_the_loss_of_its_formula_with_the_centres_after_their_update(teacher_file, margin, alpha):
    """Both kinds of alpha run with every margin: the published code stopped at plain alpha with an undefined name."""
    task, networks = distil(teacher_file, margin=margin, alpha=alpha, cache_teacher=False)
    memory, given = networks.memory, batch()
    centres, label = memory.centres.weight.tolist(), given["label"].tolist()
    for step in range(2):
        s = networks.model(given["image"]).tolist()
        t = networks.frozen["teacher"](given["image"]).tolist()
        before = centres
        loss = task.loss(networks.model, networks, given, at())
        centres, alphas = moved(centres, label, s, t, alpha)
        torch.testing.assert_close(memory.centres.weight, torch.tensor(centres), rtol=1e-4, atol=1e-5)
        assert centres[3] == before[3] and centres[0] != before[0], "only centres of the batch move"
        assert float(loss.logs["alpha"]) == pytest.approx(sum(alphas) / 9, rel=1e-3)
        if margin.name != "adaface" or step == 0:
            q = quality(norms_of(s), margin) if margin.name == "adaface" else None
            assert loss.sum.item() == pytest.approx(cross_entropy(s, label, centres, margin, q), rel=1e-3)


def test_mse_is_the_squared_distance_of_the_normalised_embeddings(teacher_file):
    task, networks = distil(teacher_file, method="mse", cache_teacher=False)
    given = batch()
    s = networks.model(given["image"]).tolist()
    t = networks.frozen["teacher"](given["image"]).tolist()
    expected = sum(sum((x - y) ** 2 for x, y in zip(unit(a), unit(b), strict=True)) for a, b in zip(s, t, strict=True))
    loss = task.loss(networks.model, networks, given, at())
    assert loss.sum.item() == pytest.approx(expected, rel=1e-4) and networks.memory is None
    assert loss.sum.item() == pytest.approx(18 - 2 * 9 * float(loss.logs["cosine_to_teacher"]), rel=1e-4)


def test_aml_is_a_margin_loss_against_the_centres_of_the_teacher_which_stay(teacher_file):
    task, networks = distil(teacher_file, method="aml")
    own, given = safe_load.read_tensors(teacher_file)["head.weight"], batch()
    assert torch.equal(networks.memory.centres.weight, own)
    given["teacher"] = networks.frozen["teacher"](given["image"])
    s = networks.model(given["image"]).tolist()
    loss = task.loss(networks.model, networks, given, at())
    expected = cross_entropy(s, given["label"].tolist(), own.tolist(), task.margin, None)
    assert loss.sum.item() == pytest.approx(expected, rel=1e-4) and "alpha" not in loss.logs
    assert torch.equal(networks.memory.centres.weight, own)


def test_centres_of_aml_come_from_a_file_of_their_own_where_one_is_named(teacher_file, tmp_path):
    table = torch.randn(DIM, CLASSES)
    safe_load.write_tensors(tmp_path / "header.safetensors", {"kernel": table})
    teacher = Teacher(net=NET, weights=str(teacher_file), centres=str(tmp_path / "header.safetensors"))
    _, networks = distil(teacher_file, method="aml", teacher=teacher)
    assert torch.equal(networks.memory.centres.weight, table.T)


def test_aml_without_centres_or_with_those_of_other_people_is_refused(teacher_file, tmp_path):
    tensors = safe_load.read_tensors(teacher_file)
    head = tensors.pop("head.weight")
    safe_load.write_tensors(tmp_path / "none.safetensors", tensors)
    safe_load.write_tensors(tmp_path / "more.safetensors", {**tensors, "head.weight": torch.cat([head, head])})
    with pytest.raises(UserError, match=r"no class centres.*task\.teacher\.centres"):
        distil(tmp_path / "none.safetensors", method="aml")
    with pytest.raises(UserError, match=r"centres of shape \(8, 8\).*\(4, 8\).*same classes"):
        distil(tmp_path / "more.safetensors", method="aml")
    for name in ("none", "more"):
        distil(tmp_path / f"{name}.safetensors")  # adadistill has no use for them


# Who learns


@pytest.mark.parametrize(("method", "margin"), [("adadistill", MARGINS[2]), ("aml", MARGINS[0]), ("mse", MARGINS[0])])
def test_only_the_student_learns(teacher_file, method, margin):
    """Centres in an optimizer or in what is wrapped for processes cost the published code 176 MB a step."""
    task, networks = distil(teacher_file, method=method, margin=margin, cache_teacher=False)
    optimizer = optim.build(networks.model, schema.Optim(lr=0.05))
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in networks.model.parameters()}
    frozen = {name: t.clone() for name, t in networks.frozen["teacher"].state_dict().items()}
    memory = [] if networks.memory is None else [t.clone() for t in networks.memory.state_dict().values()]
    student = [p.detach().clone() for p in networks.model.parameters()]
    for step in range(3):
        optimizer.zero_grad()
        task.loss(networks.model, networks, batch(seed=step), at()).sum.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in networks.model.parameters())
        optimizer.step()
    assert any((p != before).any() for p, before in zip(networks.model.parameters(), student, strict=True))
    assert all(p.grad is None for p in networks.frozen["teacher"].parameters())
    assert all(torch.equal(t, frozen[name]) for name, t in networks.frozen["teacher"].state_dict().items())
    if networks.memory is not None:
        assert not list(networks.memory.parameters()) and not any(t.requires_grad for t in networks.memory.buffers())
        changed = [(t != old).any().item() for t, old in zip(networks.memory.buffers(), memory, strict=True)]
        assert all(changed) if method == "adadistill" else not any(changed)


def test_the_gradient_of_the_student_takes_the_centres_as_constants(teacher_file):
    task, networks = distil(teacher_file, cache_teacher=False, margin=CosFace(m=0.35, scale=16.0))
    given = batch()
    task.loss(networks.model, networks, given, at()).sum.backward()
    got = [p.grad.clone() for p in networks.model.parameters()]
    networks.model.zero_grad()
    s = networks.model(given["image"])
    c = networks.memory.centres.weight.clone()
    cosine = (s / s.norm(dim=1, keepdim=True)) @ (c / c.norm(dim=1, keepdim=True)).T
    logits = 16 * (cosine - 0.35 * nn.functional.one_hot(given["label"], CLASSES))
    (logits.logsumexp(1) - logits[torch.arange(9), given["label"]]).sum().backward()
    for mine, theirs in zip(got, networks.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("method", ["adadistill", "aml", "mse"])
def test_a_teacher_computed_ahead_gives_the_loss_of_one_asked_each_time(teacher_file, method):
    losses = []
    for ahead in (True, False):
        task, networks = distil(teacher_file, method=method, cache_teacher=ahead)
        given = batch()
        assert networks.cached == ({"teacher": networks.frozen["teacher"]} if ahead else {})
        if ahead:  # as the loop fills its table: in other portions than the batches of training
            teacher = networks.cached["teacher"]
            given["teacher"] = torch.cat([teacher(part) for part in given["image"].split(4)])
        losses.append(task.loss(networks.model, networks, given, at()).sum.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_the_norm_statistics_of_adaface_move_and_are_saved(teacher_file):
    margin = AdaFace(t_alpha=0.25)
    task, networks = distil(teacher_file, margin=margin, cache_teacher=False)
    given = batch()
    norms = norms_of(networks.model(given["image"]).tolist())
    task.loss(networks.model, networks, given, at())
    assert set(networks.memory.state_dict()) == {"centres.weight", "norms.mean", "norms.std"}
    assert float(networks.memory.norms.mean) == pytest.approx(0.75 * 20 + 0.25 * sum(norms) / 9, rel=1e-5)
    assert float(networks.memory.norms.std) == pytest.approx(0.75 * 100 + 0.25 * spread(norms), rel=1e-5)


def reference_step(weight, x, teacher, label, centres, norms, margin, geometry, progress):
    """One step of AdaDistill with AdaFace and the geometry margin in the published order, sample by sample.

    Returns the loss and the margin scalers; moves `centres` (a list of rows) and `norms` ([mean, std]).
    """
    s = x @ weight.T
    t = [row / row.norm() for row in teacher]
    near = [float(torch.dot(a / a.norm(), b)) for a, b in zip(s.detach(), t, strict=True)]
    hard = [
        min(max(float(torch.dot(centres[y] / centres[y].norm(), b)), 1e-6), 1.0) for y, b in zip(label, t, strict=True)
    ]
    old = list(centres)
    for y, a, h, b in zip(label, near, hard, t, strict=True):  # of several samples of a class the last one counts
        alpha = min(max(a * h, 1e-6), 1.0)
        centres[y] = alpha * old[y] + (1 - alpha) * b
    length = s.detach().norm(dim=1).clamp(1e-3, 100)
    for i, now in enumerate((length.mean(), length.std())):
        norms[i] = margin.t_alpha * float(now) + (1 - margin.t_alpha) * norms[i]
    share = min(progress / geometry.ramp, 1.0)
    scalers, loss = [], 0.0
    for i, y in enumerate(label):
        extra = geometry.weight * share * geometry.gain * hard[i] * max(hard[i] - near[i], 0.0)
        q = min(max((float(length[i]) - norms[0]) / (norms[1] + 1e-3) * margin.h + extra, -1.0), 1.0)
        cosine = torch.stack([torch.dot(s[i] / s[i].norm(), w / w.norm()) for w in centres])
        theta = cosine[y].clamp(-0.999, 0.999).acos() - margin.m * q
        target = theta.clamp(1e-3, math.pi - 1e-3).cos() - margin.m - margin.m * q
        logits = margin.scale * torch.cat([cosine[:y], target[None], cosine[y + 1 :]])
        loss = loss + logits.logsumexp(0) - logits[y]
        scalers.append(q)
    return loss, scalers


def test_sixty_steps_with_the_geometry_margin_equal_the_published_order(teacher_file):
    """Hardness is taken before the centres move: afterwards it is near 1 where the student is worst."""
    margin, geometry = AdaFace(m=0.4, scale=16.0, t_alpha=0.05), GeometryMargin(weight=1.0, gain=3.0, ramp=0.25)
    task, networks = distil(teacher_file, margin=margin, geometry=geometry)
    draw = torch.Generator().manual_seed(3)
    people, away = torch.randn(CLASSES, 12, generator=draw).double(), torch.randn(12, DIM, generator=draw).double()
    memory, net = networks.memory, nn.Linear(12, DIM, bias=False).double()
    memory.centres.double()
    weight = net.weight.detach().clone().requires_grad_()
    centres, norms = list(memory.centres.weight.clone()), [20.0, 100.0]
    raised = 0
    for step in range(60):
        label = torch.randint(CLASSES, (7,), generator=draw)
        x = 3 * people[label] + torch.randn(7, 12, generator=draw).double()
        teacher = (x @ away).tanh()
        loss = task.loss(net, networks, {"image": x, "label": label, "teacher": teacher}, at(step / 60))
        expected, scalers = reference_step(
            weight, x, teacher, label.tolist(), centres, norms, margin, geometry, step / 60
        )
        assert loss.sum.item() == pytest.approx(expected.item(), rel=1e-6), step
        for given, parameter in ((loss.sum, net.weight), (expected, weight)):
            parameter.grad = None
            given.backward()
        torch.testing.assert_close(net.weight.grad, weight.grad, rtol=0, atol=1e-6 * float(weight.grad.norm()))
        with torch.no_grad():
            for parameter in (net.weight, weight):
                parameter -= 2e-3 * parameter.grad
        raised += max(scalers) > 0.2
    torch.testing.assert_close(memory.centres.weight, torch.stack(centres), rtol=1e-6, atol=1e-6)
    assert [float(memory.norms.mean), float(memory.norms.std)] == pytest.approx(norms, rel=1e-6)
    assert raised > 10, "the term is felt"


def test_every_process_moves_its_centres_by_the_samples_of_all(teacher_file):
    """In the published code each of four GPUs kept a table of its own."""
    settings = {"margin": MARGINS[2], "cache_teacher": False}
    whole_task, whole = distil(teacher_file, **settings)
    whole.model.eval()
    given = batch(8)
    alone = whole_task.loss(whole.model, whole, given, at())
    slots, turn, sums = [None, None], threading.Barrier(2, timeout=60), [0.0, 0.0]
    parts_of = [distil(teacher_file, **settings) for _ in range(2)]

    def rank(number: int) -> None:
        def gather(x):
            slots[number] = x.detach()
            turn.wait()
            both = torch.cat(slots)
            turn.wait()
            return both

        task, networks = parts_of[number]
        networks.model.eval()
        mine = {key: value[4 * number : 4 * number + 4] for key, value in given.items()}
        sums[number] = float(task.loss(networks.model, networks, mine, at(gather=gather)).sum.detach())

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (_, one), (_, two) = parts_of
    for name, t in whole.memory.state_dict().items():
        assert torch.equal(one.memory.state_dict()[name], two.memory.state_dict()[name])
        torch.testing.assert_close(one.memory.state_dict()[name], t, rtol=1e-5, atol=1e-6)
    assert sum(sums) == pytest.approx(alone.sum.item(), rel=1e-4)


# Scoring


def test_a_picture_is_embedded_with_its_mirror_image():
    torch.manual_seed(0)
    task = Embed(net=NET)
    net = task.build(META, {}, 0).model.eval()
    given = batch()
    with torch.no_grad():
        rows = task.predict(net, given)
        plain, mirrored = net(given["image"]), net(given["image"][..., list(range(SIDE))[::-1]])
    torch.testing.assert_close(rows["embedding"], plain + mirrored, rtol=1e-4, atol=1e-5)
    norms = [(a + b) / 2 for a, b in zip(norms_of(plain.tolist()), norms_of(mirrored.tolist()), strict=True)]
    assert rows["norm"].tolist() == pytest.approx(norms, rel=1e-4)


def test_raw_pixels_are_the_reference_and_score_like_any_network(teacher_file):
    task, networks = distil(teacher_file)
    assert isinstance(networks.frozen["pixels"], Pixels) and networks.trusted == ("teacher",)
    given = batch(12)
    rows = task.predict(networks.frozen["pixels"], given)
    assert rows["embedding"].shape == (12, 3 * SIDE * SIDE)

    label = given["label"].tolist()
    pairs = [(i, j) for i in range(12) for j in range(i)]
    first, second = (torch.tensor(side).numpy() for side in zip(*pairs, strict=True))
    same = torch.tensor([label[i] == label[j] for i, j in pairs]).numpy()

    class Split:
        name, protocol = "few", Pairs(first, second, same)

    assert task.score(rows, Split()).metrics["auc"] == 1.0, "these people are told apart by their pixels"


# What cannot be


def test_student_and_teacher_must_give_embeddings_of_one_length():
    other = MobileFaceNetSpec(name="mobilefacenet", embedding=2 * DIM)
    with pytest.raises(ValueError, match=r"embedding is 16, teacher\.net\.embedding 8"):
        AdaDistill(student=other, teacher=Teacher(net=NET, weights="x"))


def test_the_geometry_margin_needs_adaface_and_moving_centres():
    for wrong in ({"margin": ArcFace()}, {"margin": AdaFace(), "method": "aml"}):
        with pytest.raises(ValueError, match="geometry needs"):
            AdaDistill(student=STUDENT, teacher=Teacher(net=NET, weights="x"), geometry=GeometryMargin(), **wrong)


@pytest.mark.parametrize("given", [{}, {"weights": "a", "recipe": "b"}])
def test_a_teacher_has_weights_or_a_recipe(given):
    with pytest.raises(ValueError, match="either weights or recipe"):
        Teacher(net=NET, **given)


def test_a_teacher_of_another_shape_is_refused_with_the_names_that_do_not_fit(teacher_file, tmp_path):
    wider = IResNetSpec(name="iresnet18", embedding=DIM, width=0.125)
    with pytest.raises(UserError, match=r"model\.safetensors: does not fit IResNet; .* of another shape: .*conv1"):
        distil(teacher_file, teacher=Teacher(net=wider, weights=str(teacher_file)))
    deeper = IResNetSpec(name="iresnet34", embedding=DIM, width=0.0625)
    with pytest.raises(UserError, match=r"\d+ missing: layer"):
        distil(teacher_file, teacher=Teacher(net=deeper, weights=str(teacher_file)))
    broken = safe_load.read_tensors(teacher_file)
    broken["net.conv1.weight"][0] = math.nan
    safe_load.write_tensors(tmp_path / "nan.safetensors", broken)
    with pytest.raises(UserError, match=r"not finite in conv1\.weight"):
        distil(tmp_path / "nan.safetensors")


# Embeddings of classes that are trained on


def embed(margin, **settings):
    torch.manual_seed(0)
    task = Embed(net=NET, margin=margin, **settings)
    return task, task.build(NAMED, {}, 0)


NAMED = DatasetInfo(CLASSES, (3, SIDE, SIDE), "toy", tuple("abcd"))


@pytest.mark.parametrize("margin", [NoMargin(), NoMargin(loss="bce"), *MARGINS], ids=lambda m: m.name)
def test_classes_are_predicted_with_the_scores_that_training_lowers_by_the_margin(margin):
    task, networks = embed(margin, classify=True, mirror=False)
    net = networks.model.eval()
    rows = task.predict(net, batch())
    embedding, scores = net(batch()["image"], with_scores=True)
    torch.testing.assert_close(rows["embedding"], embedding)
    scale = 1.0 if isinstance(margin, NoMargin) else margin.scale
    torch.testing.assert_close(rows["logits"], scale * scores)
    assert "pixels" not in networks.frozen  # raw pixels give no class


def test_the_mirror_image_has_its_say_in_embedding_and_scores():
    task, networks = embed(CosFace(m=0.2, scale=12.0, scale_eval=6.0), classify=True)
    net, shown = networks.model.eval(), batch()
    turned = {**shown, "image": shown["image"].flip(-1)}
    rows, other = task.predict(net, shown), task.predict(net, turned)
    for key in ("embedding", "logits", "norm"):
        torch.testing.assert_close(rows[key], other[key])
    plain = Embed(net=NET, margin=task.margin, classify=True, mirror=False).predict(net, shown)
    assert not torch.allclose(rows["logits"], plain["logits"])
    assert float(plain["logits"].abs().max()) <= 6.0


def test_without_a_mirror_an_embedding_is_that_of_the_picture_alone():
    task, networks = embed(MARGINS[0], mirror=False)
    net, shown = networks.model.eval(), batch()
    rows = task.predict(net, shown)
    torch.testing.assert_close(rows["embedding"], net(shown["image"]))
    torch.testing.assert_close(rows["norm"], rows["embedding"].norm(dim=1))


def test_a_class_of_double_weight_counts_as_if_it_stood_there_twice():
    task, networks = embed(NoMargin(), class_weights={"b": 2.0})
    even, _ = embed(NoMargin())
    net, shown = networks.model.eval(), batch(9)
    twice = torch.cat([torch.arange(9), torch.nonzero(shown["label"] == 1)[:, 0]])
    weighted = task.loss(net, networks, shown, at())
    repeated = even.loss(net, networks, {key: value[twice] for key, value in shown.items()}, at())
    torch.testing.assert_close(weighted.sum / weighted.weight, repeated.sum / repeated.weight)
    assert float(weighted.weight) == len(twice)


def test_a_margin_that_grows_makes_the_loss_grow_with_the_epochs():
    task, networks = embed(CosFace(m=0.4, scale=12.0, ramp_epochs=4))
    net = networks.model.eval()
    losses = [float(task.loss(net, networks, batch(), StepContext(0, e, 0.0, lambda x: x, contextlib.nullcontext)).sum)
              for e in range(6)]  # fmt: skip
    assert losses[0] < losses[1] < losses[2] < losses[3] < losses[4] == losses[5]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("face_teacher", "task.margin={name: none}"), "head.sharded with `margin: {name: none}`"),
        (("face_teacher", "task.classify=true"), "head.sharded with `classify: true`"),
        (("face_teacher", "optim.name=timm:lamb"), "optim.name is timm:lamb and task.head.sharded is true"),
        (("adadistill", "task.method=mse"), "head.sharded with `method: mse`"),
        (("adadistill", "task.margin={name: adaface}", "task.geometry={}"), "head.sharded with geometry"),
    ],
)
def test_a_divided_head_is_refused_with_what_needs_a_whole_one(words, said):
    recipe, *own = words
    with pytest.raises(UserError, match=re.escape(said)):
        load(RunRequest(ROOT / "recipes" / f"{recipe}.yaml", ["task.head={sharded: true}", *own]))
