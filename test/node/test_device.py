"""What a board says about itself, and what it does not say."""

from pathlib import Path

from qwen_vl_ros.engine.errors import EngineError, ErrorCode
from qwen_vl_ros.measure.jetson import Throttle
from qwen_vl_ros.node.device import (
    UNAVAILABLE,
    Board,
    device_values,
    explain_failed_load,
    hardware_id,
    memory_facts,
)
from qwen_vl_ros.node.diagnostics import OK, WARN, device_status


def test_a_machine_that_says_nothing_is_unavailable_everywhere(tmp_path):
    assert set(device_values(tmp_path).values()) == {UNAVAILABLE}
    assert memory_facts(tmp_path) == (
        'MemAvailable unavailable, largest free block unavailable, L4T release unavailable')
    assert hardware_id(tmp_path)


def test_a_jetson_is_read(tmp_path):
    files = {
        'proc/device-tree/model': 'NVIDIA Jetson AGX Orin Developer Kit\0',
        'proc/meminfo': 'MemTotal: 64000000 kB\nMemAvailable:   31457280 kB\n',
        'proc/buddyinfo': ('Node 0, zone      DMA      1      0      2      0\n'
                           'Node 0, zone   Normal    100     50      0      0\n'),
        'etc/nv_tegra_release': '# R36 (release), REVISION: 4.7, GCID: 1, BOARD: generic\n',
        'sys/devices/platform/gpu.0/load': '873\n',
        'sys/class/thermal/thermal_zone0/temp': '51250\n',
        'sys/class/thermal/thermal_zone1/temp': '-256000\n',
        'sys/class/thermal/thermal_zone2/temp': '48000\n',
        'var/lib/nvpmodel/status': 'pmode:0003 fmode:cool\n'}
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    values = device_values(tmp_path)
    assert values['gpu_load'] == '0.873' and values['temperature_c'] == '51.2'
    assert values['power_mode'] == '3'
    assert hardware_id(tmp_path) == 'NVIDIA Jetson AGX Orin Developer Kit'
    assert memory_facts(tmp_path) == (
        'MemAvailable 30720 MiB, largest free block 16 KiB, L4T 36.4.7')


def test_unreadable_values_are_unavailable_not_zero(tmp_path):
    load = tmp_path / 'sys/devices/gpu.0/load'
    load.parent.mkdir(parents=True)
    load.write_text('n/a')
    assert device_values(tmp_path)['gpu_load'] == UNAVAILABLE


def test_a_hot_board_warns_with_its_latency_and_ends_with_hysteresis(tmp_path):
    zone = tmp_path / 'sys/class/thermal/thermal_zone0'
    zone.mkdir(parents=True)
    (zone / 'type').write_text('tj-thermal')
    board = Board(tmp_path, Throttle(warn_c=95))
    said = []
    for degrees in (94, 96, 91, 89):
        (zone / 'temp').write_text(f'{degrees}000')
        level, sentence, values = device_status(board, 812.4)
        said.append((level, values['throttled'] != 'no'))
    assert said == [(OK, False), (WARN, True), (WARN, True), (OK, False)]
    (zone / 'temp').write_text('99000')
    _, sentence, values = device_status(board, 812.4)
    assert '99.0 degrees' in sentence and 'median latency 812 ms' in sentence
    assert 'latency' not in device_status(board, float('nan'))[1]


def test_over_current_is_named(tmp_path):
    count = tmp_path / 'sys/class/hwmon/hwmon3/oc2_event_cnt'
    count.parent.mkdir(parents=True)
    board = Board(tmp_path)
    for events, level in ((4, OK), (5, WARN)):
        count.write_text(str(events))
        assert device_status(board, 1.0)[0] == level
    assert 'over-current' in board.read()[1]


def test_a_value_of_root_is_not_permitted(tmp_path, monkeypatch):
    read_text = Path.read_text

    def refuse(path, *args, **more):
        if 'debug' in str(path):
            raise PermissionError(13, 'Permission denied')
        return read_text(path, *args, **more)

    monkeypatch.setattr(Path, 'read_text', refuse)
    assert device_values(tmp_path)['memory_load'] == 'not permitted'


def test_a_load_that_lacked_memory_says_what_there_was():
    for error in (MemoryError('12 GiB'), RuntimeError('CUDA error: out of memory'),
                  EngineError(ErrorCode.OUT_OF_MEMORY, 'the model needs 5 GiB')):
        sentence = explain_failed_load(error)
        assert 'MemAvailable' in sentence and 'largest free block' in sentence
    assert explain_failed_load(EngineError(ErrorCode.UNKNOWN, 'no folder')) == 'no folder'
    assert explain_failed_load(KeyError('x')) == "KeyError: 'x'"
