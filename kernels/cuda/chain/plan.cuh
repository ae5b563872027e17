// What each kernel of the chain is given: places in the workspace, shares of shared memory.
#ifndef QWEN_VL_CHAIN_PLAN_CUH_
#define QWEN_VL_CHAIN_PLAN_CUH_

#include <algorithm>
#include <cstdint>

#include "attend.cuh"
#include "choose.cuh"
#include "embed.cuh"
#include "finish.cuh"

namespace qwen_vl {
namespace chain {

constexpr int kOps = 5;
constexpr int kMostPace = 100000;

// Cuts the workspace up, the rows first; returns its size.
inline int64_t place(const qwen_vl_decode_model& m, Model* to) {
  decode::Workspace take(static_cast<uint8_t*>(m.workspace));
  const int64_t heads = 1ll * kRows * m.heads, dim = m.head_dim;
  Model p = {};
  p.width = m.width;
  p.mlp = m.mlp;
  p.heads = m.heads;
  p.kv_heads = m.kv_heads;
  p.dim_shift = m.head_dim == 128 ? 7 : 6;
  p.vocab = m.vocab;
  p.layers = m.layers;
  p.eps = m.eps;
  p.by_width = 1.f / m.width;
  p.embedding = m.embedding;
  p.frequencies = m.frequencies;
  p.state = reinterpret_cast<qwen_vl_decode_row*>(take(kRows * sizeof(qwen_vl_decode_row)));
  p.launch = reinterpret_cast<qwen_vl_decode_launch*>(take(sizeof(qwen_vl_decode_launch)));
  p.x = reinterpret_cast<float*>(take(4ll * kRows * m.width));
  p.turn = reinterpret_cast<float2*>(take(kRows * dim / 2 * 8));
  p.q = take(heads * dim * 2);
  p.parts = take(heads * kMaxParts * dim * 2);
  p.part_scale = reinterpret_cast<float2*>(take(heads * kMaxParts * 8));
  p.act = take(2ll * kRows * m.mlp);
  p.best = reinterpret_cast<Best*>(take(1ll * kRows * m.blocks * sizeof(Best)));
  take(256);  // a flag of the other form of the step, which stays zero (stuck_of)
  if (to) *to = p;
  return take.used;
}
inline int* stuck_of(const Model& m, int blocks) {
  return reinterpret_cast<int*>(reinterpret_cast<uint8_t*>(m.best) +
                                (1ll * kRows * blocks * sizeof(Best) + 255) / 256 * 256);
}

// Sequences that an instance of the kernels takes.
inline int instance_rows(int count) { return count == 1 ? 1 : kRows; }

// Completes a product's parameters; returns its bytes of shared memory.
//
// ahead: steps that a warp copies ahead.
inline int set_product(const qwen_vl_decode_model& model, const qwen_vl_decode_layer* layers,
                       const Model& m, int op, int layer, int ahead, Product* p) {
  const int form = op == kHead ? model.head_form : model.form, n = instance_rows(m.count);
  const int inputs = op == kDown ? m.mlp : op == kOut ? m.heads << m.dim_shift : m.width;
  const qwen_vl_decode_matrix& matrix = op == kHead ? model.head : layers[layer].op[op];
  *p = {};
  p->m = m;
  p->weight = matrix.weight;
  p->scales = matrix.scales;
  p->norm = op == kHead ? model.norm : op == kQkv ? layers[layer].norm1 : layers[layer].norm2;
  p->bias = op == kHead ? nullptr : layers[layer].bias;
  p->layer = layer;
  const int outputs = op == kQkv ? (m.heads + 2 * m.kv_heads) << m.dim_shift
                      : op == kGateUp ? 2 * m.mlp : op == kHead ? m.vocab : m.width;
  const int pairs = outputs / 2;
  p->every = pairs / model.blocks;
  p->over = pairs % model.blocks;
  p->row_bytes = decode::form_bytes(form, inputs);
  p->steps = p->row_bytes / kStepRow;
  p->other = static_cast<int64_t>(p->row_bytes) *
             (op == kGateUp ? m.mlp : op == kQkv ? 1 << (m.dim_shift - 1) : 8);
  p->act_stride = form == kFloat ? inputs * 2 + kPad : codes_bytes(form, inputs);
  p->groups = inputs / kGroup;
  auto up = [](int bytes) { return (bytes + 127) / 128 * 128; };
  const int most = p->every + (p->over > 0);  // pairs of a block
  const int pieces = (most + 7) / 8 + kWarps;
  int used = (n == 1 ? kActAt<1> : kActAt<kRows>) + up(m.count * p->act_stride);
  p->at_ring = used;
  used += kWarps * ahead * slot_bytes(form);
  p->at_spans = used;
  used += up((most + 7) / 8 * 4);
  p->at_parts = used;
  return used + up(pieces * 16 * n * 4);
}

// Steps that kernels copy ahead: those of the down projection, of gate and up, and all others.
struct Ahead {
  int down, gate_up, others;
  int of(int op) const {
    return op == kDown ? down : op == kGateUp ? gate_up : op == kHead ? kAhead : others;
  }
};

// Chooses as many as leave a block of the down projection room beside one of the kernels around it,
// so that each asks for its weights while the other still runs; where that cannot be, as many as
// fit a block alone. shared: bytes of a block at most; all: of a multiprocessor.
inline Ahead choose_ahead(const qwen_vl_decode_model& model, const qwen_vl_decode_layer* layers,
                          const Model& m, int shared, int all) {
  constexpr int kReserved = 1024;  // bytes that the system takes of each block
  auto bytes = [&](int op, int ahead) {
    Product p;
    return set_product(model, layers, m, op, 0, ahead, &p) + kReserved;
  };
  if (instance_rows(m.count) == 1) {
    constexpr Ahead kOne[] = {{kAheadDown[0], kAheadGate, kAhead},
                              {kAhead, kAhead, kAhead},
                              {kAheadDown[0], kAhead, kAhead}};
    for (const Ahead& one : kOne) {
      // INT4 is no faster with more: nearly all of gate and up is copied ahead as it is.
      if (one.gate_up > kAhead && model.form == kInt4) continue;
      const int near = std::max(bytes(kDown, one.down), bytes(kOut, one.others));
      if (bytes(kGateUp, one.gate_up) + near <= all) return one;
    }
    return kOne[1];
  }
  Ahead best = {kAheadDown[2], kAheadMany[1], kAheadMany[1]}, alone = best;
  bool side_by_side = false;
  for (int others : kAheadMany)
    for (int down : kAheadDown) {
      const int big = bytes(kDown, down);
      const int near = std::max(bytes(kGateUp, others), bytes(kQkv, others));
      if (std::max(big, near) > shared + kReserved) continue;
      if (others + down > alone.others + alone.down) alone = {down, others, others};
      if (big + near > all) continue;
      if (!side_by_side || others + down > best.others + best.down) best = {down, others, others};
      side_by_side = true;
    }
  return side_by_side ? best : alone;
}

// As many blocks as other kernels have, at least.
inline int attention_grid(const Model& m, int blocks) {
  return std::max(m.count * m.kv_heads * kMaxParts, blocks);
}

}  // namespace chain
}  // namespace qwen_vl
#endif  // QWEN_VL_CHAIN_PLAN_CUH_
