// The weights as a warp sees them: one stream of items through all layers, read ahead of use.
//
// Which items a warp multiplies is settled before the step begins, so its ring in shared memory
// fills on while the warp waits for a barrier, for attention, or for its turn: memory never idles.
// A lane copies what it alone will read; only scales pass between lanes.
#ifndef QWEN_VL_DECODE_STREAM_CUH_
#define QWEN_VL_DECODE_STREAM_CUH_

#include "decode_types.cuh"

namespace qwen_vl {
namespace decode {

// A block's and its warps' share of a matrix.
struct Share {
  int begin, count, per_tile, first, base;

  __device__ explicit Share(const qwen_vl_decode_range& r)
      : begin(r.begin), count(r.end - r.begin), per_tile(r.per_tile), first(r.first),
        base(r.base) {}
  // First item of a warp; those of warp w are [item(w), item(w + 1)).
  __device__ int item(int warp) const { return begin + count * warp / kWarps; }
};

// Row of output g (0 to 7) of a tile; output g + 8 lies `other_row` rows on. Halves that rotate
// together, and gate and up of a channel, meet in one lane.
__device__ inline int tile_row(const qwen_vl_decode_model& m, int op, int tile) {
  if (op == kQkv) {
    const int per_head = m.head_dim / kTile;
    return tile / per_head * m.head_dim + tile % per_head * 8;
  }
  return tile * (op == kGateUp ? 8 : kTile);
}
__device__ inline int other_row(const qwen_vl_decode_model& m, int op) {
  return op == kQkv ? m.head_dim / 2 : op == kGateUp ? m.mlp : 8;
}
__device__ inline int op_inputs(const qwen_vl_decode_model& m, int op) {
  return op == kDown ? m.mlp : op == kOut ? m.heads * m.head_dim : m.width;
}

template <int kForm, int kHeadForm>
class Stream {
 public:
  __device__ Stream(const Params& p, const qwen_vl_decode_layer* layers,
                    const qwen_vl_decode_range* ranges, uint8_t* shared)
      : p_(p), layers_(layers), ranges_(ranges), warp_(threadIdx.x / 32),
        lane_(threadIdx.x % 32), ring_(shared + warp_ * p.depth * p.slot_bytes),
        ring_address_(shared_of(ring_)) {
    op_ = -1;
    layer_ = 0;
    step_ = 0;
    next_matrix();
    for (int i = 0; i < p.depth; ++i) issue();
  }

  // The oldest item; valid until release().
  __device__ const uint8_t* acquire() {
    wait_for(p_.depth - 1);
    __syncwarp();  // scales were copied by other lanes
    return ring_ + use_ * p_.slot_bytes;
  }
  __device__ void release() {
    __syncwarp();
    if (++use_ == p_.depth) use_ = 0;
    issue();
  }

 private:
  __device__ int form() const { return op_ == kHead ? kHeadForm : kForm; }

  // Finds the next matrix of which this warp has items.
  __device__ void next_matrix() {
    left_ = 0;
    while (step_ < p_.l.steps) {
      if (++op_ == kHead && layer_ + 1 < p_.m.layers) {
        op_ = 0;
        ++layer_;
      } else if (op_ == kOps) {
        op_ = 0;
        layer_ = 0;
        if (++step_ == p_.l.steps) return;
      }
      const Share share(ranges_[op_]);
      const int begin = share.item(warp_);
      left_ = share.item(warp_ + 1) - begin;
      if (left_ > 0) {
        per_tile_ = share.per_tile;
        tile_ = begin / per_tile_;
        at_ = begin - tile_ * per_tile_;
        row_bytes_ = form_bytes(form(), op_inputs(p_.m, op_));
        find_tile();
        return;
      }
    }
  }

  __device__ void find_tile() {
    const qwen_vl_decode_matrix& matrix = op_ == kHead ? p_.m.head : layers_[layer_].op[op_];
    const int64_t row = tile_row(p_.m, op_, tile_) + lane_ / 4;
    in_row_ = at_ * kItemRow + lane_ % 4 * 16;
    from_ = static_cast<const uint8_t*>(matrix.weight) + row * row_bytes_ + in_row_;
    other_ = other_row(p_.m, op_) * row_bytes_;
    const int f = form();
    if (f != kFloat) {
      const int64_t tile_bytes =
          f == kInt8 ? 4 * kTile : op_inputs(p_.m, op_) / p_.m.group * 4 * kTile;
      scales_ = static_cast<const uint8_t*>(matrix.scales) + tile_ * tile_bytes + lane_ * 16;
      if (f != kInt8) scales_ += at_ * scale_bytes(f, p_.m.group);
    }
  }

  __device__ void issue() {
    if (left_ > 0) {
      const uint32_t to = ring_address_ + fill_ * p_.slot_bytes + lane_ * 16;
      const bool whole = in_row_ < row_bytes_, more = in_row_ + 64 < row_bytes_;
      copy16(to, from_, whole);
      copy16(to + 512, from_ + 64, more);
      copy16(to + 1024, from_ + other_, whole);
      copy16(to + 1536, from_ + other_ + 64, more);
      if (++fill_ == p_.depth) fill_ = 0;
      const int f = form();
      const bool ends = ++at_ == per_tile_;
      --left_;
      if (f != kFloat) {
        // Scales of outputs are used where a run of items ends, those of groups with each item.
        const int bytes = scale_bytes(f, p_.m.group);
        if (lane_ * 16 < bytes && (f != kInt8 || ends || left_ == 0))
          copy16(to + kItem, scales_, true);
        if (f != kInt8) scales_ += bytes;
      }
      if (left_ == 0) {
        next_matrix();
      } else if (ends) {
        at_ = 0;
        ++tile_;
        find_tile();
      } else {
        from_ += kItemRow;
        in_row_ += kItemRow;
      }
    }
    commit();
  }

  const Params& p_;
  const qwen_vl_decode_layer* layers_;
  const qwen_vl_decode_range* ranges_;
  const int warp_, lane_;
  uint8_t* const ring_;
  const uint32_t ring_address_;
  int op_, layer_, step_, left_, tile_ = 0, at_ = 0, per_tile_ = 1, row_bytes_ = 0;
  int in_row_ = 0, fill_ = 0, use_ = 0;
  const uint8_t *from_ = nullptr, *scales_ = nullptr;
  int other_ = 0;  // bytes from output g to output g + 8
};

}  // namespace decode
}  // namespace qwen_vl
#endif  // QWEN_VL_DECODE_STREAM_CUH_
