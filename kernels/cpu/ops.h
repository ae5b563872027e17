// What one instruction set has to offer; everything else is the same code for all of them.
//
// The unit of work is a tile of Ops::rows camera rows. It is turned on its side, so that a byte
// column (one channel of one pixel) becomes a vector over rows. Then the horizontal pass is the
// same operation as the vertical one: a weighted sum of vectors, with one weight for all lanes and
// no gather. Interleaved channels, padded rows and subsampled chroma cost nothing extra: they only
// choose which columns and which row pointers are taken.
//
// Buffers that these functions write are padded to whole vectors by the caller; only camera rows
// are not, and are never read past their end.
#ifndef QWEN_VL_CPU_OPS_H_
#define QWEN_VL_CPU_OPS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "axis.h"

namespace qwen_vl {

constexpr int kColumns = 16;   // columns that are turned at a time
constexpr int kMaxRows = 64;   // the largest Ops::rows
constexpr int kMaxTaps = 4;    // the largest number of taps in a group
constexpr int kPadding = 64;   // bytes of a whole vector of any instruction set

// An axis in an instruction set's own form: per output one word that the sum starts from, then
// for each group of taps the weights cut into limbs.
struct PackedAxis {
  int groups = 0;
  int words = 0;  // per output
  std::vector<int32_t> data;
};

struct Ops {
  int isa;
  int rows;  // camera rows of a tile: the lanes of a vector over rows
  int taps;  // taps of a group

  PackedAxis (*pack)(const Axis& axis);

  // out[c * rows + r] = row[r][offset + c] for c < columns, rounded up to whole kColumns. Reads
  // row[r][0 .. row_bytes) only.
  void (*turn_in)(const uint8_t* const* row, int64_t offset, int64_t row_bytes, int columns,
                  uint8_t* out);

  // out[r * out_step + c] = in[c * in_step + r] for r < rows, c < columns (rounded up likewise).
  void (*turn_out)(const uint8_t* in, ptrdiff_t in_step, int columns, uint8_t* out,
                   ptrdiff_t out_step);

  // One output of an axis: the weighted sum of `groups * taps` vectors, `step` bytes apart, over n
  // lanes (rounded up to whole vectors); rounded and clipped to a byte.
  void (*weigh)(const uint8_t* in, ptrdiff_t step, int groups, const int32_t* packed, int n,
                uint8_t* out);

  // Outputs [first, last) of an axis from turned columns `step` bytes apart, of which the first is
  // pixel `origin`: out[(i - first) * rows].
  void (*weigh_columns)(const uint8_t* in, ptrdiff_t step, int origin, const Axis& axis,
                        const PackedAxis& packed, int first, int last, uint8_t* out);

  // Lane by lane BT.601, limited range, 20-bit fixed point (OpenCV's constants).
  void (*yuv_to_rgb)(const uint8_t* y, const uint8_t* u, const uint8_t* v, int n, uint8_t* r,
                     uint8_t* g, uint8_t* b);
};

const Ops* scalar_ops();
// Null where this build has them not; whether the machine has them is asked in dispatch.cc.
const Ops* avx2_ops();
const Ops* avx512_ops();
const Ops* neon_ops();

// Bit i: qwen_vl_isa i is built in and this machine runs it.
int available_isas();
// The fastest for isa = -1; null where it is not available.
const Ops* find_ops(int isa);

}  // namespace qwen_vl
#endif  // QWEN_VL_CPU_OPS_H_
