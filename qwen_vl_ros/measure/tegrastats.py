"""
Lines of NVIDIA's tegrastats, JetPack 4 to 7, Nano and TX to Thor, into samples.

The format was never documented and changes with every release: words that are not known are
passed over, values that are missing stay unknown, and no line raises.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from datetime import datetime

from qwen_vl_ros.measure.samples import Load, Sample

#: A number; digits are bounded because Python refuses to read thousands of them.
N = r'-?[0-9]{1,9}(?:\.[0-9]{1,9})?'

STAMP = re.compile(r'([0-9]{2})-([0-9]{2})-([0-9]{4}) ([0-9]{2}):([0-9]{2}):([0-9]{2})\b')
MEMORY = re.compile(rf'\b(I?RAM|SWAP) ({N})/({N})([kMG]B)'
                    rf'(?: ?\((?:lfb ({N})x({N})([kMG]B)|[^)]*)\))?')
CPU = re.compile(rf'\bCPU \[([^\]]*)\](?:@({N}))?', re.IGNORECASE)
CORE = re.compile(rf'({N})%(?:@({N}))?')
EMC = re.compile(rf'\bEMC(?:_FREQ)? (?:({N})%)?(?:@({N}))?')
GPU = re.compile(rf'\bGR3D(?:_FREQ)? (?:({N})%)?(?:@(?:\[([^\]]*)\]|({N})))?')
#: A name begins where a word does and is bounded: a line of any length is read in linear time.
TEMPERATURE = re.compile(rf'(?<![\w.@-])([A-Za-z][\w-]{{0,63}})@({N})C(?:/({N})C)*(?!\w)')
RAIL = re.compile(
    rf'(?<![\w.@+-])([A-Za-z][\w.+-]{{0,63}}) ({N})(mW)?/({N})(?:mW)?(?:/({N})(?:mW)?)*(?=\s|$)')
ENGINE = re.compile(rf'(?<![\w.@])([A-Z][A-Z0-9_]*) (off|(?:({N})%)?@?({N})?)(?=\s|$)')

#: Names that are not of engines though they look so; GR3D2 is no second GPU.
NO_ENGINE = {'RAM', 'IRAM', 'SWAP', 'CPU', 'EMC', 'GR3D', 'GR3D2', 'NC', 'MTS', 'EDP'}

#: Degrees that a sensor can show; one that is switched off shows -256.
DEGREES = (-50.0, 150.0)

KIB = {'kB': 1 / 1024, 'MB': 1.0, 'GB': 1024.0}


def parse(line: str | bytes, time_ns: int = 0) -> Sample:
    """
    Return what a line says; never raises.

    :param time_ns: when the line arrived, monotonic clock.
    """
    text = line.decode('utf-8', 'replace') if isinstance(line, bytes) else line
    values: dict[str, object] = {'time_ns': time_ns}
    values |= _memory(text)
    values['cpu'] = _cpu(text)
    emc = EMC.search(text)
    if emc:
        values |= {'emc_percent': _percent(emc[1]), 'emc_mhz': _number(emc[2])}
    gpu = GPU.search(text)
    if gpu:
        clocks = gpu[2].split(',') if gpu[2] is not None else [gpu[3]]
        known = [_number(clock.strip()) for clock in clocks if clock]
        values |= {'gpu_percent': _percent(gpu[1]),
                   'gpu_mhz': tuple(clock for clock in known if clock is not None)}
    values['engines'] = _engines(text)
    values['temperatures'] = {
        name.lower(): float(degrees) for name, degrees, _ in TEMPERATURE.findall(text)
        if DEGREES[0] <= float(degrees) <= DEGREES[1]}
    now: dict[str, float] = {}
    average: dict[str, float] = {}
    for name, first, _, second, _ in RAIL.findall(text):
        if name.upper() not in ('NC', 'RAM', 'IRAM', 'SWAP'):
            for rails, value in ((now, _number(first)), (average, _number(second))):
                if value is not None:
                    rails[name] = value
    return Sample(**values, power_mw=now, power_average_mw=average)  # type: ignore[arg-type]


def _number(text: str | None) -> float | None:
    """Return a number that is not negative, which no load, amount or clock can be."""
    if not text or not re.fullmatch(N, text):
        return None
    value = float(text)
    return value if value >= 0 else None


def _percent(text: str | None) -> float | None:
    """Return a share of 0 to 100."""
    value = _number(text)
    return value if value is None or value <= 100 else None


def _memory(text: str) -> dict[str, object]:
    out: dict[str, object] = {}
    for name, used, total, unit, count, block, block_unit in MEMORY.findall(text):
        key = {'RAM': 'ram', 'SWAP': 'swap'}.get(name)
        if key is None:
            continue
        scale = KIB[unit]
        for what, amount in (('used', _number(used)), ('total', _number(total))):
            out[f'{key}_{what}_mb'] = None if amount is None else amount * scale
        blocks, size = _number(count), _number(block)
        if key == 'ram' and blocks is not None and size is not None:
            out['largest_free_block_mb'] = size * KIB[block_unit] if blocks else 0.0
    return out


def _cpu(text: str) -> tuple[Load, ...]:
    found = CPU.search(text)
    if not found:
        return ()
    cores = []
    for word in found[1].split(','):
        core = CORE.fullmatch(word.strip())
        if core:
            # The oldest form has one clock for all cores, behind the list.
            cores.append(Load(_percent(core[1]), _number(core[2] or found[2]), True))
        else:
            cores.append(Load(on=False if word.strip().lower() == 'off' else None))
    return tuple(cores)


def _engines(text: str) -> dict[str, Load]:
    out = {}
    for name, word, percent, mhz in ENGINE.findall(text):
        short = name.removesuffix('_FREQ')
        if short in NO_ENGINE or not word:
            continue
        out[short] = Load(on=False) if word == 'off' else Load(
            _percent(percent), _number(mhz), True)
    return out


def stamp_of(line: str) -> float | None:
    """Return a line's own time in seconds, or ``None`` where it has none."""
    found = STAMP.search(line)
    if not found:
        return None
    month, day, year, hour, minute, second = map(int, found.groups())
    try:
        return datetime(year, month, day, hour, minute, second).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def replay(lines: Iterable[str], interval_ms: float = 1000.0) -> Iterator[Sample]:
    """
    Yield the samples of a recorded log, on a clock that starts at its first line.

    Stamps count whole seconds, so lines of one second are spread by ``interval_ms``; a log without
    stamps has one line each ``interval_ms``. Lines without any value are passed over.
    """
    first: float | None = None
    previous = -interval_ms
    for line in lines:
        sample = parse(line)
        if sample == Sample():
            continue
        time_ms = previous + interval_ms
        stamp = stamp_of(line)
        if stamp is not None:
            first = stamp if first is None else first
            own = (stamp - first) * 1e3
            # Within the stamp's second the interval is the better clock.
            time_ms = time_ms if own <= time_ms < own + 1000.0 else max(own, previous)
        previous = time_ms
        yield parse(line, int(time_ms * 1e6))
