"""A built-in set of synthetic orbits in 3-D, so that a segmentation network can train and score without a download.

Heads as a coronal T2-weighted MRI of thyroid eye disease shows them, in TOM500's layout, labels and units (Zhang et
al., Scientific Data 2025). Everything is a spindle between two points, whose slices are ellipses. Disease thickens
muscles and pushes the eyes forward, heads lie differently, and a scan has shading, noise and a scale without a unit.
 Labels are painted by an unsteady hand, muscles look alike, other things are as bright as organs, and one file in
six has two axes reversed. It shows that the code runs and a network beats the mean label map; nothing about patients.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trainkit.data.synthetic.drawing import drawn_once, generator, spread, write_about

VERSION = 3
"""Part of the folder's name; raised with any change to what is drawn, so that an old set never passes for a new one."""
SEED = 20261121
NAMES = ("background", "SR", "LR", "MR", "IR", "ON", "FAT", "LG", "SO", "EB")
"""Names of the labels 0..9 as TOM500 numbers them: superior, lateral, medial and inferior rectus, optic nerve, orbital
fat, lacrimal gland, superior oblique, eyeball."""
PATIENTS = {"train": 40, "val": 12}
"""Patients of each split; nobody is in both."""
SIDE, SPACING = 128, (1.25, 1.25, 3.85)
"""Voxels of a file to the left and up, and mm between voxels along its axes."""
_TONES = {
    "air": (0.01, 0.04), "fat": (0.58, 0.86), "muscle": (0.20, 0.32), "eye": (0.85, 1.1), "lens": (0.15, 0.3),
    "nerve": (0.34, 0.46), "fluid": (0.75, 1.0), "gland": (0.38, 0.56), "bone": (0.04, 0.10), "brain": (0.38, 0.5),
    "soft": (0.26, 0.36), "lining": (0.5, 0.9), "sinus": (0.01, 0.4),
}  # fmt: skip
"""How bright each tissue is, from .. to."""
_FOLDS = {"brain": ("fluid", 0.15), "fat": ("soft", 0.07)}  # what shows in the folds of a tissue, and how wide
_HEAD = (  # tissue, and middle and half axes of an ellipsoid in mm: outwards, to the front, up
    ("fat", (0, -78, 6), (74, 92, 119)), ("fat", (0, 12, -22), (15, 22, 30)), ("soft", (0, -80, 6), (68, 86, 112)),
    ("fat", (24, -6, -36), (20, 22, 15)), ("bone", (0, -62, 68), (62, 84, 50)), ("fluid", (0, -62, 69), (57, 77, 46)),
    ("brain", (0, -62, 69), (54, 74, 43)), ("bone", (46, -64, 4), (23, 39, 25)), ("brain", (46, -64, 4), (20, 36, 22)),
    ("lining", (0, -20, -26), (14, 36, 17)), ("air", (0, -24, -2), (9, 22, 13)), ("air", (4, -12, -28), (4, 28, 13)),
    ("bone", (30, -14, -37), (15, 19, 16)), ("sinus", (30, -14, -37), (13, 17, 14)),
)  # fmt: skip
_ORBIT = (  # organ, tissue, angle, mm off the axis behind and in front, from and to in mm, half axes, share of swelling
    ("", "bone", 0, 0, 0, -39, 14, 18.4, 18, 0), ("FAT", "fat", 0, 0, 0, -38, 14, 16.1, 15.8, 0),
    ("", "muscle", 268, 13, 13, 0, 4.5, 2, 11, 0), ("LG", "gland", 48, 17, 17, -7.5, 9.5, 4.4, 9, 0),
    ("SR", "muscle", 86, 3, 13.5, -38, 4, 2.4, 5.2, 0.70), ("LR", "muscle", -4, 5, 16, -38, 4, 2, 4.8, 0.55),
    ("MR", "muscle", 181, 3, 13.5, -38, 4, 1.8, 4.8, 0.90), ("IR", "muscle", 268, 3, 13.5, -38, 4, 1.8, 4.4, 0.95),
    ("SO", "muscle", 137, 5, 16, -36, 0, 1.5, 2.5, 0.45), ("ON", "fluid", 0, 0, 0, -44, -7, 2.7, 2.7, 0),
    ("", "nerve", 0, 0, 0, -44, -7, 1.8, 1.8, 0), ("EB", "bone", 0, 0, 0, -11.6, 11.6, 11.6, 11.6, 0),
    ("", "eye", 0, 0, 0, -10.6, 10.6, 10.6, 10.6, 0), ("", "lens", 0, 0, 0, 5.7, 9.5, 4.3, 4.3, 0),
)  # fmt: skip
"""Things of an orbit, from the first drawn to the last; what has no name has no label."""
Voxels = tuple[int, int, int] | None
Spacing = tuple[float, float, float] | None


