// What a block keeps in shared memory besides weights and activations.
#ifndef QWEN_VL_DECODE_TABLES_CUH_
#define QWEN_VL_DECODE_TABLES_CUH_

#include "decode_types.cuh"

namespace qwen_vl {
namespace decode {

constexpr int kNormUnits = 4;  // times kWarps: most pieces of 256 inputs of all sequences together
constexpr int kMaxBias = 512;  // of a block's share of qkv

// A block's tables in shared memory.
struct Tables {
  qwen_vl_decode_range range[kOps];
  qwen_vl_decode_row row[kRows];
  float2 rope[kRows][64];
  float squares[kNormUnits * kWarps];
  float edge[2 * kAttendWarps * 8];
  float bias[kMaxBias];
  int token[kRows];
  qwen_vl_decode_layer layer[kMaxLayers];  // as many as there are: must be last
};

}  // namespace decode
}  // namespace qwen_vl
#endif  // QWEN_VL_DECODE_TABLES_CUH_
