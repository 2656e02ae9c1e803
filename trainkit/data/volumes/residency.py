"""Placement of volumes during a training: memory-mapped files, or the device."""

from __future__ import annotations

import functools
import mmap
import os
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import psutil

from trainkit.errors import UserError
from trainkit.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor

    from trainkit.data.storage.volume_store import PackedVolumes

Place = Literal["disk", "device"]

DEVICE_SHARE = 0.4
"""Most of the GPU's free memory that `auto` gives to volumes; the network and its activations need the rest."""


def decide(asked: Literal["auto", "disk", "device"], voxels: int, channels: int = 1) -> tuple[Place, str]:
    """Choose where so many voxels go, and a sentence that says so with the numbers it rests on.

    Memory of the machine is not a choice of its own: what is mapped stays in it, and patches of it are as fast as those
    of copies (1.62 and 1.75 ms). Raises UserError where `device` was asked for and there is not that much memory.
    """
    needed, gpu = voxels * (2 * channels + 1), _free_on_gpu()  # float16 of each channel, and uint8 of the mask
    if asked == "disk" or (asked == "auto" and (gpu is None or needed > DEVICE_SHARE * gpu)):
        return "disk", f"cache disk: {size(needed)} of volumes stay memory-mapped"
    free, where = (gpu, "the GPU") if gpu is not None else (psutil.virtual_memory().available, "this machine")
    if needed > free:
        found, remedy = f"device, for {size(needed)} of volumes", "use cache: auto, which selects the fastest with room"
        raise UserError("data.cache", found, f"less: {where} has {size(free)} free", remedy)
    return "device", f"cache device: {size(needed)} of volumes; {where} has {size(free)} free"


def cut(volume: np.ndarray, start: Sequence[int], out: np.ndarray, fill: float) -> None:
    """Copy the window of `volume` (D, H, W) that begins at `start` into `out`; what lies outside becomes `fill`.

    Both are of one dtype and have rows without gaps. A row is copied as one element, by memcpy: of volumes outside the
    processor's cache that takes a tenth less than element by element.
    """
    (z, y, x), (d, h, w), (depth, height, width) = start, out.shape, volume.shape
    if not (0 <= z <= depth - d and 0 <= y <= height - h and 0 <= x <= width - w):
        out[...] = fill
        low = [max(0, -s) for s in start]
        high = [min(p, n - s) for s, p, n in zip(start, out.shape, volume.shape, strict=True)]
        if any(end <= begin for begin, end in zip(low, high, strict=True)):
            return
        out = out[tuple(slice(begin, end) for begin, end in zip(low, high, strict=True))]
        z, y, x = (s + begin for s, begin in zip(start, low, strict=True))
        d, h, w = out.shape
    row = _row(w * volume.itemsize)
    out.view(row)[...] = volume[z : z + d, y : y + h, x : x + w].view(row)


@functools.cache
def _row(size: int) -> np.dtype:
    return np.dtype((np.void, size))


