// What a block keeps in shared memory besides weights and activations.
//
// Everything that follows from shapes and shares is worked out once: a step passes 140 barriers,
// and an integer division between two of them costs as much as reading a kilobyte.
#ifndef QWEN_VL_DECODE_TABLES_CUH_
#define QWEN_VL_DECODE_TABLES_CUH_

#include "decode_types.cuh"

namespace qwen_vl {
namespace decode {

constexpr int kNormUnits = 64;  // most pieces of 256 inputs of all sequences together
constexpr int kMaxBias = 512;   // of a block's share of qkv

// A warp's items [begin, end) of a matrix; the first is item `at` of tile `tile`. The last tile
// that it begins but does not end is its own; `others` warps after it have the rest.
struct WarpShare {
  int begin, end, tile;
  int16_t at, others;
};

// A matrix and a block's share [begin, end) of it.
struct OpInfo {
  int begin, end, per_tile, first_tile;
  int part_first, part_base;       // where sums of the first tile and of others go
  int row_bytes, other;            // bytes of an output's weights, and from output g to g + 8
  int scale_tile, scale_item;      // bytes of scales
};

// Where a warp's stream of weights is; looked at where a tile ends.
struct Cursor {
  int op, layer, step, tile;
  int left;  // items of the matrix behind those of the tile
};

// A part of the attention of one sequence's group of heads; row is -1 for none.
struct Unit {
  int row, kv, part, begin, end;
};

struct Tables {
  unsigned long long target;  // of the barrier
  int given_up;
  int unit_count;
  Unit unit;  // this block's first
  Cursor cursor[kWarps];
  OpInfo op[kOps];
  WarpShare share[kOps][kWarps];
  qwen_vl_decode_row row[kRows];
  float2 rope[kRows][64];
  float squares[kNormUnits];
  float edge[2 * kAttendWarps * 8];
  float bias[kMaxBias];
  int token[kRows], splits[kRows];
  qwen_vl_decode_layer layer[kMaxLayers];  // as many as there are: must be last
};

// First row of a tile. Halves that rotate together, and gate and up of a channel, meet in a lane:
// rows g and g + 8 of a tile lie OpInfo::other apart.
__device__ inline int tile_row(const qwen_vl_decode_model& m, int op, int tile) {
  if (op == kQkv) {
    const int shift = m.head_dim == 128 ? 3 : 2;
    return (tile >> shift) * m.head_dim + (tile & ((1 << shift) - 1)) * 8;
  }
  return tile * (op == kGateUp ? 8 : kTile);
}

// Fills the tables; to be followed by a barrier of the block.
__device__ inline void fill_tables(const Params& p, Tables& tables) {
  const qwen_vl_decode_model& m = p.m;
  for (int i = threadIdx.x; i < kOps * kWarps; i += kThreads) {
    const int op = i / kWarps, warp = i % kWarps;
    const qwen_vl_decode_range r = m.ranges[op * m.blocks + blockIdx.x];
    const int count = r.end - r.begin;
    WarpShare s;
    s.begin = r.begin + count * warp / kWarps;
    s.end = r.begin + count * (warp + 1) / kWarps;
    s.tile = s.begin / r.per_tile;
    s.at = static_cast<int16_t>(s.begin - s.tile * r.per_tile);
    s.others = 0;
    if (s.end > s.begin) {
      const int portion = min(r.end, ((s.end - 1) / r.per_tile + 1) * r.per_tile);
      while (warp + s.others + 1 < kWarps &&
             r.begin + count * (warp + s.others + 1) / kWarps < portion)
        ++s.others;
    }
    tables.share[op][warp] = s;
    if (warp == 0) {
      const int inputs = op == kDown ? m.mlp : op == kOut ? m.heads * m.head_dim : m.width;
      const int form = op == kHead ? m.head_form : m.form;
      OpInfo o = {};
      o.begin = r.begin;
      o.end = r.end;
      o.per_tile = r.per_tile;
      o.first_tile = r.begin / r.per_tile;
      o.part_first = r.first;
      o.part_base = r.base;
      o.row_bytes = form_bytes(form, inputs);
      o.other = o.row_bytes * (op == kQkv ? m.head_dim / 2 : op == kGateUp ? m.mlp : 8);
      o.scale_tile = form == kInt8 ? 4 * kTile : grouped(form) ? inputs / m.group * 4 * kTile : 0;
      o.scale_item = scale_bytes(form, m.group);
      tables.op[op] = o;
    }
  }
  const int words = m.layers * static_cast<int>(sizeof(qwen_vl_decode_layer) / 8);
  for (int i = threadIdx.x; i < words; i += kThreads)
    reinterpret_cast<uint64_t*>(tables.layer)[i] = reinterpret_cast<const uint64_t*>(m.layer)[i];
  for (int s = threadIdx.x; s < p.l.count; s += kThreads) {
    tables.row[s] = p.state[p.l.slot[s]];
    tables.token[s] = tables.row[s].token;
  }
}

}  // namespace decode
}  // namespace qwen_vl
#endif  // QWEN_VL_DECODE_TABLES_CUH_
