"""Records of the benchmarks: form, ratios, and that newer ones replace older ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import records

ROOT = Path(__file__).parents[2]
FIELDS = {'stage', 'case', 'metric', 'value', 'unit', 'p95', 'runs', 'kind', 'baseline', 'ratio',
          'machine', 'commit', 'command', 'date'}


def one(value, baseline='theirs', **more):
    return records.record('patches', {'size': '640x480'}, 'ms', value, 'ms',
                          baseline=(baseline, 10.0), **more)


def test_a_record_has_every_field():
    made = one(2.5, times=[3.0, 2.5, 2.0, 9.0])
    assert set(made) >= FIELDS
    assert made['ratio'] == 4
    assert (made['runs'], made['min'], made['p95']) == (4, 2.0, 9.0)
    assert made['baseline'] == {'name': 'theirs', 'value': 10.0}
    assert str(ROOT) not in made['command']
    assert one(20.0, higher_is_better=True)['ratio'] == 2
    assert records.record('patches', {}, 'mb', 1.23456, 'MB')['value'] == 1.235


@pytest.mark.parametrize(('value', 'higher', 'words'), [
    (2.5, False, '4x better than theirs (10)'), (20.0, True, '2x better than theirs (10)'),
    (0.76, True, '7.6 % of theirs (10)'), (40.0, False, '4x worse than theirs (10)')])
def test_the_table_says_how_a_figure_stands_to_its_baseline(value, higher, words):
    line = records.table([one(value, higher_is_better=higher)])
    assert line.endswith('  ' + words)


def test_newer_records_replace_older_ones(tmp_path):
    path = tmp_path / 'results' / 'machine.json'
    records.write(path, [one(5.0), one(5.0, 'others')])
    records.write(path, [one(4.0)])
    found = json.loads(path.read_text())
    assert [(r['value'], r['baseline']['name']) for r in found] == [(5, 'others'), (4, 'theirs')]


def test_everybody_gets_a_turn():
    order = []
    times = records.alternate({'a': lambda i: order.append('a'), 'b': lambda i: order.append('b')},
                              0.0, rounds=3)
    assert order == ['a', 'b'] * 4
    assert [len(t) for t in times.values()] == [3, 3]  # the first round is not counted


@pytest.mark.parametrize('path', sorted((ROOT / 'benchmarks' / 'results').glob('*.json')),
                         ids=lambda path: path.name)
def test_results_have_the_form(path):
    found = json.loads(path.read_text())
    assert found
    for made in found:
        assert set(made) >= FIELDS, made
        assert made['kind'] in ('measured', 'projected', 'computed')


def test_the_program_names_its_stages():
    done = subprocess.run([sys.executable, 'benchmarks/run.py', '--stage', 'patches', '--help'],
                          cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert '--torchvision' in done.stdout
    assert 'projection' in done.stdout
