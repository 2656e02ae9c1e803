"""A built-in set of drawn orbits in 3-D, so that a segmentation network can train and score without a download.

What it is: heads as a coronal T2-weighted MRI of thyroid eye disease shows them, in the layout, the labels and the
units of TOM500 (Zhang et al., Scientific Data 2025): both eyes with their nine organs, brain, sinuses, bone and the fat
of cheek and temple around them. A patient has a head of a size, a stage of the disease that thickens muscles, brightens
them and pushes the eyes forward, and a pose in the scanner; a scan adds slices four times as thick as pixels are wide
(so that borders blur across slices), shading of the coil, ghosts of motion, noise, and a scale of its own, for
intensities of such scanners have no unit. Labels are what a person would have painted slice by slice: their borders
wander by half a millimetre and their first and last slices are a matter of opinion, so that nothing can score 1.0.
Left and right organs share a label, the muscles look alike and differ by where they are, and other things are as bright
as each organ. One file in six has two of its axes the other way round.

What it shows: that the code runs, and that a network beats the place where organs usually are. Mean Dice of the nine
organs on `val`: mean label map 0.11 (0.26 with the best threshold for each organ), a 3-D U-Net of 120 K parameters 0.69
after 600 updates of two patches of 12 x 64 x 64, still learning (eyeball 0.88, fat 0.80, superior oblique 0.56, optic
nerve 0.46). Unwandered borders score 0.88 against the painted ones (20 patients of `train`), which is about the most
that there is to reach. What it does not show: that large networks beat small ones (one level more, 493 K parameters:
0.69 as well, one seed each), or that anything works on patients. No number from it belongs beside a published one.

The drawing depends on nothing but a seed: numpy's PCG64 seeded per patient, organs as distances in millimetres to
ellipses along a line, in float64, so that a patient is the same person at every resolution.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from trainkit.data.synthetic.faces import drawn_once
from trainkit.errors import UserError

VERSION = 2
"""Part of the folder's name; raised with any change to what is drawn, so that an old set never passes for a new one."""
SEED = 20261121
NAMES = ("background", "SR", "LR", "MR", "IR", "ON", "FAT", "LG", "SO", "EB")
"""Names of the labels 0..9 as TOM500 numbers them: superior (with the lid's levator), lateral, medial and inferior
rectus, optic nerve, orbital fat, lacrimal gland, superior oblique, eyeball."""
PATIENTS = {"train": 40, "val": 12}
"""Patients of each split; nobody is in both."""
_HIGHEST_ID = 1670  # patients of TOM500 are numbered from 1 to about this
_THICK = 3  # layers drawn of each slice, whose mean is what the scanner sees


def folder() -> Path:
    """The sample set as a folder, drawn when first asked for (about 20 s on one core, 22 MB).

    Holds `train/image/<id>.nii.gz`, `train/label/<id>.nii.gz`, the same for `val`, `clinical.csv` (a row a patient) and
    `sample.json`, which says how it was made. Images are int16 with a slope, about 128 x 128 x 16..20 voxels of
    1.25 x 1.25 x 3.85 mm, the third axis from back to front; labels are uint8, 0..9 as in `NAMES`. Any number of
    processes may call this at the same time: one draws, the others wait, and a folder that exists is whole.

    Raises:
        UserError: the folder cannot be written (no permission, disk full), or nibabel is not installed.
    """
    return drawn_once(f"orbits-v{VERSION}", _write, megabytes=30)


def patients(split: str) -> list[int]:
    """Ids of the patients of `split` ("train" or "val"), ascending: numbers with gaps, as hospitals have them."""
    order = np.random.Generator(np.random.PCG64([SEED, 1])).permutation(_HIGHEST_ID) + 1
    first = 0 if split == "train" else PATIENTS["train"]
    return sorted(order[first : first + PATIENTS[split]].tolist())


def clinical(patient: int) -> dict[str, Any]:
    """What the table says of a patient, with the columns of TOM500's: Id, Age, Sex, SmokingIndex, DiseaseDuration in
    months, and CAS, the clinical activity score 0..6."""
    who = _Patient.of(patient)
    return dict(who.clinical)


def geometry(patient: int) -> tuple[tuple[int, int, int], tuple[float, float, float]]:
    """Voxels and spacing in mm of a patient's file, along its axes: two within slices, then across them."""
    rng = _rng(2, patient)
    slices = int(rng.integers(16, 21))
    spacing, kind = 1.25, float(rng.uniform())
    if kind < 0.06:
        spacing = 1.237
    thick = 3.9 if kind > 0.98 else 3.85
    return (128, 128, slices), (spacing, spacing, thick)


