"""A discrete card's counters through NVML (package nvidia-ml-py, optional), read only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qwen_vl_ros.measure.samples import Sample

#: Reasons for lower clocks that are nobody's fault: idle, an application's own setting, a display.
HARMLESS = 0x1 | 0x2 | 0x100

REASONS = {0x4: 'power cap', 0x8: 'hardware slowdown', 0x10: 'sync boost',
           0x20: 'software thermal', 0x40: 'hardware thermal', 0x80: 'power brake'}


class UnavailableError(Exception):
    """A source that this machine does not have; the message is one sentence."""


def load() -> Any:
    """
    Return pynvml, initialised.

    :raises UnavailableError: without the package, the driver or a card.
    """
    try:
        import pynvml
    except ImportError:
        raise UnavailableError('nvidia-ml-py is not installed') from None
    try:
        pynvml.nvmlInit()
    except Exception as error:
        raise UnavailableError(f'NVML does not start: {error}') from None
    return pynvml


class Nvml:
    """
    Reads samples of one card.

    :param index: of the card.
    :param library: pynvml, or what stands in for it.
    :raises UnavailableError: where there is no such card.
    """

    name = 'nvml'

    def __init__(self, index: int = 0, library: Any = None) -> None:
        self._nvml = library or load()
        try:
            self._handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
        except Exception as error:
            raise UnavailableError(f'NVML has no card {index}: {error}') from None

    def read(self) -> Sample:
        """Return the present values; never raises."""
        n, handle, whys = self._nvml, self._handle, {}

        def ask(name: str, call: Callable[[], Any]) -> Any:
            try:
                return call()
            except Exception as error:
                whys[name] = str(error) or type(error).__name__
                return None

        busy = ask('gpu_percent', lambda: n.nvmlDeviceGetUtilizationRates(handle))
        memory = ask('gpu_memory_used_mb', lambda: n.nvmlDeviceGetMemoryInfo(handle))
        clock = ask('gpu_mhz', lambda: n.nvmlDeviceGetClockInfo(handle, n.NVML_CLOCK_SM))
        warm = ask('temperatures', lambda: n.nvmlDeviceGetTemperature(
            handle, n.NVML_TEMPERATURE_GPU))
        power = ask('power_mw', lambda: n.nvmlDeviceGetPowerUsage(handle))
        reasons = ask('throttled', lambda: n.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        return Sample(
            gpu_percent=None if busy is None else float(busy.gpu),
            gpu_mhz=() if clock is None else (float(clock),),
            gpu_memory_used_mb=None if memory is None else memory.used / 2 ** 20,
            gpu_memory_total_mb=None if memory is None else memory.total / 2 ** 20,
            temperatures={} if warm is None else {'gpu': float(warm)},
            power_mw={} if power is None else {'gpu': float(power)},
            throttled=None if reasons is None else throttle_reasons(reasons), whys=whys)


def throttle_reasons(bits: int) -> tuple[str, ...]:
    """Return the names of the bits that hold clocks back; unknown ones by number."""
    bits &= ~HARMLESS
    return tuple(REASONS.get(1 << i, f'reason {1 << i:#x}')
                 for i in range(bits.bit_length()) if bits >> i & 1)
