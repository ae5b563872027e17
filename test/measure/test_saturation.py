"""This machine, measured: the sweep's arithmetic, and that it runs where there is no GPU."""

import json

import pytest
import torch

from qwen_vl_ros.cli.main import main
from qwen_vl_ros.measure import saturation
from qwen_vl_ros.measure.devices import Device, Mode


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Keep buffers and products small: what is tested is not how fast this machine is."""
    monkeypatch.setattr(saturation, 'COLD_BYTES', {'cpu': 1 << 20, 'cuda': 1 << 20})
    monkeypatch.setattr(saturation, 'GEMMS', (('small', 64, 96),))


def test_points_hold_flops_bytes_and_the_roof():
    device = Device('x', 'measured', {'measured': Mode(10.0, 0.1)}, launch_us=2.0)
    points = list(saturation.sweep(torch.device('cpu'), device, most_rows=16, runs=1))
    assert [p.rows for p in points] == [1, 4, 16]
    last = points[-1]
    assert last.flops == 2 * 16 * 64 * 96
    assert last.bytes == 4 * (16 * 64 + 64 * 96 + 16 * 96)
    assert last.density == pytest.approx(last.flops / last.bytes)
    assert last.attainable_ms == pytest.approx(max(
        last.flops / 0.1e9, last.bytes / 10e6, 0.002))
    assert last.tflops * last.ms == pytest.approx(last.flops / 1e9)
    assert last.gb_s * last.ms == pytest.approx(last.bytes / 1e6)


def test_this_machine_is_measured():
    device = saturation.measure_device(torch.device('cpu'), runs=1)
    mode = device.modes['measured']
    assert mode.gb_s > 0 and mode.tflops > 0 and device.launch_us > 0
    assert 'measured' in device.source and not device.orin


def test_the_sweep_command_writes_records_and_a_plot(tmp_path, capsys):
    assert main(['roofline', '--sweep', str(tmp_path / 'out'), '--json', '-']) == 0
    records = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / 'out' / 'saturation.json').read_text()) == records
    assert (tmp_path / 'out' / 'saturation.png').read_bytes().startswith(b'\x89PNG')
    assert all(r['kind'] == 'measured' and r['value'] > 0 for r in records)
