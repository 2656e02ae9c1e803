"""MRL Eye: infrared crops of open and closed eyes of 37 people, whose labels stand in the names of their files.

`mrlEyes_2018_01/s0001/s0001_00001_0_0_0_0_0_01.png`: subject, image, gender (0 man, 1 woman), glasses (0 no, 1 yes),
eye (0 closed, 1 open), reflections (0 none, 1 small, 2 big), lighting (0 bad, 1 good), sensor (01 to 03). Eyes of one
person are alike, so splits go by person: each is a group.

http://mrl.cs.vsb.cz/eyedataset
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from trainkit.data.formats.image_decode import below
from trainkit.data.record import Record, Source
from trainkit.errors import UserError, listing, number_of

STATES = ("closed", "open")

_NAME = re.compile(r"(s\d{4})_\d+_[01]_[01]_([01])_[0-2]_[01]_\d{2}\.png")


def recognise(root: Path) -> Source | None:
    """Open MRL Eye at `root`; None where there is something else.

    Taken for it when the first image has such a name in the folder of its subject; sorted into other folders
    the same files are ordinary classes. Raises UserError at an image that does not belong there.
    """
    found = below(root)
    files = found.files
    if not files or _parts(files[0]) is None:
        return None
    parts = {file: own for file in files if (own := _parts(file)) is not None}
    if strange := [file.relative_to(root).as_posix() for file in files if file not in parts]:
        said = f"{number_of(len(strange), 'images')} not named like those of MRL Eye:{listing(strange)}\n"
        raise UserError(str(root), said, "<subject>/s0001_00001_0_0_0_0_0_01.png", "move them away")

    def records() -> Iterator[Record]:
        for file, (subject, state) in parts.items():
            yield Record(file.relative_to(root).as_posix(), state, file, str(file), group=subject)

    return Source("MRL Eye folder", str(root), len(files), records, tuple(files), STATES, left_out=found.left_out())


def _parts(file: Path) -> tuple[str, int] | None:
    found = _NAME.fullmatch(file.name)
    if found is None or file.parent.name != found.group(1):
        return None
    return found.group(1), int(found.group(2))
