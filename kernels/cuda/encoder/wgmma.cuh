// The instructions of sm_90a that attention_sm90.cu is made of.
//
// Operands in shared memory are columns of 16 channels: a row of a column is 32 bytes, eight rows
// are an atom of 256 bytes, in which the halves of rows 4 to 7 are exchanged, as the copy engine's
// 32-byte swizzle writes them. That is free of bank conflicts, and any number of channels that is a
// multiple of 16 fits without padding. The same layout serves keys (rows are the product's columns,
// K-major) and values (rows are what is summed over, MN-major).
#ifndef QWEN_VL_CUDA_ENCODER_WGMMA_CUH_
#define QWEN_VL_CUDA_ENCODER_WGMMA_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace qwen_vl {

// Bytes of a column's row, and of eight rows.
constexpr int kColumnBytes = 32, kAtomBytes = 8 * kColumnBytes;

// A matrix of atoms: those of a column follow each other, columns are `column_step` bytes apart
// (which is not read where a product takes one column, as K-major ones do).
__device__ inline uint64_t matrix(uint32_t address, uint32_t column_step) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) |
         static_cast<uint64_t>(column_step >> 4) << 16 |
         static_cast<uint64_t>(kAtomBytes >> 4) << 32 | 3ull << 62;
}

__device__ inline void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kLeft>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

// Shared memory that this thread wrote (cp.async included) may be read by the tensor cores.
__device__ inline void publish_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Barriers in shared memory that count arrivals; `parity` is that of the phase waited for.
__device__ inline void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ inline void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\nbra again;\nfinished:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Registers of a warpgroup: what copying warps do without, multiplying ones get.
template <int kCount>
__device__ inline void registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ inline void registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Named barriers: threads of a block meet without the rest of it; those that arrive do not wait.
template <int kThreads>
__device__ inline void named_wait(int name) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "n"(kThreads) : "memory");
}
template <int kThreads>
__device__ inline void named_arrive(int name) {
  asm volatile("bar.arrive %0, %1;" ::"r"(name), "n"(kThreads) : "memory");
}

#define QWEN_VL_R4(x, i) "+f"(x[i][0]), "+f"(x[i][1]), "+f"(x[i][2]), "+f"(x[i][3])

#define QWEN_VL_SCORES(type)                                                                      \
  asm volatile(                                                                                   \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %58, 0;\n"                                                \
      "wgmma.mma_async.sync.aligned.m64n112k16.f32." type "." type " {"                           \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, "                              \
      "%14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, "                    \
      "%28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "                    \
      "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55}, "                   \
      "%56, %57, p, 1, 1, 0, 0;\n}"                                                               \
      : QWEN_VL_R4(c, 0), QWEN_VL_R4(c, 1), QWEN_VL_R4(c, 2), QWEN_VL_R4(c, 3),                   \
        QWEN_VL_R4(c, 4), QWEN_VL_R4(c, 5), QWEN_VL_R4(c, 6), QWEN_VL_R4(c, 7),                   \
        QWEN_VL_R4(c, 8), QWEN_VL_R4(c, 9), QWEN_VL_R4(c, 10), QWEN_VL_R4(c, 11),                 \
        QWEN_VL_R4(c, 12), QWEN_VL_R4(c, 13)                                                      \
      : "l"(a), "l"(b), "r"(static_cast<int>(add)))

// c[64 x keys] (+)= a[64x16] * b[keys x 16]^T, both in shared memory, K-major.
__device__ inline void multiply_scores(float (&c)[14][4], uint64_t a, uint64_t b, bool add,
                                       __nv_bfloat16) {
  QWEN_VL_SCORES("bf16");
}
__device__ inline void multiply_scores(float (&c)[14][4], uint64_t a, uint64_t b, bool add,
                                       __half) {
  QWEN_VL_SCORES("f16");
}

#define QWEN_VL_RESULT(type)                                                                     \
  asm volatile(                                                                                  \
      "wgmma.mma_async.sync.aligned.m64n80k16.f32." type "." type                                \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "  \
      "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, "    \
      "%36, %37, %38, %39}, {%40, %41, %42, %43}, %44, 1, 1, 1, 1;"                              \
      : QWEN_VL_R4(c, 0), QWEN_VL_R4(c, 1), QWEN_VL_R4(c, 2), QWEN_VL_R4(c, 3),                  \
        QWEN_VL_R4(c, 4), QWEN_VL_R4(c, 5), QWEN_VL_R4(c, 6), QWEN_VL_R4(c, 7),                  \
        QWEN_VL_R4(c, 8), QWEN_VL_R4(c, 9)                                                       \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

// c[64x80] += a[64x16] * b[16x80], a in registers, b in shared memory, MN-major.
__device__ inline void multiply_result(float (&c)[10][4], const uint32_t (&a)[4], uint64_t b,
                                       __nv_bfloat16) {
  QWEN_VL_RESULT("bf16");
}
__device__ inline void multiply_result(float (&c)[10][4], const uint32_t (&a)[4], uint64_t b,
                                       __half) {
  QWEN_VL_RESULT("f16");
}

#undef QWEN_VL_RESULT
#undef QWEN_VL_SCORES
#undef QWEN_VL_R4

}  // namespace qwen_vl
#endif  // QWEN_VL_CUDA_ENCODER_WGMMA_CUH_
