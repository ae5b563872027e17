// The few names of cuBLASLt that this library calls. They are declared here, with the numbers that
// NVIDIA's documentation of versions 11 to 13 gives them, because its header does not come with the
// compiler and the library itself is opened at run time: on a Jetson it is part of CUDA, elsewhere
// torch brings it along.
#ifndef QWEN_VL_CUDA_ENCODER_CUBLASLT_H_
#define QWEN_VL_CUDA_ENCODER_CUBLASLT_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace qwen_vl {
namespace lt {

using Handle = void*;
using Descriptor = void*;
using Layout = void*;
using Preference = void*;

struct Algorithm {
  uint64_t data[8];
};

struct Candidate {
  Algorithm algorithm;
  size_t workspace;
  int state;  // 0: fits
  float waves;
  int reserved[4];
};

constexpr int kFloat32 = 0, kFloat16 = 2, kBfloat16 = 14;  // cudaDataType
constexpr int kComputeFloat32 = 68;
constexpr int kTransposed = 1;

enum DescriptorAttribute { kTransA = 3, kEpilogue = 7, kBiasPointer = 8, kBiasType = 26 };
enum EpilogueKind : uint32_t { kNone = 1, kBias = 4 };
enum PreferenceAttribute { kWorkspaceBytes = 1, kReductions = 3 };
// Partial sums of a product that is split along its inputs are added in float32, never in the
// output's dtype.
constexpr uint32_t kReduceInFloat32 = 2;

struct Functions {
  size_t (*version)();
  int (*create)(Handle*);
  int (*destroy)(Handle);
  int (*descriptor_create)(Descriptor*, int compute, int scale);
  int (*descriptor_destroy)(Descriptor);
  int (*descriptor_set)(Descriptor, int attribute, const void* value, size_t size);
  int (*layout_create)(Layout*, int type, uint64_t rows, uint64_t columns, int64_t leading);
  int (*layout_destroy)(Layout);
  int (*preference_create)(Preference*);
  int (*preference_destroy)(Preference);
  int (*preference_set)(Preference, int attribute, const void* value, size_t size);
  int (*heuristic)(Handle, Descriptor, Layout a, Layout b, Layout c, Layout d, Preference, int most,
                   Candidate* found, int* count);
  int (*check)(Handle, Descriptor, Layout a, Layout b, Layout c, Layout d, const Algorithm*,
               Candidate* result);
  int (*multiply)(Handle, Descriptor, const void* alpha, const void* a, Layout, const void* b,
                  Layout, const void* beta, const void* c, Layout, void* d, Layout,
                  const Algorithm*, void* workspace, size_t workspace_bytes, cudaStream_t);
};

}  // namespace lt
}  // namespace qwen_vl
#endif  // QWEN_VL_CUDA_ENCODER_CUBLASLT_H_
