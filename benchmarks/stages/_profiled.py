"""What the profiler watches: every kernel of the projection, once before and once counted."""

from __future__ import annotations

import numpy as np
import torch

from qwen_vl_ros.engine.embedding import still_projection
from qwen_vl_ros.frame import Frame
from qwen_vl_ros.kernels.cuda import CudaKernels

#: Picture of the camera and resized, (width, height), and patches of a product alone.
SIZE, RESIZED, COUNT = (1280, 720), (1288, 728), 1564
WIDTH = 1280


def main() -> None:
    """Launch make_patches, project, embed and project, in this order, twice."""
    torch.manual_seed(0)
    kernels = CudaKernels()
    conv = torch.randn(WIDTH, 3, 2, 14, 14, device='cuda').mul_(0.03).bfloat16()
    projection = still_projection(conv, torch.float16)
    rgb = np.random.default_rng(0).integers(0, 256, (SIZE[1], SIZE[0], 3), dtype=np.uint8)
    frame = Frame.from_rgb(rgb)
    pixels = torch.from_numpy(frame.data).cuda()
    few = torch.randint(0, 256, (COUNT, 588), dtype=torch.uint8, device='cuda')
    held = []
    for _ in range(2):
        patches = kernels.patches(frame, pixels, RESIZED[1], RESIZED[0])
        held.append(kernels.project(patches, projection, dtype=torch.bfloat16))
        held.append(kernels.embed(
            frame, pixels, RESIZED[1], RESIZED[0], projection, dtype=torch.bfloat16))
        held.append(kernels.project(few, projection, dtype=torch.bfloat16))
    torch.cuda.synchronize()


if __name__ == '__main__':
    main()
