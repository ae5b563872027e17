"""Every method of the table is timed through the engine, and the page shows it."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks.stages import _selection_wall
from benchmarks.stages.selection import METHODS
from qwen_vl_ros.saliency.after_merger import DROPPERS
from tools.plot_accuracy import table

HEAD = Path(__file__).parents[2] / 'models' / 'tiny' / 'saliency_head.safetensors'


@pytest.fixture(scope='module')
def records():
    patch = pytest.MonkeyPatch()
    patch.setattr(_selection_wall, 'WARM', 0)
    patch.setattr(_selection_wall, 'net_ms', lambda head, device: [])
    yield _selection_wall.wall(argparse.Namespace(wall=1, device='cpu'), HEAD)
    patch.undo()


def test_every_method_is_timed(records):
    answers = {r['case']['method']: r for r in records if r['metric'] == 'ms_per_answer'}
    # What was trained for smaller pictures sees the same ones.
    assert set(answers) == {*METHODS, 'full', 'threshold'} - {'downsample_trained'}
    kept = {method: r['case']['kept'] for method, r in answers.items()}
    assert kept.pop('full') == 192 and kept.pop('threshold') < 72
    assert 50 < kept.pop('roi') <= 72 and 50 < kept.pop('downsample') <= 72
    assert set(kept.values()) == {72}
    chosen = {r['case']['method']: r['value'] for r in records if r['metric'] == 'ms_select'}
    assert all(0 < ms < answers[method]['value'] for method, ms in chosen.items())
    assert {r['case']['method'] for r in records if r['metric'] == 'ms_reflect'} == {
        'next_frame', 'next_head', 'entropy'}
    assert set(DROPPERS) == {'divprune', 'dart', 'fastv'}


def test_the_table_has_a_column_of_the_clock_and_a_line_of_80_percent(records):
    clock = {}
    for r in records:
        clock.setdefault(r['case']['method'], {})[r['metric']] = r
    row = {'value': 0.5, 'flops_share': 0.3, 'where_downsampling_fails': None, 'runs': 8,
           'evidence_recall': None}
    rows = {('tiny', method, kept): row for method in ('head', 'next_frame', 'downsample_trained')
            for kept in (144, 96, 63, 42, 21)}
    rows |= {('tiny', 'full', 192): row, ('tiny', 'random', 154): {**row, 'value': 0.25}}
    lines = table(rows, 'tiny', clock).splitlines()
    cells = {line.split(' | ')[0]: line.split('|')[-2].strip() for line in lines if '|' in line}
    assert cells['| method'] == 'ms (choosing)'
    ms = {name: clock[name]['ms_per_answer']['value'] for name in clock}
    assert cells['| light head'] == (
        f"{ms['head']:.1f} ({clock['head']['ms_select']['value']:.2f})")
    assert cells['| next frame (no head)'].endswith(
        f"+ {clock['next_frame']['ms_reflect']['value']:.1f}")
    assert cells['| downsampling, trained for it'] == f"{ms['downsample']:.1f}"
    assert lines[-1].endswith('random (PatchDropout) 0.250.')
    assert 'choosing' not in table(rows, 'tiny', {})
