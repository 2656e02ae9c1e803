"""A built-in set of synthetic orbits in 3-D, so that a segmentation network can train and score without a download.

Heads as a coronal T2-weighted MRI of thyroid eye disease shows them, in the layout, the labels and the
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
after 600 steps of two patches of 12 x 64 x 64, still learning (eyeball 0.88, fat 0.80, superior oblique 0.56, optic
nerve 0.46). Unwandered borders score 0.88 against the painted ones (20 patients of `train`), which is about the most
that there is to reach. What it does not show: that large networks beat small ones (one level more, 493 K parameters:
0.69 as well, one seed each), or that anything works on patients.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from trainkit.data.synthetic.anatomy import SEED, Patient, egg, ellipsoid
from trainkit.data.synthetic.drawing import drawn_once, generator, write_about

VERSION = 2
"""Part of the folder's name; raised with any change to what is drawn, so that an old set never passes for a new one."""
NAMES = ("background", "SR", "LR", "MR", "IR", "ON", "FAT", "LG", "SO", "EB")
"""Names of the labels 0..9 as TOM500 numbers them: superior (with the lid's levator), lateral, medial and inferior
rectus, optic nerve, orbital fat, lacrimal gland, superior oblique, eyeball."""
PATIENTS = {"train": 40, "val": 12}
"""Patients of each split; nobody is in both."""
_HIGHEST_ID = 1670  # patients of TOM500 are numbered from 1 to about this
_THICK = 3  # layers drawn of each slice, whose mean is what the scanner sees


def folder() -> Path:
    """Return the sample set as a folder, by `drawn_once` (about 20 s on one core, 22 MB).

    Holds `train/image/<id>.nii.gz`, `train/label/<id>.nii.gz`, the same for `val`, and
    `sample.json`. Images are int16 with a slope, about 128 x 128 x 16..20 voxels of 1.25 x 1.25 x 3.85 mm, the third
    axis from back to front; labels are uint8, 0..9 as in `NAMES`.
    """
    return drawn_once(f"orbits-v{VERSION}", _write, megabytes=30)


def patients(split: str) -> list[int]:
    """Return the ids of the patients of `split` ("train" or "val"), ascending, with gaps as hospitals have them."""
    order = generator(SEED, 1).permutation(_HIGHEST_ID) + 1
    first = 0 if split == "train" else PATIENTS["train"]
    return sorted(order[first : first + PATIENTS[split]].tolist())


def geometry(patient: int) -> tuple[tuple[int, int, int], tuple[float, float, float]]:
    """Return voxels and spacing in mm of a patient's file, along its axes: two within slices, then across them."""
    rng = generator(SEED, 2, patient)
    slices = int(rng.integers(16, 21))
    spacing, kind = 1.25, float(rng.uniform())
    if kind < 0.06:
        spacing = 1.237
    thick = 3.9 if kind > 0.98 else 3.85
    return (128, 128, slices), (spacing, spacing, thick)


def affine(
    patient: int, shape: tuple[int, int, int] | None = None, spacing: tuple[float, float, float] | None = None
) -> np.ndarray:
    """Return the matrix from voxel indices of `draw` to RAS+ millimetres of the scanner: (4, 4) float64.

    The axes run to the left, up and to the front but for a few degrees by which slices are tilted.
    """
    shape, spacing = shape or geometry(patient)[0], spacing or geometry(patient)[1]
    who = Patient.of(patient)
    matrix = np.eye(4)
    matrix[:3, :3] = who.slab @ (np.array([[-1, 0, 0], [0, 0, 1], [0, 1, 0]], dtype=np.float64) * spacing)
    matrix[:3, 3] = who.isocentre - matrix[:3, :3] @ ((np.array(shape, dtype=np.float64) - 1) / 2)
    return matrix


