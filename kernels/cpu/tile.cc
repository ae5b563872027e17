#include "tile.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "check.h"

namespace qwen_vl {
namespace {

// What a strip's columns may take of the first-level cache, before and after resampling each.
constexpr int kStripBytes = 12 * 1024;

int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

bool is_nv(int encoding) { return encoding == QWEN_VL_NV12 || encoding == QWEN_VL_NV21; }
bool is_yuv(int encoding) { return encoding >= QWEN_VL_NV12; }

// Pixels that a strip of outputs needs; from an even one on, since two camera pixels share chroma.
struct Window {
  int first, last;
};

Window window_of(const Axis& axis, int first, int last) {
  return {axis.start[first] & ~1, axis.end[last - 1]};
}

// Pixels of the widest strip's window and what its last output's taps of zero weight read: every
// output has as many taps as the widest one, and the groups of a vector are whole.
int64_t widest_window(const Axis& axis, int strip) {
  int64_t widest = 0;
  for (int first = 0; first < axis.out; first += strip) {
    const int last = std::min(first + strip, axis.out) - 1;
    widest = std::max<int64_t>(widest, axis.start[last] + axis.taps - (axis.start[first] & ~1));
  }
  return round_up(widest + kMaxTaps, kColumns);
}

int strip_of(const Axis& axis, int rows, int channels) {
  const double shrink = std::max(1.0, static_cast<double>(axis.in) / axis.out);
  const int fit = static_cast<int>(kStripBytes / (rows * channels * shrink));
  return std::max(fit / kColumns, 1) * kColumns;
}

Rows rows_of(int width, int planes) {
  Rows rows;
  rows.pitch = static_cast<int>(round_up(width, kColumns));
  rows.step = round_up(static_cast<int64_t>(planes) * rows.pitch, kPadding);
  // Rows at a power of two share few sets of the cache.
  if (rows.step % 512 == 0) rows.step += kPadding;
  return rows;
}

void copy_patch_row(const uint8_t* from, uint8_t* to) {
  // 14 bytes as two words that share two bytes.
  uint64_t low, high;
  std::memcpy(&low, from, 8);
  std::memcpy(&high, from + QWEN_VL_PATCH - 8, 8);
  std::memcpy(to, &low, 8);
  std::memcpy(to + QWEN_VL_PATCH - 8, &high, 8);
}

class Band {
 public:
  Band(const Job& job, Scratch& scratch) : job_(job), ops_(*job.ops), scratch_(scratch) {}

  // Output rows [first, last).
  void run(int first, int last) {
    const Axis& axis = job_.y->axis;
    const int last_row = axis.end[last - 1];
    int y = first;
    int held = axis.start[first];  // camera row of the first row in scratch_.rows
    for (int row = held; row < last_row; row += ops_.rows) {
      const int keep = std::min(axis.start[y], row);
      std::memmove(rows_at(0), rows_at(keep - held), (row - keep) * job_.before.step);
      held = keep;
      const int end = std::min(row + ops_.rows, last_row);
      first_pass(row, end, rows_at(row - held));
      for (; y < last && axis.end[y] <= end; ++y) {
        const uint8_t* rows = rows_at(axis.start[y] - held);
        if (!job_.last) {
          scatter(y, vertical(y, rows, scratch_.sums.data()), job_.before);
          continue;
        }
        const int slot = (y - first) % ops_.rows;
        vertical(y, rows, scratch_.sums.data() + slot * job_.before.step);
        if (slot == ops_.rows - 1 || y == last - 1) last_pass(y - slot, y + 1);
      }
    }
  }

 private:
  uint8_t* rows_at(int64_t row) const { return scratch_.rows.data() + row * job_.before.step; }

  // Camera rows [first, last) to rows for the vertical pass; a tile that is not full repeats its
  // last row.
  void first_pass(int first, int last, uint8_t* out) {
    const uint8_t* row[2][kMaxRows];
    for (int i = 0; i < ops_.rows; ++i) {
      const int64_t y = std::min(first + i, last - 1);
      row[0][i] = job_.frame->plane[0].data + y * job_.frame->plane[0].step;
      if (is_nv(job_.frame->encoding)) {
        row[1][i] = job_.frame->plane[1].data + y / 2 * job_.frame->plane[1].step;
      }
    }
    const int width = job_.first->axis.out;
    for (int x = 0; x < width; x += job_.first_strip) {
      const int end = std::min(x + job_.first_strip, width);
      const Window window = window_of(job_.first->axis, x, end);
      const uint8_t* tile = turned(row[0], row[1], window);
      for (int p = 0; p < job_.planes; ++p) {
        resample(*job_.first, tile + job_.column_of[p] * ops_.rows, job_.channels, window.first, x,
                 end, out + p * job_.before.pitch + x, job_.before.step);
      }
    }
  }

