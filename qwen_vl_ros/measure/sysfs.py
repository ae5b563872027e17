"""What a Jetson's kernel files say, as far as this user may read them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from qwen_vl_ros.measure.samples import Load, Sample

NOT_PERMITTED, NOT_PRESENT, UNREADABLE = 'not permitted', 'not present', 'unreadable'

#: Activity of the memory controller, newest kernel first (as jetson_stats looks for it).
EMC_ACTIVITY = (
    'sys/kernel/debug/cactmon/mc_all',
    'sys/kernel/debug/bpmp/debug/actmon/mc_all_avg_activity',
    'sys/kernel/actmon_avg_activity/mc_all')
EMC_RATE = ('sys/kernel/debug/bpmp/debug/clk/emc/rate', 'sys/kernel/debug/clk/emc/clk_rate')

GPU_LOADS = ('sys/devices/gpu.0/load', 'sys/devices/platform/gpu.0/load',
             'sys/devices/platform/bus@0/17000000.gpu/load',
             'sys/devices/platform/17000000.gpu/load')
GPU_CLOCKS = (
    'sys/devices/platform/17000000.gpu/devfreq_dev/cur_freq',
    'sys/devices/platform/bus@0/17000000.gpu/devfreq_dev/cur_freq',
    'sys/devices/17000000.*/devfreq/*/cur_freq',
    'sys/devices/57000000.gpu/devfreq/*/cur_freq',
    'sys/class/devfreq/*.g[pav]*/cur_freq')

RAILS = 'sys/bus/i2c/drivers/ina3221/*/hwmon/hwmon*'
OLD_RAILS = 'sys/bus/i2c/drivers/ina3221x/*/iio:device*'


def read(root: Path, paths: Iterable[str]) -> tuple[str | None, str]:
    """
    Return the text of the first file that can be read, and else why there is none.

    :param paths: below ``root``; may hold ``*``. 'not permitted' outweighs 'not present'.
    """
    why = NOT_PRESENT
    for pattern in paths:
        try:
            found = sorted(root.glob(pattern)) if '*' in pattern else [root / pattern]
        except OSError:
            found = []
        for path in found:
            try:
                return path.read_text(errors='replace').strip().strip('\0'), ''
            except PermissionError:
                why = NOT_PERMITTED
            except FileNotFoundError:
                continue
            except OSError:
                why = UNREADABLE if why == NOT_PRESENT else why
    return None, why


def number(root: Path, paths: Iterable[str]) -> tuple[float | None, str]:
    """Return a file's number as :func:`read` does."""
    text, why = read(root, paths)
    if text is None:
        return None, why
    if not re.fullmatch(r'-?[0-9]{1,18}', text):
        return None, UNREADABLE
    return float(text), ''


