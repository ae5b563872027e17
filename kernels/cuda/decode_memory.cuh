// Where a step's data lies: shared memory of a block, and the workspace.
#ifndef QWEN_VL_DECODE_MEMORY_CUH_
#define QWEN_VL_DECODE_MEMORY_CUH_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "decode_tables.cuh"

namespace qwen_vl {
namespace decode {

constexpr int kMinDepth = 2;

// Shared memory of a launch of `rows` sequences.
struct SharedLayout {
  int depth, slot_bytes, act_stride, slots, act, sums, tables, total;
};

inline int padded(int form, int inputs) {
  const int per = form_inputs(form);
  return (inputs + per - 1) / per * per;
}

inline SharedLayout layout_for(const qwen_vl_decode_model& m, int rows, int limit) {
  SharedLayout l = {};
  const int longest = std::max({padded(m.form, m.mlp), padded(m.form, m.heads * m.head_dim),
                                padded(m.form, m.width), padded(m.head_form, m.width)});
  l.slot_bytes = kItem + std::max(scale_bytes(m.form, m.group), scale_bytes(m.head_form, m.group));
  // Behind an op's inputs stay the sums that they were made from (stage_norm).
  l.act_stride = std::max(longest * 2, padded(m.form, m.width) * 2 + m.width * 4) + kActPad;
  l.act_stride = std::max(l.act_stride, padded(m.head_form, m.width) * 2 + m.width * 4 + kActPad);
  const int slots = kWarps * 8 * ((rows + 1) / 2) * 16;
  const int act = std::max({rows * l.act_stride, kAttendBytes,
                            static_cast<int>(kWarps * kRows * sizeof(Best))});
  const int sums = grouped(m.form) ? longest / m.group * kRows * 4 : 0;
  const int tables = static_cast<int>(offsetof(Tables, layer)) +
                     m.layers * static_cast<int>(sizeof(qwen_vl_decode_layer));
  auto up = [](int n) { return (n + 127) / 128 * 128; };
  const int fixed = up(slots) + up(act) + up(sums) + up(tables);
  l.depth = std::min(kMaxDepth, (limit - fixed) / (kWarps * l.slot_bytes));
  l.slots = up(kWarps * std::max(l.depth, 0) * l.slot_bytes);
  l.act = l.slots + up(slots);
  l.sums = l.act + up(act);
  l.tables = l.sums + up(sums);
  l.total = l.tables + up(tables);
  if (l.total > limit && l.depth > 0) --l.depth;
  return l;
}

inline bool fits(const qwen_vl_decode_model& m, int rows, int limit) {
  const SharedLayout l = layout_for(m, rows, limit);
  return l.depth >= kMinDepth && l.total <= limit && rows * (m.width / 256) <= kNormUnits;
}

// Cuts the workspace up; returns its size.
inline int64_t place(const qwen_vl_decode_model& m, Params* p) {
  Workspace take(static_cast<uint8_t*>(m.workspace));
  const int64_t row = 4ll * kRows * m.width, heads = 1ll * kRows * m.heads;
  Params q = {};
  q.state = reinterpret_cast<qwen_vl_decode_row*>(take(kRows * sizeof(qwen_vl_decode_row)));
  q.arrived = reinterpret_cast<unsigned long long*>(take(8));
  q.stuck = reinterpret_cast<int*>(take(4));
  q.x[0] = reinterpret_cast<float*>(take(row));
  q.x[1] = reinterpret_cast<float*>(take(row));
  q.part_out = reinterpret_cast<float*>(take(row * m.parts_out));
  q.part_down = reinterpret_cast<float*>(take(row * m.parts_down));
  q.attention = reinterpret_cast<float*>(take(heads * kMaxSplits * m.head_dim * 4));
  q.attention_scale = reinterpret_cast<float2*>(take(heads * kMaxSplits * 8));
  q.q = take(heads * m.head_dim * 2);
  q.act = take(2ll * kRows * m.mlp);
  q.best = reinterpret_cast<Best*>(take(1ll * kRows * m.blocks * sizeof(Best)));
  q.m = m;
  if (p) *p = q;
  return take.used;
}

// Completes the parameters of a launch; returns its bytes of shared memory.
inline int set_launch(const qwen_vl_decode_launch& launch, int shared, Params* p) {
  const SharedLayout l = layout_for(p->m, launch.count, shared);
  auto by = [](int n) {
    return n == 1 ? 0u : static_cast<uint32_t>((0x100000000ull + n - 1) / n);
  };
  p->l = launch;
  p->depth = l.depth;
  p->slot_bytes = l.slot_bytes;
  p->act_stride = l.act_stride;
  p->offset_slots = l.slots;
  p->offset_act = l.act;
  p->offset_sums = l.sums;
  p->offset_tables = l.tables;
  p->by_norm_units = by(p->m.width / 256);
  p->by_attention = by(p->m.heads * p->m.head_dim / 8);
  p->by_mlp = by(p->m.mlp / 8);
  p->by_blocks = by(p->m.blocks);
  return l.total;
}

}  // namespace decode
}  // namespace qwen_vl
#endif  // QWEN_VL_DECODE_MEMORY_CUH_
