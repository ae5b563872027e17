"""Every known form of a tegrastats line, and whatever else may come."""

import time

import tegrastats_lines as lines
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_vl_ros.measure.samples import Load, Sample
from qwen_vl_ros.measure.tegrastats import parse, replay, stamp_of


def test_jetpack_5_of_the_32_gb_board():
    s = parse(lines.JP5_32, 5)
    assert s.time_ns == 5
    assert (s.ram_used_mb, s.ram_total_mb, s.largest_free_block_mb) == (2257, 30536, 4)
    assert (s.swap_used_mb, s.swap_total_mb) == (0, 15268)
    assert s.cpu == (Load(0, 729, True),) * 12
    assert (s.emc_percent, s.emc_mhz, s.gpu_percent, s.gpu_mhz) == (0, 204, 0, (0,))
    assert s.engines == {'NVJPG1': Load(None, 729, True), 'VIC': Load(None, 115, True),
                         'APE': Load(None, 233, True)}
    assert s.temperatures == {'cpu': 41.437, 'tboard': 29, 'soc2': 39.062, 'tdiode': 30.75,
                              'soc0': 39.031, 'tj': 41.656, 'soc1': 38.937}
    assert s.junction_c == 41.656
    assert s.power_mw == {'VDD_GPU_SOC': 2390, 'VDD_CPU_CV': 796, 'VIN_SYS_5V0': 3522,
                          'VDDQ_VDD2_1V8AO': 301}


def test_jetpack_5_of_the_64_gb_board_has_two_gpu_clocks():
    s = parse(lines.JP5_64)
    assert (s.gpu_percent, s.gpu_mhz, s.emc_mhz) == (0, (0, 0), 2133)
    assert s.temperatures['tj'] == 44.343 and 'gpu' not in s.temperatures
    assert s.power_mw['VDD_CPU_CV'] == 390 and 'NC' not in s.power_mw


def test_jetpack_6_has_loads_of_engines():
    s = parse(lines.JP6_64)
    assert [c.percent for c in s.cpu] == [14, 5, 8, 14, 46, 47, 2, 10, 4, 5, 6, 10]
    assert s.cpu[0].mhz == 2188 and s.cpu[-1].mhz == 1036
    assert (s.emc_percent, s.emc_mhz) == (3, 2133)
    assert s.engines['NVENC'] == Load(79, 166, True) and s.engines['VIC'] == Load(36, 115, True)
    assert s.engines['NVDEC'] == s.engines['PVA0'] == Load(on=False)
    assert s.swap_used_mb == 86


def test_jetpack_7_has_pairs_of_temperatures_and_triples_of_power():
    s = parse(lines.JP7_64)
    assert (s.gpu_percent, s.gpu_mhz) == (12, (1300, 1300))
    assert (s.emc_percent, s.emc_mhz) == (3, 3199)
    assert s.swap_used_mb is None and s.swap_total_mb is None
    assert s.temperatures == {'cpu': 52.968, 'soc2': 48.406, 'soc0': 49.531, 'gpu': 47.625}
    assert s.junction_c == 52.968
    assert s.power_mw == {'VDD_GPU_SOC': 5139, 'VDD_CPU_CV': 3268, 'VIN_SYS_5V0': 5500}


def test_orin_nano():
    s = parse(lines.NANO_JP6)
    assert s.gpu_mhz == (1018,) and len(s.cpu) == 6 and s.cpu[3].percent == 9
    assert s.total_mw == 5971


def test_without_root_there_is_no_memory_load():
    s = parse(lines.NO_ROOT)
    assert s.emc_percent is None and s.emc_mhz is None
    assert s.gpu_percent == 0 and s.gpu_mhz == ()
    assert s.cpu == (Load(5, 1510, True), Load(on=False), Load(on=False), Load(1, 729, True))
    assert s.power_mw == {} and s.total_mw is None


def test_xavier_has_rails_named_like_engines_and_sensors():
    s = parse(lines.CLASSIC)
    assert (s.gpu_percent, s.gpu_mhz) == (10, (1300,))
    assert s.power_mw == {'GPU': 0, 'CPU': 311, 'SOC': 933, 'CV': 0, 'VDDRQ': 155, 'SYS5V': 1499}
    assert s.power_average_mw['SYS5V'] == 1510
    assert s.temperatures['gpu'] == 36 and s.junction_c == 36.1  # PMIC's constant 100 left out


def test_xavier_nx():
    s = parse(lines.XAVIER_NX)
    assert (s.emc_percent, s.emc_mhz, s.gpu_percent, s.gpu_mhz) == (2, 1600, 5, (114,))
    assert [core.on for core in s.cpu] == [True] * 4 + [False] * 2
    assert s.engines == {'VIC': Load(3, 115, True), 'APE': Load(None, 150, True)}
    assert s.power_mw == {'VDD_IN': 3520, 'VDD_CPU_GPU_CV': 410, 'VDD_SOC': 1100}
    assert (s.total_mw, s.power_average_mw['VDD_SOC']) == (3520, 1110)
    # PMIC's constant 100 left out; the hottest of the others.
    assert s.temperatures['gpu'] == 31.5 and s.junction_c == 33


def test_thor_says_nothing_about_the_gpu_load():
    s = parse(lines.THOR)
    assert s.gpu_percent is None and s.gpu_mhz == (1575, 1575, 1575)
    assert s.power_mw['VIN'] == s.total_mw == 30000 and s.power_average_mw['VDD_GPU'] == 3400


