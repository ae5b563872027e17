"""The batched evaluator answers as the engine does, and the sweep runs in its small form."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.records import CannotRun, record
from benchmarks.stages import _selection_cost as cost
from benchmarks.stages._selection_maps import maps_of
from benchmarks.stages._selection_methods import Bench, join, show, smaller_grid
from benchmarks.stages._selection_shape import on_shape
from qwen_vl_ros.engine.config import load_config
from qwen_vl_ros.engine.engine import Engine
from qwen_vl_ros.engine.types import Request, Visual
from qwen_vl_ros.roboscene.evaluate import frames_of
from qwen_vl_ros.roboscene.geometry import GRID_H, GRID_W, UNITS
from qwen_vl_ros.roboscene.items import items
from qwen_vl_ros.saliency import next_frame
from qwen_vl_ros.saliency.head import SaliencyHead
from qwen_vl_ros.saliency.selectors import FILE
from tools.distil_head.batched import CLOSED, Picture, TinyBatch
from tools.distil_head.coarse import coarse_bins
from tools.distil_head.group import answer_kept, groups, question_mask
from tools.distil_head.roboscene import main as distil
from tools.plot_accuracy import controller, wall
from tools.train_tiny.data import item_batch, tokenizer

ROOT = Path(__file__).parents[2]
TINY = ROOT / 'models' / 'tiny'
CPU = torch.device('cpu')


@pytest.fixture(scope='module')
def model():
    return TinyBatch(TINY, CPU)


def group_of(family: str, count: int):
    drawn = list(items(family, 'test', count, 8))
    group, = groups(item_batch(drawn), CPU)
    return drawn, group


@pytest.mark.parametrize('family', ['number', 'change'])
def test_the_batched_model_is_the_engines(model, family):
    drawn, group = group_of(family, 2)
    generator = np.random.default_rng(0)
    keep = torch.from_numpy(np.sort(np.stack([generator.choice(
        UNITS * group.slices, 60, replace=False) for _ in drawn]), 1))
    with torch.no_grad():
        logits = answer_kept(model, group, keep)
    engine = Engine.load(str(TINY), device='cpu', dtype='float32')
    for i, item in enumerate(drawn):
        mask = np.zeros(UNITS * group.slices, bool)
        mask[keep[i]] = True
        _, expected = engine.trace(Request(item.question.text, (Visual(frames_of(item), mask),)))
        at = int((group.labels[i] >= 0).int().argmax())
        assert torch.allclose(logits[i, at], expected[-1], atol=2e-3)
    engine.close()


def test_a_shut_gate_is_a_dropped_unit_and_an_open_one_changes_nothing(model):
    _, group = group_of('attribute', 2)
    keep = torch.arange(0, UNITS, 3).expand(2, -1)
    gate = torch.full((2, UNITS), CLOSED)
    gate.scatter_(1, keep, 0.0)
    everything = torch.arange(UNITS).expand(2, -1)
    with torch.no_grad():
        dropped = model.answer([Picture(model.encode(group.rgb, keep), keep)], group.tokens)
        shut = model.answer([Picture(model.encode(group.rgb, gate=gate), everything, gate=gate)],
                            group.tokens)
        plain = model.encode(group.rgb)
        opened = model.encode(group.rgb, gate=torch.zeros(2, UNITS))
    assert torch.allclose(dropped, shut, atol=2e-3)
    assert torch.allclose(plain, opened, atol=1e-4)


def test_the_batched_join_is_the_selectors():
    generator = np.random.default_rng(1)
    cam = generator.random((3, GRID_H, GRID_W), np.float32) ** 4
    cam[2] = 0
    motion = (generator.random((3, 2 * UNITS)) * 30).astype(np.float32)
    motion[0, :16] = 255
    base = generator.random((3, 2 * UNITS), np.float32)
    shifts = np.array([[0, 0], [0.5, -1.25], [1, 0]], np.float32)
    got = join(*(torch.from_numpy(x) for x in (cam, shifts, motion, base, shifts))).numpy()
    for i in range(3):
        shape = (2, GRID_H, GRID_W)
        expected = next_frame.join(cam[i], tuple(shifts[i]), motion[i].reshape(shape),
                                   base[i].reshape(shape)).reshape(-1)
        # OpenCV moves by whole 32nds of a unit.
        assert np.abs(got[i] - expected).max() < 0.03


def test_the_question_is_told_from_its_template():
    drawn, group = group_of('pointing', 3)
    mask = question_mask(group.labels)
    for i, item in enumerate(drawn):
        ids = group.tokens[i][mask[i]].tolist()
        assert tokenizer().decode(ids, skip_special_tokens=False) == item.question.text


def test_no_method_but_the_oracle_sees_the_evidence(model):
    """Scores stay what they are when the evidence is said to lie elsewhere."""
    drawn = list(items('far', 'test', 2))
    shown = show(drawn, [maps_of(i) for i in drawn], CPU, 0)
    head = SaliencyHead.load(TINY / FILE)
    with torch.no_grad():
        before = {m: Bench(model, head, shown).scores(m).clone()
                  for m in ('head', 'grad_cam', 'saliency', 'window', 'motion')}
        shown.evidence[:] = ~shown.evidence
        after = Bench(model, head, shown)
        assert all(torch.equal(after.scores(m), before[m]) for m in before)


def test_costs_are_those_of_the_engines_stages():
    config = load_config(TINY)
    item = next(items('relation', 'test', 1))
    mask = np.zeros(UNITS, bool)
    mask[:63] = True
    engine = Engine.load(str(TINY), device='cpu')
    from qwen_vl_ros.engine.types import Done
    answer = next(e.answer for e in engine.answer(Request(
        item.question.text, (Visual(frames_of(item), mask),), max_new_tokens=1))
        if isinstance(e, Done))
    spent = sum(s.flops for s in answer.timeline.spans)
    text = answer.prompt_tokens - 63
    assert cost.encoder(config, [63]) + cost.prefill(config, 63, text) == pytest.approx(
        spent, rel=2e-3)
    engine.close()
    head = SaliencyHead.load(TINY / FILE)
    full = cost.question(config, head, 'full', UNITS, text)
    assert cost.question(config, head, 'head', 72, text) < 0.35 * full
    assert head.flops(GRID_H, GRID_W, 12) < 0.03 * full
    assert cost.question(config, head, 'grad_cam', 63, text) > full


def test_smaller_pictures_fit_the_budget_and_name_their_own_bins():
    for kept in (20, 42, 63, 96, 144):
        rows, columns = smaller_grid(kept)
        assert rows * columns <= kept < 1.3 * rows * columns and 1 <= columns / rows <= 1.8
    table = coarse_bins((6, 8), CPU)
    x = tokenizer().token_to_id
    assert table[x('<x15>')] == x('<x7>') and table[x('<y1>')] == x('<y0>')
    assert coarse_bins((7, 9), CPU)[x('<x1>')] == -1  # lies in two bins of nine


def test_the_sweep_runs_in_its_small_form(tmp_path):
    out = tmp_path / 'out.json'
    subprocess.run(
        [sys.executable, 'benchmarks/run.py', '--stage', 'selection', '--items', '1', '--seeds',
         '1', '--models', 'tiny', '--methods', 'head', 'next_frame', 'uniform', 'downsample',
         'dart', '--wall', '0', '--workers', '0', '--coarse-seconds', '0', '--device', 'cpu',
         '--json', str(out), '--partial', str(tmp_path / 'part.json')],
        cwd=ROOT, check=True, capture_output=True, timeout=240)
    records = json.loads(out.read_text())
    assert (tmp_path / 'part.json').exists()
    kept = {(r['case']['method'], r['case']['kept']): r for r in records}
    assert kept['full', 192]['flops_share'] == 1 and kept['full', 192]['below_full'] == 0
    assert 0.25 < kept['head', 63]['flops_share'] < kept['head', 72]['flops_share'] < 0.35
    assert set(kept['head', 63]['families']) == {
        'attribute', 'count', 'relation', 'pointing', 'number', 'path', 'far', 'change'}
    next_share = kept['next_frame', 63]['flops_share']
    assert kept['head', 63]['flops_share'] < next_share < 0.35 < kept['dart', 63]['flops_share']
    assert kept['uniform', 63]['evidence_recall'] <= 1 and kept['downsample', 21]['runs'] == 8


@pytest.mark.skipif(torch.cuda.is_available(), reason='says what is missing where no GPU is')
def test_a_shape_without_a_gpu_is_refused():
    with pytest.raises(CannotRun, match='no CUDA device'):
        on_shape('2b')


def test_the_page_tells_how_a_target_was_held():
    """Runs of the same rung are counted together; times of a shape carry its name."""
    found = [record('selection', {'model': '2b', 'size': '8x8', 'method': 'controller',
                                  'case': 'half'}, 'ms_settled', 4.0, 'ms', times=[4.0, 4.5],
                    baseline=('target', 5.0), rungs=[0, 0, 1, 1, 1, 0], moves_when_settled=[1],
                    rungs_ms=[9.0, 4.0]),
             record('selection', {'model': '2b', 'size': '8x8', 'method': 'head'},
                    'ms_frame_to_map', 0.25, 'ms', times=[0.25], share_of_whole_frame=0.02)]
    told = controller(found).splitlines()
    assert told[2].split('|')[1:6] == [' half ', ' 5.0 ', ' 4.0 ', ' 4.5 ',
                                       ' 0 (2x), 1 (3x), 0 (1x) ']
    row, = wall(found).splitlines()[2:]
    assert '2B shape | 8x8 | light head | frame to map | 0.25 | 0.25 | 2.0% |' in row


def test_a_head_is_distilled(tmp_path):
    distil(['--model', str(TINY), '--out', str(tmp_path), '--steps', '3', '--stills', '3',
            '--clips', '1', '--workers', '0', '--eval-items', '0', '--asked', '1',
            '--device', 'cpu'])
    log = json.loads((tmp_path / 'saliency_head.json').read_text())['log']
    assert [x['stage'] for x in log if x['step'] == 3] == ['cam', 'answer']
    assert SaliencyHead.load(tmp_path / FILE).shape['text_width'] == 256


@pytest.mark.parametrize(('option', 'value', 'expected'), [
    ('--steps', '0', 'a whole number of at least 1'),
    ('--steps', '-1', 'a whole number of at least 1'),
    ('--batch', '0', 'a whole number of at least 1'),
    ('--limit', '0', 'a whole number of at least 1'),
    ('--rate', 'nan', 'a finite number over 0'), ('--rate', '0', 'a finite number over 0'),
    ('--lr', 'nan', 'a finite number over 0'), ('--lr', '7', 'a number over 0 to 1'),
    ('--layers', '-1', '0 (all) to'), ('--layers', '99', '0 (all) to')])
def test_arguments_that_cannot_be_distilled_with_are_refused(option, value, expected, tmp_path,
                                                             capsys):
    from tools.distil_head.__main__ import parse
    out = tmp_path / 'out'
    with pytest.raises(SystemExit) as caught:
        parse(['--model', str(TINY), '--pictures', str(tmp_path), '--out', str(out),
               f'{option}={value}'])
    said = capsys.readouterr().err
    assert caught.value.code == 2 and not out.exists()
    assert f'argument {option}: ' in said and f'expected {expected}' in said


def test_a_head_is_distilled_for_a_checkpoint_of_ones_own(tmp_path, capsys):
    import cv2

    from tools.distil_head.__main__ import main
    for number, item in enumerate(items('attribute', 'test', 3)):
        picture = frames_of(item)[0].rgb()[..., ::-1]
        cv2.imwrite(str(tmp_path / f'{number}.png'), picture)
    (tmp_path / 'broken.jpg').write_bytes(b'none')
    (tmp_path / 'asked.txt').write_text('Is the path blocked?\n\nWhat do you see?\n')
    words = ['--model', str(TINY), '--pictures', str(tmp_path), '--questions',
             str(tmp_path / 'asked.txt'), '--out', str(tmp_path), '--steps', '25', '--batch', '4',
             '--device', 'cpu']
    assert main(words) == 0
    told = capsys.readouterr()
    assert '6 maps' in told.out and 'left out' in told.err
    found, before = (float(x) for x in (told.out.split('holds ')[1].split()[0],
                                        told.out.split('(')[1].split()[0]))
    assert found > before
    SaliencyHead.load(tmp_path / FILE)
    empty = tmp_path / 'empty'
    empty.mkdir()
    assert main([*words[:3], str(empty), *words[4:]]) == 1
    assert 'expected at least 2' in capsys.readouterr().err
    for wrong in (['--model', str(empty), '--pictures', str(tmp_path), '--out', str(tmp_path)],
                  ['--model', str(TINY), '--bag', str(empty), '--out', str(tmp_path)]):
        assert main([*wrong, '--device', 'cpu']) == 1
        assert str(empty) in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*words[:4], '--out', str(tmp_path / 'broken.jpg')])