class Shelf:
    """The volumes of a split where they are wanted. Each case is compared with its checksums when it is first read.

    `disk` maps the file of the packed set; of one on a network disk, where a mapped file that is cut ends the process,
    it maps a copy in the folder of temporary files, made case by case. `device` copies all cases when the first batch
    is cut, on whatever device that batch is. What is read is the same to the bit.
    """

    def __init__(self, packed: PackedVolumes, cases: np.ndarray, place: Place):
        """`cases`, int64 (N,): the cases of the packed set, in the order in which they are numbered here."""
        self.packed, self.cases, self.place = packed, cases, place
        infos = [packed.case(case) for case in cases.tolist()]
        self.shapes = np.asarray([info.shape for info in infos], np.int64).reshape(-1, 3)
        """int64 (N, 3)."""
        self.floors = np.asarray([info.floors for info in infos], np.float16).reshape(-1, packed.channels)
        """float16 (N, channels): what stands for the surroundings of each."""
        sizes = self.shapes.prod(1)
        self._begins, self._voxels = np.cumsum(sizes) - sizes, int(sizes.sum())
        self._start()

    def _start(self) -> None:
        self._views: list[tuple[np.ndarray, np.ndarray] | None] = [None] * len(self.cases)
        self._tensors: dict[torch.device, tuple[Tensor, ...]] = {}
        self._copy: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
        if self.place == "disk" and self.packed.on_network:
            voxels, numbers = self._voxels, self._voxels * self.packed.channels
            size = max(1, 2 * numbers + voxels + len(self.cases))
            with tempfile.TemporaryFile(prefix="trainkit-volumes-") as file:
                file.truncate(size)
                block = mmap.mmap(file.fileno(), size)
            images = np.frombuffer(block, np.float16, numbers)
            labels = np.frombuffer(block, np.uint8, voxels, 2 * numbers)
            there = np.frombuffer(block, np.bool_, len(self.cases), 2 * numbers + voxels)
            self._copy = images, labels, there

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_views", "_tensors", "_copy")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def read(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return image, float16 (channels, D, H, W), and mask, uint8 (D, H, W), of a case; not to be written to.

        Raises UserError where it is not what was packed.
        """
        found = self._views[number]
        if found is None:
            found = self._views[number] = self._open(number)
        return found

    def _open(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        case = int(self.cases[number])
        if self._copy is None:
            self.packed.check(case)
            return self.packed.image(case), self.packed.label(case)
        images, labels, there = self._copy
        shape, begin = self.shapes[number], int(self._begins[number])
        end, count = begin + int(shape.prod()), self.packed.channels
        image = images[begin * count : end * count].reshape((count, *shape))
        label = labels[begin:end].reshape(shape)
        if not there[number]:  # two processes that come at once write the same bytes
            self.packed.check(case)
            image[...], label[...] = self.packed.image(case), self.packed.label(case)
            there[number] = True
        return image, label

    def patches(self, numbers: np.ndarray, starts: np.ndarray, size: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
        """Cut windows of cases from disk: float16 (B, channels, *size) and uint8 (B, *size).

        `starts`, int64 (B, 3), may lie outside, where the image is the case's floor and the mask 0.
        """
        images = torch.empty((len(numbers), self.packed.channels, *size), dtype=torch.float16)
        masks = torch.empty((len(numbers), *size), dtype=torch.uint8)
        to_image, to_mask = images.numpy(), masks.numpy()
        for place, (number, start) in enumerate(zip(numbers.tolist(), starts.tolist(), strict=True)):
            image, label = self.read(number)
            for channel, volume in enumerate(image):
                cut(volume, start, to_image[place, channel], float(self.floors[number, channel]))
            cut(label, start, to_mask[place], 0)
        return images, masks

    def patches_on(self, numbers: Tensor, starts: Tensor, size: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
        """As `patches`, from the memory of the device that `numbers` and `starts` are on, without waiting for it."""
        images, labels, begins, shapes, floors = self._on(numbers.device)
        begin, shape, floor = begins[numbers], shapes[numbers], floors[numbers]
        along, inside = [], []
        for axis in range(3):
            at = starts[:, axis, None] + torch.arange(size[axis], device=starts.device)
            last = shape[:, axis, None]
            inside.append((at >= 0) & (at < last))
            along.append(torch.minimum(at.clamp(min=0), last - 1))
        planes = begin[:, None] + along[0] * (shape[:, 1] * shape[:, 2])[:, None]
        rows = along[1] * shape[:, 2, None]
        index = planes[:, :, None, None] + rows[:, None, :, None] + along[2][:, None, None, :]
        known = inside[0][:, :, None, None] & inside[1][:, None, :, None] & inside[2][:, None, None, :]
        channels = self.packed.channels
        apart = begin[:, None] * (channels - 1) + torch.arange(channels, device=begin.device) * shape.prod(1)[:, None]
        found = images[index[:, None] + apart[:, :, None, None, None]]
        return torch.where(known[:, None], found, floor[:, :, None, None, None]), labels[index] * known

    def _on(self, device: torch.device) -> tuple[Tensor, ...]:
        if device not in self._tensors:
            images = torch.empty(self._voxels * self.packed.channels, dtype=torch.float16, device=device)
            labels = torch.empty(self._voxels, dtype=torch.uint8, device=device)
            for number, case in enumerate(self.cases.tolist()):
                self.packed.check(case)
                begin, end = int(self._begins[number]), int(self._begins[number] + self.shapes[number].prod())
                # Copied first: torch warns of arrays that must not be written to.
                image = torch.from_numpy(np.array(self.packed.image(case))).view(-1)
                images[begin * self.packed.channels : end * self.packed.channels] = image
                labels[begin:end] = torch.from_numpy(np.array(self.packed.label(case))).view(-1)
            tables = (torch.from_numpy(table).to(device) for table in (self._begins, self.shapes, self.floors))
            self._tensors[device] = (images, labels, *tables)
        return self._tensors[device]


def _free_on_gpu() -> int | None:
    """Return the bytes free on the GPU that this process trains on; None where it trains on the CPU."""
    on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    if on_cpu or not torch.cuda.is_available():
        return None
    return torch.cuda.mem_get_info()[0]


def size(count: float) -> str:
    """Write a number of bytes with three digits and its unit: `25.3 MB`."""
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB" if count < 1000 else f"{count / 1000:,.3g} TB"
