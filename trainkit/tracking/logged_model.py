"""Write the files by which MLflow loads and serves logged weights: MLmodel, requirements, input example.

The model is a pyfunc whose loader module is named here and lies above, in `trainkit.inference`. Nothing is pickled.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trainkit.files import write_aside

LOADER = "trainkit.inference.mlflow_model"
"""Module whose `_load_pyfunc` MLflow calls with the folder of the model."""
ABOUT = "trainkit.json"
"""File of the folder from which that module makes the network again."""
MLMODEL, REQUIREMENTS, PYTHON, EXAMPLE, SERVED = (
    "MLmodel", "requirements.txt", "python_env.yaml", "input_example.json", "serving_input_example.json",
)  # fmt: skip
# A reader of a folder that is being written finds all that MLmodel needs beside it.
FILES = (ABOUT, REQUIREMENTS, PYTHON, EXAMPLE, SERVED, MLMODEL)


@dataclass(frozen=True, kw_only=True)
class Described:
    """A description of weights for MLflow. All of it is JSON, since it waits in the desired state of a run."""

    about: Mapping[str, Any]
    """Content of `ABOUT`."""
    inputs: Sequence[Mapping[str, Any]]
    """Columns of the signature, as MLflow's `ModelSignature.from_dict` reads them."""
    outputs: Sequence[Mapping[str, Any]] | None
    """None where they are not known."""
    params: Sequence[Mapping[str, Any]]
    example: Mapping[str, Sequence[Any]]
    """Input example: `columns` and `data`, with bytes as base64."""
    requirements: Sequence[str]
    metadata: Mapping[str, Any]


def write_files(
    folder: Path, described: Mapping[str, Any], *, size: int, name: str, model_id: str, run_id: str
) -> list[Path]:
    """Write the files that make weights of `size` bytes a pyfunc, to lie beside them; return them, `MLmodel` last.

    `described` has the fields of `Described`.
    """
    from mlflow.models import Model, ModelSignature

    words = {key: json.dumps(described[key]) for key in ("inputs", "outputs", "params") if described[key]}
    model = Model(
        artifact_path=name,
        run_id=run_id,
        model_id=model_id,
        signature=ModelSignature.from_dict(words),
        metadata=dict(described["metadata"]),
        model_size_bytes=size,
        saved_input_example_info={
            "artifact_path": EXAMPLE,
            "serving_input_path": SERVED,
            "type": "dataframe",
            "pandas_orient": "split",
        },
    )
    python = platform.python_version()
    model.add_flavor("python_function", loader_module=LOADER, python_version=python, env={"virtualenv": PYTHON})
    environment = {"python": python, "build_dependencies": ["pip"], "dependencies": [f"-r {REQUIREMENTS}"]}
    for file, text in {
        ABOUT: json.dumps(described["about"], indent=1) + "\n",
        REQUIREMENTS: "".join(f"{line}\n" for line in described["requirements"]),
        PYTHON: yaml.safe_dump(environment, sort_keys=False),
        EXAMPLE: json.dumps(described["example"]),
        SERVED: json.dumps({"dataframe_split": described["example"]}),
        MLMODEL: model.to_yaml(),
    }.items():
        write_aside(folder / file, text)
    return [folder / file for file in FILES]