  // Columns of the window's pixels: as they come, or RGB where they come as YUV.
  const uint8_t* turned(const uint8_t* const* row, const uint8_t* const* chroma, Window window) {
    const qwen_vl_frame& frame = *job_.frame;
    const int pixels = window.last - window.first, even = (pixels + 1) / 2 * 2;
    const int64_t bytes = row_bytes(frame, 0);
    uint8_t* raw = scratch_.raw.data();
    if (!is_yuv(frame.encoding)) {
      ops_.turn_in(row, static_cast<int64_t>(window.first) * job_.channels, bytes,
                   pixels * job_.channels, raw);
      return raw;
    }
    const int rows = ops_.rows;
    uint8_t* rgb = scratch_.rgb.data();
    if (is_nv(frame.encoding)) {
      uint8_t* uv = raw + round_up(pixels, kColumns) * rows;
      ops_.turn_in(row, window.first, bytes, pixels, raw);
      ops_.turn_in(chroma, window.first, row_bytes(frame, 1), even, uv);
      const int u = frame.encoding == QWEN_VL_NV12 ? 0 : 1;
      for (int i = 0; i < pixels; ++i) {
        const uint8_t* pair = uv + (i & ~1) * rows;
        to_rgb(raw + i * rows, pair + u * rows, pair + (1 - u) * rows, rgb + i * 3 * rows);
      }
      return rgb;
    }
    ops_.turn_in(row, static_cast<int64_t>(window.first) * 2, bytes, even * 2, raw);
    const int y = frame.encoding == QWEN_VL_YUYV ? 0 : 1;
    for (int i = 0; i < pixels; ++i) {
      const uint8_t* pair = raw + (i & ~1) * 2 * rows;
      to_rgb(pair + ((i & 1) * 2 + y) * rows, pair + (1 - y) * rows, pair + (3 - y) * rows,
             rgb + i * 3 * rows);
    }
    return rgb;
  }

  void to_rgb(const uint8_t* y, const uint8_t* u, const uint8_t* v, uint8_t* out) {
    ops_.yuv_to_rgb(y, u, v, ops_.rows, out, out + ops_.rows, out + 2 * ops_.rows);
  }

  // Outputs [first, last) of one plane from its column of pixel `origin` on, turned back into rows.
  void resample(const AxisTables& x, const uint8_t* column, int channels, int origin, int first,
                int last, uint8_t* out, int64_t out_step) {
    const ptrdiff_t step = static_cast<ptrdiff_t>(channels) * ops_.rows;
    if (x.axis.identity()) {
      ops_.turn_out(column + (first - origin) * step, step, last - first, out, out_step);
      return;
    }
    uint8_t* resized = scratch_.resized.data();
    ops_.weigh_columns(column, step, origin, x.axis, x.packed, first, last, resized);
    ops_.turn_out(resized, ops_.rows, last - first, out, out_step);
  }

  // One output row from the first of its rows on; into `out`, or where it already is.
  const uint8_t* vertical(int y, const uint8_t* rows, uint8_t* out) {
    if (job_.y->axis.identity()) return rows;
    const PackedAxis& packed = job_.y->packed;
    ops_.weigh(rows, job_.before.step, packed.groups,
               &packed.data[static_cast<size_t>(y) * packed.words],
               job_.planes * job_.before.pitch, out);
    return out;
  }

  // Horizontal pass over the output rows [first, last) in scratch_.sums.
  void last_pass(int first, int last) {
    const uint8_t* row[kMaxRows];
    for (int i = 0; i < ops_.rows; ++i) {
      row[i] = scratch_.sums.data() + std::min(i, last - first - 1) * job_.before.step;
    }
    const int width = job_.last->axis.out;
    for (int x = 0; x < width; x += job_.last_strip) {
      const int end = std::min(x + job_.last_strip, width);
      const Window window = window_of(job_.last->axis, x, end);
      for (int p = 0; p < job_.planes; ++p) {
        ops_.turn_in(row, p * job_.before.pitch + window.first, job_.before.step,
                     window.last - window.first, scratch_.raw.data());
        resample(*job_.last, scratch_.raw.data(), 1, window.first, x, end,
                 scratch_.last.data() + p * job_.after.pitch + x, job_.after.step);
      }
    }
    for (int y = first; y < last; ++y) {
      scatter(y, scratch_.last.data() + (y - first) * job_.after.step, job_.after);
    }
  }