def test_older_boards():
    s = parse(lines.TX2)
    assert (s.emc_percent, s.gpu_mhz, s.total_mw) == (7, (140,), 2095)
    assert set(s.engines) == {'APE'}
    s = parse(lines.TX1)
    assert s.cpu == (Load(0, 102, True), Load(0, 102, True), Load(3, 102, True),
                     Load(0, 102, True))
    assert (s.emc_percent, s.emc_mhz, s.gpu_percent, s.gpu_mhz) == (7, 408, 0, (76,))
    s = parse(lines.NANO)
    assert (s.ram_used_mb, s.gpu_percent, s.total_mw) == (1024, 99, 2532)
    assert s.power_average_mw['POM_5V_IN'] == 2698


def test_words_that_nobody_knows_are_passed_over():
    s = parse('HELLO 5%% ' + lines.JP6_64 + ' NEWTHING [a,b] x@y 1/2/3 GR3D9_FREQ z')
    assert s.power_mw == parse(lines.JP6_64).power_mw
    assert s.gpu_mhz == parse(lines.JP6_64).gpu_mhz


def test_impossible_numbers_are_unknown():
    s = parse('CPU [-1%@-5] EMC_FREQ -3%@-2 GR3D_FREQ -1%@[-7,x,] cpu@-256C')
    assert s.emc_percent is None and s.gpu_mhz == () and s.temperatures == {}
    assert s.cpu == (Load(None, None, True),)
    s = parse('RAM -1390/30536MB (lfb -2x4MB) SWAP 5/-1MB CPU [101%@729] EMC_FREQ 100.5%@204 '
              'GR3D_FREQ 900%@[1300] NVENC 300%@166 tj@9000C cpu@-50.5C gpu@150C soc0@-50C '
              'tboard@-256C VDD_IN -9000mW/5000mW VDD_CPU 10mW/-1mW')
    assert s.ram_used_mb is None and s.ram_total_mb == 30536 and s.largest_free_block_mb is None
    assert s.swap_used_mb == 5 and s.swap_total_mb is None
    assert s.cpu == (Load(None, 729, True),) and s.engines['NVENC'] == Load(None, 166, True)
    assert s.emc_percent is None and s.gpu_percent is None and s.gpu_mhz == (1300,)
    assert s.temperatures == {'gpu': 150, 'soc0': -50}
    assert s.power_mw == {'VDD_CPU': 10} and s.power_average_mw == {'VDD_IN': 5000}
    assert parse('GR3D_FREQ 100%@[1300] EMC_FREQ 0%@204').gpu_percent == 100


def test_nothing_said_is_nothing_known():
    assert parse('') == parse('\x00\xff') == parse(b'\xff\xfe') == Sample()


WORDS = st.sampled_from([word for line in lines.ALL for word in line.split()])


@settings(max_examples=400, deadline=None)
@given(st.one_of(
    st.text(max_size=300), st.binary(max_size=300),
    st.lists(WORDS, max_size=40).map(' '.join),
    st.tuples(st.sampled_from(lines.ALL), st.integers(0, 900), st.text(max_size=9)).map(
        lambda t: t[0][:t[1]] + t[2] + t[0][t[1] + 3:])))
def test_no_line_raises_and_no_value_is_impossible(line):
    s = parse(line)
    numbers = [s.emc_percent, s.emc_mhz, s.gpu_percent, *s.gpu_mhz]
    assert all(n is None or n >= 0 for n in numbers)
    amounts = [s.ram_used_mb, s.ram_total_mb, s.swap_used_mb, s.largest_free_block_mb,
               *s.power_mw.values(), *s.power_average_mw.values()]
    assert all(n is None or n >= 0 for n in amounts)
    loads = [s.emc_percent, s.gpu_percent, *(x.percent for x in (*s.cpu, *s.engines.values()))]
    assert all(n is None or 0 <= n <= 100 for n in loads)
    assert all(-50 <= t <= 150 for t in s.temperatures.values())


def test_long_digits_do_not_raise():
    parse('RAM ' + '9' * 5000 + '/1MB EMC_FREQ ' + '9' * 5000 + '% cpu@' + '9' * 5000 + 'C')


def test_a_long_line_is_read_in_linear_time():
    # Catastrophic backtracking would take minutes here.
    parse('A ' * 100_000 + 'GR3D_FREQ ' + '1' * 100_000 + 'VDD_' * 10_000)


def test_a_log_is_replayed_on_its_own_clock():
    log = [lines.JP6_64, lines.JP6_64, '', 'garbage',
           lines.JP6_64.replace('18:42:06', '18:42:08')]
    samples = list(replay(log, interval_ms=500))
    assert [s.time_ns for s in samples] == [0, 500_000_000, 2_000_000_000]
    assert samples[0].emc_percent == 3
    plain = list(replay([lines.NO_ROOT] * 3, interval_ms=100))
    assert [s.time_ns for s in plain] == [0, 100_000_000, 200_000_000]


def test_impossible_stamps_are_none():
    assert stamp_of('99-99-2025 10:36:27 RAM') is None
    assert stamp_of('RAM 1/2MB') is None
    assert stamp_of(lines.JP6_64) is not None


def test_a_long_line_of_half_names_takes_no_longer_than_reading_it():
    text = 'a-' * 64_000
    begun = time.process_time()
    sample = parse(f'{text} cpu@40C VDD_IN 5000mW/5000mW')
    # Trying every letter as the begin of a name takes a minute.
    assert time.process_time() - begun < 2
    assert sample.temperatures == {'cpu': 40.0} and sample.power_mw == {'VDD_IN': 5000.0}
