"""The command line as people use it: pictures, moments of bags, bad input, the doctor."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import cv2
import pytest
from conftest import frames

from qwen_vl_ros.cli import checks, common
from qwen_vl_ros.cli.main import COMMANDS, main

ROOT = Path(__file__).parents[2]


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / 'scene.png'
    _, rgb = next(iter(frames()))
    cv2.imwrite(str(path), rgb[..., ::-1])
    return path


def failing(capsys, *argv) -> str:
    """Return the one line that a bad call gets."""
    assert main(list(map(str, argv))) == 2
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith(f'qwen_vl {argv[0]}: ')
    assert not captured.out
    return lines[0]


@pytest.mark.parametrize('command', [None, *COMMANDS])
def test_help_is_a_manual(command, capsys):
    with pytest.raises(SystemExit) as caught:
        main([command, '--help'] if command else ['--help'])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) > 10
    if command:
        assert text.count(f'qwen_vl {command} ') >= 2


def test_no_command_and_unknown_command(capsys):
    for argv in ([], ['dance']):
        with pytest.raises(SystemExit) as caught:
            main(argv)
        assert caught.value.code == 2
    assert 'dance' in capsys.readouterr().err


def test_ask_about_files(picture, quick, capsys):
    assert main(['ask', 'What?', str(picture), *quick, '--stages']) == 0
    captured = capsys.readouterr()
    text = captured.out.rstrip('\n')
    assert 'tokens in' in captured.err and 'prefill' in captured.err
    assert main(['ask', 'What?', str(picture), str(picture), *quick, '--json']) == 0
    two = json.loads(capsys.readouterr().out)
    assert len(two['frames']) == 2
    assert main(['ask', 'What?', str(picture), *quick, '--json']) == 0
    one = json.loads(capsys.readouterr().out)
    assert one['text'] == text and two['vision_tokens_in'] == 2 * one['vision_tokens_in']
    assert main(['ask', 'What?', '--clip', str(picture), str(picture), *quick, '--json']) == 0
    assert json.loads(capsys.readouterr().out)['vision_tokens_in'] == one['vision_tokens_in']


@pytest.mark.parametrize('storage', ['mcap', 'sqlite3'])
def test_ask_about_a_moment_of_a_bag(bags, storage, quick, capsys):
    stamps = [s for s, _ in frames()]
    for at, index in ((0.0, 0), (0.5, 15), (29 / 30, 29)):
        assert main(['ask', 'What?', '--bag', str(bags[storage]), '--at', str(at), *quick,
                     '--json']) == 0
        got = json.loads(capsys.readouterr().out)
        assert got['frames'][0]['stamp_ns'] == stamps[index]
    assert 'outside the bag; it lasts 0.967 s' in failing(
        capsys, 'ask', 'What?', '--bag', bags[storage], '--at', 99, *quick)


def test_bad_input_gets_one_line(picture, bags, quick, tmp_path, capsys):
    bag = bags['mcap']
    cut = tmp_path / 'cut.png'
    cut.write_bytes(picture.read_bytes()[:60])
    (tmp_path / 'notes.txt').write_text('no picture')
    (tmp_path / 'report.json').write_text('{}')
    cases = [
        (('ask', 'What?'), 'either picture files or --bag'),
        (('ask', 'What?', picture, '--bag', bag), 'either picture files or --bag'),
        (('ask', 'What?', tmp_path / 'absent.jpg'), 'No such file'),
        (('ask', 'What?', tmp_path), 'directory'),
        (('ask', 'What?', cut), 'PNG is cut after 60 bytes'),
        (('ask', 'What?', tmp_path / 'notes.txt'), 'no JPEG, PNG or WebP'),
        (('ask', 'What?', picture, '--threads', '0'), '--threads is 0'),
        (('replay', bag), 'at least one --question'),
        (('replay', bag, '-q', ' '), 'is empty'),
        (('replay', tmp_path / 'absent', '-q', 'What?'), 'does not exist'),
        (('replay', bag, '-q', 'What?', '--topic', '/no'), "no image topic '/no'"),
        (('replay', bag, '-q', 'What?', '--rate', '0'), '--rate is 0.0; expected over 0'),
        (('replay', bag, '-q', 'What?', '--rate', 'nan'), '--rate is nan'),
        (('replay', bag, '-q', 'What?', '--frames', '0'), '--frames is 0; expected 1 to 64'),
        (('replay', bag, '-q', 'What?', '--limit', '-1'), '--limit is -1'),
        (('replay', bag, '-q', 'What?', '--max-age', '0'), '--max-age is 0'),
        (('replay', bag, '-q', 'What?', '--compare', tmp_path), 'no report of qwen_vl'),
        (('replay', bag, '-q', 'What?', '--start', '5'), 'which lasts 0.967 s'),
        (('replay', bag, '-q', 'What?', '--report', '/proc/x'), 'cannot write into /proc/x'),
        (('replay', bag, '-q', 'What?', '--trace', '/nowhere/t.json'), 'cannot write /nowhere'),
        (('ask', 'What?', picture, '--explain', '/nowhere/a.png'), 'cannot write /nowhere'),
        (('ask', 'What?', picture, '--explain', tmp_path), 'ends in .png'),
    ]
    for argv, expected in cases:
        assert expected in failing(capsys_drained(capsys), *argv, *quick_of(argv, quick))
    assert 'cannot be read' in failing(capsys, 'compare', tmp_path / 'absent', tmp_path)
    assert 'no report of qwen_vl' in failing(capsys, 'compare', tmp_path, tmp_path)


def test_places_are_checked_before_the_work_and_left_as_they_are(tmp_path, capsys):
    old = tmp_path / 'old.json'
    old.write_text('kept')
    for good in (None, '', '-', old, '/dev/null', tmp_path / 'new.json'):
        common.check_writable(good)
    common.check_writable(tmp_path / 'a' / 'b', folder=True)
    assert old.read_text() == 'kept' and list(tmp_path.iterdir()) == [old]
    for bad, folder in ((tmp_path, False), (tmp_path / 'a' / 'b.json', False), (old, True),
                        (old / 'x', True), (old / 'x', False), ('/proc/x', False),
                        (tmp_path / ('x' * 300), False), ('a\0b', False)):
        with pytest.raises(common.CliError, match='cannot write'):
            common.check_writable(bad, folder)
    assert 'cannot write' in failing(capsys, 'interconnect', '--json', '/nowhere/x.json')
    assert 'cannot write' in failing(capsys, 'bench', 'answer', '--results', '/proc/x/y.json')
    assert list(tmp_path.iterdir()) == [old]


def capsys_drained(capsys):
    capsys.readouterr()
    return capsys


def quick_of(argv, quick):
    """Leave out what a case sets itself."""
    if '--threads' not in argv:
        return quick
    at = quick.index('--threads')
    return quick[:at] + quick[at + 2:]


@pytest.mark.parametrize('option, value', [
    ('--max-new-tokens', '0'), ('--temperature', '-1'), ('--temperature', 'nan'),
    ('--keep-ratio', '0'), ('--keep-ratio', '1.5')])
def test_request_out_of_range_is_named(picture, quick, capsys, option, value):
    assert main(['ask', 'What?', str(picture), *quick, option, value]) == 2
    captured = capsys.readouterr()
    assert f'{option} is {value if option[2] == "m" else float(value)}; expected' in captured.err
    assert captured.err.count('\n') == 1 and not captured.out


@pytest.mark.parametrize(('words', 'expected'), [
    (('--at', '1'), '--at and --topic are of a bag'),
    (('--topic', '/a'), '--at and --topic are of a bag'),
    (('--ke', '0.5'), 'ambiguous option: --ke could match'),
    (('--min-pixels', '900000'), '--min-pixels is 900000; expected 1 to --max-pixels 401408'),
    (('--max-context', '2'), '--max-context is 2; expected at least 16'),
    (('--quantization', 'int3'), '--quantization is int3; expected none, int8, int4')])
def test_options_are_refused_in_one_line_before_a_model_is_loaded(
        picture, capsys, monkeypatch, words, expected):
    monkeypatch.setattr(common, 'make_chosen', None)
    try:
        code = main(['ask', 'What?', str(picture), *words])
    except SystemExit as left:
        code = left.code
    captured = capsys.readouterr()
    assert code == 2 and expected in captured.err and captured.err.count('\n') == 1


def test_roofline_takes_results_for_the_table_alone(capsys, tmp_path):
    assert main(['roofline', '--results', str(tmp_path)]) == 2
    assert '--results is for --table' in capsys.readouterr().err


def test_what_was_kept_beside_the_wish_is_explained(picture, quick, capsys, tmp_path):
    png = tmp_path / 'kept.png'
    words = ['ask', 'What?', str(picture), *quick, '--explain', str(png)]
    assert main(words) == 0
    assert 'nothing was dropped' in capsys.readouterr().err
    assert main([*words, '--keep-ratio', '0.01']) == 0
    assert '100% were kept where 1% were asked for' in capsys.readouterr().err  # four units


@pytest.mark.parametrize(('words', 'expected'), [
    (('--threads', '999999999999'), '--threads is 999999999999; expected 1 to 1024'),
    (('--seed', '99999999999999999999999'), '--seed is 99999999999999999999999'),
    (('--seed', '-1'), '--seed is -1')])
def test_numbers_out_of_range_are_named(picture, capsys, words, expected):
    assert expected in failing(capsys, 'ask', 'What?', picture, *words)


def test_output_that_cannot_be_written_is_one_line(bags, quick, capsys, tmp_path):
    file = tmp_path / 'taken'
    file.write_text('')
    bag = str(next(iter(bags.values())))
    assert main(['replay', bag, '--question', 'What?', '--limit', '1', *quick,
                 '--report', str(file)]) == 2
    assert 'cannot write into' in capsys.readouterr().err


def test_model_that_is_none(picture, tmp_path, capsys, monkeypatch):
    assert 'absent' in failing(capsys, 'ask', 'What?', picture, '--model', tmp_path / 'absent')
    (tmp_path / 'config.json').write_text('{"model_type": "llama"}')
    assert "'llama'" in failing(capsys, 'ask', 'What?', picture, '--model', tmp_path)
    monkeypatch.delenv('QWEN_VL_MODEL', raising=False)
    monkeypatch.setattr(common, 'default_model', lambda: None)
    assert '--model PATH' in failing(capsys, 'ask', 'What?', picture)


def test_closed_pipe_ends_quietly(bags, quick):
    command = [sys.executable, '-m', 'qwen_vl_ros.cli.main', 'replay', str(bags['mcap']),
               '-q', 'What?', '--rate', '30', *quick]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               env={**os.environ, 'HF_HUB_OFFLINE': '1'})
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline().startswith(b'bag ')
    process.stdout.close()
    err = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(60) in (0, 141)
    assert 'Traceback' not in err and 'BrokenPipe' not in err


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_interrupt_ends_without_traceback(bags, quick, number):
    command = [sys.executable, '-m', 'qwen_vl_ros.cli.main', 'replay', str(bags['mcap']),
               '-q', 'What?', '--rate', '30', *quick, '--max-new-tokens', '200']
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True, env={**os.environ, 'HF_HUB_OFFLINE': '1'})
    assert process.stdout is not None and process.stderr is not None
    line = ''
    while 'What?' not in line:
        line = process.stdout.readline()
        assert line, process.stderr.read()
    sent = time.monotonic()
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and 'Traceback' not in err
    assert 'interrupted' in err
    assert time.monotonic() - sent < 3


def test_doctor(checkpoint, capsys):
    code = main(['doctor', '--model', str(checkpoint), '--json'])
    result = json.loads(capsys.readouterr().out)
    by_name = {c['name']: c for c in result['checks']}
    assert code == (0 if result['ready'] else 1)
    assert by_name['model']['status'] == 'OK' and '2 + 3 layers' in by_name['model']['found']
    assert {'python', 'torch', 'ros', 'rmw', 'fast dds profile', 'kernel buffers', 'gpu',
            'jetson', 'kernels', 'model'} <= set(by_name)
    for check in result['checks']:
        assert check['status'] in ('OK', 'WARN', 'FAIL') and check['found']
    assert main(['doctor', '--model', str(checkpoint)]) == code
    assert 'OK    python' in capsys.readouterr().out


def test_doctor_names_a_bad_model(tmp_path, capsys):
    assert main(['doctor', '--model', str(tmp_path / 'absent')]) == 1
    assert 'FAIL  model' in capsys.readouterr().out
    (tmp_path / 'config.json').write_text('{"model_type": "llama"}')
    check = checks.model_folder(tmp_path)
    assert check.status == 'FAIL' and "'llama'" in check.found and check.next_step


def test_doctor_on_the_fast_dds_profile(tmp_path, monkeypatch):
    for name in ('FASTRTPS_DEFAULT_PROFILES_FILE', 'FASTDDS_DEFAULT_PROFILES_FILE',
                 'FASTDDS_BUILTIN_TRANSPORTS'):
        monkeypatch.delenv(name, raising=False)
    assert checks.fast_dds_profile().status == 'WARN'
    shipped = ROOT / 'config' / 'fastdds.xml'
    monkeypatch.setenv('FASTRTPS_DEFAULT_PROFILES_FILE', str(shipped))
    assert checks.fast_dds_profile().status == 'OK'
    small = tmp_path / 'small.xml'
    small.write_text('<dds><segment_size>1000</segment_size></dds>')
    monkeypatch.setenv('FASTRTPS_DEFAULT_PROFILES_FILE', str(small))
    assert checks.fast_dds_profile().status == 'WARN'
    monkeypatch.setenv('FASTRTPS_DEFAULT_PROFILES_FILE', str(tmp_path / 'absent.xml'))
    assert checks.fast_dds_profile().status == 'FAIL'


def test_doctor_survives_a_check_that_raises(monkeypatch):
    def broken():
        raise RuntimeError('no such device')

    monkeypatch.setattr(checks, 'gpu', broken)
    found = {c.name: c for c in checks.run_checks(None)}
    assert found['broken'].status == 'WARN' and 'no such device' in found['broken'].found
    assert found['model'].status == 'FAIL'


def test_doctor_sees_a_cpu_torch_on_a_gpu_machine(monkeypatch):
    import torch

    monkeypatch.setattr(checks, 'has_nvidia_gpu', lambda: True)
    monkeypatch.setattr(torch.version, 'cuda', None)
    assert checks.torch_build().status == 'FAIL'
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    assert checks.gpu().status == 'FAIL'


def test_topic_without_messages(quick, tmp_path, capsys):
    from tools.make_bags.writer import CameraBag

    with CameraBag(tmp_path / 'bag') as bag:
        stamp_ns, rgb = next(iter(frames()))
        bag.add_picture('/left', stamp_ns, rgb, jpeg=False)
    both = ['--topic', '/left/image_raw', '--topic', '/right/image_raw']
    assert "no image topic '/right/image_raw'" in failing(
        capsys, 'replay', tmp_path / 'bag', '-q', 'What?', *both, *quick)


def test_replay_writes_a_trace(bags, quick, tmp_path, capsys):
    path = tmp_path / 'trace.json'
    words = ['replay', str(bags['mcap']), '-q', 'What?', '--limit', '2', *quick]
    assert main([*words, '--trace', str(path)]) == 0
    assert 'ui.perfetto.dev' in capsys.readouterr().out
    events = json.loads(path.read_text())['traceEvents']
    assert {'encode', 'prefill'} <= {e['name'] for e in events if e['ph'] == 'X'}
    assert main([*words, '--trace', '/nowhere/trace.json']) == 2
    assert '/nowhere/trace.json' in capsys.readouterr().err


def test_replay_watches_the_board(bags, quick, tmp_path, capsys):
    words = ['replay', str(bags['mcap']), '-q', 'What?', '--limit', '2', *quick, '--sensors']
    assert main([*words, '--report', str(tmp_path), '--trace', str(tmp_path / 't.json')]) == 0
    out = capsys.readouterr().out
    assert 'in all: GPU stages' in out and 'board ' in out
    report = json.loads((tmp_path / 'report.json').read_text())
    assert report['sensors']['bandwidth']['cpu'] > 0 and report['sensors']['samples'] > 0
    events = json.loads((tmp_path / 't.json').read_text())['traceEvents']
    assert any(e['ph'] == 'X' for e in events)
