// The weights as a warp sees them: one stream of items through all layers, read ahead of use.
//
// Which items a warp multiplies is settled before the step begins, so its ring in shared memory
// fills on while the warp waits for a barrier, for attention, or for its turn.
#ifndef QWEN_VL_DECODE_STREAM_CUH_
#define QWEN_VL_DECODE_STREAM_CUH_

#include "decode_tables.cuh"

namespace qwen_vl {
namespace decode {

template <int kForm, int kHeadForm>
class Stream {
  static constexpr bool kScales = kForm != kFloat || kHeadForm != kFloat;

 public:
  __device__ Stream(const Params& p, Tables& tables, uint8_t* shared)
      : p_(p), tables_(tables), ring_(shared + threadIdx.x / 32 * (p.depth * p.slot_bytes)) {
    if (threadIdx.x / 32 >= kWarps) return;
    next_matrix(Cursor{-1, 0, 0, 0, 0});
    for (int i = 0; i < p.depth; ++i) issue();
  }

  // The oldest item; valid until release().
  __device__ const uint8_t* acquire() {
    wait_for(p_.depth - 1);
    __syncwarp();  // lanes copy for each other
    return ring_ + use_;
  }
  __device__ void release() {
    __syncwarp();
    use_ += p_.slot_bytes;
    if (use_ == p_.depth * p_.slot_bytes) use_ = 0;
    issue();
  }

 private:
  // Finds the next matrix of which this warp has items.
  __device__ void next_matrix(Cursor c) {
    const int warp = threadIdx.x / 32;
    run_ = 0;
    while (c.step < p_.l.steps) {
      if (++c.op == kHead && c.layer + 1 < p_.m.layers) {
        c.op = 0;
        ++c.layer;
      } else if (c.op == kOps) {
        c.op = 0;
        c.layer = 0;
        if (++c.step == p_.l.steps) break;
      }
      const WarpShare share = tables_.share[c.op][warp];
      c.left = share.end - share.begin;
      c.tile = share.tile;
      if (c.left > 0) {
        begin_tile(c, share.at);
        break;
      }
    }
  }

  __device__ void begin_tile(Cursor& c, int at) {
    const int lane = threadIdx.x % 32;
    const qwen_vl_decode_matrix& matrix =
        c.op == kHead ? p_.m.head : tables_.layer[c.layer].op[c.op];
    const OpInfo& info = tables_.op[c.op];
    const int in_row = at * kItemRow + lane % 8 * 16;
    other_ = info.other;
    four_ = info.row_bytes * 4;
    room_ = info.row_bytes - in_row;
    from_ = static_cast<const uint8_t*>(matrix.weight) + in_row +
            static_cast<int64_t>(tile_row(p_.m, c.op, c.tile) + lane / 8) * info.row_bytes;
    if (kScales) {
      const int form = c.op == kHead ? kHeadForm : kForm;
      scale_bytes_ = info.scale_item;
      scale_step_ = grouped(form) ? scale_bytes_ : 0;
      scales_ = static_cast<const uint8_t*>(matrix.scales) + lane * 16 + at * scale_step_ +
                static_cast<int64_t>(c.tile) * info.scale_tile;
    }
    run_ = min(info.per_tile - at, c.left);
    c.left -= run_;
    if (lane == 0) tables_.cursor[threadIdx.x / 32] = c;
    __syncwarp();
  }

  __device__ void end_tile() {
    Cursor c = tables_.cursor[threadIdx.x / 32];
    __syncwarp();
    if (c.left > 0) {
      ++c.tile;
      begin_tile(c, 0);
    } else {
      next_matrix(c);
    }
  }

  __device__ void issue() {
    if (run_ > 0) {
      const int lane = threadIdx.x % 32;
      // Four rows of 128 bytes at a time, to where the lanes that multiply them look.
      const uint32_t slot = shared_of(ring_) + fill_;
      const uint32_t to = slot + lane / 8 * 64 + lane % 4 * 16 + lane % 8 / 4 * 512;
      const bool whole = room_ > 0;
      copy16(to, from_, whole);
      copy16(to + 256, from_ + four_, whole);
      copy16(to + 1024, from_ + other_, whole);
      copy16(to + 1280, from_ + other_ + four_, whole);
      if (kScales) {
        if (lane * 16 < scale_bytes_) copy16(slot + lane * 16 + kItem, scales_, true);
        scales_ += scale_step_;
      }
      fill_ += p_.slot_bytes;
      if (fill_ == p_.depth * p_.slot_bytes) fill_ = 0;
      from_ += kItemRow;
      room_ -= kItemRow;
      if (--run_ == 0) end_tile();
    }
    commit();
  }

  const Params& p_;
  Tables& tables_;
  uint8_t* const ring_;
  int run_ = 0;   // items left of the tile
  int room_ = 0;  // bytes left of the row from here
  int other_ = 0;  // bytes from output g to output g + 8
  int four_ = 0;   // and to the fourth after it
  int fill_ = 0, use_ = 0, scale_bytes_ = 0, scale_step_ = 0;
  const uint8_t *from_ = nullptr, *scales_ = nullptr;
};

}  // namespace decode
}  // namespace qwen_vl
#endif  // QWEN_VL_DECODE_STREAM_CUH_
