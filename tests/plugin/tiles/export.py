"""Export networks of tiles."""

import torch

from trainkit.export import files
from trainkit.export.agreement import Exportable, Exporter, NamedModule, by_name, compare_rows, write_onnx_of_rows
from trainkit.inference.trained_model import load_network


class Deployed(NamedModule):
    outputs = ("logits",)

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, tiles):
        return (self.net(tiles),)


def exporter(recipe):
    return Exporter(exportable, rebuilt)


def exportable(recipe, meta, run, weights, formats, pictures):
    net = load_network(recipe, meta, weights)
    split, deployed = files.scored_split(recipe), Deployed(net)
    rows = files.spread(split.size, pictures)
    tiles = split.fetch(rows, 0)["image"]
    with torch.no_grad():
        expected = {"logits": net(tiles)}
    return Exportable(
        net=net,
        about={
            "takes": "tiles",
            "input": "tiles: float32 (B, 3, 8, 8)",
            "output": "logits: float32 (B, classes)",
            "names": list(meta.class_names),
            "normalised": "not at all",
            "shape": [1, *meta.shape],
        },
        checked_on=(split.name, rows.tolist()),
        check=lambda file: compare_rows(file.name, by_name(rebuilt(recipe, meta, {}, file)), tiles, expected),
        write_onnx=lambda file, about: write_onnx_of_rows(file, deployed, "Net", tiles, expected, about),
    )


def rebuilt(recipe, meta, said, file):
    return Deployed(load_network(recipe, meta, file))
