"""The page beside an exported network: scores of its own weights, what is known of licences, how it is loaded."""

from __future__ import annotations

import re
from types import SimpleNamespace

from trainkit.errors import visible
from trainkit.export import model_card
from trainkit.interfaces import Source
from trainkit.tracking import lineage
from trainkit.tracking.journal import Journal
from trainkit.tracking.markdown import plain
from trainkit.tracking.run_folder import RunFolder

ABOUT = {
    "input": "pixels: RGB 0 .. 255, float32 (B, 3, 32, 64)",
    "output": "logits: float32 (B, 2)",
    "names": ["cat", "dog"],
    "normalised": "inside",
    "fit": "squeezed",
    "size": [32, 64],
    "weights": "checkpoints/step-000000020/ema.safetensors",
    "data": {"digest": "cd" * 32, "checked_on": "val"},
    "made_with": {"trainkit": "1.2.3"},
    "notes": ["takes one image at a time"],
    "recipe": "name: pets\n",
}


class Classify:
    """A task of this name, which began with timm's weights."""

    def __init__(self, **sources: Source):
        self._sources = sources

    def required_weights(self):
        return self._sources


def recipe(train: str = "pets", evaluate=None, **sources: Source):
    data = SimpleNamespace(train=train, evaluate=evaluate or {})
    return SimpleNamespace(name="pets", task=Classify(**sources), data=data, evaluations={"val": None})


def folder(tmp_path) -> RunFolder:
    made = RunFolder(tmp_path / "pets-s0")
    made.path.mkdir()
    written = Journal(made.journal)
    for at, top1 in ((10, 0.5), (20, 0.75)):
        written.append(at, {"val/top1": top1, "val/ema/top1": top1 + 0.125, "val/f1.cat": 0.1, "train/loss": 1.0})
        written.append(at, {"val/ema/miou": top1, "val/ema/miou_low": top1 - 0.25, "val/ema/miou_high": top1 + 0.2})
    written.append(30, {"val/ema/top1": 0.1, "validation/top1": 1.0})
    written.close()
    return made


def test_scores_are_those_of_the_weights_that_were_exported(tmp_path):
    run = folder(tmp_path)
    text = model_card.card(run, recipe(), run.path / ABOUT["weights"], ABOUT, {"model.onnx": "8 images, all the same"})
    (table,) = [part for part in text.split("```") if "95 % interval" in part]
    rows = {line.split()[0]: line.split()[1:] for line in table.strip().splitlines()[1:]}
    assert rows == {"top1": ["0.8750", "-"], "miou": ["0.7500", "0.5000", "to", "0.9500"]}
    assert "at step 20, EMA weights" in text
    plain = model_card.card(run, recipe(), run.path / "checkpoints/step-000000010/model.safetensors", ABOUT, {})
    assert "0.5000" in plain and "0.6250" not in plain and "EMA" not in plain


HOSTILE = (
    "<img src=x onerror=alert(1)>", "</code><script>alert(1)</script>", "![x](http://evil.example/x.png)",
    "[here](javascript:alert(1))", "`<b>", "``` <b>", "``", "`", " ", "*a* _b_ ~~c~~", "# a\n## b", "a\n\n<b>c",
    "a | b", "\x1b[31mred\x1b]8;;http://evil.example\x07", "\u202ecod", "<http://evil.example>", "&lt;b&gt;",
    "\\`<b>", "- a\n- b", "\\", "x\\", "a ` b `` c", "$x$", "n01_fox_",
)  # fmt: skip
_PARTS = re.compile(
    r"(?ms) ^(`{3,})\w*\n(?P<block>.*?)\n\1$ | (?<!`)(`+)(?!`) (?P<span>.*?) (?<!`)\3(?!`)"
    r"| \\(?P<escaped>[!-/:-@\[-`{-~]) | (?P<other>.)",
    re.VERBOSE,
)


