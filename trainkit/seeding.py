"""Randomness as a pure function of (seed, stream, epoch, sample, step, rank): nothing random has to be saved to resume.

A generator that is carried along is state: it must be saved, and it ties a sample's augmentation to the number of
workers and ranks. Here every draw is a hash of where it stands, so an interrupted run continues with the same bits and
a sample is augmented alike on one process and on eight.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _scramble(x: np.ndarray) -> np.ndarray:
    """The SplitMix64 finaliser (Steele et al., OOPSLA 2014): a bijection of 64-bit words that mixes every bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def words(seed: int, stream: str, *parts: int | np.ndarray) -> np.ndarray:
    """64 hashed bits for each combination of `parts` (integers or integer arrays that broadcast), uint64."""
    with np.errstate(over="ignore"):
        state = np.asarray([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64)
        for part in (zlib.crc32(stream.encode()), *parts):
            state = _scramble(state + _GOLDEN + np.asarray(part).astype(np.int64).astype(np.uint64) * _GOLDEN)
    return state


def uniform(seed: int, stream: str, *parts: int | np.ndarray) -> np.ndarray:
    """A draw in [0, 1) for each combination of `parts`, float64. Streams with different names are independent."""
    return (words(seed, stream, *parts) >> np.uint64(11)) * (1.0 / (1 << 53))


def number(seed: int, stream: str, *parts: int) -> int:
    """One hashed integer in [0, 2^63)."""
    return int(words(seed, stream, *parts)[0] >> np.uint64(1))


def permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    """The order of an epoch: a permutation of 0 .. size-1, int64."""
    return np.random.Generator(np.random.Philox(key=number(seed, "order", epoch))).permutation(size)


def reseed(device: torch.device, seed: int, step: int, micro: int, rank: int) -> None:
    """Set the generators that dropout and other layers draw from, for one micro-batch.

    That of the processor, for draws that need not wait for a device, and the device's own: `torch.manual_seed` visits
    every device and costs about 100 us.
    """
    value = number(seed, "layers", step, micro, rank)
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(value)
    elif device.type != "cpu":
        torch.manual_seed(value)


def generator(seed: int, stream: str) -> torch.Generator:
    """A CPU generator for drawing initial weights of state that is built once."""
    return torch.Generator().manual_seed(number(seed, stream))
