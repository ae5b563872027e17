"""Requests that are cut off or break, and the one after them."""

from __future__ import annotations

import math
import threading
import time

import pytest
import torch
from engine_asking import QUESTION, ask, names, refusal

from qwen_vl_ros.engine.engine import Engine
from qwen_vl_ros.engine.errors import EngineError, ErrorCode
from qwen_vl_ros.engine.generate import Choice
from qwen_vl_ros.engine.layers import rms_norm
from qwen_vl_ros.engine.types import Delta, Request, Stage, Visual
from qwen_vl_ros.kernels.loader import KernelError
from qwen_vl_ros.measure.timeline import Timeline


def test_cancel_ends_within_one_token(engine, picture):
    flag = threading.Event()
    engine.end_tokens, ends = frozenset(), engine.end_tokens
    try:
        count = 0
        for event in engine.answer(
                Request(QUESTION, (Visual((picture(448, 336),)),), max_new_tokens=500),
                cancelled=flag.is_set):
            if isinstance(event, Delta):
                count = event.tokens
                if count >= 5:
                    flag.set()
        assert event.answer.finish_reason == 'cancelled'
        assert len(event.answer.token_ids) == count
        assert event.answer.text
    finally:
        engine.end_tokens = ends


@pytest.mark.parametrize('after', [0, 1, 2, 3])
def test_cancel_between_pictures_and_chunks(folders, picture, after):
    engine = Engine.load(str(folders['small']), device='cpu', prefill_chunk=100)
    polls = []

    def cancelled():
        polls.append(1)
        return len(polls) > after

    request = Request(
        QUESTION, (Visual((picture(224, 224),)), Visual((picture(224, 224, 1),))))
    events = list(engine.answer(request, cancelled=cancelled))
    answer = events[-1].answer
    assert (answer.finish_reason, answer.text, answer.token_ids) == ('cancelled', '', ())
    assert math.isnan(answer.confidence)
    assert names(answer).get('encode', 0) == min(after, 2)
    assert names(answer).get('prefill', 0) == max(0, after - 2)
    assert Stage('decode') not in events
    whole = list(engine.answer(request))[-1].answer
    engine.forget()
    assert whole.token_ids == list(engine.answer(request))[-1].answer.token_ids


def test_a_device_is_never_more_than_a_chunk_ahead(folders, picture, monkeypatch):
    """A cancel is looked for when the chunk before the last one is done."""
    engine = Engine.load(str(folders['small']), device='cpu', prefill_chunk=32)
    log = []

    class Noted:
        def __init__(self, number):
            self.number = number

        def wait(self):
            log.append(('waited', self.number))

    def here(device):
        number = sum(what == 'launched' for what, _ in log)
        log.append(('launched', number))
        return Noted(number)

    monkeypatch.setattr('qwen_vl_ros.engine.engine.Mark.here', here)
    ask(engine, QUESTION, picture(448, 336))
    chunks = [number for what, number in log if what == 'launched']
    assert len(chunks) >= 6 and log == [('launched', 0)] + [
        one for number in chunks[1:] for one in (('waited', number - 1), ('launched', number))]


def test_a_deadline_counts_from_submission_and_stops_the_work(engine, picture):
    """C14."""
    request = Request(QUESTION, (Visual((picture(448, 336),)),), max_new_tokens=4000,
                      deadline_s=0.2)
    engine.end_tokens, ends = frozenset(), engine.end_tokens
    try:
        steps = []
        decode = engine.model.step
        engine.model.step = lambda *a: steps.append(1) or decode(*a)
        started = time.monotonic()
        answer = list(engine.answer(request))[-1].answer
        assert time.monotonic() - started < 2
        assert answer.finish_reason == 'deadline'
        assert len(steps) == len(answer.token_ids) - 1
        late = Timeline()
        late.start_ns -= 10 ** 9
        answer = list(engine.answer(request, late))[-1].answer
        assert (answer.finish_reason, answer.token_ids) == ('deadline', ())
    finally:
        engine.end_tokens = ends
        engine.model.__dict__.pop('step', None)


def test_an_abandoned_answer_leaves_the_engine_usable(engine, picture):
    frame = picture(448, 336)
    expected = ask(engine, QUESTION, frame).token_ids
    for stop_at in range(4):
        events = engine.answer(Request(QUESTION, (Visual((frame,)),)))
        for _ in range(stop_at + 1):
            next(events)
        events.close()
        assert ask(engine, QUESTION, frame).token_ids == expected
        engine.forget()


