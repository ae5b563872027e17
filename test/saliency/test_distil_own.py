"""Distilling for a checkpoint of one's own: what is set aside, and what cannot be used."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from qwen_vl_ros.saliency.head import SaliencyHead, channels
from qwen_vl_ros.saliency.selectors import FILE
from tools.distil_head.__main__ import Lesson, main, parse, set_aside

TINY = Path(__file__).parents[2] / 'models' / 'tiny'


def draw(path: Path, width: int, height: int) -> None:
    rgb = np.random.default_rng(width).integers(0, 255, (height, width, 3), np.uint8)
    Image.fromarray(rgb).save(path)


def lesson(picture: int) -> Lesson:
    return Lesson(torch.zeros(6, 7, 7), torch.zeros(1, 8), torch.ones(1), picture)


@pytest.mark.parametrize(('pictures', 'aside'), [(12, 2), (10, 1), (3, 1)])
def test_no_picture_is_both_learnt_and_set_aside(pictures, aside):
    given = [lesson(p) for p in range(pictures) for _ in range(3)]
    learnt, kept_out = set_aside(given)
    assert len({x.picture for x in kept_out}) == aside
    assert not {x.picture for x in kept_out} & {x.picture for x in learnt}
    assert len(learnt) + len(kept_out) == len(given)


def test_one_picture_alone_is_learnt():
    learnt, kept_out = set_aside([lesson(4), lesson(4)])
    assert len(learnt) == len(kept_out) == 2


def test_a_picture_that_the_model_does_not_take_is_left_out(tmp_path, capsys):
    draw(tmp_path / 'a.png', 2000, 3)
    draw(tmp_path / 'b.png', 112, 84)
    draw(tmp_path / 'c.png', 140, 84)
    asked = tmp_path / 'asked.txt'
    asked.write_text('What do you see?\n')
    assert main(['--model', str(TINY), '--pictures', str(tmp_path), '--questions', str(asked),
                 '--out', str(tmp_path), '--steps', '2', '--batch', '2', '--device', 'cpu']) == 0
    told = capsys.readouterr()
    line, = told.err.splitlines()
    assert line.startswith('left out: a.png: a picture of 2000x3 is too narrow')
    assert '2 maps' in told.out
    # What learned from stills ranks each moment of a clip by itself.
    head = SaliencyHead.load(tmp_path / FILE)
    now, before = torch.rand(2, 1, 3, 21, 28) * 255
    asked = torch.rand(1, 192)
    assert torch.equal(head(channels(now, before), asked), head(channels(now), asked))


@pytest.mark.parametrize(('option', 'content', 'expected'), [
    ('--questions', 'Où est la balle ?\n'.encode('latin-1'), 'is not in UTF-8 (byte 1)'),
    ('--questions', b'\n  \n', 'is empty; expected one question a line'),
    ('--questions', None, 'No such file'),
    ('--pictures', None, 'does not exist; expected a folder of pictures'),
    ('--pictures', b'', 'is no folder; expected a folder of pictures')])
def test_what_cannot_be_read_is_named_before_the_work(option, content, expected, tmp_path, capsys):
    given, out = tmp_path / 'given', tmp_path / 'out'
    if content is not None:
        given.write_bytes(content)
    words = {'--model': TINY, '--pictures': tmp_path, '--out': out, option: given}
    with pytest.raises(SystemExit) as caught:
        parse([str(x) for pair in words.items() for x in pair])
    assert caught.value.code == 2 and not out.exists()
    last = capsys.readouterr().err.splitlines()[-1]
    assert f'argument {option}: {given}' in last and expected in last
