// The products of attention_prompt_sm90.cu; see wgmma.cuh for how operands lie in shared memory.
#ifndef QWEN_VL_CUDA_ENCODER_WGMMA_PROMPT_CUH_
#define QWEN_VL_CUDA_ENCODER_WGMMA_PROMPT_CUH_

#include "wgmma.cuh"

namespace qwen_vl {

#define QWEN_VL_R4(x, i) "+f"(x[i][0]), "+f"(x[i][1]), "+f"(x[i][2]), "+f"(x[i][3])

#define QWEN_VL_SCORES(type)                                                                      \
  asm volatile(                                                                                   \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"                                                \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {"                            \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                    \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "         \
      "{%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"                                                 \
      : QWEN_VL_R4(c, 0), QWEN_VL_R4(c, 1), QWEN_VL_R4(c, 2), QWEN_VL_R4(c, 3),                   \
        QWEN_VL_R4(c, 4), QWEN_VL_R4(c, 5), QWEN_VL_R4(c, 6), QWEN_VL_R4(c, 7)                    \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)))

// c[64 x 64 keys] (+)= a[64x16] * b[64 keys x 16]^T, a in registers, b in shared memory, K-major.
__device__ inline void multiply_scores(float (&c)[8][4], const uint32_t (&a)[4], uint64_t b,
                                       bool add, __nv_bfloat16) {
  QWEN_VL_SCORES("bf16");
}
__device__ inline void multiply_scores(float (&c)[8][4], const uint32_t (&a)[4], uint64_t b,
                                       bool add, __half) {
  QWEN_VL_SCORES("f16");
}

#define QWEN_VL_RESULT(type)                                                                      \
  asm volatile(                                                                                   \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {"                           \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                    \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "          \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "          \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "         \
      "{%64, %65, %66, %67}, %68, 1, 1, 1, 1;"                                                    \
      : QWEN_VL_R4(c, 0), QWEN_VL_R4(c, 1), QWEN_VL_R4(c, 2), QWEN_VL_R4(c, 3),                   \
        QWEN_VL_R4(c, 4), QWEN_VL_R4(c, 5), QWEN_VL_R4(c, 6), QWEN_VL_R4(c, 7),                   \
        QWEN_VL_R4(c, 8), QWEN_VL_R4(c, 9), QWEN_VL_R4(c, 10), QWEN_VL_R4(c, 11),                 \
        QWEN_VL_R4(c, 12), QWEN_VL_R4(c, 13), QWEN_VL_R4(c, 14), QWEN_VL_R4(c, 15)                \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

// c[64x128] += a[64x16] * b[16x128], a in registers, b in shared memory, MN-major.
__device__ inline void multiply_result(float (&c)[16][4], const uint32_t (&a)[4], uint64_t b,
                                       __nv_bfloat16) {
  QWEN_VL_RESULT("bf16");
}
__device__ inline void multiply_result(float (&c)[16][4], const uint32_t (&a)[4], uint64_t b,
                                       __half) {
  QWEN_VL_RESULT("f16");
}

#undef QWEN_VL_RESULT
#undef QWEN_VL_SCORES
#undef QWEN_VL_R4

}  // namespace qwen_vl
#endif  // QWEN_VL_CUDA_ENCODER_WGMMA_PROMPT_CUH_