def folder() -> Path:
    """Return the sample set as a folder, by `drawn_once` (22 MB).

    Holds `train/image/<id>.nii.gz`, `train/label/<id>.nii.gz`, the same for `val`, and `sample.json`. Images are int16
    with a slope, 128 x 128 x 16..20 voxels of 1.25 x 1.25 x 3.85 mm, the third axis from back to front.
    """
    return drawn_once(f"orbits-v{VERSION}", _write)


def patients(split: str) -> list[int]:
    """Return the ids of the patients of `split` ("train" or "val"), ascending, with gaps as hospitals have them."""
    first = 0 if split == "train" else PATIENTS["train"]
    return sorted((generator(SEED, 1).permutation(1670) + 1)[first : first + PATIENTS[split]].tolist())


def draw(patient: int, shape: Voxels = None, spacing: Spacing = None) -> tuple[np.ndarray, np.ndarray]:
    """Draw image (float32) and labels (uint8) of a patient, axes to the left, up, to the front; None: as the file's.

    A patient is the same person in the same pose at every resolution; noise is drawn anew.
    """
    scan = Scan(patient, shape, spacing)
    return scan.image(), scan.labels()


def affine(patient: int, shape: Voxels = None, spacing: Spacing = None) -> np.ndarray:
    """Return the matrix from voxel indices of `draw` to RAS+ millimetres of the scanner: (4, 4) float64."""
    scan, matrix = Scan(patient, shape, spacing), np.eye(4)
    matrix[:3, :3] = np.array([(-1, 0, 0), (0, 0, 1), (0, 1, 0)]) * scan.spacing
    matrix[:3, 3] = (scan.lines[0][0], scan.lines[2][0] + 40, scan.lines[1][0] + 20)
    return matrix


class Spindle(NamedTuple):
    """Something whose slices are ellipses: ends behind and in front (2, 3), direction and half axes of its slices."""

    name: str
    tissue: str
    ends: np.ndarray
    angle: float
    axes: tuple[float, float]


class Scan:
    """A patient as they lie in the scanner, and the grid on which they are sampled."""

    def __init__(self, patient: int, shape: Voxels = None, spacing: Spacing = None):
        rng, self.patient, self.spacing = generator(SEED, 2, patient), patient, spacing or SPACING
        self.shape = shape or (SIDE, SIDE, 16 + patient % 5)
        x, z, y = ((np.arange(n) - (n - 1) / 2) * s for n, s in zip(self.shape, self.spacing, strict=True))
        self.lines = (-x, z, y)
        self.tone = {name: float(rng.uniform(*span)) for name, span in _TONES.items()}
        self.slope = float(np.float32(0.4 * math.exp(min(3.6, max(-2.2, rng.normal(0, 0.95))))))
        self.noise, self.shading = rng.uniform((0.02, 0.08), (0.06, 0.3)).tolist()
        things = []
        for tissue, (u, front, up), (a, b, c) in _HEAD:
            for side in (1, -1)[: 1 + (u > 0)]:
                ends = np.array([(u * side, front - b, up), (u * side, front + b, up)])
                things.append(Spindle("", tissue, ends, 0, (a, c)))
        severity, apart, size = float(rng.beta(1.1, 2.0)), float(rng.normal(31, 1.2)), float(rng.normal(1, 0.03))
        things += _orbit(rng, 1, severity, apart, size) + _orbit(rng, -1, severity, apart, size)
        roll, pitch, yaw = (0.07 * np.clip(rng.standard_normal(3), -2, 2)).tolist()  # the pose, by small angles
        turn, moved = np.array([(1, yaw, -roll), (-yaw, 1, -pitch), (roll, pitch, 1)]), rng.uniform(-9, 9, 3)
        self.things = []
        for thing in things:
            ends = (thing.ends[:, None] * turn).sum(-1) + moved + (0, 13, 2)
            self.things.append(thing._replace(ends=ends, angle=thing.angle + roll))

    def field(self, rng: np.random.Generator, size: float) -> np.ndarray:
        """Draw a smooth field whose features are about `size` mm, the same at every resolution."""
        knots = rng.standard_normal((math.ceil(200 / size) + 2,) * 3)
        return spread(knots, *((np.clip(line, -100, 100) + 100) / size for line in self.lines))

    def outside(self, thing: Spindle, moved: np.ndarray | float = 0.0) -> tuple[tuple[slice, ...], np.ndarray]:
        """Return the box that holds a thing and how many mm, about, each of its places lies outside of the thing."""
        box, margin = [], np.array([max(thing.axes) + 3, 0, max(thing.axes) + 3])
        low, high = thing.ends.min(0) - margin, thing.ends.max(0) + margin
        for line, k in zip(self.lines, (0, 2, 1), strict=True):
            near = np.flatnonzero((line > low[k]) & (line < high[k]))
            box.append(slice(int(near[0]), int(near[-1]) + 1) if len(near) else slice(0, 0))
        x, z, y = np.ix_(*(line[part] for line, part in zip(self.lines, box, strict=True)))
        way = (y - thing.ends[0, 1]) / (thing.ends[1, 1] - thing.ends[0, 1])
        middle = thing.ends[0, ::2, None, None, None] + (thing.ends[1] - thing.ends[0])[::2, None, None, None] * way
        shift = np.broadcast_to(moved, (2, *self.shape))[:, *box]
        x, z = x - middle[0] + shift[0], z - middle[1] + shift[1]
        (a, b), c, s = thing.axes, math.cos(thing.angle), math.sin(thing.angle)
        far = np.sqrt(((c * x + s * z) / a) ** 2 + ((c * z - s * x) / b) ** 2)
        return tuple(box), (far - np.sqrt(np.maximum(4 * way * (1 - way), 1e-4))) * min(a, b)

    def image(self) -> np.ndarray:
        """Compute what the scanner stores: float32 in steps of the patient's slope."""
        rng, picture, blur = generator(SEED, 3, self.patient), np.zeros(self.shape), max(*self.spacing[:2], 0.8)
        fine, cells, coarse = (self.field(rng, size) for size in (6, 4.5, 70))
        for thing in self.things:
            box, outside = self.outside(thing)
            bright = self.tone[thing.tissue] * (1 + 0.1 * fine[box])
            if fold := _FOLDS.get(thing.tissue):
                bright = np.where(np.abs(cells[box]) < fold[1], self.tone[fold[0]], bright)
            picture[box] += np.clip(0.5 - outside / blur, 0, 1) * (bright - picture[box])
        real, imaginary = self.noise * generator(SEED, 4, self.patient).standard_normal((2, *self.shape))
        steps = np.rint(np.sqrt((picture * (1 + self.shading * coarse) + real) ** 2 + imaginary**2) * 1500)
        return np.clip(steps, 0, 4095).astype(np.float32) * np.float32(self.slope)

    def labels(self, wander: float = 1.0) -> np.ndarray:
        """Paint labels: uint8. `wander` 0 is where the organs are."""
        painted, rng = np.zeros(self.shape, dtype=np.uint8), generator(SEED, 5, self.patient)
        moved = wander * 0.6 * np.stack([self.field(rng, 7) for _ in range(2)])
        for thing in self.things:
            if thing.name:
                box, outside = self.outside(thing, moved)
                painted[box][outside < wander * rng.normal(0, 0.2)] = NAMES.index(thing.name)
        return painted


