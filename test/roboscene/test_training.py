"""The training program: deterministic from its seed, resumable, and able to learn."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys

import pytest

from tools.train_tiny import recipe
from tools.train_tiny.data import DataError, Mix, batches
from tools.train_tiny.train import Trainer, main, parse

SMALL = ['--stills', '3', '--clips', '1', '--workers', '0', '--device', 'cpu']


def _run(folder, *extra: str) -> Trainer:
    trainer = Trainer(parse(['--out', str(folder), *SMALL, *extra]))
    trainer.run()
    return trainer


def test_same_seed_same_losses_and_a_resumed_run_goes_on(tmp_path, capsys):
    whole = _run(tmp_path / 'a', '--steps', '2')
    assert [p['step'] for p in whole.curve] == [1, 2]
    first = Trainer(parse(['--out', str(tmp_path / 'b'), *SMALL, '--steps', '2',
                           '--stop-after', '0.001']))
    assert first.run() is False  # stopped after its first step
    second = Trainer(parse(['--out', str(tmp_path / 'b'), *SMALL, '--steps', '2']))
    assert second.step == 1 and second.steps == 2
    assert second.run() is True
    losses = [p['loss'] for p in whole.curve]
    again = [p['loss'] for p in json.loads((tmp_path / 'b' / 'curve.json').read_text())]
    assert again[0] == losses[0] and again[-1] == pytest.approx(losses[-1], abs=2e-3)
    assert losses[1] < losses[0]
    assert 'resumed at step 1 of 2' in capsys.readouterr().out


def test_a_finished_folder_is_a_checkpoint_and_can_be_trained_on(tmp_path, monkeypatch, capsys):
    _run(tmp_path / 'a', '--steps', '1')
    monkeypatch.setattr('sys.argv', ['train', '--out', str(tmp_path / 'b'), *SMALL, '--steps', '2',
                                     '--keep', '--init', str(tmp_path / 'a'), '--eval-items', '1'])
    main()
    table = json.loads((tmp_path / 'b' / 'accuracy.json').read_text())
    assert set(table) == {'test', 'test/blind', 'test/shuffled', 'heldout', 'shift'}
    assert 'step 2 of 2' in capsys.readouterr().out
    from qwen_vl_ros.engine.engine import Engine
    engine = Engine.load(str(tmp_path / 'b'), device='cpu')
    assert engine.info.weight_bytes > 0
    engine.close()


def _main(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr('sys.argv', ['train', *SMALL, *arguments])
    return main()


@pytest.mark.parametrize('wrong,words', [
    (('--steps', '-1'), '--steps -1: expected a number from 0 to'),
    (('--lr', 'nan'), '--lr nan: expected a number over 0 and at most 1'),
    (('--aux-until', '7'), '--aux-until 7.0: expected a number over 0 and at most 1'),
    (('--aux-until', '0'), '--aux-until 0.0: expected'),
    (('--minutes', '-2'), '--minutes -2.0: expected'),
    (('--workers', '-1'), '--workers -1: expected'),
    (('--stop-after', '-1'), '--stop-after -1.0: expected'),
    (('--stills', '0', '--clips', '0'), 'a step needs a picture or a clip'),
    (('--device', 'abacus'), "--device abacus: expected 'cpu' or 'cuda'"),
    (('--init', '/nope'), '--init /nope holds no *.safetensors'),
])
def test_what_cannot_be_trained_is_refused(tmp_path, monkeypatch, capsys, wrong, words):
    with pytest.raises(SystemExit) as ended:
        _main(monkeypatch, '--out', str(tmp_path / 'a'), *wrong)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / 'a').exists()


@pytest.mark.parametrize('folder,file,words', [
    ('out', 'state.pt', 'state.pt is no state that can be resumed (UnpicklingError)'),
    ('init', 'model.safetensors', 'init: Error while deserializing header'),
])
def test_a_broken_file_is_one_line(tmp_path, monkeypatch, capsys, folder, file, words):
    (tmp_path / folder).mkdir()
    (tmp_path / folder / file).write_text('garbage')
    start = ['--init', str(tmp_path / 'init')] if folder == 'init' else []
    assert _main(monkeypatch, '--out', str(tmp_path / 'out'), *start) == 1
    said = capsys.readouterr().err
    assert words in said and said.count('\n') == 1


def test_ctrl_c_saves_a_whole_step_and_the_stored_run_goes_on(tmp_path, monkeypatch, capsys):
    plain = Trainer.one

    def interrupted(trainer, batch):
        os.kill(os.getpid(), signal.SIGINT)
        return plain(trainer, batch)

    out = ('--out', str(tmp_path / 'a'))
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, 'one', interrupted)
        assert _main(patched, *out, '--steps', '2') == 130
    assert 'the same command goes on from' in capsys.readouterr().err
    assert _main(monkeypatch, *out, '--steps', '7', '--init', '/nope') == 0
    said = capsys.readouterr().out
    assert 'resumed at step 1 of 2; --steps 7 and --init /nope ignored' in said
    assert 'step 2 of 2' in said
    assert _main(monkeypatch, *out, '--steps', '2') == 0  # nothing left: no third step
    assert 'step 2 of 2' in capsys.readouterr().out


def test_a_worker_that_fails_or_dies_ends_the_training():
    feed = batches(1, 0, Mix(0, 0), 1)
    with pytest.raises(DataError, match='failed: ValueError: need at least one array'):
        next(feed)
    feed = batches(1, 0, Mix(1, 0), 1)
    next(feed)
    for process in multiprocessing.active_children():
        os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(DataError, match='ended with exit code -9'):
        for _ in range(20):
            next(feed)


@pytest.mark.parametrize('wrong,words', [
    (('--out', '/proc/x', '--device', 'cpu'), '--out /proc/x: '),
    (('--out', 'x', '--steps', '0'), '--steps 0: expected a number from 1'),
    (('--out', 'x'), 'no CUDA device: 13727 steps take days on a CPU'),
])
def test_the_recipe_says_why_it_does_not_start(monkeypatch, capsys, wrong, words):
    monkeypatch.setattr('torch.cuda.is_available', lambda: False)
    monkeypatch.setattr('sys.argv', ['recipe', *wrong])
    with pytest.raises(SystemExit):
        recipe.main()
    assert words in capsys.readouterr().err


def test_curves_of_all_phases_are_one():
    rows = [{'step': 2, 'seconds': 3.0}]
    assert recipe.joined([rows, rows], [4, 4]) == [
        {'step': 2, 'seconds': 3.0}, {'step': 6, 'seconds': 6.0}]
    assert recipe.run([sys.executable, '-c', 'raise SystemExit(3)']) == 3
