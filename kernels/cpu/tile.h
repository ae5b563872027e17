// The way of a picture through one thread: camera rows to patches, tile by tile.
#ifndef QWEN_VL_CPU_TILE_H_
#define QWEN_VL_CPU_TILE_H_

#include <cstdint>
#include <cstdlib>
#include <memory>

#include "ops.h"
#include "qwen_vl_kernels.h"

namespace qwen_vl {

// Memory that begins on a cache line; grows, never shrinks.
class Buffer {
 public:
  uint8_t* data() const { return data_.get(); }
  uint64_t size() const { return size_; }
  void reserve(uint64_t size);  // throws std::bad_alloc; contents are lost

 private:
  struct Free {
    void operator()(uint8_t* p) const { std::free(p); }
  };
  std::unique_ptr<uint8_t, Free> data_;
  uint64_t size_ = 0;
};

struct AxisTables {
  Axis axis;
  PackedAxis packed;
};

// Rows of resampled or camera pixels, one plane after the other.
struct Rows {
  int pitch;     // bytes of one plane, whole kColumns
  int64_t step;  // bytes of all planes, whole vectors
};

// Everything about a call that all threads share.
//
// Rows first:     camera rows -> horizontal pass -> vertical pass -> patches
// Columns first:  camera rows -> planes -> vertical pass -> horizontal pass -> patches
struct Job {
  const Ops* ops;
  const qwen_vl_frame* frame;
  const qwen_vl_patches* patches;
  const AxisTables* first;  // axis of the pass over camera rows: the width's, or its identity
  const AxisTables* y;
  const AxisTables* last;  // axis of the pass after the vertical one; null where there is none

  // How the first pass finds a channel among the columns of a turned tile.
  int channels;      // columns of a pixel
  int planes;        // 3, or 1 for grey
  int column_of[3];  // of red, green, blue among them

  int first_strip;  // output columns that are made at a time, first and last pass
  int last_strip;
  Rows before;  // what the vertical pass reads and writes
  Rows after;   // what becomes patches
};

Job make_job(const Ops* ops, const qwen_vl_frame& frame, const qwen_vl_patches& patches,
             const AxisTables* first, const AxisTables* y, const AxisTables* last);

// A thread's own memory.
struct Scratch {
  Buffer raw;      // a strip of a tile, turned
  Buffer rgb;      // the same as RGB, where it came as YUV
  Buffer resized;  // its output columns
  Buffer rows;     // rows before the vertical pass, as many as it still needs
  Buffer sums;     // a row after it, or a tile of them for the last pass
  Buffer last;     // a tile after the last pass

  void reserve(const Job& job);  // throws std::bad_alloc
  uint64_t bytes() const;
};

// Makes the patches of the unit rows [first, last).
void run_band(const Job& job, int first, int last, Scratch& scratch);

}  // namespace qwen_vl
#endif  // QWEN_VL_CPU_TILE_H_