def _orbit(rng: np.random.Generator, side: int, severity: float, apart: float, size: float) -> list[Spindle]:
    """Draw the things of the orbit at the right (1) or the left (-1) of a head that lies straight."""
    eye = np.array([apart, 5 * severity + rng.normal(0, 0.8), rng.normal(0, 0.5)])
    apex, found = rng.normal((15.5, 0, -0.5), (0.8, 1.3, 0.8)), []
    for name, tissue, degrees, behind, ahead, start, end, thick, wide, ill in _ORBIT:
        turn, scale, broad = rng.normal((degrees, 1, 1), (4, 0.08, 0.04)) if name not in ("", "EB") else (degrees, 1, 1)
        swollen, angle = severity * ill * float(rng.uniform(0.4, 1.6)), math.radians(turn)
        out = np.array([math.cos(angle), 0, math.sin(angle)])
        origin = apex if start < -20 else eye
        ends = np.stack([origin + size * (behind * out + (0, start, 0)), eye + size * (ahead * out + (0, end, 0))])
        axes = (thick * size * scale * (1 + swollen), wide * size * broad * (1 + 0.1 * swollen))
        found.append(Spindle(name, tissue, ends * (side, 1, 1), angle if side > 0 else math.pi - angle, axes))
    return found


def _write(to: Path) -> None:
    import nibabel

    for split in PATIENTS:
        for kind in ("image", "label"):
            (to / split / kind).mkdir(parents=True)
        for n, patient in enumerate(patients(split)):
            (image, label), matrix, slope = draw(patient), affine(patient), Scan(patient).slope
            raw = np.rint(image / np.float32(slope)).astype(np.int16)
            if n % 6 == 5:  # another scanner's software: first and last axis the other way round
                turn = np.diag([-1.0, 1, -1, 1])
                turn[:, 3] = (raw.shape[0] - 1, 0, raw.shape[2] - 1, 1)
                raw, label, matrix = raw[::-1, :, ::-1], label[::-1, :, ::-1], matrix @ turn
            for kind, array in (("image", raw), ("label", label)):
                file = nibabel.Nifti1Image(np.ascontiguousarray(array), matrix)
                file.header.set_xyzt_units("mm")
                if kind == "image":
                    file.header.set_slope_inter(slope, 0)
                nibabel.save(file, to / split / kind / f"{patient}.nii.gz")
    what = "synthetic orbits generated by trainkit.data.synthetic; for tests of the code, not of accuracy on real eyes"
    write_about(to, what, VERSION, SEED, names=NAMES, patients=PATIENTS)