def draw(
    patient: int, shape: tuple[int, int, int] | None = None, spacing: tuple[float, float, float] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Draw image (float32) and labels (uint8, 0..9) of a patient, both (to the left, up, to the front).

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
    who = Patient.of(patient)
    scan = _Scan(who, shape, spacing)
    return scan.image(), scan.labels()


def _write(to: Path) -> None:
    import nibabel

    for split in PATIENTS:
        for kind in ("image", "label"):
            (to / split / kind).mkdir(parents=True)
        for n, patient in enumerate(patients(split)):
            image, label = draw(patient)
            matrix, slope = affine(patient), Patient.of(patient).slope
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
    what = "synthetic orbits generated by trainkit.data.synthetic; for tests of the code, not of accuracy on real eyes"
    write_about(to, what, VERSION, SEED, names=NAMES, patients=PATIENTS)


def _turned(shape: tuple[int, ...], axes: tuple[int, ...]) -> np.ndarray:
    """Return the matrix from indices of an array whose `axes` were reversed to those of the array as it was: (4, 4)."""
    matrix = np.eye(4)
    for axis in axes:
        matrix[axis, axis], matrix[axis, 3] = -1, shape[axis] - 1
    return matrix


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

    def __init__(self, who: Patient, shape: tuple[int, int, int], spacing: tuple[float, float, float]):
        self.who, self.shape, self.spacing = who, shape, spacing
        self.x, self.z, self.y = ((np.arange(n) - (n - 1) / 2) * s for n, s in zip(shape, spacing, strict=True))
        self.x = -self.x  # the first axis runs to the left

    def inside(self, x: np.ndarray, y: np.ndarray, z: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Turn points of the volume's frame into the head's."""
        turn, at = self.who.pose.T, self.who.place
        x, y, z = x - at[0], y - at[1], z - at[2]
        return tuple(turn[i, 0] * x + turn[i, 1] * y + turn[i, 2] * z for i in range(3))

    def box(self, side: int) -> tuple[slice, slice, slice]:
        """Find the part of the grid that can hold an orbit: right (0) or left (1)."""
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
        """Compute what the scanner stores: float32 in steps of the patient's slope."""
        who, blur = self.who, max(self.spacing[0], self.spacing[1], 0.8)
        rng = generator(SEED, 7, who.number)
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
        rng = generator(SEED, 5, who.number)
        if who.ghosts:  # the head moved between excitations: faint copies along the phase axis
            shift = float(rng.uniform(0.2, 0.4)) * self.shape[0] * self.spacing[0]
            step = round(shift / self.spacing[0])
            picture = picture + who.ghosts * (np.roll(picture, step, 0) + np.roll(picture, -step, 0) - picture)
        picture = picture * (1 + who.shading * self.field(rng, 70.0))
        rng = generator(SEED, 6, who.number, *self.shape)
        sigma = who.noise
        real = picture + sigma * rng.standard_normal(picture.shape)
        magnitude = np.sqrt(real * real + (sigma * rng.standard_normal(picture.shape)) ** 2)
        steps = np.clip(np.rint(magnitude * 1500), 0, 4095)
        return steps.astype(np.float32) * np.float32(who.slope)

    def field(self, rng: np.random.Generator, size: float) -> np.ndarray:
        """Draw a smooth field with deviation 1 whose features are about `size` mm, the same at every resolution."""
        n = math.ceil(220 / size) + 4
        knots = rng.standard_normal((n, n, n))
        for line in (self.x, self.z, self.y):  # each turn replaces the first axis and puts it last
            knots = np.tensordot(knots, _weights(line, size, n), axes=(0, 1))
        return knots

    def head(self, blur: float, part: slice) -> np.ndarray:
        """Draw everything but the orbits, in a few slices."""
        who, tone, head = self.who, self.who.tone, self.who.head
        x, y, z = self.inside(self.x[:, None, None], self.y[None, None, part], self.z[None, :, None])
        coarse, fine, cells = self.coarse[:, :, part], self.fine[:, :, part], self.cells[:, :, part]
        skin = egg(x, y + 78, z - 6, head["wide"], 92.0, head["high"]) + 1.2 * coarse
        skin = np.minimum(skin, ellipsoid(x, y - 12, z + 22, 15.0, 22.0, 30.0))  # the nose
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
        fossa = ellipsoid(side - 45, y + 64, z - 4, 21.0, 37.0, 23.0) + 0.8 * coarse
        lay(fossa - 2.0, tone["bone"])
        lay(fossa + 0.5, np.where(folds < 0.2, tone["fluid"] * 0.9, tone["brain"] * (1 + 0.1 * fine)))
        nose = np.maximum(np.maximum(side - 15, z + 9), -42 - z) + 1.2 * coarse
        lay(np.maximum(nose, skin + 3), np.where(fine + 0.4 * cells > 0.2, tone["mucosa"] * 0.8, 0.02))
        ethmoid = np.maximum(np.maximum(side - head["ethmoid"], z - 12), np.maximum(-11 - z, y - 2)) + coarse
        lay(ethmoid, np.where(cells > 0.75, tone["mucosa"], 0.03))
        for name, one in (("sinus_right", 1.0), ("sinus_left", -1.0)):
            sinus = ellipsoid(x * one - 30, y + 14, z + 37, 13.0, 17.0, 14.0) + 0.8 * coarse
            lay(sinus - 1.5, tone["bone"])
            lay(sinus, tone["mucosa"] if head[name] > 0.45 else 0.02)
            lay(sinus + 1.0 + 9.0 * max(0.0, head[name] - 0.6), tone["mucosa"] if head[name] > 0.9 else 0.02)
        return canvas.picture

    def orbit(self, side: int, box: tuple[slice, ...], y: np.ndarray, below: np.ndarray, blur: float) -> np.ndarray:
        """Draw one layer of an orbit over what is `below`."""
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
        """Paint labels: uint8. `wander` 0 is where the organs are at the middle of each slice."""
        who = self.who
        painted = np.zeros(self.shape, dtype=np.uint8)
        rng = generator(SEED, 8, who.number, self.shape[2])
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
    """Return weights of cubic B-splines every `size` mm from -110 on, at each place of `line`: (len(line), knots).

    They are scaled so that random knots of deviation 1 give a field of deviation 1."""
    at = (np.clip(line, -110, 110) + 110) / size
    whole = np.floor(at).astype(np.int64)
    f = at - whole
    parts = ((1 - f) ** 3 / 6, (3 * f**3 - 6 * f**2 + 4) / 6, (-3 * f**3 + 3 * f**2 + 3 * f + 1) / 6, f**3 / 6)
    answer = np.zeros((len(at), knots))
    for i, weight in enumerate(parts):
        answer[np.arange(len(at)), whole + i] = weight
    return answer / math.sqrt(151 / 315)  # the mean of the sum of squares of the four weights
