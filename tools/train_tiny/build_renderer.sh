#!/usr/bin/env bash
# Builds RoboScene's renderer for the CPU, and for CUDA where nvcc is, into qwen_vl_ros/kernels/lib.
# The same flags as kernels/CMakeLists.txt: no contraction, so that both give the same pictures.
set -eu
cd "$(dirname "$0")/../.."
out=qwen_vl_ros/kernels/lib
mkdir -p "$out"
g++ -O3 -std=c++17 -ffp-contract=off -shared -fPIC -pthread kernels/roboscene/render_cpu.cc -o "$out/libqwen_vl_roboscene.so"
if command -v nvcc > /dev/null; then
  nvcc -O3 -std=c++17 -arch="${CUDA_ARCH:-native}" -fmad=false -Xcompiler -fPIC -shared kernels/roboscene/render_cuda.cu -o "$out/libqwen_vl_roboscene_cuda.so"
fi
