"""
An engine without a model: streams words with a delay and fails when told to.

The question tells it how, in words of the form ``key=value``:

* ``words=N``: answer with N words (default 3);
* ``delay=S``: seconds before each word;
* ``stuck=S``: seconds during which it looks neither at cancel nor at the deadline;
* ``raise=TEXT``: raise RuntimeError, or ``raise=MemoryError``;
* ``code=NAME``: raise EngineError with that code.

Without any it tells the size and the first byte of each picture.
"""

from __future__ import annotations

import time
from collections import deque
from types import SimpleNamespace

from qwen_vl_ros.engine.errors import EngineError, ErrorCode
from qwen_vl_ros.engine.types import Answer, Delta, Done, Stage
from qwen_vl_ros.measure.timeline import Timeline


class FakeEngine:
    """See the module."""

    def __init__(self, settings=None):
        self.resets = 0
        self.closed = False
        self.requests = deque(maxlen=4)
        self.info = SimpleNamespace(
            name='fake', revision='0', device='cpu', dtype='float32', quantization='none',
            weight_bytes=1000, min_pixels=3136, max_pixels=401408, max_context=4096,
            engine_version='0.1.0', image_processor='none')

    @classmethod
    def load(cls, settings):
        """Return an engine; a path that does not exist is refused, as by the real one."""
        if settings.model_path.startswith('/missing'):
            raise EngineError(ErrorCode.UNKNOWN, f'{settings.model_path}: no such folder')
        return cls(settings)

    def reset_sessions(self):
        self.resets += 1

    def set_pixels(self, min_pixels, max_pixels):
        self.info.min_pixels, self.info.max_pixels = min_pixels, max_pixels

    def close(self):
        self.closed = True

    def answer(self, request, timeline=None, cancelled=lambda: False):
        """Yield stages, words and the answer; sleeps in steps of 10 ms between looks at cancel."""
        self.requests.append(request)
        timeline = timeline or Timeline()
        orders = dict(
            word.split('=', 1) for word in request.question.split() if '=' in word)
        if 'raise' in orders:
            raise {'MemoryError': MemoryError}.get(orders['raise'], RuntimeError)(orders['raise'])
        if 'code' in orders:
            raise EngineError(ErrorCode[orders['code']], 'as ordered')
        with timeline.stage('encode'):
            yield Stage('vision')
        with timeline.stage('prefill'):
            yield Stage('prefill')
            time.sleep(float(orders.get('stuck', 0)))
        yield Stage('decode')
        if orders:
            words = [f'w{n}' for n in range(int(orders.get('words', 3)))]
        else:
            words = [f'{f.width}x{f.height}:{f.data[0]}' for v in request.visuals
                     for f in v.frames] or ['nothing', 'seen']
        text, reason = '', 'stop'
        for number, word in enumerate(words[:request.max_new_tokens]):
            with timeline.stage('token' if number else 'first_token', bytes_read=1000):
                end = time.monotonic() + float(orders.get('delay', 0))
                while time.monotonic() < end and not cancelled():
                    time.sleep(min(0.01, max(0.0, end - time.monotonic())))
            if cancelled():
                reason = 'cancelled'
                break
            piece = word if not text else f' {word}'
            text += piece
            yield Delta(piece, number + 1)
        else:
            reason = 'stop' if len(words) <= request.max_new_tokens else 'length'
        count = len(text.split())
        yield Done(Answer(text, reason, tuple(range(count)), 0.5, 10, 8, 20, timeline))