def shown(page: str) -> tuple[str, str]:
    """What a reader sees of a page, and the characters in it that may be markup, by the rules of CommonMark."""
    words, markup = "", ""
    for part in _PARTS.finditer(page):
        span = part["span"] or ""
        if span.strip() and span[0] == span[-1] == " ":
            span = span[1:-1]
        words += (part["block"] or "") + span + (part["escaped"] or "") + (part["other"] or "")
        markup += part["other"] if part["other"] and part["other"] in "\\`*[]<>&|~$" else ""
    return " ".join(words.split()), markup


def test_names_of_others_are_shown_on_the_page_as_they_are(tmp_path):
    run = folder(tmp_path)
    agreed = {"model.onnx": "near"}
    quiet = shown(model_card.card(run, recipe(), run.path / ABOUT["weights"], ABOUT, agreed))[1]
    for name in HOSTILE:
        given = {"names": [name, "dog"], "notes": [name], "network": name, "fit": name, "recipe": f"name: {name}\n"}
        given |= {"data": {"digest": "cd" * 32, "checked_on": name}}
        named = recipe(name, evaluate={"val": name}, net=Source(weights=name))
        text = model_card.card(run, named, run.path / ABOUT["weights"], ABOUT | given, agreed)
        words, markup = shown(text)
        assert markup == quiet, name
        seen = visible(" ".join(name.split()))
        assert words.count(seen) >= 7 and f"2 classes: {seen}, dog" in words, name
        assert not set(text) & {"\x1b", "\x07", "\u202e"}


def test_lines_that_mlflow_shows_as_markdown_are_shown_as_they_are():
    for name in HOSTILE:
        seen = visible(" ".join(name.split()))
        assert shown(f"before {plain(name)} after") == (" ".join(f"before {seen} after".split()), ""), name
        assert not plain(name).startswith(("#", "-", "+", "="))
        assert all(line[:4] == "    " or not line for line in lineage.as_it_stands(name.splitlines()).split("\n"))
        assert "\x1b" not in lineage.as_it_stands([name])
    assert plain("recipes/face_teacher.yaml 1.0 (a-b)") == "recipes/face_teacher.yaml 1.0 (a-b)"


def test_a_run_that_was_never_scored_says_so(tmp_path):
    text = model_card.card(RunFolder(tmp_path / "none"), recipe(), tmp_path / "weights.safetensors", ABOUT, {})
    assert "None: these weights were not evaluated." in text


def test_the_page_says_how_each_file_is_loaded_and_nothing_of_those_that_are_not_there(tmp_path):
    run = folder(tmp_path)
    agreed = {"model.safetensors": "same", "model.onnx": "near"}
    text = model_card.card(run, recipe(), run.path / ABOUT["weights"], ABOUT, agreed)
    assert text.startswith("---\nlicense: unknown\npipeline_tag: image-classification\n")
    assert 'export.load(".")' in text
    assert '.convert("RGB").resize((64, 32))' in text
    cut = ABOUT | {"crop_mode": "center", "crop_pct": 0.875, "outputs": {"logits": ""}}
    assert '.convert("RGB"), (64, 32), bleed=0.0625)' in model_card.card(
        run, recipe(), run.path / "x.safetensors", cut, agreed
    )
    for part in (
        "2 classes: `cat`, `dog`",
        "name: pets",
        "cd" * 32,
        "takes one image at a time",
        "- model.onnx: near",
    ):
        assert part in text
    alone = model_card.card(run, recipe(), run.path / ABOUT["weights"], ABOUT, {"model.onnx": "near"})
    assert "export.load" not in alone


def test_data_and_weights_are_listed_and_their_licences_are_not_guessed():
    found = list(
        model_card.licences(
            recipe(
                "hf://owner/pets@main#train",
                {"val": "sample:objects", "held": "held_out"},
                net=Source(weights="timm:resnet18.a1_in1k"),
                teacher=Source(recipe="teacher.yaml"),
            )
        )
    )
    assert found == [
        "training data: `hf://owner/pets@main#train`; licence unknown",
        "evaluation data (val): `sample:objects`; synthetic data of trainkit without third-party images",
        "initial weights (net): `timm:resnet18.a1_in1k`; licence unknown",
        "initial weights (teacher): `teacher.yaml`; licence unknown",
    ]
