// The weights as a warp sees them: one stream of items through all layers, read ahead of use.
//
// Which items a warp multiplies is settled before the step begins, so its ring in shared memory
// fills on while the warp waits for a barrier, for attention, or for its turn: memory never idles.
// A lane copies what it alone will read; only scales pass between lanes.
#ifndef QWEN_VL_DECODE_STREAM_CUH_
#define QWEN_VL_DECODE_STREAM_CUH_

#include "decode_tables.cuh"

namespace qwen_vl {
namespace decode {

template <int kForm, int kHeadForm>
class Stream {
 public:
  __device__ Stream(const Params& p, const Tables& tables, uint8_t* shared)
      : p_(p), tables_(tables), warp_(threadIdx.x / 32), lane_(threadIdx.x % 32),
        ring_(shared + warp_ * p.depth * p.slot_bytes), ring_address_(shared_of(ring_)) {
    next_matrix();
    for (int i = 0; i < p.depth; ++i) issue();
  }

  // The oldest item; valid until release().
  __device__ const uint8_t* acquire() {
    wait_for(p_.depth - 1);
    if (kForm != kFloat || kHeadForm != kFloat) __syncwarp();  // other lanes copied the scales
    return ring_ + use_;
  }
  __device__ void release() {
    if (kForm != kFloat || kHeadForm != kFloat) __syncwarp();
    use_ += p_.slot_bytes;
    if (use_ == p_.depth * p_.slot_bytes) use_ = 0;
    issue();
  }

 private:
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
      const WarpShare share = tables_.share[op_][warp_];
      left_ = share.end - share.begin;
      if (left_ > 0) {
        tile_ = share.tile;
        at_ = share.at;
        find_tile();
        return;
      }
    }
  }

  __device__ void find_tile() {
    const qwen_vl_decode_matrix& matrix =
        op_ == kHead ? p_.m.head : tables_.layer[layer_].op[op_];
    const OpInfo& info = tables_.op[op_];
    per_tile_ = info.per_tile;
    row_bytes_ = info.row_bytes;
    other_ = info.other;
    in_row_ = at_ * kItemRow + lane_ % 4 * 16;
    from_ = static_cast<const uint8_t*>(matrix.weight) +
            static_cast<int64_t>(tile_row(p_.m, op_, tile_) + lane_ / 4) * row_bytes_ + in_row_;
    if (kForm != kFloat || kHeadForm != kFloat) {
      scale_item_ = info.scale_item;
      scales_ = static_cast<const uint8_t*>(matrix.scales) +
                static_cast<int64_t>(tile_) * info.scale_tile + lane_ * 16;
      const int form = op_ == kHead ? kHeadForm : kForm;
      scale_step_ = grouped(form) ? scale_item_ : 0;
      scales_ += at_ * scale_step_;
    }
  }

  __device__ void issue() {
    if (left_ > 0) {
      const uint32_t to = ring_address_ + fill_ + lane_ * 16;
      const bool whole = in_row_ < row_bytes_, more = in_row_ + 64 < row_bytes_;
      copy16(to, from_, whole);
      copy16(to + 512, from_ + 64, more);
      copy16(to + 1024, from_ + other_, whole);
      copy16(to + 1536, from_ + other_ + 64, more);
      if (kForm != kFloat || kHeadForm != kFloat) {
        if (lane_ * 16 < scale_item_) copy16(to + kItem, scales_, true);
        scales_ += scale_step_;
      }
      fill_ += p_.slot_bytes;
      if (fill_ == p_.depth * p_.slot_bytes) fill_ = 0;
      from_ += kItemRow;
      in_row_ += kItemRow;
      ++at_;
      if (--left_ == 0) {
        next_matrix();
      } else if (at_ == per_tile_) {
        at_ = 0;
        ++tile_;
        find_tile();
      }
    }
    commit();
  }

  const Params& p_;
  const Tables& tables_;
  const int warp_, lane_;
  uint8_t* const ring_;
  const uint32_t ring_address_;
  int op_ = -1, layer_ = 0, step_ = 0, left_ = 0, tile_ = 0, at_ = 0, per_tile_ = 1;
  int row_bytes_ = 0, in_row_ = 0, fill_ = 0, use_ = 0;
  int other_ = 0;  // bytes from output g to output g + 8
  int scale_item_ = 0, scale_step_ = 0;
  const uint8_t *from_ = nullptr, *scales_ = nullptr;
};

}  // namespace decode
}  // namespace qwen_vl
#endif  // QWEN_VL_DECODE_STREAM_CUH_
