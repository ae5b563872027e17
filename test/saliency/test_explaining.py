"""Explanations show what an answer was really given about, and are no second choice."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from qwen_vl_ros.cli.main import main
from qwen_vl_ros.engine.engine import Engine
from qwen_vl_ros.engine.types import Answer, Done, Request, Visual
from qwen_vl_ros.frame import Frame
from qwen_vl_ros.measure.timeline import Timeline
from qwen_vl_ros.saliency.answering import FULL_FRAME, Fewer, answer
from qwen_vl_ros.saliency.explaining import Chosen, explain_answer, keep_maps
from qwen_vl_ros.saliency.next_frame import NextFrameSelector
from qwen_vl_ros.saliency.picture import LINE, TILE, explain, grown, sheet
from qwen_vl_ros.saliency.roi import Window
from qwen_vl_ros.saliency.selectors import make_selector

TINY = Path(__file__).parents[2] / 'models' / 'tiny'
RNG = np.random.default_rng(3)


def frame(name: str = 'lens', width: int = 224, height: int = 168) -> Frame:
    """Return a grey picture with a bright patch of noise somewhere."""
    rgb = np.full((height, width, 3), 160, np.uint8)
    y, x = RNG.integers(0, height - 40), RNG.integers(0, width - 40)
    rgb[y:y + 40, x:x + 40] = RNG.integers(0, 255, (40, 40, 3))
    return Frame.from_rgb(rgb, camera=name)


def engine_of(name: str) -> Engine:
    return Engine.load(str(TINY), device='cpu', min_pixels=784,
                       selector=make_selector(name, model=TINY, min_units=1))


def asked(engine: Engine, *visuals: tuple[Frame, ...], ratio: float = 0.3,
          **fewer: float) -> Answer:
    request = Request('What is it?', tuple(Visual(v) for v in visuals), keep_ratio=ratio,
                      max_new_tokens=2)
    *_, done = answer(engine, request, fewer=Fewer(**fewer))
    assert isinstance(done, Done)
    return done.answer


def dimmed(picture: np.ndarray, frame: Frame, kept: np.ndarray) -> bool:
    """Say whether a picture is the frame, dark where units were dropped and there alone."""
    rgb = frame.rgb()[..., ::-1]
    shown = grown(kept, frame.width, frame.height)[..., None]
    return bool((picture == np.where(shown, rgb, rgb >> 2)).all())


def test_every_slice_of_a_clip_is_drawn_with_the_map_that_chose_it(monkeypatch):
    engine = engine_of('next_frame')
    clips = [tuple(frame() for _ in range(4)) for _ in range(2)]
    asked(engine, clips[0])  # something to remember
    maps = keep_maps(engine.options.selector)
    got = asked(engine, clips[1])
    monkeypatch.setattr(NextFrameSelector, 'saliency', lambda *_: pytest.fail('chosen again'))
    assert [m.values.shape for m in maps] == [(2, 6, 8)]
    kept, = got.kept_slices
    assert kept.shape == (2, 6, 8) and (kept[0] != kept[1]).any()
    least = maps[0].values[kept].min()  # what was kept is what ranked first
    assert (maps[0].values[~kept] <= least).all()
    drawn = explain_answer([Visual(clips[1])], got, maps)
    assert drawn.shape == (2 * (LINE + 168), 448, 3)
    for part, picture in enumerate(np.split(drawn, 2)):
        newer = clips[1][2 * part + 1]
        assert dimmed(picture[LINE:, :224], newer, kept[part])
        scale = float(maps[0].values.min()), float(maps[0].values.max())
        assert (picture[LINE:] == explain(
            newer.rgb(), kept[part], maps[0].values[part], scale)).all()
        assert picture[:LINE].max() > 200


def test_keeping_maps_changes_no_choice():
    frames = [frame() for _ in range(3)]
    kept = []
    for watched in (False, True):
        engine = engine_of('next_frame')
        maps = keep_maps(engine.options.selector) if watched else []
        kept.append([asked(engine, (f,)).kept_units[0] for f in frames])
    assert len(maps) == 3
    assert all((a == b).all() for a, b in zip(*kept))


@pytest.mark.parametrize(('name', 'found'), [
    ('saliency', 1), ('head', 1), ('threshold', 1), ('motion', 1), ('uniform', 0), ('random', 0)])
def test_selectors_with_and_without_maps(name, found):
    engine, picture = engine_of(name), frame()
    maps = keep_maps(engine.options.selector)
    got = asked(engine, (picture,))
    assert len(maps) == found
    drawn = explain_answer([Visual((picture,))], got, maps)
    assert drawn.shape == (168, 224 * (1 + found), 3)
    assert dimmed(drawn[:, :224], picture, got.kept_units[0])


def test_pictures_of_several_sizes_stand_below_each_other():
    engine = engine_of('saliency')
    pictures = [frame('front'), frame('Rückblick 后', 112, 280), frame('', 60, 60)]
    maps = keep_maps(engine.options.selector)
    got = asked(engine, *((p,) for p in pictures))
    assert len(maps) == len(got.kept_slices) == 3
    drawn = explain_answer([Visual((p,)) for p in pictures], got, maps)
    assert drawn.shape == (168 + 280 + 60 + 3 * LINE, 448, 3)
    top = LINE
    for picture, kept in zip(pictures, got.kept_units):
        part = drawn[top:top + picture.height]
        assert dimmed(part[:, :picture.width], picture, kept)
        assert not part[:, 2 * picture.width:].any()
        top += picture.height + LINE


def test_a_region_of_interest_is_explained_in_the_whole_frame(monkeypatch):
    window = Window(112, 84, 112, 84, 224, 168)  # the lower right quarter
    monkeypatch.setattr('qwen_vl_ros.saliency.answering.best_window', lambda *_: window)
    engine, picture = engine_of('saliency'), frame()
    maps = keep_maps(engine.options.selector)
    for ratio in (1.0, 0.5):
        maps.clear()
        got = asked(engine, (picture,), ratio=ratio, region=0.25)
        kept, = got.kept_units
        assert kept.shape == (6, 8) and not kept[:3].any() and not kept[:, :4].any()
        assert kept[3:, 4:].all() == (ratio == 1)
        drawn = explain_answer([Visual((picture,))], got, maps)
        assert dimmed(drawn[:, :224], picture, kept)
        # Beside it the map of the whole frame, which the window was chosen by.
        assert (drawn == explain(picture.rgb(), kept, maps[0].values[0])).all()


def test_a_doubtful_answer_was_given_about_all():
    engine, picture = engine_of('saliency'), frame()
    maps = keep_maps(engine.options.selector)
    got = asked(engine, (picture,), least_margin=1e6)
    assert FULL_FRAME in got.approximate
    drawn = explain_answer([Visual((picture,))], got, maps)
    assert drawn.shape == (168, 448, 3) and dimmed(drawn[:, :224], picture, np.ones((6, 8), bool))


def test_maps_of_other_pictures_are_not_shown():
    picture, kept = frame(), np.ones((1, 6, 8), bool)
    got = Answer('', 'stop', (), 0.0, 48, 48, 60, Timeline(), kept_slices=(kept,))
    for other in (Chosen((frame(),), np.zeros((1, 6, 8), np.float32)),
                  Chosen((picture,), np.zeros((1, 3, 4), np.float32))):
        assert explain_answer([Visual((picture,))], got, [other]).shape == (168, 224, 3)


def test_wide_pictures_of_a_sheet_are_reduced():
    wide = np.full((100, 4 * TILE, 3), 9, np.uint8)
    drawn = sheet([('a', wide), ('b ' * 100, wide[:, :8])])
    assert drawn.shape[0] == 25 + 100 + 2 * LINE and drawn.shape[1] > TILE
    assert (drawn[LINE:LINE + 25, :TILE] == 9).all() and not drawn[LINE:LINE + 25, TILE:].any()


def test_ask_explains_a_clip_in_one_file(tmp_path, monkeypatch, capsys):
    asked_for = []
    find = NextFrameSelector.saliency
    monkeypatch.setattr(NextFrameSelector, 'saliency', lambda self, frames, *rest: (
        asked_for.append(len(frames)), find(self, frames, *rest))[1])
    paths = []
    for number in range(5):
        paths.append(str(tmp_path / f'{number}.png'))
        cv2.imwrite(paths[-1], frame().rgb())
    out = tmp_path / 'why.png'
    words = ['ask', 'What is it?', *paths, '--explain', str(out), '--max-new-tokens', '2']
    assert main([*words, '--clip', '--keep-ratio', '0.3', '--select', 'next_frame']) == 0
    assert asked_for == [3]  # once, for the three slices of five frames
    assert cv2.imread(str(out)).shape == (3 * (168 + LINE), 448, 3)
    assert main(words) == 0  # five stills, and nothing was dropped
    assert 'nothing was dropped' in capsys.readouterr().err
    drawn = cv2.imread(str(out))
    assert drawn.shape[0] == 5 * (168 + LINE)
    assert (drawn[LINE:LINE + 168, :224] == cv2.imread(paths[0])).all()
    region = ['ask', 'Where is it?', paths[0], '--explain', str(out), '--roi', '0.3']
    assert main([*region, '--max-new-tokens', '2']) == 0
    assert 'nothing was dropped' not in capsys.readouterr().err
