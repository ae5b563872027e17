"""Newest frames: what a question sees when messages are good, bad, many, or undecoded."""

from types import SimpleNamespace

import numpy as np
import pytest

from qwen_vl_ros import pipeline
from qwen_vl_ros.engine.errors import EngineError, ErrorCode
from qwen_vl_ros.pipeline import FrameStore

NOW = 1_700_000_000 * 10**9


def image(number: int, *, stamp_ns: int = NOW, encoding: str = 'rgb8', cut: int = 0):
    """Return an 8x8 picture whose bytes all are ``number``."""
    data = np.full(8 * 8 * 3 - cut, number, np.uint8)
    stamp = SimpleNamespace(sec=stamp_ns // 10**9, nanosec=stamp_ns % 10**9)
    return SimpleNamespace(
        header=SimpleNamespace(stamp=stamp, frame_id='lens'), encoding=encoding, width=8, height=8,
        step=24, is_bigendian=0, data=data)


def offer(store, number, **kwargs):
    lazy = kwargs.pop('lazy', True)
    return store.offer('front', image(number, **kwargs), now_ns=NOW, received_ns=5, lazy=lazy)


def select(store, **kwargs):
    return store.select(now_ns=NOW, now_received_ns=5, **kwargs)


def test_lazy_frames_are_decoded_only_when_somebody_looks(monkeypatch):
    decoded = []
    original = pipeline.frame_from_message
    monkeypatch.setattr(
        pipeline, 'frame_from_message',
        lambda message, **kw: decoded.append(message) or original(message, **kw))
    store = FrameStore(['front'])
    for number in range(10):
        assert offer(store, number) is None
    assert decoded == []
    frame, = select(store)[0].frames
    assert frame.data[0] == 9
    select(store)
    assert len(decoded) == 1
    counts = store.counts('front')
    assert (counts.received, counts.replaced, counts.rejected) == (10, 9, 0)


@pytest.mark.parametrize('lazy', [True, False])
def test_a_bad_frame_is_counted_once_and_the_last_good_one_stays(lazy):
    store = FrameStore(['front'])
    offer(store, 1, lazy=lazy)
    offer(store, 2, encoding='rgb7', lazy=lazy)
    offer(store, 3, cut=5, lazy=lazy)
    assert select(store)[0].frames[0].data[0] == 1
    assert store.newest('front').data[0] == 1
    counts = store.counts('front')
    assert (counts.received, counts.rejected) == (3, 2)
    assert 'rgb7' in counts.last_reason or '187 bytes' in counts.last_reason


def test_the_last_good_frame_outlives_any_number_of_bad_ones():
    store = FrameStore(['front'])
    offer(store, 1)
    assert store.newest('front').data[0] == 1
    for number in range(20):
        offer(store, number, encoding='rgb7')
    assert select(store)[0].frames[0].data[0] == 1


def test_clips_hold_the_newest_frames_oldest_first():
    store = FrameStore(['front'], history=4)
    for number in range(7):
        offer(store, number)
    assert [int(f.data[0]) for f in select(store, num_frames=3)[0].frames] == [4, 5, 6]
    offer(store, 7)
    assert [int(f.data[0]) for f in select(store, num_frames=9)[0].frames] == [4, 5, 6, 7]


def test_after_clear_there_is_no_image():
    store = FrameStore(['front'])
    offer(store, 1)
    select(store)
    store.clear()
    with pytest.raises(EngineError) as caught:
        select(store)
    assert caught.value.code == ErrorCode.NO_IMAGE


def test_stamps_that_cannot_be_are_counted_and_aged_from_reception():
    store = FrameStore(['front'])
    for stamp_ns in (0, 1_650_000_000, NOW + 3600 * 10**9):
        offer(store, 1, stamp_ns=stamp_ns)
        frame, = store.select(now_ns=NOW, now_received_ns=2 * 10**9 + 5,
                              max_age_ns=3 * 10**9)[0].frames
        assert frame.stamp_ns == stamp_ns and frame.frame_id == 'lens'
        assert pipeline.age_ns(frame, NOW, 2 * 10**9 + 5) == 2 * 10**9
    assert store.counts('front').odd_stamps == 3
    with pytest.raises(EngineError) as caught:
        store.select(now_ns=NOW, now_received_ns=9 * 10**9, max_age_ns=3 * 10**9)
    assert caught.value.code == ErrorCode.STALE_IMAGE
