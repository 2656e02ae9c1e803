"""Sources of volumes: each layout of folders becomes a list of cases, an image and its label map each.

| layout                                          | splits                                   | names of labels from |
|-------------------------------------------------|------------------------------------------|----------------------|
| `{train,val}/{image,label}/<patient>.nii.gz`    | TOM500's: `#train`, `#val`, any folder   | `names.json`, if any |
| `dataset.json`, `imagesTr`, `labelsTr`          | the Decathlon's; `#test` for `imagesTs`  | `dataset.json`       |
| the same without lists of files                 | nnU-Net's, `<id>_0000`; likewise         | `dataset.json`       |
| a folder of images and one of labels            | none                                     | `names.json`, if any |
| files, or one file: to predict for, no labels   | folders                                  | none                 |

A case is a file, of several channels where it has a 4th axis; or a file for each channel.

`names.json` beside the folders of images and labels, or one folder above, is the list of the names of labels 0, 1, ...

What is there and is not used is named in `left_out`: whoever imports shows it, since a label map whose image is called
otherwise is a case less, and nobody would notice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainkit.data import folders
from trainkit.data.sources import finding, split_of
from trainkit.data.volumes import channels as channel_files
from trainkit.data.volumes import layouts
from trainkit.data.volumes.label_names import Classes
from trainkit.data.volumes.layouts import Asked, Found
from trainkit.errors import UserError, few

_CHOOSE = "add the files, or choose channels that all cases have in data.channels"


@dataclass(frozen=True)
class Case:
    """One volume of a source."""

    id: str
    """The name of its image without folder and suffix; no two of a source are alike."""
    patient: str
    image: Path
    """Its first file."""
    label: Path | None
    """None where only images are there."""
    further: tuple[Path, ...] = ()
    """Files of the second and further channels, where each has its own."""

    @property
    def images(self) -> tuple[Path, ...]:
        """All files of the image, in the order of the channels."""
        return (self.image, *self.further)


@dataclass(frozen=True)
class VolumeSource:
    """A set of volumes in some layout."""

    kind: str
    """The layout, in words."""
    where: str
    cases: tuple[Case, ...]
    """In the order of their ids."""
    classes: Classes
    """Labels of its label maps, where the source says so."""
    left_out: tuple[str, ...]
    """Sentences about what is there and not used, or odd."""
    files: tuple[Path, ...]
    """All files that it is made of, for noticing changes."""
    channels: tuple[str, ...] = ()
    """Names of the channels; empty where there is one, or files of 4 axes whose channels nothing names."""
    incomplete: tuple[str, ...] = ()
    """Sentences about cases that lack a channel, and are not among `cases`."""

    @property
    def names(self) -> tuple[str, ...] | None:
        """Names of labels 0, 1, ..., where the source says so; the first is `background`."""
        return self.classes.names


def open_volumes(
    path: Path | str,
    *,
    patient: str | None = None,
    labelled: bool = True,
    channels: Sequence[str] | None = None,
) -> VolumeSource:
    """Open the volumes at `path`, whatever the layout, as `path#split` where there are splits. Reads no voxels.

    `patient` is a regular expression with one part in parentheses that finds the patient in the id of a case; without
    it every case is a patient of its own. With `labelled` only cases with a label map are taken; without,
    all images, of a plain folder and a single file too. `channels` are the names of those that are wanted, in order.

    Raises UserError when there is nothing, no such split, two files of one id, or a damaged `dataset.json`.
    """
    find = None if patient is None else finding(patient, "patient")
    asked = Asked(labelled, tuple(channels or ()))
    try:
        found, where = _found(path, asked)
    except OSError as error:  # a name too long, a folder that may not be entered
        raise UserError(str(path)[:300], f"cannot be read ({error.strerror or error})", "a folder of volumes") from None
    if not found.pairs and not found.incomplete:
        layouts.refuse_dicom(split_of(path)[0])
        said = f"; {few(found.left_out, 3)}" if found.left_out else ""
        wanted = "images with label maps of the same names" if labelled else layouts.FILES
        raise UserError(where, f"no {'labelled ' if labelled else ''}volumes{said}", wanted)
    folders.check_names(where, found.pairs)
    cases = [
        Case(id, find(id, str(images[0])) if find else id, images[0], label, images[1:])
        for id, (images, label) in sorted(found.pairs.items())
    ]
    files = list(found.made_of)
    for case in cases:
        files += [*case.images, *([] if case.label is None else [case.label])]
    names = _channel_names(found, asked.channels, where)
    if found.incomplete and not cases:
        raise UserError(where, few(found.incomplete, 3), "an image of each channel", _CHOOSE)
    left_out, incomplete = tuple(found.left_out), tuple(found.incomplete)
    return VolumeSource(found.kind, where, tuple(cases), found.classes, left_out, tuple(files), names, incomplete)


def _found(path: Path | str, asked: Asked) -> tuple[Found, str]:
    """Find the layout at a path, and return also the place as messages name it."""
    path, split = split_of(path)
    where = f"{path}#{split}" if split else str(path)
    if not path.exists():
        raise UserError(str(path), "does not exist", "a folder of volumes")
    if path.is_file() and path.name != "dataset.json":
        return layouts.single(path, split, asked.labelled), where
    folder = path.parent if path.is_file() else path
    # To predict for, `imagesTs` is what it says; with label maps it is a part of the set above.
    root = layouts.root_of(folder) if asked.labelled or not layouts.volumes_in(folder) else folder
    if split is None and root == folder.parent and folder.name.lower().endswith("ts"):
        split = "test"
    found = layouts.layout(root, split, asked, where)
    if root != folder:
        found.kind += f" in {root.name}"
    return found, where


def _channel_names(found: Found, wanted: tuple[str, ...], where: str) -> tuple[str, ...]:
    """Name the channels as was asked for, or as the source does. Raises UserError where both name them otherwise."""
    if not wanted or wanted == found.channels:
        return found.channels
    if not found.channels and all(len(images) == 1 for images, _ in found.pairs.values()):
        return wanted if len(wanted) > 1 else ()  # how many a file of 4 axes has is seen when it is read
    if len(found.channels) == len(wanted) and (
        channel_files.automatic(found.channels) or channel_files.automatic(wanted)
    ):
        return wanted
    said = few(found.channels, 20) or "one channel"
    raise UserError(where, f"channels {said}", few(wanted, 20), "use these names in data.channels")
