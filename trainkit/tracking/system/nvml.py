"""Read GPUs through NVIDIA's management library (nvidia-ml-py).

CUDA and the library may count devices in different orders, so a device is found by its UUID.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from trainkit.tracking.system.reading import Gpu

REASONS = {0x04: "power_cap", 0x08: "hardware", 0x20: "thermal", 0x40: "thermal", 0x80: "power_brake"}
"""Bits of nvmlClocksEventReasons for which a GPU is slower than it could be; an idle one, or one whose clock was set by
its owner, is not listed."""


@dataclass
class Device:
    """One GPU of this run."""

    index: int
    """As torch counts them."""
    uuid: str
    handle: Any
    seen: int = 0
    """Time stamp of the newest sample of its use, in microseconds."""
    more: dict[str, float] = field(default_factory=dict)
    """Values for MLflow beyond a `Gpu`, by metric name."""


class Gpus:
    """The GPUs that the processes of this run on this machine compute on: one each, from torch's first.

    Nothing is read before the process uses CUDA itself: asking must not begin that. `library` is `pynvml`.
    """

    def __init__(self, library: Any = None, uuids: Callable[[], list[str] | None] | None = None):
        self._library: Any = library
        self._uuids = uuids or _own_uuids
        self.absent: dict[str, str] = {}
        self._devices: list[Device] | None = None

    def read(self, own: Callable[[], set[int]]) -> tuple[Gpu, ...]:
        """Read all devices; `own` returns the ids of the processes of this run."""
        if self._devices is None:
            self._devices = self._find()
        return tuple(self._of(device, own) for device in self._devices or ())

    def index(self, uuid: str) -> int:
        """Return the number that torch gives a GPU."""
        return next(d.index for d in self._devices or () if d.uuid == uuid)

    def metrics(self) -> dict[str, float]:
        """Return the values of the last `read` beyond a `Gpu`: memory and power in percent and watts."""
        return {f"gpu_{d.index}_{name}": value for d in self._devices or () for name, value in d.more.items()}

    def _find(self) -> list[Device] | None:
        """Find the devices; None while CUDA is not in use yet."""
        try:
            uuids = self._uuids()
        except Exception as error:
            self.absent["gpus"] = f"CUDA does not tell its devices: {error}"
            return []
        if uuids is None:
            self.absent["gpus"] = "this process has used no GPU so far"
            return None
        self.absent.pop("gpus", None)
        if not uuids:
            self.absent["gpus"] = "not an NVIDIA GPU"
            return []
        try:
            if self._library is None:
                import pynvml

                self._library = pynvml
            self._library.nvmlInit()
        except ImportError:
            self.absent["gpus"] = "the package nvidia-ml-py is not installed"
            return []
        except Exception as error:
            self.absent["gpus"] = f"NVML: {error}"
            return []
        found = []
        for index, uuid in enumerate(uuids):
            for name in (f"GPU-{uuid}", f"MIG-{uuid}"):
                try:
                    found.append(Device(index, name, self._library.nvmlDeviceGetHandleByUUID(name)))
                    break
                except Exception as error:
                    why = str(error)
            else:
                self.absent[f"gpu_{index}"] = f"NVML does not find GPU-{uuid}: {why}"
        return found

    def _of(self, device: Device, own: Callable[[], set[int]]) -> Gpu:
        nv, handle, more = self._library, device.handle, {}
        used = self._ask(device, "used", lambda: self._used(device))
        memory = self._ask(device, "memory_gb", lambda: nv.nvmlDeviceGetMemoryInfo(handle))
        clock = self._ask(device, "clock_mhz", lambda: nv.nvmlDeviceGetClockInfo(handle, 1))  # of the multiprocessors
        reasons = self._ask(device, "throttled", lambda: self._reasons(handle))
        watts = self._ask(device, "power", lambda: nv.nvmlDeviceGetPowerUsage(handle) / 1e3)
        limit = self._ask(device, "power limit", lambda: nv.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3)
        others = self._ask(device, "others", lambda: self._others(device, own))
        if memory is not None:
            more["memory_usage_percentage"] = 100 * memory.used / memory.total
        if watts is not None:
            more["power_usage_watts"] = watts
            if limit:
                more["power_usage_percentage"] = 100 * watts / limit
        if reasons is not None:
            more["throttled"] = float(bool(reasons))
        device.more = more
        return Gpu(
            uuid=device.uuid,
            used=used,
            memory_gb=memory.used / 1e9 if memory is not None else None,
            clock_mhz=float(clock) if clock is not None else None,
            throttled=reasons or (),
            others=others,
        )

    def _ask(self, device: Device, what: str, question: Callable[[], Any]) -> Any:
        name = f"gpu_{device.index} {what}"
        try:
            answer = question()
        except Exception as error:  # NVMLError, or a function that this version of the library lacks
            self.absent[name] = str(error)
            return None
        self.absent.pop(name, None)
        return answer

    def _used(self, device: Device) -> float:
        """Return the mean of the samples since the last reading; the driver keeps those of some 15 seconds."""
        nv = self._library
        try:
            _, samples = nv.nvmlDeviceGetSamples(device.handle, nv.NVML_GPU_UTILIZATION_SAMPLES, device.seen)
            samples = [s for s in samples if s.timeStamp > device.seen]
            if not samples:
                raise LookupError
        except Exception:
            rates: Any = nv.nvmlDeviceGetUtilizationRates(device.handle)  # of the last moments alone
            return rates.gpu / 100
        device.seen = max(s.timeStamp for s in samples)
        return sum(s.sampleValue.uiVal for s in samples) / len(samples) / 100

    def _reasons(self, handle: Any) -> tuple[str, ...]:
        nv = self._library
        ask = getattr(nv, "nvmlDeviceGetCurrentClocksEventReasons", None)
        bits = (ask or nv.nvmlDeviceGetCurrentClocksThrottleReasons)(handle)
        named = {word for bit, word in REASONS.items() if bits & bit}
        # The bit of the hardware is set along with those that say why it slowed down.
        return tuple(sorted(named - {"hardware"} if named & {"thermal", "power_brake"} else named))

    def _others(self, device: Device, own: Callable[[], set[int]]) -> int | None:
        there = {process.pid for process in self._library.nvmlDeviceGetComputeRunningProcesses(device.handle)}
        if os.getpid() not in there:
            # In a container ids are those of the host: which of them is this process cannot be told.
            raise LookupError("NVML does not list this process (other process ids in a container)")
        return len(there - own())


def _own_uuids() -> list[str] | None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    if torch.version.hip:
        return []
    many = min(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count())
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(many)]
