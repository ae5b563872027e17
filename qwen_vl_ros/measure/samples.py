"""One moment of a machine, whoever tells it: what is not known is ``None``, never 0."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields


@dataclass(frozen=True)
class Load:
    """
    An engine or a CPU core.

    :param percent: busy share.
    :param mhz: clock.
    :param on: whether it is powered; ``None`` where nobody says.
    """

    percent: float | None = None
    mhz: float | None = None
    on: bool | None = None


@dataclass(frozen=True)
class Sample:
    """
    A reading of memory, clocks, loads, temperatures and power.

    :param time_ns: monotonic clock, or the log's own time where it is replayed.
    :param ram_used_mb: and the others: MiB, as tegrastats counts.
    :param cpu: cores in order; ``on`` is false for one that is switched off.
    :param emc_percent: share of the memory controller's cycles in use at ``emc_mhz``.
    :param gpu_percent: load of the GPU; ``gpu_mhz`` the clocks of its parts.
    :param gpu_memory_used_mb: of a card with memory of its own.
    :param engines: by upper-case name, such as NVDEC, VIC, APE.
    :param temperatures: degrees by lower-case sensor name; a sensor that is off is left out.
    :param power_mw: milliwatts now by rail; ``power_average_mw`` over the source's window.
    :param power_mode: name or number of nvpmodel's mode.
    :param over_current: throttle events since boot.
    :param throttled: why a card says that it holds back its clocks; empty: it does not.
    :param whys: what could not be read, and why: 'not permitted', 'not present', ...
    """

    time_ns: int = 0
    ram_used_mb: float | None = None
    ram_total_mb: float | None = None
    largest_free_block_mb: float | None = None
    swap_used_mb: float | None = None
    swap_total_mb: float | None = None
    cpu: tuple[Load, ...] = ()
    emc_percent: float | None = None
    emc_mhz: float | None = None
    gpu_percent: float | None = None
    gpu_mhz: tuple[float, ...] = ()
    gpu_memory_used_mb: float | None = None
    gpu_memory_total_mb: float | None = None
    engines: dict[str, Load] = field(default_factory=dict)
    temperatures: dict[str, float] = field(default_factory=dict)
    power_mw: dict[str, float] = field(default_factory=dict)
    power_average_mw: dict[str, float] = field(default_factory=dict)
    power_mode: str | None = None
    over_current: int | None = None
    throttled: tuple[str, ...] | None = None
    whys: dict[str, str] = field(default_factory=dict)

    @property
    def junction_c(self) -> float | None:
        """
        Return the temperature that throttling goes by: the sensor ``tj``, else the hottest.

        PMIC is left out: on most boards it is a constant 100.
        """
        if 'tj' in self.temperatures:
            return self.temperatures['tj']
        return max((t for name, t in self.temperatures.items() if name != 'pmic'), default=None)

    @property
    def total_mw(self) -> float | None:
        """Return the board's power: an input rail, else the sum of what is known."""
        for name, value in self.power_mw.items():
            if name.upper() in ('VDD_IN', 'POM_5V_IN', 'VIN', 'TOTAL'):
                return value
        # A card's own figure is a part of what a board's rails say.
        parts = [value for name, value in self.power_mw.items() if name != 'gpu']
        return sum(parts or self.power_mw.values()) if self.power_mw else None


def merge(samples: Iterable[Sample], time_ns: int) -> Sample:
    """
    Put what several sources say about one moment together; the first that knows a value wins.

    :param time_ns: of the result.
    """
    out: dict[str, object] = {}
    whys: dict[str, str] = {}
    for sample in samples:
        for spec in fields(Sample):
            value = getattr(sample, spec.name)
            if spec.name == 'whys':
                whys = {**value, **whys}
            elif isinstance(value, dict):
                # Also first in order, by which the input rail is found.
                have: dict[str, object] = out.setdefault(spec.name, {})  # type: ignore[assignment]
                for name, one in value.items():
                    have.setdefault(name, one)
            elif value not in (None, ()) and spec.name not in out:
                out[spec.name] = value
            elif spec.name == 'throttled' and value == () and 'throttled' not in out:
                out[spec.name] = ()
    known = {name for name, value in out.items() if value not in (None, (), {})}
    out['whys'] = {name: why for name, why in whys.items() if name not in known}
    out['time_ns'] = time_ns
    return Sample(**out)  # type: ignore[arg-type]
