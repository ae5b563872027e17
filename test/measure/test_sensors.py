"""Kernel files, jtop, NVML, the sampling thread, throttling and attribution."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import tegrastats_lines as lines

from qwen_vl_ros.measure import jetson, nvml
from qwen_vl_ros.measure.jetson import (
    Attribution,
    Jtop,
    Sampler,
    Tegrastats,
    Throttle,
    attribute,
    bandwidth_gb_s,
    bytes_per_clock,
)
from qwen_vl_ros.measure.nvml import Nvml, UnavailableError, throttle_reasons
from qwen_vl_ros.measure.samples import Load, Sample, merge
from qwen_vl_ros.measure.sysfs import NOT_PERMITTED, NOT_PRESENT, UNREADABLE, Sysfs
from qwen_vl_ros.measure.tegrastats import parse, replay
from qwen_vl_ros.measure.timeline import Span
from qwen_vl_ros.measure.watch import Watch, format_report

ORIN = {
    'sys/kernel/debug/cactmon/mc_all': '38388000\n',
    'sys/kernel/debug/bpmp/debug/clk/emc/rate': '3199000000\n',
    'sys/devices/platform/gpu.0/load': '873\n',
    'sys/devices/platform/17000000.gpu/devfreq_dev/cur_freq': '1300500000\n',
    'sys/class/thermal/thermal_zone0/type': 'tj-thermal\n',
    'sys/class/thermal/thermal_zone0/temp': '61250\n',
    'sys/class/thermal/thermal_zone1/type': 'cv0-thermal\n',
    'sys/class/thermal/thermal_zone1/temp': '-256000\n',
    'sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon4/in1_label': 'VDD_GPU_SOC\n',
    'sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon4/in1_input': '19000\n',
    'sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon4/curr1_input': '200\n',
    'sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon4/in2_label': 'NC\n',
    'sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon4/in2_input': '1\n',
    'sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon4/curr2_input': '1\n',
    'var/lib/nvpmodel/status': 'pmode:0003 fmode:cool\n',
    'etc/nvpmodel.conf': '< POWER_MODEL ID=2 NAME=MODE_30W >\n< POWER_MODEL ID=3 NAME=MODE_50W >',
    'sys/class/hwmon/hwmon1/oc1_event_cnt': '0\n',
    'sys/class/hwmon/hwmon1/oc2_event_cnt': '2\n',
    'sys/devices/system/cpu/cpu0/online': '1\n',
    'sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq': '2201600\n',
    'sys/devices/system/cpu/cpu10/online': '0\n',
    'proc/meminfo': 'MemTotal: 64000000 kB\nMemAvailable: 32000000 kB\nSwapTotal: 1024 kB\n'
                    'SwapFree: 0 kB\n'}


@pytest.fixture
def board(tmp_path):
    for name, text in ORIN.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_the_board_keeps_its_power_beside_a_card_that_tells_its_own():
    board, card = Sample(power_mw={'VIN': 30e3}), Sample(power_mw={'gpu': 4e3})
    assert merge([board, card], 0).total_mw == 30e3
    assert merge([board, Sample(power_mw={'total': 4e3, 'VIN': 1.0})], 0).total_mw == 30e3
    assert merge([Sample(power_mw={'CPU': 5e3, 'GPU': 3e3}), card], 0).total_mw == 8e3
    assert card.total_mw == 4e3


def test_kernel_files_of_an_orin(board):
    s = Sysfs(board).read()
    assert s.emc_percent == pytest.approx(12.0) and s.emc_mhz == 3199
    assert s.gpu_percent == 87.3 and s.gpu_mhz == (1300.5,)
    assert s.temperatures == {'tj': 61.25}
    assert s.power_mw == {'VDD_GPU_SOC': 3800}
    assert s.power_mode == '3 MODE_50W' and s.over_current == 2
    assert s.cpu == (Load(None, 2201.6, True), Load(None, None, False))
    assert s.ram_used_mb == 31250 and s.swap_used_mb == 1
    assert s.whys == {}


def test_what_is_not_there_is_unknown_and_says_so(tmp_path):
    s = Sysfs(tmp_path).read()
    assert s.emc_percent is None and s.gpu_percent is None and s.temperatures == {}
    assert set(s.whys.values()) == {NOT_PRESENT}
    assert {'emc_percent', 'emc_mhz', 'gpu_percent', 'gpu_mhz', 'power_mw'} <= set(s.whys)


def test_a_refused_read_is_not_permitted(board, monkeypatch):
    read_text = Path.read_text

    def refuse(path, *args, **more):
        if 'debug' in str(path):
            raise PermissionError(13, 'Permission denied')
        return read_text(path, *args, **more)

    monkeypatch.setattr(Path, 'read_text', refuse)
    s = Sysfs(board).read()
    assert s.emc_percent is None and s.whys['emc_percent'] == NOT_PERMITTED
    assert s.gpu_percent == 87.3


@pytest.mark.parametrize(('file', 'name'), [
    ('temp', 'temperatures'), ('_input', 'power_mw'), ('status', 'power_mode'),
    ('_event_cnt', 'over_current')])
def test_what_is_there_and_refused_is_not_called_absent(board, monkeypatch, file, name):
    assert name not in Sysfs(board).read().whys
    read_text = Path.read_text

    def refuse(path, *args, **more):
        if path.name.endswith(file):
            raise PermissionError(13, 'Permission denied')
        return read_text(path, *args, **more)

    monkeypatch.setattr(Path, 'read_text', refuse)
    sample = Sysfs(board).read()
    assert sample.whys[name] == NOT_PERMITTED and not getattr(sample, name)


def test_emc_activity_without_its_clock_is_unknown(board):
    (board / 'sys/kernel/debug/bpmp/debug/clk/emc/rate').write_text('0\n')
    assert Sysfs(board).read().emc_percent is None
    (board / 'sys/kernel/debug/bpmp/debug/clk/emc/rate').write_text('nonsense\n')
    s = Sysfs(board).read()
    assert s.emc_percent is None and s.emc_mhz is None and s.whys['emc_mhz'] == UNREADABLE


def test_the_first_source_that_knows_wins():
    merged = merge([
        Sample(gpu_percent=None, temperatures={'cpu': 50.0}, whys={'gpu_percent': 'no'}),
        Sample(gpu_percent=12.0, temperatures={'cpu': 40.0, 'gpu': 41.0}, throttled=(),
               whys={'emc_percent': NOT_PERMITTED})], 7)
    assert merged.gpu_percent == 12 and merged.time_ns == 7
    assert merged.temperatures == {'cpu': 50.0, 'gpu': 41.0}
    assert merged.throttled == () and merged.whys == {'emc_percent': NOT_PERMITTED}
    assert merge([Sample(gpu_percent=0.0), Sample(gpu_percent=5.0)], 0).gpu_percent == 0.0


# jtop

class FakeJtop:
    nvpmodel: str | None = 'MODE_50W'

    def __init__(self):
        self.memory = {'EMC': {'cur': 3199000, 'val': 17}, 'RAM': {'used': 1024000,
                                                                   'tot': 2048000}}
        self.gpu = {'ga10b': {'status': {'load': 42.0}, 'freq': {'cur': 1300500}}}
        self.power = {'rail': {'VDD_GPU_SOC': {'power': 5139}}, 'tot': {'power': 12000}}
        self.temperature = {'tj': {'temp': 51.5, 'online': True}, 'CV0': {'temp': -256.0},
                            'gpu': {'temp': 1.0, 'online': False}}
        self.cpu = {'cpu': [{'online': True, 'idle': 90.0, 'freq': {'cur': 2201600}},
                            {'online': False}]}

    def start(self):
        pass

    def close(self):
        raise RuntimeError('gone')


def test_jtop_is_read():
    source = Jtop(FakeJtop)
    s = source.read()
    assert (s.emc_percent, s.emc_mhz, s.gpu_percent, s.gpu_mhz) == (17, 3199, 42, (1300.5,))
    assert s.power_mw == {'total': 12000, 'VDD_GPU_SOC': 5139} and s.total_mw == 12000
    assert s.temperatures == {'tj': 51.5} and s.power_mode == 'MODE_50W'
    assert s.cpu == (Load(10.0, 2201.6, True), Load(None, None, False))
    assert (s.ram_used_mb, s.ram_total_mb) == (1000, 2000)
    source.close()


def test_jtop_absent_stopped_or_broken_is_unavailable():
    with pytest.raises(UnavailableError, match='not installed'):
        Jtop()

    class Stopped(FakeJtop):
        def start(self):
            raise ConnectionError('service is not running')

    with pytest.raises(UnavailableError, match='not running'):
        Jtop(Stopped)

    class OtherVersion(FakeJtop):
        nvpmodel = None

        def __init__(self):
            self.memory, self.gpu, self.temperature = {}, {}, None
            self.power, self.cpu = {'rail': {}}, {'total': {}}

    s = Jtop(OtherVersion).read()
    assert s.emc_percent is None and s.gpu_percent is None and s.cpu == ()
    assert s.power_mw == {} and s.whys['emc_percent'].startswith('jtop: KeyError')


# NVML

class FakeNvml:
    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0

    def nvmlDeviceGetHandleByIndex(self, index):
        if index:
            raise RuntimeError('Invalid Argument')
        return 'card'

    def nvmlDeviceGetUtilizationRates(self, card):
        return SimpleNamespace(gpu=37, memory=12)

    def nvmlDeviceGetMemoryInfo(self, card):
        return SimpleNamespace(used=2 << 30, total=4 << 30)

    def nvmlDeviceGetClockInfo(self, card, which):
        return 1980

    def nvmlDeviceGetTemperature(self, card, which):
        return 44

    def nvmlDeviceGetPowerUsage(self, card):
        raise RuntimeError('Not Supported')

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, card):
        return 0x44


def test_nvml_is_read_and_what_it_lacks_is_unknown():
    s = Nvml(library=FakeNvml()).read()
    assert (s.gpu_percent, s.gpu_mhz, s.gpu_memory_used_mb) == (37, (1980,), 2048)
    assert s.power_mw == {} and s.whys == {'power_mw': 'Not Supported'}
    assert s.throttled == ('power cap', 'hardware thermal')
    with pytest.raises(UnavailableError, match='no card 1'):
        Nvml(1, FakeNvml())


def test_idle_clocks_are_not_throttled():
    assert throttle_reasons(0) == throttle_reasons(0x1) == throttle_reasons(0x101) == ()
    assert throttle_reasons(1 << 20) == ('reason 0x100000',)


def test_without_a_driver_nvml_is_unavailable():
    try:
        nvml.load()
    except UnavailableError as error:
        assert 'NVML' in str(error) or 'not installed' in str(error)


# tegrastats as a program, and the thread

def test_a_running_tegrastats_is_followed(tmp_path):
    script = tmp_path / 'tegrastats'
    script.write_text(f'#!/bin/sh\necho "{lines.JP6_64}"\nexec sleep 60\n')
    script.chmod(0o755)
    source = Tegrastats([str(script)])
    for _ in range(200):
        if source.read().emc_percent is not None:
            break
        time.sleep(0.02)
    assert source.read().emc_percent == 3 and source.read().time_ns > 0
    source._newest = parse(lines.JP6_64, time.monotonic_ns() - 5_000_000_000)
    assert source.read() == Sample(whys={'tegrastats': 'silent'})
    source.close()
    with pytest.raises(UnavailableError, match='not on this machine'):
        Tegrastats(['no-such-program'])


def test_the_thread_samples_until_it_is_closed_and_a_broken_source_is_named():
    class Good:
        name = 'good'
        closed = False

        def read(self):
            return Sample(gpu_percent=5.0)

        def close(self):
            self.closed = True

    class Bad:
        name = 'bad'

        def read(self):
            raise OSError('vanished')

    good = Good()
    sampler = Sampler([Bad(), good], period_s=0.01, keep=5)
    assert sampler.newest() is None
    sampler.start()
    deadline = time.monotonic() + 10
    while len(sampler.between(0, time.monotonic_ns())) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    sampler.close()
    kept = sampler.between(0, time.monotonic_ns())
    assert len(kept) == 5 and all(s.gpu_percent == 5 for s in kept)
    assert [s.time_ns for s in kept] == sorted(s.time_ns for s in kept)
    assert sampler.faults == {'bad': 'OSError: vanished'} and good.closed


def test_sources_of_this_machine_are_found_and_the_others_named():
    found, missing = jetson.find_sources()
    assert found[-1].name == 'sysfs'
    assert {s.name for s in found} | set(missing) == {'tegrastats', 'jtop', 'nvml', 'sysfs'}
    for source in found:
        source.read()
        getattr(source, 'close', lambda: None)()


# Throttling

def hot(degrees, t=0.0, **more):
    return Sample(int(t * 1e9), temperatures={} if degrees is None else {'tj': degrees}, **more)


def test_heat_warns_and_ends_with_hysteresis():
    throttle = Throttle(warn_c=95, back_k=5)
    said = [bool(throttle.update(hot(t))) for t in (90, 94.9, 95, 94, 90.1, 89.9, 94, 96)]
    assert said == [False, False, True, True, True, False, False, True]
    assert 'last read' in throttle.update(hot(None))
    assert '97.5' in throttle.update(hot(97.5))
    assert Throttle(warn_c=0).update(hot(120)) == ''
    assert Throttle().update(hot(None)) == ''


def test_over_current_counts_from_the_first_reading_and_ends_after_a_while():
    throttle = Throttle(hold_ns=10_000_000_000)
    assert throttle.update(hot(50, 0, over_current=7)) == ''
    assert 'over-current' in throttle.update(hot(50, 1, over_current=8))
    assert 'over-current' in throttle.update(hot(50, 11))
    assert throttle.update(hot(50, 11.1)) == ''


def test_a_card_that_holds_back_its_clocks_is_throttled():
    assert 'power cap' in Throttle().update(Sample(throttled=('power cap',)))
    assert Throttle().update(Sample(throttled=())) == ''


def test_a_recorded_log_goes_through_the_same_code():
    log = [lines.JP6_64.replace('tj@52.562C', f'tj@{t}C') for t in (90, 96, 92, 80)]
    throttle = Throttle(warn_c=95)
    assert [bool(throttle.update(s)) for s in replay(log, 100)] == [False, True, True, False]


# Attribution

def test_measured_bandwidth_is_divided_by_the_engines_counts():
    second = 1_000_000_000
    samples = [Sample(t * second // 10, emc_percent=50.0, emc_mhz=3200.0) for t in range(11)]
    spans = [Span('token', 0, second // 2, 'cuda:0', 60_000_000_000, 0),
             Span('patches', second // 2, second, 'cpu', 1_000_000_000, 500_000_000),
             Span('encode', second, 3 * second, 'cuda:0', 90_000_000_000, 0)]
    found = attribute(samples, spans, 0, second, 64, 204.8)
    assert found.measured == pytest.approx(102.4)
    assert (found.gpu, found.cpu) == pytest.approx((60.0, 1.5))
    assert found.rest == pytest.approx(40.9)
    assert found.share('measured') == pytest.approx(0.5)
    # The last span lies half inside.
    assert attribute(samples, spans, 0, 2 * second, 64).gpu == pytest.approx((60 + 45) / 2)


def test_what_was_not_measured_stays_unknown():
    second = 1_000_000_000
    spans = [Span('token', 0, second, 'cuda:0', 60_000_000_000, 0)]
    dark = [Sample(0, emc_mhz=3200.0), Sample(1, emc_percent=10.0)]
    found = attribute(dark, spans, 0, second, 64, 204.8)
    assert found.measured is None and found.rest is None and found.gpu == pytest.approx(60)
    assert found.share('rest') is None and found.share('gpu') == pytest.approx(60 / 204.8)
    assert attribute([Sample(0, emc_percent=1.0, emc_mhz=3200.0)], spans, 0, second, 64
                     ).rest is None  # counts above the measurement
    assert attribute(dark, spans, 0, second, None).share('gpu') is None
    with pytest.raises(ValueError, match='empty'):
        attribute([], [], 5, 5, 64)
    assert isinstance(found, Attribution)


def test_engines_are_unknown_unless_the_board_says_that_they_are_off():
    second = 1_000_000_000
    off, on, unsaid = Load(on=False), Load(12.0, 115.0, True), Load(None, 174.0)

    def found(**engines):
        return attribute([Sample(1, emc_percent=9.0, emc_mhz=3200.0, engines=engines)], [], 0,
                         second, 64)

    assert found(NVDLA0=off, VIC=off, APE=unsaid).engines == 0.0
    assert found(NVDLA0=off, VIC=on).engines is None
    assert found(NVDLA0=off, VIC=on).engines_on == ('VIC',)
    assert found(APE=unsaid).engines is None and found().engines is None
    # As a board's own lines are read: VIC and NVENC are on in the one, all are off in the other.
    busy, idle = parse(lines.JP6_64, 5), parse(lines.JP7_64, 5)
    assert attribute([busy], [], 0, second, 64).engines_on == ('NVENC', 'VIC')
    assert attribute([idle], [], 0, second, 64).engines == 0.0


def test_bandwidth_of_a_sample():
    assert bandwidth_gb_s(parse(lines.JP7_64), 64) == pytest.approx(0.03 * 3199e6 * 64 / 1e9)
    assert bandwidth_gb_s(parse(lines.NO_ROOT), 64) is None
    assert bytes_per_clock('NVIDIA Jetson AGX Orin Developer Kit') == 64
    assert bytes_per_clock('NVIDIA Jetson Orin Nano Developer Kit') == 32
    assert bytes_per_clock('a toaster') is None


# Beside a run.

def test_a_run_is_watched():
    class Board:
        name = 'board'

        def read(self):
            return Sample(emc_percent=25.0, emc_mhz=3200.0, gpu_percent=80.0, power_mode='0 MAXN',
                          power_mw={'VDD_IN': 30_000.0}, temperatures={'tj': 96.0})

    watch = Watch([Board()], 'Jetson AGX Orin')
    start = time.monotonic_ns()
    while not watch.samples:
        time.sleep(0.01)
    time.sleep(0.05)
    end = time.monotonic_ns()
    watch.stop()
    report = watch.report([Span('token', start, end, 'cuda:0', int((end - start) * 20), 0)])
    moved = report['bandwidth']
    assert moved['measured'] == pytest.approx(51.2) and moved['peak'] == pytest.approx(204.8)
    assert moved['measured_share'] == pytest.approx(0.25)
    assert 0 < moved['gpu'] <= 20 and moved['cpu'] == 0
    assert moved['rest'] == pytest.approx(51.2 - moved['gpu'])
    assert report['power_w'] == 30 and report['junction_c_max'] == 96
    assert 'junction at 96.0' in report['throttled'][0]
    text = format_report(report)
    assert '51.20 GB/s (25% of the peak) in all' in text and 'throttled' in text


def test_an_unknown_board_reports_unknown_values():
    class Dark:
        name = 'dark'

        def read(self):
            return Sample(whys={'emc_percent': NOT_PERMITTED})

    watch = Watch([Dark()], 'a toaster')
    while not watch.samples:
        time.sleep(0.01)
    watch.stop()
    report = watch.report([])
    assert report['bandwidth']['measured'] is None and report['gpu_percent'] is None
    assert report['unknown'] == {'emc_percent': NOT_PERMITTED}
    assert 'unknown in all' in format_report(report) and '0.0' not in format_report(
        report).replace('0.00', '')
