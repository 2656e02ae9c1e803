"""Write the model card of an exported network: architecture, usage, metrics, data and licences.

All of it is read from the run. Unknown facts, such as the licence of the data, are marked as unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from trainkit.config.schema import Recipe
from trainkit.data.split import named_sets
from trainkit.export.agreement import Agreement
from trainkit.export.files import ONNX, TENSORS
from trainkit.files import Json
from trainkit.terminal import aligned, numbers
from trainkit.tracking import journal
from trainkit.tracking.markdown import block, code, plain
from trainkit.tracking.run_folder import RunFolder

_PIPELINES = dict.fromkeys(("segment2d", "segment3d"), "image-segmentation") | {"classify": "image-classification"}
"""Pipeline tag of the Hugging Face hub by task; other tasks are feature extraction."""


def card(
    folder: RunFolder,
    recipe: Recipe,
    file: Path,
    about: Mapping[str, Json],
    agreements: Mapping[str, Agreement],
) -> str:
    """Write the model card in Markdown: `file` are the weights, `about` is the content of model.json.

    `agreements` describe, by file name, the difference of each file from the trained network.
    """
    kind, made = type(recipe.task).__name__.lower(), about["made_with"]["trainkit"]
    parts = [
        _front(kind),
        f"# {plain(recipe.name)}",
        f"Weights {code(about['weights'])} of run {code(folder.name)}, exported with trainkit {plain(made)}.",
        *_described(about),
        "## Usage",
        *_loading(about, agreements),
        "## Metrics",
        *_scores(folder, recipe, file),
        "## Data and licences",
        "\n".join(f"- {line}" for line in licences(recipe)),
        f"SHA-256 of the training data: {code(about['data']['digest'])}.",
        "## Verification",
        f"Each file was compared with the trained network on real samples of {code(about['data']['checked_on'])}, in "
        "float32 on a CPU:",
        "\n".join(f"- {plain(name)}: {plain(said)}" for name, said in agreements.items()),
        *(["\n".join(f"- {plain(note)}" for note in about["notes"])] if about["notes"] else []),
        "## Recipe",
        block(about["recipe"].rstrip(), "yaml"),
    ]
    return "\n\n".join(parts) + "\n"


def licences(recipe: Recipe) -> Iterator[str]:
    """List the data and the initial weights, whose licences are for the reader to find out."""
    for name, text in named_sets(recipe.data).items():
        what = "training data" if name == "train" else f"evaluation data ({name})"
        synthetic = text == "sample" or str(text).startswith("sample:")
        said = "synthetic data of trainkit without third-party images" if synthetic else "licence unknown"
        if text != "held_out":
            yield f"{plain(what)}: {code(text)}; {said}"
    for name, source in recipe.task.required_weights().items():
        yield f"initial weights ({name}): {code(source.recipe or source.weights or '')}; licence unknown"


def scores_of(folder: RunFolder, recipe: Recipe, weights: Path) -> dict[str, float]:
    """Return all metrics at the step of a checkpoint's weights, by names as in MLflow: `val/top1`, `val/ema/top1`."""
    step = _step(weights)
    history = journal.read(folder.journal) if folder.journal.is_file() else journal.History()
    found = {
        name: [point.value for point in points if point.step == step]
        for name, points in history.metrics.items()
        if name.split("/")[0] in recipe.evaluations
    }
    return {name: values[-1] for name, values in found.items() if values}


def _front(kind: str) -> str:
    """Write the front matter that the hub reads."""
    lines = ["---", "license: unknown"]
    lines += [f"pipeline_tag: {_PIPELINES.get(kind, 'image-feature-extraction')}", "tags:", "- trainkit", "---"]
    return "\n".join(lines)


def _described(about: Mapping[str, Json]) -> Iterator[str]:
    """Describe the network, its input and output, and its classes."""
    lines = [f"- Network: {plain(about['network'])}"] if "network" in about else []
    lines.append(f"- Input: {plain(about['input'])}; normalisation {plain(about['normalised'])}")
    lines += [f"- Preparation of a file: {plain(about['fit'])}"] if "fit" in about else []
    yield "\n".join([*lines, f"- Output: {plain(about['output'])}"])
    if names := about["names"]:
        listed = ", ".join(map(code, names[:50]))
        yield f"{len(names)} classes: {listed}" + (", ... (all in model.json)" if len(names) > 50 else "")


