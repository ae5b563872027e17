"""What the board says about itself; what it does not say is ``unavailable``, never 0."""

from __future__ import annotations

import math
import platform
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from qwen_vl_ros.engine.errors import EngineError, ErrorCode

UNAVAILABLE = 'unavailable'

GPU_LOADS = ('sys/devices/gpu.0/load', 'sys/devices/platform/gpu.0/load',
             'sys/devices/platform/bus@0/17000000.gpu/load',
             'sys/devices/platform/17000000.gpu/load')

#: Memory bandwidth of modules by their name, 1e9 bytes/s (NVIDIA's data sheets).
PEAK_GB_S = {'AGX Orin': 204.8, 'Orin NX': 102.4, 'Orin Nano': 68.0}


def _read(path: Path) -> str:
    try:
        return path.read_text(errors='replace').strip().strip('\0')
    except OSError:
        return ''


def _first(values: Iterable[str]) -> str:
    return next((value for value in values if value), UNAVAILABLE)


def hardware_id(root: Path = Path('/')) -> str:
    """Return the module's name, such as 'NVIDIA Jetson AGX Orin Developer Kit'."""
    model = _read(root / 'proc/device-tree/model')
    return model or f'{platform.machine()} {platform.node()}'


def peak_bandwidth_gb_s(module: str) -> float:
    """Return the memory bandwidth of a module by its :func:`hardware_id`; NaN where unknown."""
    return next((peak for name, peak in PEAK_GB_S.items() if name in module), math.nan)


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


def device_values(root: Path = Path('/')) -> dict[str, str]:
    """Return memory, load, temperature and power mode by diagnostics key; never raises."""
    used, total = _gpu_memory()
    return {
        'gpu_memory_used_mb': used, 'gpu_memory_total_mb': total,
        'gpu_load': _gpu_load(root), 'temperature_c': _temperature(root),
        'power_mode': _power_mode(root)}


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


def _gpu_load(root: Path) -> str:
    """Return the GPU's load, 0 to 1; Jetson's file counts in thousandths."""
    text = _first(_read(root / path) for path in GPU_LOADS)
    return f'{int(text) / 1000:.3f}' if text.isdigit() else UNAVAILABLE


def _temperature(root: Path) -> str:
    """Return the hottest sensor in degrees; -256 is how a Jetson says that a sensor is off."""
    hottest = []
    for zone in sorted(root.glob('sys/class/thermal/thermal_zone*')):
        text = _read(zone / 'temp')
        if re.fullmatch(r'-?\d+', text) and int(text) > -200_000:
            hottest.append(int(text) / 1000)
    return f'{max(hottest):.1f}' if hottest else UNAVAILABLE


def _power_mode(root: Path) -> str:
    """Return the number of nvpmodel's mode."""
    found = re.search(r'pmode:0*(\d+)', _read(root / 'var/lib/nvpmodel/status'))
    return found[1] if found else UNAVAILABLE
