// The products of products_sm90.cu: both operands in shared memory, K-major, rows of 128 bytes
// swizzled as the copy engine writes them.
#ifndef QWEN_VL_CUDA_ENCODER_WGMMA_PRODUCTS_CUH_
#define QWEN_VL_CUDA_ENCODER_WGMMA_PRODUCTS_CUH_

#include "wgmma.cuh"

namespace qwen_vl {

// A matrix of rows of 128 bytes, eight rows of which are one swizzled block of 1024 bytes.
__device__ inline uint64_t swizzled_matrix(uint32_t address) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | 1ull << 16 |
         static_cast<uint64_t>(1024 >> 4) << 32 | 1ull << 62;
}

__device__ inline uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ inline void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

// Arrives at the barrier that lies at the same place in a block of the cluster.
__device__ inline void barrier_arrive_at(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

#define QWEN_VL_R4(x, i) "+f"(x[i][0]), "+f"(x[i][1]), "+f"(x[i][2]), "+f"(x[i][3])

#define QWEN_VL_TILE_160(type)                                                                    \
  asm volatile(                                                                                   \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %82, 0;\n"                                                \
      "wgmma.mma_async.sync.aligned.m64n160k16.f32." type "." type " {"                           \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "          \
      "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "          \
      "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "          \
      "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, "          \
      "%66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79}, "                   \
      "%80, %81, p, 1, 1, 0, 0;\n}"                                                               \
      : QWEN_VL_R4(c, 0), QWEN_VL_R4(c, 1), QWEN_VL_R4(c, 2), QWEN_VL_R4(c, 3),                   \
        QWEN_VL_R4(c, 4), QWEN_VL_R4(c, 5), QWEN_VL_R4(c, 6), QWEN_VL_R4(c, 7),                   \
        QWEN_VL_R4(c, 8), QWEN_VL_R4(c, 9), QWEN_VL_R4(c, 10), QWEN_VL_R4(c, 11),                 \
        QWEN_VL_R4(c, 12), QWEN_VL_R4(c, 13), QWEN_VL_R4(c, 14), QWEN_VL_R4(c, 15),               \
        QWEN_VL_R4(c, 16), QWEN_VL_R4(c, 17), QWEN_VL_R4(c, 18), QWEN_VL_R4(c, 19)                \
      : "l"(a), "l"(b), "r"(static_cast<int>(add)))

#define QWEN_VL_TILE_192(type)                                                                    \
  asm volatile(                                                                                   \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %98, 0;\n"                                                \
      "wgmma.mma_async.sync.aligned.m64n192k16.f32." type "." type " {"                           \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "               \
      "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "               \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, "               \
      "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "               \
      "%62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, "               \
      "%77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, "               \
      "%92, %93, %94, %95}, "                                                                     \
      "%96, %97, p, 1, 1, 0, 0;\n}"                                                               \
      : QWEN_VL_R4(c, 0), QWEN_VL_R4(c, 1), QWEN_VL_R4(c, 2), QWEN_VL_R4(c, 3),                   \
        QWEN_VL_R4(c, 4), QWEN_VL_R4(c, 5), QWEN_VL_R4(c, 6), QWEN_VL_R4(c, 7),                   \
        QWEN_VL_R4(c, 8), QWEN_VL_R4(c, 9), QWEN_VL_R4(c, 10), QWEN_VL_R4(c, 11),                 \
        QWEN_VL_R4(c, 12), QWEN_VL_R4(c, 13), QWEN_VL_R4(c, 14), QWEN_VL_R4(c, 15),               \
        QWEN_VL_R4(c, 16), QWEN_VL_R4(c, 17), QWEN_VL_R4(c, 18), QWEN_VL_R4(c, 19),               \
        QWEN_VL_R4(c, 20), QWEN_VL_R4(c, 21), QWEN_VL_R4(c, 22), QWEN_VL_R4(c, 23)                \
      : "l"(a), "l"(b), "r"(static_cast<int>(add)))

#define QWEN_VL_TILE_208(type)                                                                    \
  asm volatile(                                                                                   \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %106, 0;\n"                                               \
      "wgmma.mma_async.sync.aligned.m64n208k16.f32." type "." type " {"                           \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "          \
      "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "          \
      "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "          \
      "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, "          \
      "%66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, "          \
      "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, "          \
      "%98, %99, %100, %101, %102, %103}, "                                                       \
      "%104, %105, p, 1, 1, 0, 0;\n}"                                                             \
      : QWEN_VL_R4(c, 0), QWEN_VL_R4(c, 1), QWEN_VL_R4(c, 2), QWEN_VL_R4(c, 3),                   \
        QWEN_VL_R4(c, 4), QWEN_VL_R4(c, 5), QWEN_VL_R4(c, 6), QWEN_VL_R4(c, 7),                   \
        QWEN_VL_R4(c, 8), QWEN_VL_R4(c, 9), QWEN_VL_R4(c, 10), QWEN_VL_R4(c, 11),                 \
        QWEN_VL_R4(c, 12), QWEN_VL_R4(c, 13), QWEN_VL_R4(c, 14), QWEN_VL_R4(c, 15),               \
        QWEN_VL_R4(c, 16), QWEN_VL_R4(c, 17), QWEN_VL_R4(c, 18), QWEN_VL_R4(c, 19),               \
        QWEN_VL_R4(c, 20), QWEN_VL_R4(c, 21), QWEN_VL_R4(c, 22), QWEN_VL_R4(c, 23),               \
        QWEN_VL_R4(c, 24), QWEN_VL_R4(c, 25)                                                      \
      : "l"(a), "l"(b), "r"(static_cast<int>(add)))

#define QWEN_VL_TILE_240(type)                                                                    \
  asm volatile(                                                                                   \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %122, 0;\n"                                               \
      "wgmma.mma_async.sync.aligned.m64n240k16.f32." type "." type " {"                           \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "          \
      "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "          \
      "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "          \
      "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, "          \
      "%66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, "          \
      "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, "          \
      "%98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, "              \
      "%111, %112, %113, %114, %115, %116, %117, %118, %119}, "                                   \
      "%120, %121, p, 1, 1, 0, 0;\n}"                                                             \
      : QWEN_VL_R4(c, 0), QWEN_VL_R4(c, 1), QWEN_VL_R4(c, 2), QWEN_VL_R4(c, 3),                   \
        QWEN_VL_R4(c, 4), QWEN_VL_R4(c, 5), QWEN_VL_R4(c, 6), QWEN_VL_R4(c, 7),                   \
        QWEN_VL_R4(c, 8), QWEN_VL_R4(c, 9), QWEN_VL_R4(c, 10), QWEN_VL_R4(c, 11),                 \
        QWEN_VL_R4(c, 12), QWEN_VL_R4(c, 13), QWEN_VL_R4(c, 14), QWEN_VL_R4(c, 15),               \
        QWEN_VL_R4(c, 16), QWEN_VL_R4(c, 17), QWEN_VL_R4(c, 18), QWEN_VL_R4(c, 19),               \
        QWEN_VL_R4(c, 20), QWEN_VL_R4(c, 21), QWEN_VL_R4(c, 22), QWEN_VL_R4(c, 23),               \
        QWEN_VL_R4(c, 24), QWEN_VL_R4(c, 25), QWEN_VL_R4(c, 26), QWEN_VL_R4(c, 27),               \
        QWEN_VL_R4(c, 28), QWEN_VL_R4(c, 29)                                                      \
      : "l"(a), "l"(b), "r"(static_cast<int>(add)))

#define QWEN_VL_TILE_256(type)                                                                    \
  asm volatile(                                                                                   \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"                                               \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type " {"                           \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "               \
      "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "               \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, "               \
      "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "               \
      "%62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, "               \
      "%77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, "               \
      "%92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, "              \
      "%106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, "                  \
      "%118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "                             \
      "%128, %129, p, 1, 1, 0, 0;\n}"                                                             \
      : QWEN_VL_R4(c, 0), QWEN_VL_R4(c, 1), QWEN_VL_R4(c, 2), QWEN_VL_R4(c, 3),                   \
        QWEN_VL_R4(c, 4), QWEN_VL_R4(c, 5), QWEN_VL_R4(c, 6), QWEN_VL_R4(c, 7),                   \
        QWEN_VL_R4(c, 8), QWEN_VL_R4(c, 9), QWEN_VL_R4(c, 10), QWEN_VL_R4(c, 11),                 \
        QWEN_VL_R4(c, 12), QWEN_VL_R4(c, 13), QWEN_VL_R4(c, 14), QWEN_VL_R4(c, 15),               \
        QWEN_VL_R4(c, 16), QWEN_VL_R4(c, 17), QWEN_VL_R4(c, 18), QWEN_VL_R4(c, 19),               \
        QWEN_VL_R4(c, 20), QWEN_VL_R4(c, 21), QWEN_VL_R4(c, 22), QWEN_VL_R4(c, 23),               \
        QWEN_VL_R4(c, 24), QWEN_VL_R4(c, 25), QWEN_VL_R4(c, 26), QWEN_VL_R4(c, 27),               \
        QWEN_VL_R4(c, 28), QWEN_VL_R4(c, 29), QWEN_VL_R4(c, 30), QWEN_VL_R4(c, 31)                \
      : "l"(a), "l"(b), "r"(static_cast<int>(add)))

// c[64 x columns] (+)= a[64x16] * b[columns x 16]^T.
__device__ inline void multiply_tile(float (&c)[20][4], uint64_t a, uint64_t b, bool add,
                                     __nv_bfloat16) {
  QWEN_VL_TILE_160("bf16");
}
__device__ inline void multiply_tile(float (&c)[20][4], uint64_t a, uint64_t b, bool add,
                                     __half) {
  QWEN_VL_TILE_160("f16");
}
__device__ inline void multiply_tile(float (&c)[24][4], uint64_t a, uint64_t b, bool add,
                                     __nv_bfloat16) {
  QWEN_VL_TILE_192("bf16");
}
__device__ inline void multiply_tile(float (&c)[24][4], uint64_t a, uint64_t b, bool add,
                                     __half) {
  QWEN_VL_TILE_192("f16");
}
__device__ inline void multiply_tile(float (&c)[26][4], uint64_t a, uint64_t b, bool add,
                                     __nv_bfloat16) {
  QWEN_VL_TILE_208("bf16");
}
__device__ inline void multiply_tile(float (&c)[26][4], uint64_t a, uint64_t b, bool add,
                                     __half) {
  QWEN_VL_TILE_208("f16");
}
__device__ inline void multiply_tile(float (&c)[30][4], uint64_t a, uint64_t b, bool add,
                                     __nv_bfloat16) {
  QWEN_VL_TILE_240("bf16");
}
__device__ inline void multiply_tile(float (&c)[30][4], uint64_t a, uint64_t b, bool add,
                                     __half) {
  QWEN_VL_TILE_240("f16");
}
__device__ inline void multiply_tile(float (&c)[32][4], uint64_t a, uint64_t b, bool add,
                                     __nv_bfloat16) {
  QWEN_VL_TILE_256("bf16");
}
__device__ inline void multiply_tile(float (&c)[32][4], uint64_t a, uint64_t b, bool add,
                                     __half) {
  QWEN_VL_TILE_256("f16");
}

#undef QWEN_VL_TILE_256
#undef QWEN_VL_TILE_240
#undef QWEN_VL_TILE_208
#undef QWEN_VL_TILE_192
#undef QWEN_VL_TILE_160
#undef QWEN_VL_R4

}  // namespace qwen_vl
#endif  // QWEN_VL_CUDA_ENCODER_WGMMA_PRODUCTS_CUH_
