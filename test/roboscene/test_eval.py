"""``qwen_vl eval``: the table, the records, and what bad input gets."""

from __future__ import annotations

import json

import pytest

from qwen_vl_ros.cli.main import main
from qwen_vl_ros.kernels import loader
from qwen_vl_ros.roboscene.evaluate import chance, wilson
from qwen_vl_ros.roboscene.items import items


def test_records_and_table(tmp_path, capsys):
    out = tmp_path / 'out.json'
    assert main(['eval', '--items', '3', '--family', 'number', 'far', '--json', str(out)]) == 0
    shown = capsys.readouterr().out
    records = json.loads(out.read_text())
    assert [r['case']['family'] for r in records] == ['number', 'far']
    for record in records:
        assert record['stage'] == 'eval' and record['metric'] == 'accuracy'
        assert record['kind'] == 'measured' and record['runs'] == 3
        low, high = record['interval']
        assert low <= record['value'] <= high
        assert record['kept_tokens'] == 192 and record['case']['select'] == 'all'
        assert f"{record['case']['family']:<10} {record['value']:>8.3f}" in shown
    assert 'mean' in shown


def test_dropping_is_counted(capsys):
    assert main(['eval', '--items', '2', '--family', 'number', '--keep-ratio', '0.33',
                 '--select', 'oracle', '--json', '-']) == 0
    record, = json.loads(capsys.readouterr().out)
    assert record['kept_tokens'] == 72 and record['evidence_recall'] == 1
    assert record['case']['select'] == 'oracle'


def test_another_choice_is_another_case(capsys):
    assert main(['eval', '--items', '2', '--family', 'path', '--keep-ratio', '0.33', '--select',
                 'next_frame', '--weights', 'gradient=1,motion=1', '--least-margin', '0.5',
                 '--json', '-']) == 0
    out, err = capsys.readouterr()
    case = json.loads(out)[0]['case']
    assert (case['weights'], case['least_margin']) == ('gradient=1,motion=1', 0.5)
    assert 'by next_frame gradient=1,motion=1' in err and 'generic_every' not in case


@pytest.mark.parametrize(('words', 'expected'), [
    (['--items', '0'], '--items is 0'),
    (['--family', 'smell'], "--family 'smell' is not one of attribute"),
    (['--family', 'path', '--split', 'heldout'], "--family 'path' is not one of"),
    (['--keep-ratio', '0'], '--keep-ratio is 0'),
    (['--select', 'magic'], "selector 'magic' is not one of"),
    (['--select', 'saliency', '--weights', 'motion=1'], "--weights: signal 'motion' is not one"),
    (['--model', '/nowhere'], '/nowhere'),
    (['--json', '/nowhere/x.json'], 'cannot write /nowhere/x.json'),
])
def test_bad_input_is_named(words, expected, capsys):
    assert main(['eval', *words]) == 2
    out, err = capsys.readouterr()
    assert expected in err and len(err.splitlines()) == 1 and not out


@pytest.mark.parametrize('words', [
    ['--temperature', 'nan'], ['--max-new-tokens', '-7'], ['--system', 'x']])
def test_what_eval_does_not_use_it_does_not_take(words, capsys):
    with pytest.raises(SystemExit) as caught:
        main(['eval', *words])
    assert caught.value.code == 2
    assert words[0] in capsys.readouterr().err


def test_without_the_renderer_it_says_so_first(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv(loader.VARIABLE, raising=False)
    monkeypatch.setattr(loader, 'FOLDER', tmp_path)
    loader.library.cache_clear()
    assert main(['eval', '--items', '1']) == 2
    out, err = capsys.readouterr()
    assert err == ('qwen_vl eval: rendered scenes need the renderer, '
                   "build it with 'make kernels'\n")
    assert not out


def test_wilson_interval_of_known_shares():
    assert wilson(0, 0) == (0.0, 1.0)
    low, high = wilson(183, 200)
    assert (round(low, 3), round(high, 3)) == (0.868, 0.946)
    assert wilson(10, 10)[1] == pytest.approx(1.0) and wilson(0, 10)[0] == 0.0


def test_chance_is_the_best_constant_answer():
    drawn = list(items('relation', 'test', 40))
    yes = sum(i.question.answer == 'yes' for i in drawn) / 40
    assert chance('relation', drawn) == max(yes, 1 - yes)
    assert chance('number', []) == 0.0
