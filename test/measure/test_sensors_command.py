"""``qwen_vl sensors``: a log, this machine, bad arguments, an interrupt."""

import json
import signal
import subprocess
import sys

import pytest
import tegrastats_lines as lines

from qwen_vl_ros.cli.main import main


def test_sensors_of_a_log(tmp_path, capsys):
    log = tmp_path / 'drive.log'
    log.write_text('\n'.join([lines.JP7_64, lines.NO_ROOT, 'junk']))
    assert main(['sensors', '--log', str(log), '--module', 'AGX Orin', '--json', '-']) == 0
    out, table = capsys.readouterr()
    found = json.loads(out)
    assert [s['time_ns'] for s in found['samples']] == [0, 100_000_000]
    assert found['samples'][0]['bandwidth_gb_s'] == pytest.approx(6.142, rel=1e-3)
    assert found['samples'][1]['bandwidth_gb_s'] is None
    assert table.splitlines()[2].split()[1:4] == ['-', '-', '-']


def test_sensors_of_this_machine(capsys):
    assert main(['sensors', '--seconds', '0.3']) == 0
    assert 'mem GB/s' in capsys.readouterr().out


@pytest.mark.parametrize(('words', 'named'), [
    (['--seconds', '-1'], '--seconds'), (['--seconds', 'nan'], '--seconds'),
    (['--interval', 'inf'], '--interval'), (['--warn-at', 'nan'], '--warn-at is nan'),
    (['--log', '/nowhere'], '/nowhere'), (['--log', '/dev/null'], 'no line'),
    (['--json', '/nowhere/x.json'], 'cannot write /nowhere/x.json')])
def test_sensors_refuses_with_one_sentence(capsys, words, named):
    assert main(['sensors', *words]) == 2
    out, err = capsys.readouterr()
    assert named in err and len(err.splitlines()) == 1 and not out


@pytest.mark.parametrize('seconds', ['0', '60'])
def test_an_interrupt_keeps_what_was_sampled(seconds, tmp_path):
    path = tmp_path / 'sensors.json'
    with subprocess.Popen(
            [sys.executable, '-m', 'qwen_vl_ros.cli.main', 'sensors', '--seconds', seconds,
             '--json', str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            # Who runs the tests in a background job has it ignored, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)) as process:
        process.stdout.readline()
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and 'interrupted' in err and 'Traceback' not in err
    assert json.loads(path.read_text())['samples']