class Sysfs:
    """
    Reads samples from kernel files; an unknown value has its reason in ``whys``.

    :param root: of the file system.
    """

    name = 'sysfs'

    def __init__(self, root: Path = Path('/')) -> None:
        self.root = root

    def read(self) -> Sample:
        """Return the present values; never raises."""
        whys: dict[str, str] = {}
        values: dict[str, object] = {}
        values |= self._emc(whys)
        load, why = number(self.root, GPU_LOADS)
        # The load counts in thousandths.
        values['gpu_percent'] = _noted(whys, 'gpu_percent', None if load is None else load / 10,
                                       why)
        clock, why = number(self.root, GPU_CLOCKS)
        _noted(whys, 'gpu_mhz', clock, why)
        values['gpu_mhz'] = () if clock is None else (clock / 1e6,)
        values['temperatures'] = self._temperatures(whys)
        values['power_mw'] = self._power(whys)
        values['power_mode'] = self.power_mode(whys)
        values['over_current'] = self._over_current(whys)
        values['cpu'] = self._cpu()
        for name in ('temperatures', 'power_mw', 'power_mode', 'over_current', 'cpu'):
            if values[name] in (None, {}, ()):
                whys.setdefault(name, NOT_PRESENT)
            else:
                whys.pop(name, None)
        values |= self._memory()
        return Sample(**values, whys=whys)  # type: ignore[arg-type]

    def _emc(self, whys: dict[str, str]) -> dict[str, object]:
        rate, why = number(self.root, EMC_RATE)
        _noted(whys, 'emc_mhz', rate, why)
        activity, busy_why = number(self.root, EMC_ACTIVITY)
        percent = None
        if activity is not None and rate:
            # Activity is in percent of kHz.
            percent = activity / (rate / 1e3)
        elif activity is not None:
            busy_why = why or UNREADABLE
        _noted(whys, 'emc_percent', percent, busy_why)
        return {'emc_percent': percent, 'emc_mhz': None if rate is None else rate / 1e6}

    def _temperatures(self, whys: dict[str, str]) -> dict[str, float]:
        out = {}
        for zone in sorted(self.root.glob('sys/class/thermal/thermal_zone*')):
            degrees = _asked(whys, 'temperatures', zone, 'temp')
            # -256 degrees is how a Jetson says that a sensor is off.
            if degrees is not None and degrees > -200_000:
                name, _ = read(zone, ['type'])
                short = re.sub(r'[-_](thermal|therm)$', '', (name or zone.name).lower())
                out[short] = degrees / 1e3
        return out

    def _power(self, whys: dict[str, str]) -> dict[str, float]:
        out = {}
        for folder in sorted(self.root.glob(RAILS)):
            for label in sorted(folder.glob('in*_label')):
                name, _ = read(folder, [label.name])
                line = label.name[2:-len('_label')]
                volts = _asked(whys, 'power_mw', folder, f'in{line}_input')
                amperes = _asked(whys, 'power_mw', folder, f'curr{line}_input')
                if name and name != 'NC' and volts is not None and amperes is not None:
                    out[name] = volts * amperes / 1e3
        for folder in sorted(self.root.glob(OLD_RAILS)):
            for label in sorted(folder.glob('rail_name_*')):
                name, _ = read(folder, [label.name])
                power = _asked(whys, 'power_mw', folder, f'in_power{label.name[-1]}_input')
                if name and name != 'NC' and power is not None:
                    out[name] = power
        return out

    def power_mode(self, whys: dict[str, str]) -> str | None:
        """Return the number of nvpmodel's mode, with its name where the configuration tells it."""
        text, why = read(self.root, ['var/lib/nvpmodel/status'])
        if text is None:
            whys['power_mode'] = why
        found = re.search(r'pmode:0*([0-9]{1,4})', text or '')
        if not found:
            return None
        modes, _ = read(self.root, ['etc/nvpmodel.conf'])
        name = re.search(rf'POWER_MODEL ID={found[1]} NAME=(\S+)', modes or '')
        return f'{found[1]} {name[1]}' if name else found[1]

    def _over_current(self, whys: dict[str, str]) -> int | None:
        counts = [_asked(whys, 'over_current', path.parent, path.name)
                  for path in sorted(self.root.glob('sys/class/hwmon/hwmon*/oc*_event_cnt'))]
        known = [int(count) for count in counts if count is not None]
        return sum(known) if known else None

    def _cpu(self) -> tuple[Load, ...]:
        cores = []
        folder = self.root / 'sys/devices/system/cpu'
        for path in sorted(folder.glob('cpu[0-9]*'), key=lambda p: int(p.name[3:] or 0)):
            online, _ = number(path, ['online'])
            khz, _ = number(path, ['cpufreq/scaling_cur_freq'])
            cores.append(Load(mhz=None if khz is None else khz / 1e3,
                              on=None if online is None else online == 1))
        return tuple(cores)

    def _memory(self) -> dict[str, object]:
        text, _ = read(self.root, ['proc/meminfo'])
        kib = dict(re.findall(r'^(\w+):\s+([0-9]{1,15}) kB', text or '', re.MULTILINE))
        out: dict[str, object] = {}
        if 'MemTotal' in kib and 'MemAvailable' in kib:
            out['ram_total_mb'] = int(kib['MemTotal']) / 1024
            out['ram_used_mb'] = (int(kib['MemTotal']) - int(kib['MemAvailable'])) / 1024
        if 'SwapTotal' in kib and 'SwapFree' in kib:
            out['swap_total_mb'] = int(kib['SwapTotal']) / 1024
            out['swap_used_mb'] = (int(kib['SwapTotal']) - int(kib['SwapFree'])) / 1024
        return out


def _asked(whys: dict[str, str], name: str, folder: Path, file: str) -> float | None:
    """Return a file's number; else note why, of which 'not permitted' outweighs the rest."""
    value, why = number(folder, [file])
    if value is None and whys.get(name) != NOT_PERMITTED:
        whys[name] = why
    return value


def _noted(whys: dict[str, str], name: str, value: float | None, why: str) -> float | None:
    if value is None:
        whys[name] = why
    return value
