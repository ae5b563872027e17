// Hopper's copy engine: boxes of a tensor into shared memory, and barriers that count their bytes.
#ifndef QWEN_VL_CUDA_ENCODER_COPY_ENGINE_CUH_
#define QWEN_VL_CUDA_ENCODER_COPY_ENGINE_CUH_

#include <cuda.h>
#include <dlfcn.h>

#include <cstdint>

#include "qwen_vl_encoder.h"

namespace qwen_vl {

// Arrives, and makes the barrier wait for so many bytes more.
__device__ inline void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// What copies arrive at was set up by this thread.
__device__ inline void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Fetches the description of a tensor, before it is needed.
__device__ inline void fetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Copies a box of a tensor into shared memory of this block, or of all blocks in `mask`.
__device__ inline void copy_box(uint32_t to, const CUtensorMap& map, int column, int row,
                                uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3}], [%4];" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}
__device__ inline void copy_box(uint32_t to, const CUtensorMap& map, int column, int row, int part,
                                uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3, %4}], [%5];" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(part), "r"(barrier)
      : "memory");
}
__device__ inline void copy_box_to(uint16_t mask, uint32_t to, const CUtensorMap& map, int column,
                                   int row, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(mask)
      : "memory");
}

// Describes a tensor of 16-bit floats in boxes, innermost dimension first; `strides` are bytes, those
// of the others. What a box has beyond the tensor's ends becomes zero. False: the driver refuses.
template <int kRank>
bool describe(CUtensorMap* map, int dtype, const void* data, const cuuint64_t (&sizes)[kRank],
              const cuuint64_t (&strides)[kRank - 1], const cuuint32_t (&box)[kRank],
              CUtensorMapSwizzle swizzle) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  // The library is not linked to the driver.
  static const Encode encode = [] {
    void* const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    return driver ? reinterpret_cast<Encode>(dlsym(driver, "cuTensorMapEncodeTiled")) : nullptr;
  }();
  if (!encode) return false;
  cuuint32_t steps[kRank];
  for (cuuint32_t& step : steps) step = 1;
  return encode(map,
                dtype == QWEN_VL_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                      : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                kRank, const_cast<void*>(data), sizes, strides, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace qwen_vl
#endif  // QWEN_VL_CUDA_ENCODER_COPY_ENGINE_CUH_
