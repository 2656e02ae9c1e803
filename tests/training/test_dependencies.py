"""What `weights:` may name: files, runs, folders, timm's weights; and what is said where there are none."""

from __future__ import annotations

import pytest
import torch
from runs import PLUGIN, ROOT, own_store, run

from trainkit.checkpoint import safe_load
from trainkit.errors import UserError
from trainkit.interfaces import DatasetInfo
from trainkit.models.network_specs import Network
from trainkit.models.timm_classifier import timm_network
from trainkit.tasks.classify import Classify
from trainkit.tracking.store import Store
from trainkit.training import dependencies
from trainkit.training.best import best_weights

WHERE = "task.net.weights"
META = DatasetInfo(3, (3, 32, 32), "toy", ("a", "b", "c"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, database):
    """A run of the toy recipe, in a store of its own."""
    with own_store(tmp_path_factory.mktemp("whole"), database):
        yield run()


@pytest.fixture
def store(whole, monkeypatch):
    monkeypatch.syspath_prepend(PLUGIN)
    monkeypatch.setenv("TRAINKIT_STORE", str(whole.folder.path.parents[1]))
    return Store.locate()


def test_a_run_is_found_by_its_name_alone_by_a_beginning_and_by_its_folder(whole, store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    best, name = best_weights(whole.folder.path), whole.folder.name
    checkpoint = whole.folder.path / "checkpoints" / f"step-{whole.steps[-1]:09d}"
    for word in (f"run:{name}", name, name[:-2], str(whole.folder.path)):
        assert dependencies.find(word, store, WHERE) == best
        assert dependencies.missing(word, store, WHERE) == ""
    assert dependencies.find(str(checkpoint), store, WHERE) == checkpoint / "model.safetensors"
    (tmp_path / name).write_bytes(b"")  # a run of that name comes first
    assert dependencies.find(name, store, WHERE) == best
    assert dependencies.find(f"./{name}", store, WHERE) == tmp_path / name


def test_files_and_exported_folders_begin_at_the_folder_of_data(store, tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINKIT_DATA", str(tmp_path))
    (tmp_path / "out").mkdir()
    file = tmp_path / "out" / "model.safetensors"
    safe_load.write_tensors(file, {"a": torch.zeros(1)})
    assert dependencies.find("out/model.safetensors", store, WHERE) == file
    assert dependencies.find("out", store, WHERE) == file
    safe_load.write_tensors(tmp_path / "out" / "other.safetensors", {"a": torch.zeros(1)})
    with pytest.raises(UserError, match="2 safetensors files; expected a folder of a run, a checkpoint"):
        dependencies.find("out", store, WHERE)


@pytest.mark.parametrize(
    "word, said",
    [
        ("gone.safetensors", r"task\.net\.weights: \S*gone\.safetensors does not exist"),
        ("pretrained/gone", r"pretrained/gone does not exist; expected a file, run:NAME"),
        ("nobody", "nobody does not exist, and as a run not in .*the nearest are toy"),
        ("run:nobody", "run 'nobody': not in"),
        ("timm:resnet18.a1_in1k", r"`trainkit download my\.yaml`, or use a file"),
        ("timm:resnet18.a1_in1", "resnet18.a1_in1k"),
    ],
)
def test_weights_that_are_not_there_are_named_with_what_to_do(store, tmp_path, monkeypatch, word, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=said):
        dependencies.find(word, store, WHERE, "my.yaml")


def test_a_file_of_another_network_is_refused_with_the_names_that_differ(tmp_path):
    torch.manual_seed(0)
    safe_load.write_tensors(
        tmp_path / "m.safetensors", timm_network("test_convnext3", META.shape, {}, 7, "n").state_dict()
    )
    task = Classify(net=Network(model="test_resnet", weights="m.safetensors"))
    with pytest.raises(UserError, match=r"missing: conv1\.0\.weight.*unexpected: head\.fc\.bias"):
        task.build(META, {"net": tmp_path / "m.safetensors"}, 0)


def test_a_file_without_a_last_layer_fills_the_rest_and_says_so(tmp_path):
    net = timm_network("test_resnet", META.shape, {}, 0, "n")
    safe_load.write_tensors(tmp_path / "m.safetensors", net.state_dict())
    networks = Classify(net=Network(model="test_resnet", weights="m")).build(
        META, {"net": tmp_path / "m.safetensors"}, 0
    )
    assert torch.equal(networks.model.net.conv1[0].weight, net.conv1[0].weight)
    said = "no last layer (fc); a new one for 3 classes is trained"
    assert networks.notes == (f"{tmp_path}/m.safetensors: {said}",)


def test_check_names_weights_that_run_would_not_find(store, tmp_path, monkeypatch):
    from trainkit.config.run_request import RunRequest
    from trainkit.experiments import recipe_check

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for word, said in (("run:nobody", "run 'nobody': not in"), ("timm:resnet18.a1_in1k", "`trainkit download ")):
        request = RunRequest(ROOT / "recipes" / "convnext.yaml", (f"task.net={{model: resnet18, weights: '{word}'}}",))
        assert said in recipe_check.check(request)
