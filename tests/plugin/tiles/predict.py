"""Predict the classes of tiles."""

from pathlib import Path

import numpy as np
import torch

from trainkit.inference.output_folder import Predicted
from trainkit.inference.trained_model import rebuilt


def predict(asked):
    files = sorted(Path(asked.source).glob("*.npy"))
    with rebuilt(asked.folder, asked.recipe, asked.meta) as made, torch.no_grad():
        batch = made.runtime.to_device({"image": torch.from_numpy(np.stack([np.load(file) for file in files]))})
        best = asked.recipe.task.predict(made.net, batch)["logits"].argmax(1).tolist()
    rows = [f"{file.stem},{asked.meta.class_names[label]}\n" for file, label in zip(files, best, strict=True)]
    asked.out.write_text("id,class\n" + "".join(rows))
    return Predicted((asked.out,), (), (), asked.meta.class_names, made.weights, len(rows), ("id", "class"))
