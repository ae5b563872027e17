"""Asking an engine, and reading what came of it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from qwen_vl_ros.engine.errors import EngineError
from qwen_vl_ros.engine.types import Request, Visual

QUESTION = 'What does the camera see?'


def ask(engine, question=QUESTION, *frames, **more):
    """Return the answer of a request about stills."""
    visuals = tuple(Visual((f,)) for f in frames)
    return list(engine.answer(Request(question, visuals, max_new_tokens=8, **more)))[-1].answer


def names(answer):
    """Return how often each stage was timed."""
    spans = [s.name for s in answer.timeline.spans]
    return {name: spans.count(name) for name in spans}


def refusal(engine, request, **more):
    """Return the error that a request ends with."""
    with pytest.raises(EngineError) as caught:
        list(engine.answer(request, **more))
    return caught.value


@contextmanager
def no_memory() -> Iterator[None]:
    """Let every allocation on the GPU fail that is larger than a few kilobytes."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-6)
    taken = []
    size = 1 << 30
    try:
        # Blocks that the allocator keeps from earlier tests would serve the request.
        while size >= 4096:
            try:
                taken.append(torch.empty(size, dtype=torch.uint8, device='cuda'))
            except torch.cuda.OutOfMemoryError:
                size //= 2
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        taken.clear()
