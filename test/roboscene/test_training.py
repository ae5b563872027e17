"""The training program: deterministic from its seed, resumable, and able to learn."""

from __future__ import annotations

import json

import pytest

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