def _loading(about: Mapping[str, Json], agreements: Mapping[str, Agreement]) -> Iterator[str]:
    """Write programs that run in the folder of the card, with a file image.jpg."""
    yield "Run in this folder, with a file `image.jpg`:" if "takes" not in about else "Run in this folder:"
    if ONNX in agreements:
        yield f"With ONNX Runtime:\n\n```python\n{_by_onnx(about)}\n```"
    if TENSORS in agreements:
        takes = about.get("takes", "pixels")
        yield (
            "With trainkit, from `model.safetensors` and `model.json`:\n\n```python\n"
            "from trainkit.export import export\n\n"
            f'net = export.load(".")  # a torch module; call it with a tensor of {takes}\n```'
        )


def _by_onnx(about: Mapping[str, Json]) -> str:
    outputs = list(about.get("outputs", ["logits"]))
    found = ", ".join(outputs) + ("," if len(outputs) == 1 else "")
    if "takes" in about:
        return (
            "import numpy, onnxruntime\n\n"
            'net = onnxruntime.InferenceSession("model.onnx")\n'
            f"{about['takes']} = numpy.zeros({tuple(about['shape'])}, numpy.float32)  # prepared as described above\n"
            f'({found}) = net.run(None, {{"{about["takes"]}": {about["takes"]}}})'
        )
    height, width = about["size"]
    fitted = f'Image.open("image.jpg").convert("RGB").resize(({width}, {height}))'
    share = about.get("crop_pct", 1.0)
    if about.get("crop_mode") == "center":
        cut = f", bleed={(1 - share) / 2:.6g}" if share < 1 else ""
        fitted = f'ImageOps.fit(Image.open("image.jpg").convert("RGB"), ({width}, {height}){cut})'
    said = "  # other sizes work too" if about.get("sides") == "any" else ""
    lines = [
        "import json\n",
        "import numpy, onnxruntime\nfrom PIL import Image, ImageOps\n",
        'net = onnxruntime.InferenceSession("model.onnx")',
        f"image = {fitted}{said}",
        "pixels = numpy.asarray(image, numpy.float32).transpose(2, 0, 1)[None]  # RGB, 0 to 255",
        f'({found}) = net.run(None, {{"pixels": pixels}})',
        'names = json.loads(net.get_modelmeta().custom_metadata_map["names"])',
        "print(names[logits[0].argmax()])",
    ]
    if "sides" in about:  # semantic segmentation
        lines[-1] = "print([names[k] for k in numpy.unique(logits[0].argmax(0))])"
    return "\n".join(lines if about["names"] else lines[1:-2])


def _scores(folder: RunFolder, recipe: Recipe, file: Path) -> Iterator[str]:
    """Write a table per evaluation of the exported weights, with intervals if available."""
    found, seen = scores_of(folder, recipe, file), False
    for evaluation in recipe.evaluations:
        head = f"{evaluation}/ema" if file.stem == "ema" else evaluation
        own = {name.rpartition("/")[2]: value for name, value in found.items() if name.rpartition("/")[0] == head}
        whole = {  # without metrics per class and ends of intervals
            name: value for name, value in own.items() if "." not in name and not name.endswith(("_low", "_high"))
        }
        if not whole:
            continue
        ends = {name: (own[f"{name}_low"], own[f"{name}_high"]) for name in whole if f"{name}_low" in own}
        rows = [["metric", "value", "95 % interval"]]
        for name, value in whole.items():
            words = numbers([value, *ends.get(name, ())])
            rows.append([name, words[0], " to ".join(words[1:]) or "-"])
        text = block("\n".join(aligned(rows)))
        weights = ", EMA weights" if file.stem == "ema" else ""
        yield f"{code(evaluation)} at step {_step(file):,}{weights}.\n\n{text}"
        seen = True
    if not seen:
        yield "None: these weights were not evaluated."


def _step(file: Path) -> int:
    word = file.parent.name.removeprefix("step-")
    return int(word) if word.isdecimal() else 0