def affine(
    patient: int, shape: tuple[int, int, int] | None = None, spacing: tuple[float, float, float] | None = None
) -> np.ndarray:
    """From voxel indices of `draw` to RAS+ millimetres of the scanner: (4, 4) float64.

    The axes run to the left, up and to the front but for a few degrees by which slices are tilted.
    """
    shape, spacing = shape or geometry(patient)[0], spacing or geometry(patient)[1]
    who = _Patient.of(patient)
    matrix = np.eye(4)
    matrix[:3, :3] = who.slab @ (np.array([[-1, 0, 0], [0, 0, 1], [0, 1, 0]], dtype=np.float64) * spacing)
    matrix[:3, 3] = who.isocentre - matrix[:3, :3] @ ((np.array(shape, dtype=np.float64) - 1) / 2)
    return matrix


def draw(
    patient: int, shape: tuple[int, int, int] | None = None, spacing: tuple[float, float, float] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Image (float32) and labels (uint8, 0..9) of a patient, both (to the left, up, to the front).

    Args:
        patient: any number from 0; the id of a file for those of `patients`.
        shape: voxels along the three axes; None: as the patient's file.
        spacing: mm between voxels along the three axes; None: as the patient's file. The patient is the same person in
            the same pose at every resolution, and the middle of the volume the same place; noise and the painter's hand
            are drawn anew for each.

    Raises:
        ValueError: an axis with fewer than 2 voxels, or a spacing that is not above 0.
    """
    shape, spacing = shape or geometry(patient)[0], spacing or geometry(patient)[1]
    if len(shape) != 3 or min(shape) < 2:
        raise ValueError(f"shape must be three numbers from 2, not {shape}")
    if len(spacing) != 3 or not min(spacing) > 0:
        raise ValueError(f"spacing must be three numbers above 0, not {spacing}")
    who = _Patient.of(patient)
    scan = _Scan(who, shape, spacing)
    return scan.image(), scan.labels()


def _rng(*what: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64([SEED, *what]))


def _write(to: Path) -> None:
    try:
        import nibabel
    except ImportError as error:
        raise UserError(
            "sample:orbits",
            "NIfTI files cannot be written: nibabel is not installed",
            "the extra for medical volumes",
            'pip install "trainkit[medical]"',
        ) from error
    table = []
    for split in PATIENTS:
        for kind in ("image", "label"):
            (to / split / kind).mkdir(parents=True)
        for n, patient in enumerate(patients(split)):
            image, label = draw(patient)
            matrix, slope = affine(patient), _Patient.of(patient).slope
            raw = np.rint(image / np.float32(slope)).astype(np.int16)
            if n % 6 == 5:  # another scanner's software: first and last axis the other way round
                raw, label = raw[::-1, :, ::-1], label[::-1, :, ::-1]
                matrix = matrix @ _turned(raw.shape, (0, 2))
            for kind, array in (("image", raw), ("label", label)):
                file = nibabel.Nifti1Image(np.ascontiguousarray(array), matrix)
                file.header.set_xyzt_units("mm")
                if kind == "image":
                    file.header.set_slope_inter(slope, 0)
                nibabel.save(file, to / split / kind / f"{patient}.nii.gz")
            table.append(clinical(patient))
    with open(to / "clinical.csv", "w", newline="", encoding="utf-8") as handle:
        writer = csv.DictWriter(handle, list(table[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(table, key=lambda row: row["Id"]))
    about = {
        "what": "drawn orbits made by trainkit.data.synthetic; they show that code runs, not that it works on eyes",
        "version": VERSION,
        "seed": SEED,
        "names": NAMES,
        "patients": PATIENTS,
    }
    (to / "sample.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def _turned(shape: tuple[int, ...], axes: tuple[int, ...]) -> np.ndarray:
    """From indices of an array whose `axes` were reversed to those of the array as it was: (4, 4)."""
    matrix = np.eye(4)
    for axis in axes:
        matrix[axis, axis], matrix[axis, 3] = -1, shape[axis] - 1
    return matrix


# ---- a patient: numbers in mm, in a frame of the head whose origin is between the eyes; x right, y front, z up ----


def _turn(roll: float, pitch: float, yaw: float) -> np.ndarray:
    """Rotation about y, then x, then z; degrees."""
    (cr, sr), (cp, sp), (cy, sy) = ((math.cos(math.radians(a)), math.sin(math.radians(a))) for a in (roll, pitch, yaw))
    about_y = np.array([[cr, 0, sr], [0, 1, 0], [-sr, 0, cr]])
    about_x = np.array([[1, 0, 0], [0, cp, -sp], [0, sp, cp]])
    about_z = np.array([[cy, -sy, 0], [sy, cy, 0], [0, 0, 1]])
    return about_z @ about_x @ about_y


@dataclass(frozen=True)
class _Patient:
    """One person, and how they lay in the scanner."""

    number: int
    clinical: Mapping[str, Any]
    tone: Mapping[str, float]
    """How bright each tissue is; the vitreous is about 1."""
    head: Mapping[str, float]
    orbits: tuple[_Orbit, _Orbit]
    """Right and left."""
    pose: np.ndarray
    """(3, 3) from the head's frame to the volume's."""
    place: np.ndarray
    """Where the head's origin is in the volume's frame, mm."""
    slab: np.ndarray
    """(3, 3) from the volume's frame to the scanner's."""
    isocentre: np.ndarray
    noise: float
    ghosts: float
    shading: float
    slope: float
    """Value of one step of the stored integers."""

    @staticmethod
    @cache
    def of(number: int) -> _Patient:
        rng = _rng(3, number)
        severity = float(rng.beta(1.1, 2.0))
        active = float(np.clip(0.5 * severity + 0.5 * rng.beta(0.9, 2.2), 0, 1))
        female = float(rng.uniform()) < 0.666
        size = (0.985 if female else 1.03) * (1 + 0.03 * float(np.tanh(rng.standard_normal())))
        tone = {
            name: float(rng.uniform(low, high))
            for name, (low, high) in {
                "fat": (0.58, 0.86), "muscle": (0.20, 0.32), "vitreous": (0.85, 1.1), "lens": (0.15, 0.3),
                "sclera": (0.12, 0.25), "nerve": (0.34, 0.46), "fluid": (0.75, 1.0), "gland": (0.38, 0.56),
                "bone": (0.04, 0.10), "brain": (0.38, 0.5), "mucosa": (0.5, 0.9), "soft": (0.26, 0.36),
                "septa": (0.05, 0.14), "vessel": (0.05, 0.3),
            }.items()
        }  # fmt: skip
        tone["inflamed"] = 0.24 * active
        head = {
            name: float(rng.uniform(low, high))
            for name, (low, high) in {
                "wide": (68, 78), "high": (110, 128), "skin": (3.0, 7.5), "skull": (5.0, 8.5), "sinus_right": (0, 1),
                "sinus_left": (0, 1), "roof": (17.0, 21.0), "ethmoid": (8.5, 12.0), "cheek": (-24.0, -19.0),
                "temple": (2.0, 9.0),
            }.items()
        }  # fmt: skip
        apart = float(rng.normal(31.0, 1.2))
        both = {"severity": severity, "active": active, "size": size, "apart": apart, "globe": float(rng.normal(0, 1))}
        orbits = (_Orbit.of(_rng(4, number, 0), both), _Orbit.of(_rng(4, number, 1), both))
        angles = np.clip(rng.standard_normal(3), -2, 2) * (4.5, 4.0, 3.5)
        tilt = np.clip(rng.standard_normal(3), -2, 2) * (0.5, 3.0, 0.5)
        place = np.clip(rng.standard_normal(3), -2, 2) * (4.5, 4.5, 5.5) + (0, 13.0, 2.0)
        cas = int(np.clip(math.floor(active * 6.2 + rng.normal(-0.6, 0.8)), 0, 6))
        smoker = float(rng.uniform()) < 0.3
        table = {
            "Id": number,
            "Age": int(np.clip(round(float(rng.normal(47.2, 14))), 16, 84)),
            "Sex": "F" if female else "M",
            "SmokingIndex": int(rng.integers(20, 900)) if smoker else 0,
            "DiseaseDuration": round(float(np.exp(rng.normal(2.0, 1.0)))),
            "CAS": cas,
        }
        scale = float(np.exp(np.clip(rng.normal(0, 0.95), -2.2, 3.6)))  # fat lies at 429 times this, 50 to 15,000
        return _Patient(
            number=number, clinical=table, tone=tone, head=head, orbits=orbits, pose=_turn(*angles), place=place,
            slab=_turn(*tilt), isocentre=rng.standard_normal(3) * (3, 8, 12) + (0, 40, 20),
            noise=float(rng.uniform(0.02, 0.06)), ghosts=max(0.0, float(rng.uniform(-0.15, 0.10))),
            shading=float(rng.uniform(0.08, 0.3)), slope=float(np.float32(429 / 0.72 * scale / 1500)),
        )  # fmt: skip


@dataclass(frozen=True)
class _Muscle:
    """A band with an elliptic section, from the apex of the orbit along its wall to the globe or the trochlea."""

    name: str
    angle: float  # where around the axis, radians; 0 lateral, pi/2 up
    wide: float  # half the width at the belly, mm
    thick: float  # half the thickness at the belly, mm
    first: float  # of the way from apex (0) to the globe's equator (1)
    last: float
    belly: float  # where between first and last it is thickest
    out: float  # how far outwards, of what is usual
    active: float  # how inflamed, 0..1


@dataclass(frozen=True)
class _Orbit:
    """One orbit, in a frame where u grows from the middle of the head to its side."""

    globe: tuple[float, float, float]  # centre: u, y, z
    radius: float
    stretch: float  # length of the globe over its width
    gaze: tuple[float, float]
    apex: tuple[float, float, float]
    wall: float  # radius of the bony orbit at the globe's equator
    septum: float  # how far before the equator orbital fat ends
    muscles: tuple[_Muscle, ...]
    nerve: float  # radius of the optic nerve with its sheath
    core: float  # of the nerve in its sheath
    bend: tuple[float, float, float]
    gland: tuple[float, float, float, float, float, float]  # angle, out, y from the equator, three half axes

    @staticmethod
    def of(rng: np.random.Generator, both: Mapping[str, float]) -> _Orbit:
        size, severity = both["size"], float(np.clip(both["severity"] + rng.normal(0, 0.08), 0, 1))
        radius = size * (11.62 + 0.28 * both["globe"] + 0.08 * float(rng.standard_normal()))
        forward = 5.0 * severity + float(rng.normal(0, 0.8))
        globe = (both["apart"] * size, forward, float(rng.normal(0, 0.5)))
        muscles = []
        # name, angle in degrees, half width and half thickness in mm, first and last of the way, belly, disease's share
        for name, angle, wide, thick, first, last, belly, ill in (
            ("SR", 86, 5.2, 2.55, 0.09, 1.08, 0.50, 0.70),
            ("LR", -4, 4.9, 1.95, 0.09, 1.10, 0.55, 0.55),
            ("MR", 181, 4.7, 1.80, 0.08, 1.10, 0.50, 0.90),
            ("IR", 268, 4.5, 1.90, 0.08, 1.10, 0.50, 0.95),
            ("SO", 137, 2.8, 1.55, 0.12, 0.96, 0.60, 0.45),
        ):
            swollen = severity * ill * float(rng.uniform(0.4, 1.6))
            muscles.append(
                _Muscle(
                    name=name,
                    angle=math.radians(angle + float(rng.normal(0, 4))),
                    wide=wide * size * (1 + 0.12 * swollen) * float(rng.normal(1, 0.06)),
                    thick=thick * size * (1 + 0.95 * swollen) * float(rng.normal(1, 0.10)),
                    first=first + float(rng.uniform(-0.03, 0.03)),
                    last=last + float(rng.uniform(-0.04, 0.04)),
                    belly=belly + float(rng.uniform(-0.08, 0.08)),
                    out=float(rng.normal(1, 0.035)),
                    active=float(rng.uniform(0.2, 1.0)),
                )
            )
        return _Orbit(
            globe=globe, radius=radius, stretch=float(rng.normal(1.01, 0.025)), gaze=tuple(rng.normal(0, 0.15, 2)),
            apex=(
                size * float(rng.normal(15.5, 0.8)), size * float(rng.normal(-39, 1.3)), float(rng.normal(-0.5, 0.8)),
            ),
            wall=size * float(rng.normal(18.7, 0.6)), septum=float(rng.normal(3.5, 1.0)), muscles=tuple(muscles),
            nerve=float(rng.normal(2.4, 0.17)), core=float(rng.uniform(0.55, 0.75)),
            bend=(float(rng.normal(0, 1.3)), float(rng.normal(0, 1.3)), float(rng.uniform(0, 0.35))),
            gland=(
                math.radians(float(rng.normal(48, 6))), size * float(rng.normal(16.8, 0.7)),
                float(rng.normal(1.0, 1.5)),
                4.1 * float(rng.normal(1, 0.14)) * (1 + 0.2 * severity), 8.6 * float(rng.normal(1, 0.1)),
                8.8 * float(rng.normal(1, 0.1)),
            ),
        )  # fmt: skip

    def along(self, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The way from apex (0) to the equator of a globe that is not pushed forward (1), and the axis: t, u, z."""
        t = (y - self.apex[1]) / (0.4 * self.globe[1] - self.apex[1])
        return (
            t,
            self.apex[0] + (self.globe[0] - self.apex[0]) * t,
            self.apex[2] + (self.globe[2] - self.apex[2]) * t,
        )

    def near(self, u: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
        """Which points may be touched by anything of this orbit: about a third of the box that holds it."""
        t, cu, cz = self.along(y)
        reach = np.where(t < -0.2, 0.0, 9.0 + (self.wall - 4.2) * np.clip(t, 0, 1.15) ** 0.72)
        gu, gy, gz = u - self.globe[0], y - self.globe[1], z - self.globe[2]
        front = (gy > -14) & (gu * gu + gz * gz < 27.0**2) & (gu * gu + gy * gy + gz * gz < 30.0**2)
        return (np.maximum(np.abs(u - cu), np.abs(z - cz)) < reach) | front

    def distances(self, u: np.ndarray, y: np.ndarray, z: np.ndarray) -> dict[str, np.ndarray]:
        """About how many mm each point lies outside each organ (negative: inside), and outside things near them."""
        t, cu, cz = self.along(y)
        du, dz = u - cu, z - cz
        inside = np.clip(t, 0, 1.15)
        walls = 4.2 + (self.wall - 4.2) * inside**0.72
        found = {"orbit": _rounded(du, dz, walls, walls * 0.94)}
        found["orbit"] = np.maximum(found["orbit"], -t * 40)
        gu, gy, gz = u - self.globe[0], y - self.globe[1], z - self.globe[2]
        squeezed = np.sqrt(gu * gu + (gy / self.stretch) ** 2 + gz * gz)
        found["EB"] = squeezed - self.radius
        lens = (gu - 7.5 * self.gaze[0], gy - 7.6, gz - 7.5 * self.gaze[1])
        found["lens"] = _ellipsoid(*lens, 4.3, 1.9, 4.3)
        cap = gy - (self.septum - 0.4 * self.globe[1] - 0.09 * np.maximum(squeezed - self.radius, 0))
        found["FAT"] = np.maximum(found["orbit"], cap)
        at_globe = np.sqrt(np.maximum(self.radius**2 - np.maximum(gy, 0) ** 2, 0.3))
        for muscle in self.muscles:
            x = (t - muscle.first) / (muscle.last - muscle.first)
            bump = _bump(np.clip(x, 0, 1), muscle.belly)
            thick = 0.45 + (muscle.thick - 0.45) * bump
            if muscle.name == "SO":
                wide = muscle.wide * (0.5 + 0.5 * bump)
            else:
                wide = 1.6 + (muscle.wide - 1.6) * np.sqrt(bump)
            rho = 2.6 + (self.radius + 0.8 + (1.5 if muscle.name == "SO" else 0) - 2.6) * inside**0.66 * muscle.out
            rho = np.where(gy > 0, np.minimum(rho, at_globe + 0.8 + (2.5 if muscle.name == "SO" else 0)), rho)
            c, s = math.cos(muscle.angle), math.sin(muscle.angle)
            out, around = du * c + dz * s - rho, dz * c - du * s
            around_wall = out + around * around / (2 * np.maximum(rho, 5))  # bands follow the wall
            length = (muscle.last - muscle.first) * 40
            band = _ellipse(around_wall, around, thick, wide)
            found[muscle.name] = np.maximum(band, np.maximum(-x, x - 1) * length)
        back = np.clip(
            (self.globe[1] - 0.9 * self.radius - y) / (self.globe[1] - 0.9 * self.radius - self.apex[1]), 0, 1
        )
        wave = np.sin(np.pi * back) * back
        nu = self.globe[0] - 1.5 + (self.apex[0] - self.globe[0] + 1.5) * back + self.bend[0] * np.sin(np.pi * back)
        nz = self.globe[2] + (self.apex[2] + 0.8 - self.globe[2]) * back + self.bend[1] * wave
        nerve = np.sqrt((u - nu) ** 2 + (z - nz) ** 2)
        ends = np.maximum(y - (self.globe[1] - 0.9 * self.radius), self.apex[1] - 1 - y)
        found["ON"] = np.maximum(nerve - self.nerve, ends)
        found["core"] = np.maximum(nerve - self.nerve * self.core, ends)
        angle, far, front, a, b, c = self.gland
        ca, sa = math.cos(angle), math.sin(angle)
        out, around = gu * ca + gz * sa - far, gz * ca - gu * sa
        out = out + around * around / (2 * far)  # the gland is a shell on the globe
        found["LG"] = _ellipsoid(out, gy + 0.4 * self.globe[1] - front, around, a, c, b)
        low = gz + self.radius + 1.2
        found["oblique"] = np.maximum(np.sqrt((gy - 2.0) ** 2 + low * low) - 2.0, np.abs(gu + 2.0) - 11)
        vein_u, vein_z = cu + 9 * (0.55 - t), cz + 2.0 + 6.0 * np.clip(t, 0, 1)
        found["vein"] = np.maximum(np.sqrt((u - vein_u) ** 2 + (z - vein_z) ** 2) - 1.25, np.abs(t - 0.5) * 40 - 16)
        return found


def _ellipse(p: np.ndarray, q: np.ndarray, a: np.ndarray | float, b: np.ndarray | float) -> np.ndarray:
    """First-order distance to an ellipse with half axes a along p and b along q."""
    f = np.sqrt((p / a) ** 2 + (q / b) ** 2)
    slope = np.sqrt((p / a**2) ** 2 + (q / b**2) ** 2)
    return f * (f - 1) / np.maximum(slope, 1e-6)


def _ellipsoid(p: np.ndarray, q: np.ndarray, r: np.ndarray, a: float, b: float, c: float) -> np.ndarray:
    f = np.sqrt((p / a) ** 2 + (q / b) ** 2 + (r / c) ** 2)
    slope = np.sqrt((p / a**2) ** 2 + (q / b**2) ** 2 + (r / c**2) ** 2)
    return f * (f - 1) / np.maximum(slope, 1e-6)


def _egg(p: np.ndarray, q: np.ndarray, r: np.ndarray, a: float, b: float, c: float) -> np.ndarray:
    """First-order distance to an ellipsoid with flatter sides (exponent 3), as heads have."""
    p, q, r = np.abs(p), np.abs(q), np.abs(r)
    f = np.cbrt((p / a) ** 3 + (q / b) ** 3 + (r / c) ** 3)
    slope = np.sqrt((p * p / a**3) ** 2 + (q * q / b**3) ** 2 + (r * r / c**3) ** 2)
    return (f - 1) * f * f / np.maximum(slope, 1e-6)


def _rounded(p: np.ndarray, q: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """About the distance to a section between an ellipse and a rectangle, which is what a bony orbit has."""
    f = ((p / a) ** 2) ** 1.3 + ((q / b) ** 2) ** 1.3
    return (np.sqrt(f) ** (1 / 1.3) - 1) * np.minimum(a, b)


def _bump(x: np.ndarray, peak: float) -> np.ndarray:
    """0 at 0 and 1, 1 at `peak`, round between."""
    away = np.where(x < peak, (peak - x) / peak, (x - peak) / (1 - peak))
    return 1 - away * away


class _Canvas:
    """Voxels that things are laid over, from the back to the front."""

    def __init__(self, picture: np.ndarray, blur: float):
        self.picture, self.blur = picture, blur

    def lay(self, distance: np.ndarray, value: np.ndarray | float) -> None:
        """Cover with `value` what is inside (`distance` in mm is negative), with a border `blur` mm wide."""
        self.picture = self.picture + np.clip(0.5 - distance / self.blur, 0, 1) * (value - self.picture)


# ---- a scan: voxels from the left, from below and from the back ----


class _Scan:
    """Samples a patient on a grid."""

    def __init__(self, who: _Patient, shape: tuple[int, int, int], spacing: tuple[float, float, float]):
        self.who, self.shape, self.spacing = who, shape, spacing
        self.x, self.z, self.y = ((np.arange(n) - (n - 1) / 2) * s for n, s in zip(shape, spacing, strict=True))
        self.x = -self.x  # the first axis runs to the left

    def inside(self, x: np.ndarray, y: np.ndarray, z: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Points of the volume's frame in the head's."""
        turn, at = self.who.pose.T, self.who.place
        x, y, z = x - at[0], y - at[1], z - at[2]
        return tuple(turn[i, 0] * x + turn[i, 1] * y + turn[i, 2] * z for i in range(3))

    def box(self, side: int) -> tuple[slice, slice, slice]:
        """The part of the grid that can hold an orbit: right (0) or left (1)."""
        corners = np.array(
            [(x * (1, -1)[side], y, z) for x in (8.0, 55.0) for y in (-46.0, 24.0) for z in (-22.0, 22.0)]
        )
        corners = corners @ self.who.pose.T + self.who.place
        low, high = corners.min(0), corners.max(0)
        parts = []
        for axis, line in ((0, self.x), (2, self.z), (1, self.y)):
            at = np.flatnonzero((line >= low[axis]) & (line <= high[axis]))
            parts.append(slice(int(at[0]), int(at[-1]) + 1) if len(at) else slice(0, 0))
        return tuple(parts)

    def image(self) -> np.ndarray:
        """What the scanner stores: float32 in steps of the patient's slope."""
        who, blur = self.who, max(self.spacing[0], self.spacing[1], 0.8)
        rng = _rng(7, who.number)
        self.coarse, self.fine, self.cells = self.field(rng, 22.0), self.field(rng, 6.0), self.field(rng, 4.5)
        few = max(1, 2**16 // (self.shape[0] * self.shape[1]))  # slices that stay in a processor's cache
        parts = [slice(k, k + few) for k in range(0, self.shape[2], few)]
        picture = np.concatenate([self.head(blur, part) for part in parts], axis=2)
        for side in (0, 1):
            box = self.box(side)
            if min(part.stop - part.start for part in box) == 0:
                continue
            mean = np.zeros(picture[box].shape)
            for layer in range(_THICK):
                y = self.y[box[2]] + ((layer + 0.5) / _THICK - 0.5) * self.spacing[2]
                mean += self.orbit(side, box, y, picture[box], blur)
            picture[box] = mean / _THICK
        rng = _rng(5, who.number)
        if who.ghosts:  # the head moved between excitations: faint copies along the phase axis
            shift = float(rng.uniform(0.2, 0.4)) * self.shape[0] * self.spacing[0]
            step = round(shift / self.spacing[0])
            picture = picture + who.ghosts * (np.roll(picture, step, 0) + np.roll(picture, -step, 0) - picture)
        picture = picture * (1 + who.shading * self.field(rng, 70.0))
        rng = _rng(6, who.number, *self.shape)
        sigma = who.noise
        real = picture + sigma * rng.standard_normal(picture.shape)
        magnitude = np.sqrt(real * real + (sigma * rng.standard_normal(picture.shape)) ** 2)
        steps = np.clip(np.rint(magnitude * 1500), 0, 4095)
        return steps.astype(np.float32) * np.float32(who.slope)

    def field(self, rng: np.random.Generator, size: float) -> np.ndarray:
        """A smooth random field with deviation 1 whose features are about `size` mm, the same at every resolution."""
        n = math.ceil(220 / size) + 4
        knots = rng.standard_normal((n, n, n))
        for line in (self.x, self.z, self.y):  # each turn replaces the first axis and puts it last
            knots = np.tensordot(knots, _weights(line, size, n), axes=(0, 1))
        return knots

    def head(self, blur: float, part: slice) -> np.ndarray:
        """Everything but the orbits, in a few slices."""
        who, tone, head = self.who, self.who.tone, self.who.head
        x, y, z = self.inside(self.x[:, None, None], self.y[None, None, part], self.z[None, :, None])
        coarse, fine, cells = self.coarse[:, :, part], self.fine[:, :, part], self.cells[:, :, part]
        skin = _egg(x, y + 78, z - 6, head["wide"], 92.0, head["high"]) + 1.2 * coarse
        skin = np.minimum(skin, _ellipsoid(x, y - 12, z + 22, 15.0, 22.0, 30.0))  # the nose
        for one, to in zip(who.orbits, (1, -1), strict=True):
            u, front, height = one.globe
            lids = np.sqrt((x * to - u) ** 2 + (y - front) ** 2 + (z - height) ** 2) - one.radius - 3.0
            skin = np.minimum(skin, lids)
        canvas = _Canvas(np.zeros(x.shape), blur)
        lay, side = canvas.lay, np.abs(x)
        lay(skin, tone["fat"] * (0.92 + 0.08 * fine))
        lay(skin + head["skin"] + 1.5 * fine, tone["soft"] * (1 + 0.12 * fine))
        temple = np.maximum(np.maximum(skin + head["skin"] + head["temple"], side * -1 + 46), y + 12)
        lay(temple, np.where(fine > 0.7, tone["fat"], tone["muscle"]))
        cheek = np.maximum(np.maximum(z - head["cheek"] + 2.0 * coarse, 16 - side), -10 - y)
        lay(np.maximum(cheek, skin + 1.5), np.where(coarse + 0.6 * fine > -0.3, tone["fat"] * 0.95, tone["soft"]))
        roof = head["roof"] - 0.10 * y - 0.004 * (side - 31) ** 2
        vault = np.maximum(skin + head["skin"] + 1.5, roof - z)
        lay(vault, tone["bone"] + 0.15 * np.clip(fine - 1.0, 0, 1))
        brain = np.maximum(skin + head["skin"] + head["skull"] + 1.5, roof + 2.0 - z)
        lay(brain, tone["fluid"])
        folds = np.abs(cells + 0.5 * coarse)
        lay(brain + 2.0, np.where(folds < 0.22, tone["fluid"] * 0.9, tone["brain"] * (1 + 0.1 * fine)))
        fossa = _ellipsoid(side - 45, y + 64, z - 4, 21.0, 37.0, 23.0) + 0.8 * coarse
        lay(fossa - 2.0, tone["bone"])
        lay(fossa + 0.5, np.where(folds < 0.2, tone["fluid"] * 0.9, tone["brain"] * (1 + 0.1 * fine)))
        nose = np.maximum(np.maximum(side - 15, z + 9), -42 - z) + 1.2 * coarse
        lay(np.maximum(nose, skin + 3), np.where(fine + 0.4 * cells > 0.2, tone["mucosa"] * 0.8, 0.02))
        ethmoid = np.maximum(np.maximum(side - head["ethmoid"], z - 12), np.maximum(-11 - z, y - 2)) + coarse
        lay(ethmoid, np.where(cells > 0.75, tone["mucosa"], 0.03))
        for name, one in (("sinus_right", 1.0), ("sinus_left", -1.0)):
            sinus = _ellipsoid(x * one - 30, y + 14, z + 37, 13.0, 17.0, 14.0) + 0.8 * coarse
            lay(sinus - 1.5, tone["bone"])
            lay(sinus, tone["mucosa"] if head[name] > 0.45 else 0.02)
            lay(sinus + 1.0 + 9.0 * max(0.0, head[name] - 0.6), tone["mucosa"] if head[name] > 0.9 else 0.02)
        return canvas.picture

    def orbit(self, side: int, box: tuple[slice, ...], y: np.ndarray, below: np.ndarray, blur: float) -> np.ndarray:
        """One layer of an orbit laid over what is `below`."""
        who, tone = self.who, self.who.tone
        one = who.orbits[side]
        x, y, z = self.inside(self.x[box[0]][:, None, None], y[None, None, :], self.z[box[1]][None, :, None])
        u = x * (1, -1)[side]
        near = one.near(u, y, z)
        u, y, z = u[near], y[near], z[near]
        far = one.distances(u, y, z)
        fine, cells, canvas = self.fine[box][near], self.cells[box][near], _Canvas(below[near], blur)
        lay = canvas.lay
        lay(np.maximum(far["orbit"] - 1.6, y - one.septum), tone["bone"])
        lay(far["FAT"], tone["fat"] * (1 + 0.07 * fine) - 2.2 * tone["septa"] * (np.abs(cells) < 0.16))
        lay(far["vein"], tone["vessel"])
        lay(far["oblique"], tone["muscle"] * (1 + 0.1 * fine))
        lay(far["LG"], tone["gland"] * (1 + 0.12 * cells))
        for muscle in one.muscles:
            lay(far[muscle.name], tone["muscle"] * (1 + 0.12 * fine) + tone["inflamed"] * muscle.active)
        lay(far["ON"], tone["fluid"] * 0.8)
        lay(far["core"], tone["nerve"])
        lay(far["EB"], tone["sclera"])
        lay(far["EB"] + 1.0, tone["vitreous"])
        lay(far["lens"], tone["lens"])
        whole = below.copy()
        whole[near] = canvas.picture
        return whole

    def labels(self, wander: float = 1.0) -> np.ndarray:
        """What was painted: uint8. `wander` 0 is where the organs are at the middle of each slice."""
        who = self.who
        painted = np.zeros(self.shape, dtype=np.uint8)
        rng = _rng(8, who.number, self.shape[2])
        depth = wander * 0.6 * min(1.0, self.spacing[2] / 3.85) * np.clip(rng.standard_normal(self.shape[2]), -2, 2)
        knots = rng.standard_normal((2, self.shape[2], 40, 40))
        across = [_weights(line, 7.0, 40) for line in (self.x, self.z)]
        moved = wander * 0.33 * np.einsum("ai,bj,mkij->mabk", *across, knots, optimize=True)
        taste = wander * rng.normal(0, 0.12, (2, len(NAMES), self.shape[2])) + wander * rng.normal(
            0, 0.10, (1, len(NAMES), 1)
        )
        for side in (0, 1):
            box = self.box(side)
            part = painted[box]
            if part.size == 0:
                continue
            x = self.x[box[0]][:, None, None] + moved[0][box]
            z = self.z[box[1]][None, :, None] + moved[1][box]
            y = (self.y + depth)[box[2]][None, None, :]
            x, y, z = self.inside(x, y, z)
            u = x * (1, -1)[side]
            near = who.orbits[side].near(u, y, z)
            far = who.orbits[side].distances(u[near], y[near], z[near])
            grown = taste[side][:, box[2]][:, np.nonzero(near)[2]]
            found = np.zeros(grown.shape[1], dtype=np.uint8)
            for name in ("FAT", "oblique", "LG", "SR", "LR", "MR", "IR", "SO", "ON", "EB"):
                label = NAMES.index(name) if name in NAMES else 0  # the inferior oblique has no label
                found[far[name] < (grown[label] if label else 0.0)] = label
            part[near] = found
        return painted


def _weights(line: np.ndarray, size: float, knots: int) -> np.ndarray:
    """Weights of cubic B-splines every `size` mm from -110 on, at each place of `line`, scaled so that random knots of
    deviation 1 give a field of deviation 1: (len(line), knots)."""
    at = (np.clip(line, -110, 110) + 110) / size
    whole = np.floor(at).astype(np.int64)
    f = at - whole
    parts = ((1 - f) ** 3 / 6, (3 * f**3 - 6 * f**2 + 4) / 6, (-3 * f**3 + 3 * f**2 + 3 * f + 1) / 6, f**3 / 6)
    answer = np.zeros((len(at), knots))
    for i, weight in enumerate(parts):
        answer[np.arange(len(at)), whole + i] = weight
    return answer / math.sqrt(151 / 315)  # the mean of the sum of squares of the four weights
