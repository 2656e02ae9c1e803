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
from trainkit.data.volumes import layouts
from trainkit.data.volumes.channels import automatic
from trainkit.data.volumes.label_names import Classes
from trainkit.data.volumes.layouts import Asked
from trainkit.errors import UserError, few


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
    all images, of a plain folder and a single file too. `channels` are the names of the channels, in order.

    Raises UserError when there is nothing, no such split, two files of one id, or a damaged `dataset.json`.
    """
    find = None if patient is None else finding(patient, "patient")
    asked = Asked(labelled, tuple(channels or ()))
    try:
        place, split = split_of(path)
        found = layouts.find(place, split, asked)
    except OSError as error:  # a name too long, a folder that may not be entered
        raise UserError(str(path)[:300], f"cannot be read ({error.strerror or error})", "a folder of volumes") from None
    where = f"{place}#{split}" if split else str(place)
    if not found.pairs and not found.incomplete:
        said = f"; {few(found.left_out, 3)}" if found.left_out else ""
        wanted = "images with label maps of the same names" if labelled else layouts.FILES
        raise UserError(where, f"no {'labelled ' if labelled else ''}volumes{said}", wanted, layouts.DICOM)
    folders.check_names(where, found.pairs)
    cases = [
        Case(id, find(id, str(images[0])) if find else id, images[0], label, images[1:])
        for id, (images, label) in sorted(found.pairs.items())
    ]
    files = list(found.made_of)
    for case in cases:
        files += [*case.images, *([] if case.label is None else [case.label])]
    names = _channel_names(found.channels, asked.channels, where)
    if found.incomplete and not cases:
        raise UserError(where, few(found.incomplete, 3), "an image of each channel", "add the files")
    left_out, incomplete = tuple(found.left_out), tuple(found.incomplete)
    return VolumeSource(found.kind, where, tuple(cases), found.classes, left_out, tuple(files), names, incomplete)


def _channel_names(found: tuple[str, ...], wanted: tuple[str, ...], where: str) -> tuple[str, ...]:
    """Name the channels as was asked for, or as the source does. Raises UserError where both name them otherwise."""
    if not found:
        return wanted if len(wanted) > 1 else ()  # how many a file of 4 axes has is seen when it is read
    if wanted and wanted != found:
        if len(found) != len(wanted) or not (automatic(found) or automatic(wanted)):
            raise UserError(where, f"channels {few(found, 20)}", few(wanted, 20), "use these names in data.channels")
        return wanted
    return found
