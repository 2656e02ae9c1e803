"""The plug-in of docs/how-to/extend.md, as it stands there."""

import re
import shlex
import sys

import pytest
from PIL import Image
from runs import ROOT, Ran, newest

from trainkit.analysis.compare import compare
from trainkit.config.run_request import RunRequest
from trainkit.data import kinds
from trainkit.experiments.launch import launch
from trainkit.inference.predict import predict
from trainkit.tracking.store import Store

pytestmark = pytest.mark.usefixtures("store")
PAGE = (ROOT / "docs" / "how-to" / "extend.md").read_text(encoding="utf-8")


@pytest.fixture
def dots(tmp_path, monkeypatch):
    monkeypatch.setattr(kinds, "KINDS", dict(kinds.KINDS))
    for language, name in (("python", "dots.py"), ("yaml", "dots.yaml")):
        code = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
        assert code
        (tmp_path / name).write_text("".join(code))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "dots.yaml"
    sys.modules.pop("dots", None)


def trained(recipe, *words, stopping=lambda: False, resume=None) -> Ran:
    return Ran(launch(RunRequest(recipe, words, ("dots",), resume), stopping), newest())


def test_the_plugin_of_the_page_learns(dots):
    ran = trained(dots, "log={system_every: null}")
    assert ran.code == 0 and ran.folder.info().status == "FINISHED"
    assert ran.series("val/off")[-1] < 0.6 * ran.series("val/off_usual")[-1]
    assert ran.last.state["best"][0]["value"] == min(ran.series("val/off")), "its task declares that lower is better"
    other = trained(dots, "seed=1", "train.length=1 epochs", "log={system_every: null}")
    scores = compare(Store.locate(), [ran.folder, other.folder]).scores
    found = {score.metric: (score.lower_is_better, score.verdict) for score in scores if score.primary}
    assert found == {"off": (True, "worse")}


def test_a_shipped_task_learns_from_its_data(dots):
    (line,) = re.findall(r"^PYTHONPATH=. trainkit run (dots.*)$", PAGE, re.MULTILINE)
    words = [word for word in shlex.split(line) if re.match(r"[\w.]+=", word)]
    ran = trained(dots, *words, "train.length=4 steps", "log={system_every: null}")
    assert ran.code == 0 and 0 < ran.series("val/top5")[-1] <= 1


def test_its_kind_of_data_is_predicted(dots, tmp_path):
    trained(dots, "log={system_every: null}")
    drawn = sys.modules["dots"].Drawn("new", 20, 3, 0)
    (tmp_path / "pictures").mkdir()
    for row, image in enumerate(drawn.fetch(range(20), 0)["image"]):
        Image.fromarray((255 * image[0]).byte().numpy()).save(tmp_path / "pictures" / f"{row:02}.png")
    done = predict(newest().name, tmp_path / "pictures", tmp_path / "counts.csv", plugins=("dots",))
    head, *rows = done.written[0].read_text().splitlines()
    counts = [float(row.partition(",")[2]) for row in rows]
    assert head == "id,count" and done.rows == 20 and abs(drawn.counts - counts).mean() < 1.5


def test_its_mistakes_are_named_in_the_recipe(dots):
    with pytest.raises(Exception, match="samples and test are 1 or more"):
        trained(dots, "data.samples=0")
