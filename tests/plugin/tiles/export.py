"""Export networks of tiles."""

import torch

from trainkit.export import files
from trainkit.export.agreement import Exportable, Exporter, batch_forms, rows
from trainkit.inference.trained_model import load_network


def exporter(recipe):
    return Exporter(exportable, rebuilt)


def exportable(recipe, meta, weights, pictures):
    net = load_network(recipe, meta, weights)
    split = files.scored_split(recipe)
    chosen = files.spread(split.size, pictures)
    tiles = split.fetch(chosen, 0)["image"]
    with torch.no_grad():
        expected = {"logits": net(tiles)}
    return Exportable(
        net=net,
        outputs={"logits": "float32 (B, classes)"},
        samples=rows(tiles, expected),
        checked_on=(split.name, chosen.tolist()),
        about={
            "takes": "tiles",
            "input": "tiles: float32 (B, 3, 8, 8)",
            "names": list(meta.class_names),
            "normalised": "not at all",
            "shape": [1, *meta.shape],
        },
        forms=batch_forms(net, tiles, expected),
        network="Net",
    )


def rebuilt(recipe, meta, said, file):
    return load_network(recipe, meta, file)
