"""Patients with two orbits, for drawn MRI: numbers in mm, and distances to organs.

The frame is that of the head, its origin between the eyes; x right, y front, z up. Organs are distances to ellipses
along a line, in float64, so that a patient is the same person at every resolution.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from trainkit.data.synthetic.drawing import generator

SEED = 20261121


def _turn(roll: float, pitch: float, yaw: float) -> np.ndarray:
    """Rotation about y, then x, then z; degrees."""
    (cr, sr), (cp, sp), (cy, sy) = ((math.cos(math.radians(a)), math.sin(math.radians(a))) for a in (roll, pitch, yaw))
    about_y = np.array([[cr, 0, sr], [0, 1, 0], [-sr, 0, cr]])
    about_x = np.array([[1, 0, 0], [0, cp, -sp], [0, sp, cp]])
    about_z = np.array([[cy, -sy, 0], [sy, cy, 0], [0, 0, 1]])
    return about_z @ about_x @ about_y


@dataclass(frozen=True)
class Patient:
    """One person, and how they lay in the scanner."""

    number: int
    tone: Mapping[str, float]
    """How bright each tissue is; the vitreous is about 1."""
    head: Mapping[str, float]
    orbits: tuple[Orbit, Orbit]
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
    def of(number: int) -> Patient:
        """Draw a patient."""
        rng = generator(SEED, 3, number)
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
        orbits = (Orbit.of(generator(SEED, 4, number, 0), both), Orbit.of(generator(SEED, 4, number, 1), both))
        angles = np.clip(rng.standard_normal(3), -2, 2) * (4.5, 4.0, 3.5)
        tilt = np.clip(rng.standard_normal(3), -2, 2) * (0.5, 3.0, 0.5)
        place = np.clip(rng.standard_normal(3), -2, 2) * (4.5, 4.5, 5.5) + (0, 13.0, 2.0)
        # Numbers of a table of patients that is no more; without them version 2 would be drawn otherwise.
        rng.standard_normal()
        smoker = rng.uniform() < 0.3
        rng.standard_normal()
        _ = rng.integers(20, 900) if smoker else 0
        rng.standard_normal()
        scale = float(np.exp(np.clip(rng.normal(0, 0.95), -2.2, 3.6)))  # fat lies at 429 times this, 50 to 15,000
        return Patient(
            number=number, tone=tone, head=head, orbits=orbits, pose=_turn(*angles), place=place,
            slab=_turn(*tilt), isocentre=rng.standard_normal(3) * (3, 8, 12) + (0, 40, 20),
            noise=float(rng.uniform(0.02, 0.06)), ghosts=max(0.0, float(rng.uniform(-0.15, 0.10))),
            shading=float(rng.uniform(0.08, 0.3)), slope=float(np.float32(429 / 0.72 * scale / 1500)),
        )  # fmt: skip


@dataclass(frozen=True)
class Muscle:
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
class Orbit:
    """One orbit, in a frame where u grows from the middle of the head to its side."""

    globe: tuple[float, float, float]  # centre: u, y, z
    radius: float
    stretch: float  # length of the globe over its width
    gaze: tuple[float, float]
    apex: tuple[float, float, float]
    wall: float  # radius of the bony orbit at the globe's equator
    septum: float  # how far before the equator orbital fat ends
    muscles: tuple[Muscle, ...]
    nerve: float  # radius of the optic nerve with its sheath
    core: float  # of the nerve in its sheath
    bend: tuple[float, float, float]
    gland: tuple[float, float, float, float, float, float]  # angle, out, y from the equator, three half axes

    @staticmethod
    def of(rng: np.random.Generator, both: Mapping[str, float]) -> Orbit:
        """Draw an orbit of a patient, with what `both` have in common."""
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
                Muscle(
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
        return Orbit(
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
        """Return the way from apex (0) to the equator of a globe not pushed forward (1), and the axis: t, u, z."""
        t = (y - self.apex[1]) / (0.4 * self.globe[1] - self.apex[1])
        return (
            t,
            self.apex[0] + (self.globe[0] - self.apex[0]) * t,
            self.apex[2] + (self.globe[2] - self.apex[2]) * t,
        )

    def near(self, u: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
        """Find points that may be touched by anything of this orbit: about a third of the box that holds it."""
        t, cu, cz = self.along(y)
        reach = np.where(t < -0.2, 0.0, 9.0 + (self.wall - 4.2) * np.clip(t, 0, 1.15) ** 0.72)
        gu, gy, gz = u - self.globe[0], y - self.globe[1], z - self.globe[2]
        front = (gy > -14) & (gu * gu + gz * gz < 27.0**2) & (gu * gu + gy * gy + gz * gz < 30.0**2)
        return (np.maximum(np.abs(u - cu), np.abs(z - cz)) < reach) | front

    def distances(self, u: np.ndarray, y: np.ndarray, z: np.ndarray) -> dict[str, np.ndarray]:
        """Estimate how many mm each point lies outside each organ (negative: inside), and outside things near them."""
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
        found["lens"] = ellipsoid(*lens, 4.3, 1.9, 4.3)
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
        found["LG"] = ellipsoid(out, gy + 0.4 * self.globe[1] - front, around, a, c, b)
        low = gz + self.radius + 1.2
        found["oblique"] = np.maximum(np.sqrt((gy - 2.0) ** 2 + low * low) - 2.0, np.abs(gu + 2.0) - 11)
        vein_u, vein_z = cu + 9 * (0.55 - t), cz + 2.0 + 6.0 * np.clip(t, 0, 1)
        found["vein"] = np.maximum(np.sqrt((u - vein_u) ** 2 + (z - vein_z) ** 2) - 1.25, np.abs(t - 0.5) * 40 - 16)
        return found


def _ellipse(p: np.ndarray, q: np.ndarray, a: np.ndarray | float, b: np.ndarray | float) -> np.ndarray:
    """Return the first-order distance to an ellipse with half axes a along p and b along q."""
    f = np.sqrt((p / a) ** 2 + (q / b) ** 2)
    slope = np.sqrt((p / a**2) ** 2 + (q / b**2) ** 2)
    return f * (f - 1) / np.maximum(slope, 1e-6)


def ellipsoid(p: np.ndarray, q: np.ndarray, r: np.ndarray, a: float, b: float, c: float) -> np.ndarray:
    """Return the first-order distance to an ellipsoid."""
    f = np.sqrt((p / a) ** 2 + (q / b) ** 2 + (r / c) ** 2)
    slope = np.sqrt((p / a**2) ** 2 + (q / b**2) ** 2 + (r / c**2) ** 2)
    return f * (f - 1) / np.maximum(slope, 1e-6)


def egg(p: np.ndarray, q: np.ndarray, r: np.ndarray, a: float, b: float, c: float) -> np.ndarray:
    """Return the first-order distance to an ellipsoid with flatter sides (exponent 3), as heads have."""
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