  // One row of the resized picture into its patches.
  void scatter(int y, const uint8_t* row, const Rows& rows) {
    const qwen_vl_patches& to = *job_.patches;
    const int64_t units = to.width / QWEN_VL_UNIT;
    const int64_t first = y / QWEN_VL_UNIT * units * 4 + y / QWEN_VL_PATCH % 2 * 2;
    for (int c = 0; c < 3; ++c) {
      const uint8_t* from = row + (job_.planes == 3 ? c : 0) * rows.pitch;
      uint8_t* out = to.data + first * to.patch_stride + c * to.channel_stride +
                     y % QWEN_VL_PATCH * QWEN_VL_PATCH;
      for (int64_t u = 0; u < units; ++u, from += QWEN_VL_UNIT, out += 4 * to.patch_stride) {
        copy_patch_row(from, out);
        copy_patch_row(from + QWEN_VL_PATCH, out + to.patch_stride);
      }
    }
  }

  const Job& job_;
  const Ops& ops_;
  Scratch& scratch_;
};

}  // namespace

void Buffer::reserve(uint64_t size) {
  size = round_up(static_cast<int64_t>(size), kPadding) + kPadding;
  if (size <= size_) return;
  data_.reset();
  size_ = 0;
  void* memory = std::aligned_alloc(kPadding, size);
  if (!memory) throw std::bad_alloc();
  // Taps of zero weight may read what nothing has written.
  std::memset(memory, 0, size);
  data_.reset(static_cast<uint8_t*>(memory));
  size_ = size;
}

Job make_job(const Ops* ops, const qwen_vl_frame& frame, const qwen_vl_patches& patches,
             const AxisTables* first, const AxisTables* y, const AxisTables* last) {
  Job job = {};
  job.ops = ops;
  job.frame = &frame;
  job.patches = &patches;
  job.first = first;
  job.y = y;
  job.last = last;
  const int encoding = frame.encoding;
  const bool reversed = encoding == QWEN_VL_BGR8 || encoding == QWEN_VL_BGRA8;
  for (int p = 0; p < 3; ++p) job.column_of[p] = reversed ? 2 - p : p;
  job.channels = is_yuv(encoding) ? 3 : layout_of(encoding)->bytes_per_pixel;
  job.planes = std::min(job.channels, 3);
  job.before = rows_of(first->axis.out, job.planes);
  job.first_strip = strip_of(first->axis, ops->rows, job.channels);
  if (last) {
    job.after = rows_of(last->axis.out, job.planes);
    job.last_strip = strip_of(last->axis, ops->rows, 1);
  }
  return job;
}

void Scratch::reserve(const Job& job) {
  const int64_t tile = job.ops->rows;
  const bool yuv = is_yuv(job.frame->encoding);
  const int64_t pixels = widest_window(job.first->axis, job.first_strip);
  // NV12 takes a byte of luma and one of chroma a pixel, each padded to whole kColumns.
  raw.reserve((pixels * (yuv ? 2 : job.channels) + 2 * kColumns) * tile);
  if (yuv) rgb.reserve((pixels * 3 + kColumns) * tile);
  resized.reserve(std::max(job.first_strip, job.last_strip) * tile);
  // What earlier tiles left, a tile, and what taps of zero weight read beyond the last row.
  rows.reserve((2 * job.y->axis.taps + tile + kMaxTaps) * job.before.step);
  sums.reserve((job.last ? tile : 1) * job.before.step);
  if (job.last) {
    raw.reserve((widest_window(job.last->axis, job.last_strip) + kColumns) * tile);
    last.reserve(tile * job.after.step);
  }
}

uint64_t Scratch::bytes() const {
  return raw.size() + rgb.size() + resized.size() + rows.size() + sums.size() + last.size();
}

void run_band(const Job& job, int first, int last, Scratch& scratch) {
  Band(job, scratch).run(first * QWEN_VL_UNIT, last * QWEN_VL_UNIT);
}

}  // namespace qwen_vl
