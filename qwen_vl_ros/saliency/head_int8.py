"""The light head in INT8 on a CPU: the int8 weights of its file, activations rounded alike."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qwen_vl_ros.saliency.head import SAMPLES, SaliencyHead, places, to_int8


def available() -> bool:
    """Tell whether this torch multiplies int8 matrices on the CPU."""
    try:
        one = torch.ones((32, 16), dtype=torch.int8)
        return int(torch._int_mm(one, one.T.contiguous())[0, 0]) == 16
    except (AttributeError, RuntimeError):
        return False


class Int8Conv:
    """
    A 3x3 convolution with padding, or one whose kernel is its stride, as a product in int8.

    Weights have a scale an output channel, activations one a picture; sums are exact in int32, so
    that what is lost is the rounding of the inputs.

    :param conv: its weights and bias are taken.
    """

    def __init__(self, conv: nn.Conv2d) -> None:
        self._size = conv.kernel_size[0]
        rounded, scale = to_int8(conv.weight.float())
        self._weight = rounded.flatten(1).T.contiguous()
        self._scale = scale
        assert conv.bias is not None
        self._bias = conv.bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        """x float32 [B, C, h, w] -> [B, out, h, w], or [B, out, h / size, w / size]."""
        b, c, h, w = x.shape
        scale = x.flatten(1).abs().amax(1).clamp(min=1e-12) / 127
        small = (x / scale.view(b, 1, 1, 1)).round().to(torch.int8)
        k = self._size
        if k == 3:
            rows = F.pad(small, (1, 1, 1, 1)).unfold(2, 3, 1).unfold(3, 3, 1)
        else:
            h, w = h // k, w // k
            rows = small.view(b, c, h, k, w, k).permute(0, 1, 2, 4, 3, 5)
        rows = rows.permute(0, 2, 3, 1, 4, 5).reshape(b * h * w, -1)
        sums = torch._int_mm(rows, self._weight).float().view(b, h * w, -1)
        out = sums * scale.view(b, 1, 1) * self._scale + self._bias
        return out.transpose(1, 2).reshape(b, -1, h, w)


class Int8Head:
    """
    Scores units like :class:`SaliencyHead`, its plain twin.

    The first convolution, at sample resolution with six channels in, stays in float32: rounding
    costs there as much as the product does.

    :param head: float32, on the CPU.
    """

    def __init__(self, head: SaliencyHead) -> None:
        self._head = head
        self._units = Int8Conv(head.units)
        self._inner = [Int8Conv(c) for c in head.inner]  # type: ignore[arg-type]
        self._outer = [Int8Conv(c) for c in head.outer]  # type: ignore[arg-type]

    def __call__(self, samples: Tensor, question: Tensor) -> Tensor:
        """See :meth:`SaliencyHead.forward`."""
        head = self._head
        if samples.shape[2] % SAMPLES or samples.shape[3] % SAMPLES:
            raise ValueError(f'samples {list(samples.shape)} are no whole units')
        x = self._units(F.relu(head.first(samples)))
        x = F.relu(x + head.place(places(x.shape[2], x.shape[3], x)))
        films = head.film(question)[:, :, None, None].chunk(2 * len(self._inner), dim=1)
        for i, (inner, outer) in enumerate(zip(self._inner, self._outer)):
            y = F.relu(inner(x) * (1 + films[2 * i]) + films[2 * i + 1])
            x = F.relu(x + outer(y))
        return head.score(x)[:, 0]
