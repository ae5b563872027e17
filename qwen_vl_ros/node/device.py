"""What the board says about itself; what it does not say is ``unavailable``, never 0."""

from __future__ import annotations

import math
import platform
import re
import sys
import time
from contextlib import suppress
from pathlib import Path

from qwen_vl_ros.engine.errors import EngineError, ErrorCode
from qwen_vl_ros.measure.devices import MODULES_GB_S
from qwen_vl_ros.measure.jetson import Throttle
from qwen_vl_ros.measure.nvml import Nvml, UnavailableError
from qwen_vl_ros.measure.samples import Sample, merge
from qwen_vl_ros.measure.sysfs import NOT_PERMITTED, Sysfs

UNAVAILABLE = 'unavailable'



def _read(path: Path) -> str:
    try:
        return path.read_text(errors='replace').strip().strip('\0')
    except OSError:
        return ''


def hardware_id(root: Path = Path('/')) -> str:
    """Return the module's name, such as 'NVIDIA Jetson AGX Orin Developer Kit'."""
    model = _read(root / 'proc/device-tree/model')
    return model or f'{platform.machine()} {platform.node()}'


def peak_bandwidth_gb_s(module: str) -> float:
    """Return the memory bandwidth of a module by its :func:`hardware_id`; NaN where unknown."""
    return next((peak for words, peak in MODULES_GB_S.items() if all(w in module for w in words)),
                math.nan)


def memory_facts(root: Path = Path('/')) -> str:
    """Return what explains a failed load: free memory, largest free block, L4T release."""
    available = re.search(r'MemAvailable:\s*(\d+)', _read(root / 'proc/meminfo'))
    facts = [f'MemAvailable {int(available[1]) // 1024} MiB' if available
             else f'MemAvailable {UNAVAILABLE}']
    orders = [order for line in _read(root / 'proc/buddyinfo').splitlines()
              for order, count in enumerate(line.partition('zone')[2].split()[1:])
              if count != '0']
    facts.append(f'largest free block {4 << max(orders)} KiB' if orders
                 else f'largest free block {UNAVAILABLE}')
    release = re.search(r'R(\d+).*?REVISION: ([\d.]+)', _read(root / 'etc/nv_tegra_release'))
    facts.append(f'L4T {release[1]}.{release[2]}' if release else f'L4T release {UNAVAILABLE}')
    return ', '.join(facts)


def explain_failed_load(error: Exception) -> str:
    """Return one sentence; a lack of memory is set against what the board has."""
    sentence = str(error) if isinstance(error, (EngineError, ValueError)) else (
        f'{type(error).__name__}: {error}')
    short = isinstance(error, MemoryError) or 'out of memory' in sentence.lower() or (
        getattr(error, 'code', None) == ErrorCode.OUT_OF_MEMORY)
    return f'{sentence} ({memory_facts()})' if short else sentence


class Board:
    """
    The sensors that diagnostics report.

    :param root: of the file system.
    :param throttle: judges heat and over-current, with hysteresis.
    """

    def __init__(self, root: Path = Path('/'), throttle: Throttle | None = None) -> None:
        self.throttle = throttle or Throttle()
        self._sources: list[Sysfs | Nvml] = [Sysfs(root)]
        with suppress(UnavailableError):
            self._sources.append(Nvml())

    def read(self) -> tuple[dict[str, str], str]:
        """Return values by diagnostics key, and why the board is throttled; never raises."""
        sample = merge([source.read() for source in self._sources], time.monotonic_ns())
        reason = self.throttle.update(sample)
        judged = sample.throttled is not None or sample.junction_c is not None or (
            sample.over_current is not None)
        return values_of(sample) | {
            'throttled': reason or ('no' if judged else UNAVAILABLE)}, reason


def device_values(root: Path = Path('/')) -> dict[str, str]:
    """Return what the kernel's files say, by diagnostics key; never raises."""
    return values_of(Sysfs(root).read())


def values_of(sample: Sample) -> dict[str, str]:
    """Return a sample by diagnostics key; what is not known says why, where that helps."""
    def text(name: str, value: float | None, form: str) -> str:
        if value is not None:
            return format(value, form)
        return NOT_PERMITTED if sample.whys.get(name) == NOT_PERMITTED else UNAVAILABLE

    used, total = _gpu_memory()
    if UNAVAILABLE in (used, total):
        used = text('', sample.gpu_memory_used_mb, '.0f')
        total = text('', sample.gpu_memory_total_mb, '.0f')
    busy, emc = sample.gpu_percent, sample.emc_percent
    return {
        'gpu_memory_used_mb': used, 'gpu_memory_total_mb': total,
        'gpu_load': text('gpu_percent', None if busy is None else busy / 100, '.3f'),
        'gpu_clock_mhz': text('gpu_mhz', sample.gpu_mhz[0] if sample.gpu_mhz else None, '.0f'),
        'memory_load': text('emc_percent', None if emc is None else emc / 100, '.3f'),
        'memory_clock_mhz': text('emc_mhz', sample.emc_mhz, '.0f'),
        'power_w': text('power_mw', None if sample.total_mw is None else sample.total_mw / 1e3,
                        '.2f'),
        'temperature_c': text('temperatures', sample.junction_c, '.1f'),
        'power_mode': sample.power_mode or UNAVAILABLE}


def _gpu_memory() -> tuple[str, str]:
    """Return used and total MB; asks torch only where the engine has loaded it."""
    torch = sys.modules.get('torch')
    try:
        if torch is None or not torch.cuda.is_initialized():
            return UNAVAILABLE, UNAVAILABLE
        free, total = torch.cuda.mem_get_info()
    except Exception:
        return UNAVAILABLE, UNAVAILABLE
    return str((total - free) >> 20), str(total >> 20)
