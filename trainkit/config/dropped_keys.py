"""Keys of recipes that are no more: stored recipes that hold them at their defaults are read, with equal digests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from trainkit.config.yaml_reader import KeyPath, Tree


class Dropped(NamedTuple):
    """A key that is no more."""

    default: Tree
    """The default that it had."""
    instead: str
    """What to use instead."""
    hashed: bool = True
    """Whether digests of recipes covered it."""


_ROUNDED = "remove it: embeddings and centres are multiplied in float32"
_SHORT = Dropped("repeat", "remove it: records of people with too few come again in a draw")
_OVERLAP = "weight dice and ce, or class_weights"

DROPPED_KEYS: dict[tuple[str, str], dict[str, Dropped]] = {
    ("", ""): {"time_to": Dropped({}, "trainkit.find_run(RUN).metrics has every score by its step", hashed=False)},
    ("data", "volumes"): {
        "channels": Dropped(None, "remove it: name channels in dataset.json (channel_names)", hashed=False),
        "cache": Dropped("auto", "remove it: prepared volumes are memory-mapped, and a patch takes 1.6 ms"),
        "clinical": Dropped(None, "join tables/<evaluation>_per_case_last.csv with your table by the column patient"),
    },
    ("data.augment", "volumes"): {"elastic": Dropped(None, "remove it: rotate and scale change the shape")},
    ("data", "scenes"): {
        "store": Dropped("auto", "remove it: images of one size below 2 GB are stored as pixels"),
        "columns": Dropped({}, "save images and masks as files, with a list of image,label a line", hashed=False),
    },
    ("data.distance", "scenes"): {"ignored": Dropped("no", "remove it: borders with unlabelled pixels are none")},
    ("task", "adadistill"): {
        "products": Dropped("float32", _ROUNDED),
        "matmul_dtype": Dropped("float32", _ROUNDED, hashed=False),  # the later name of `products`
        "duplicates": Dropped("last", "remove it: of several samples of a class the last one moves its centre"),
    },
    ("data", "people"): {
        "queries": Dropped("all", "remove it: every combination of the modalities is asked for"),
        "same_camera": Dropped("ignore", "remove it, or leave out the column `camera`", hashed=False),
    },
    ("data.sampler", "pk"): {"short": _SHORT},
    ("data.sampler", "modal_pk"): {
        "short": _SHORT,
        "ensure_rgb": Dropped(True, "use the sampler pk, which takes records of any modality"),
        "prefer_complete": Dropped(True, "remove it: one record of each modality is taken before a second of any"),
        "half": Dropped(False, "remove it: one of the K records is RGB, the others are of other modalities"),
    },
    ("data.sampler", "pairs"): {"short": _SHORT, "epoch": Dropped("anchors", "set batches_per_epoch")},
    ("task.net", "classify"): {
        "frozen": Dropped(False, "use probe, with tune: linear and a length of 0 steps", hashed=False)
    },
    ("task.net", "embed"): {
        "frozen": Dropped(False, "train the whole network, at a lower rate by optim.groups", hashed=False)
    },
    ("task", "reid"): {"circle": Dropped(None, "use triplet or contrast")},
    ("task.net.text", "reid"): {
        "dropout": Dropped(0.0, "use data.token_dropout"),
        "lora": Dropped(None, "train the text encoder whole, at a lower rate by optim.groups"),
        "tune": Dropped("all", "train the text encoder whole, at a lower rate by optim.groups"),
    },
    ("task.net.lora", "reid"): {
        "match": Dropped(
            ["*.attn.qkv", "*.attn.proj", "*.mlp.fc1", "*.mlp.fc2"], "remove it: set layers, or lr_scale of a group"
        )
    },
    ("task.net.fusion", "reid"): {"dropout": Dropped(0.0, "use optim.weight_decay")},
    ("task.points", "segment2d"): {"coarse_each_layer": Dropped(False, "remove it")},
    ("task.objective", "segment2d"): {
        "boundary": Dropped(0.0, "use near, which weighs pixels near boundaries"),
        "boundary_width": Dropped(3, "remove it"),
        "boundary_reach": Dropped(5, "remove it"),
    },
    ("task.objective", "segment3d"): {
        "focal": Dropped(0.0, _OVERLAP),
        "tversky": Dropped(0.0, _OVERLAP),
        "focal_gamma": Dropped(2.0, _OVERLAP),
        "tversky_alpha": Dropped(0.3, _OVERLAP),
        "tversky_beta": Dropped(0.7, _OVERLAP),
    },
    ("promote", ""): {
        "max_slower": Dropped(0.1, "compare the throughput of runs with trainkit compare", hashed=False),
        "metric": Dropped(None, "best.metric decides, by whose weights a run is promoted", hashed=False),
    },
    ("train", ""): {
        "spikes": Dropped(None, "remove it, or set null: losses that jump are not looked for", hashed=False),
        "replay": Dropped(None, "remove it, or set null: steps are not computed twice", hashed=False),
    },
}
"""(dotted block, `name` of it, or of the task or the data, empty where it has none) to the keys that it had."""

DROPPED_VALUES: dict[tuple[str, str], tuple[Tree, str]] = {
    ("data", "fit"): ("align", "align the faces before, or use crop"),
    ("train", "nonfinite"): ("rollback", "use skip, which leaves such steps out without going back"),
}
"""(block, key) to a value that it had, for which its default stands now, and what to use instead."""


def drop(tree: Tree) -> list[tuple[KeyPath, str, str]]:
    """Take dropped keys and values out of a recipe's tree, in place. Return the paths of those that had another value
    than their default, which nothing stands for now, what is wrong with each, and what to use instead."""
    lost: list[tuple[KeyPath, str, str]] = []
    for path, block, keys in _blocks(tree):
        for key, dropped in keys.items():
            if key in block and block.pop(key) != dropped.default:
                lost.append(((*path, key), "is no longer a key", dropped.instead))
    for (name, key), (value, instead) in DROPPED_VALUES.items():
        block = tree.get(name) if isinstance(tree, dict) else None
        if isinstance(block, dict) and block.get(key) == value:
            del block[key]
            lost.append(((name, key), f"{value} is no longer a value", instead))
    return lost


def restore(tree: Tree) -> Tree:
    """Give a resolved recipe's tree its dropped keys, in place, so that its digest is that of before."""
    for _, block, keys in _blocks(tree):
        block |= {key: dropped.default for key, dropped in keys.items() if dropped.hashed}
    return tree


def _blocks(tree: Tree) -> Iterator[tuple[tuple[str, ...], dict[str, Tree], Mapping[str, Dropped]]]:
    """Yield the blocks of a recipe that had such keys: path, block, keys."""
    for (dotted, name), keys in DROPPED_KEYS.items():
        path = tuple(dotted.split(".")) if dotted else ()
        above = [tree]
        for word in path:
            below = above[-1]
            above.append(below.get(word) if isinstance(below, dict) else None)
        block, named = above[-1], [one.get("name") for one in above[1:] if isinstance(one, dict)]
        if isinstance(block, dict) and (not name or name in named):
            yield path, block, keys
