"""transformers' image processors as functions of one picture."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Processor = Callable[[Any], Any]

MIN_PIXELS = 3136


def pillow(max_pixels: int) -> Processor:
    """Return transformers' Pillow processor of Qwen2-VL: uint8 [H, W, 3] to float32 [N, 1176]."""
    try:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil as Pil,
        )
    except ImportError:  # where it was before transformers 5
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import (
            Qwen2VLImageProcessor as Pil,
        )
    return _call(Pil(size={'shortest_edge': MIN_PIXELS, 'longest_edge': max_pixels}))


def torchvision(
    max_pixels: int, folder: Path | None = None, device: str = 'cpu',
) -> Processor | None:
    """
    Return transformers' torchvision processor, or ``None`` without torchvision.

    :param folder: looked into last.
    :param device: ``cpu``, where it takes and gives arrays, or ``cuda``, where it does tensors.
    """
    if folder is not None:
        sys.path.append(str(folder))
    if not _import_torchvision():
        return None
    try:
        from transformers.models.qwen2_vl import image_processing_qwen2_vl as module
        cls = module.Qwen2VLImageProcessor
        if 'Torchvision' not in str(cls.__mro__):
            from transformers import Qwen2VLImageProcessorFast as cls
    except ImportError:
        return None
    return _call(cls(size={'shortest_edge': MIN_PIXELS, 'longest_edge': max_pixels}), device)


def _call(processor: Any, device: str = 'cpu') -> Processor:
    def process(rgb: Any) -> Any:
        if device == 'cpu':
            out = processor(images=[rgb], return_tensors='pt', input_data_format='channels_last')
            return out['pixel_values'].numpy()
        return processor(images=[rgb.permute(2, 0, 1)], return_tensors='pt', device=device,
                         input_data_format='channels_first')['pixel_values']

    return process


def _import_torchvision() -> bool:
    """
    Import torchvision, also one that was compiled for another build of torch.

    Its compiled operators (boxes, regions) do not load then, and their absence ends the import.
    The resize of the processor is torch's own; declaring the names lets the rest be imported.
    """
    import torch

    held = torch.library.Library('torchvision', 'FRAGMENT')
    _import_torchvision.held = held  # type: ignore[attr-defined]
    for _ in range(40):
        try:
            import torchvision.transforms.v2.functional  # noqa: F401
            return True
        except ModuleNotFoundError:
            return False
        except (RuntimeError, AttributeError) as error:
            missing = re.search(r'operator torchvision::(\w+) does not exist', str(error))
            if missing is None:
                return False
            held.define(f'{missing[1]}(Tensor x) -> Tensor')
            for name in [m for m in sys.modules if m.split('.')[0] == 'torchvision']:
                del sys.modules[name]
    return False
