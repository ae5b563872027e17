// The body of Ops, once for every instruction set. A file that includes this has defined, in an
// unnamed namespace, a type V with
//   kIsa, kRows, kTaps, kLimbs       kTaps taps share a group; its weights are kLimbs words
//   pack_start(sum), pack_group(w, words)
//   Vec, load, store                  kLanes bytes
//   interleave_low, interleave_high   of the bytes of two vectors, within each 16-byte lane
//   load_lanes, store_lanes           16 bytes of rows r, r + 16, ... as one vector
//   Sum, clear, add, finish           a weighted sum of kLanes bytes
//   yuv(y, u, v, r, g, b)             kLanes pixels
#include <cstring>

#include "ops.h"
#include "qwen_vl_kernels.h"

namespace qwen_vl {
namespace {

PackedAxis pack_axis(const Axis& axis) {
  PackedAxis packed;
  packed.groups = (axis.taps + V::kTaps - 1) / V::kTaps;
  packed.words = 1 + packed.groups * V::kLimbs;
  packed.data.resize(static_cast<size_t>(axis.out) * packed.words);
  std::vector<int32_t> weights(static_cast<size_t>(packed.groups) * V::kTaps);
  for (int i = 0; i < axis.out; ++i) {
    std::memcpy(weights.data(), &axis.weights[static_cast<size_t>(i) * axis.taps],
                sizeof(int32_t) * axis.taps);
    int32_t sum = 0;
    for (int32_t w : weights) sum += w;
    int32_t* words = &packed.data[static_cast<size_t>(i) * packed.words];
    *words++ = V::pack_start(sum);
    for (int g = 0; g < packed.groups; ++g, words += V::kLimbs) {
      V::pack_group(&weights[static_cast<size_t>(g) * V::kTaps], words);
    }
  }
  return packed;
}

// Transposes 16 vectors whose 16-byte lanes are the rows of 16x16 matrices. Interleaving vector i
// with vector i + 8 rotates the 8 bits of (row, column) by one place; four times is half a turn.
inline void turn(typename V::Vec* a) {
  typename V::Vec b[16];
  for (int pass = 0; pass < 2; ++pass) {
    for (int i = 0; i < 8; ++i) {
      b[2 * i] = V::interleave_low(a[i], a[i + 8]);
      b[2 * i + 1] = V::interleave_high(a[i], a[i + 8]);
    }
    for (int i = 0; i < 8; ++i) {
      a[2 * i] = V::interleave_low(b[i], b[i + 8]);
      a[2 * i + 1] = V::interleave_high(b[i], b[i + 8]);
    }
  }
}

void turn_in(const uint8_t* const* row, int64_t offset, int64_t row_bytes, int columns,
             uint8_t* out) {
  for (int c = 0; c < columns; c += kColumns, offset += kColumns) {
    const uint8_t* from[kMaxRows];
    uint8_t stage[kMaxRows][kColumns];
    const int64_t left = row_bytes - offset;
    for (int r = 0; r < V::kRows; ++r) {
      if (left >= kColumns) {
        from[r] = row[r] + offset;
      } else {
        std::memset(stage[r], 0, kColumns);
        std::memcpy(stage[r], row[r] + offset, static_cast<size_t>(left));
        from[r] = stage[r];
      }
    }
    for (int r = 0; r < V::kRows; r += V::kLanes) {
      typename V::Vec a[16];
      for (int i = 0; i < 16; ++i) a[i] = V::load_lanes(from + r + i);
      turn(a);
      for (int i = 0; i < 16; ++i) V::store(a[i], out + (c + i) * V::kRows + r);
    }
  }
}

void turn_out(const uint8_t* in, ptrdiff_t in_step, int columns, uint8_t* out,
              ptrdiff_t out_step) {
  for (int c = 0; c < columns; c += kColumns) {
    for (int r = 0; r < V::kRows; r += V::kLanes) {
      typename V::Vec a[16];
      for (int i = 0; i < 16; ++i) a[i] = V::load(in + (c + i) * in_step + r);
      turn(a);
      for (int i = 0; i < 16; ++i) V::store_lanes(a[i], out + (r + i) * out_step + c, out_step);
    }
  }
}

// Most pictures need one or two groups: with the number known, sums stay in registers and the
// loop over groups is gone.
template <int kGroups>
inline void weigh_groups(const uint8_t* in, ptrdiff_t step, int groups, const int32_t* packed,
                         int n, uint8_t* out) {
  const int count = kGroups ? kGroups : groups;
  for (int i = 0; i < n; i += V::kLanes) {
    typename V::Sum sum;
    V::clear(sum);
    const uint8_t* p = in + i;
    const int32_t* words = packed + 1;
    for (int g = 0; g < count; ++g, p += V::kTaps * step, words += V::kLimbs) {
      V::add(sum, p, step, words);
    }
    V::store(V::finish(sum, packed[0]), out + i);
  }
}

void weigh(const uint8_t* in, ptrdiff_t step, int groups, const int32_t* packed, int n,
           uint8_t* out) {
  if (groups == 1) return weigh_groups<1>(in, step, 1, packed, n, out);
  if (groups == 2) return weigh_groups<2>(in, step, 2, packed, n, out);
  weigh_groups<0>(in, step, groups, packed, n, out);
}

template <int kGroups>
void weigh_columns_groups(const uint8_t* in, ptrdiff_t step, int origin, const Axis& axis,
                          const PackedAxis& packed, int first, int last, uint8_t* out) {
  for (int i = first; i < last; ++i, out += V::kRows) {
    weigh_groups<kGroups>(in + (axis.start[i] - origin) * step, step, packed.groups,
                          &packed.data[static_cast<size_t>(i) * packed.words], V::kRows, out);
  }
}

void weigh_columns(const uint8_t* in, ptrdiff_t step, int origin, const Axis& axis,
                   const PackedAxis& packed, int first, int last, uint8_t* out) {
  const auto run = packed.groups == 1   ? weigh_columns_groups<1>
                   : packed.groups == 2 ? weigh_columns_groups<2>
                                        : weigh_columns_groups<0>;
  run(in, step, origin, axis, packed, first, last, out);
}

void yuv_to_rgb(const uint8_t* y, const uint8_t* u, const uint8_t* v, int n, uint8_t* r,
                uint8_t* g, uint8_t* b) {
  for (int i = 0; i < n; i += V::kLanes) V::yuv(y + i, u + i, v + i, r + i, g + i, b + i);
}

constexpr Ops kOps = {V::kIsa, V::kRows, V::kTaps, pack_axis, turn_in, turn_out,
                      weigh,   weigh_columns, yuv_to_rgb};

}  // namespace
}  // namespace qwen_vl