@pytest.mark.parametrize('error,code', [
    (RuntimeError('shape mismatch\nmore'), ErrorCode.UNKNOWN),
    (ValueError('odd'), ErrorCode.UNKNOWN),
    (MemoryError(), ErrorCode.OUT_OF_MEMORY),
    (torch.cuda.OutOfMemoryError('CUDA out of memory. Tried'), ErrorCode.OUT_OF_MEMORY),
    (KernelError('no memory for a plan', 11), ErrorCode.OUT_OF_MEMORY),
    (RuntimeError('CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`'),
     ErrorCode.OUT_OF_MEMORY),
    (KernelError('no GPU', 9), ErrorCode.UNKNOWN),
    (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"),
     ErrorCode.OUT_OF_MEMORY),
])
@pytest.mark.parametrize('where', ['encode_part', 'prefill', 'step'])
def test_a_failure_ends_the_request_with_its_reason(engine, picture, error, code, where):
    """C14 and out of memory: caches are given back and the next request works."""
    frame = picture(448, 336)
    expected = ask(engine, QUESTION, frame).token_ids
    engine.forget()

    def fail(*args):
        raise error

    setattr(engine.model, where, fail)
    try:
        caught = refusal(engine, Request(QUESTION, (Visual((frame,)),)))
    finally:
        delattr(engine.model, where)
    assert caught.code == code
    assert '\n' not in caught.message
    assert len(engine.features) == 0
    assert engine.pool.used_bytes == 0
    assert ask(engine, QUESTION, frame).token_ids == expected


def test_features_that_are_not_finite_concern_one_request(engine, picture):
    """C2."""
    bad, good = picture(224, 224, 1), picture(224, 224, 2)
    encode = engine.model.vision.encode

    def spoil(patches, grid, units=None):
        out = encode(patches, grid, units)
        out[3, 5] = torch.nan
        return out

    engine.model.vision.encode = spoil
    try:
        error = refusal(engine, Request(QUESTION, (Visual((bad,)),)))
    finally:
        del engine.model.vision.encode
    assert error.code == ErrorCode.NUMERICAL
    assert 'numerical failure' in error.message
    assert ask(engine, QUESTION, good).token_ids
    assert names(ask(engine, 'a box', bad))['encode'] == 1


def test_token_zero_over_and_over_is_no_answer(engine, picture):
    """C1."""
    deltas = []
    engine.model.first_token = lambda *a: torch.tensor([0.0, 1.0, 1.0, 1.0])
    engine.model.step = lambda *a: {0: Choice(0, 1.0, 1.0, True)}
    try:
        with pytest.raises(EngineError, match='numerical failure') as caught:
            for event in engine.answer(Request(QUESTION, max_new_tokens=64)):
                deltas += [event] if isinstance(event, Delta) else []
    finally:
        del engine.model.first_token, engine.model.step
    assert caught.value.code == ErrorCode.NUMERICAL
    assert deltas == []


def test_float16_survives_scores_beyond_its_range(folders, picture):
    """C1: query-key products of 1e6 overflow float16 (65504), the fused softmax does not."""
    engines = [Engine.load(str(folders['wide']), device='cpu', dtype=d)
               for d in ('float32', 'float16')]
    request = Request(QUESTION, (Visual((picture(224, 224),)),))
    for engine in engines:
        cfg = engine.model.config.language
        rows = (cfg.heads + cfg.kv_heads) * cfg.head_dim
        for layer in engine.model.language.layers:
            layer.qkv.weight[:rows] *= 60
            layer.qkv.bias[:rows] *= 60
    _, wide = engines[0].trace(request)
    _, half = engines[1].trace(request)
    x = engines[0].model.language
    scores = _largest_score(x, engines[0], request)
    assert scores > 65504
    assert half.isfinite().all()
    assert (half.float() - wide).abs().mean() < 0.05 * wide.abs().mean()


def _largest_score(language, engine, request):
    """Return the largest unscaled query-key product of the first layer."""
    prompt, _ = engine.trace(request)
    with torch.inference_mode():
        x = language.embed(torch.from_numpy(prompt.ids))
        layer = language.layers[0]
        cfg = language.config
        y = layer.qkv(rms_norm(x, layer.norm1, cfg.eps)).view(x.shape[0], -1, cfg.head_dim)
        q, k = y[:, :cfg.heads], y[:, cfg.heads:cfg.heads + 1]
        return (q.transpose(0, 1) @ k.permute(1, 2, 0)).abs().max().item()


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_half_precision_agrees(folders, engines, picture, dtype):
    request = Request(QUESTION, (Visual((picture(448, 336),)),))
    half = Engine.load(str(folders['full']), device='cpu', dtype=dtype)
    _, expected = engines['full'].trace(request)
    _, logits = half.trace(request)
    assert logits.dtype == getattr(torch, dtype)
    error = (logits.float() - expected).norm() / expected.norm()
    assert error < (0.08 if dtype == 'bfloat16' else 0.01)


def test_a_closed_engine_refuses(folders):
    engine = Engine.load(str(folders['small']), device='cpu')
    engine.close()
    engine.close()
    assert refusal(engine, Request(QUESTION)).code == ErrorCode.INACTIVE
