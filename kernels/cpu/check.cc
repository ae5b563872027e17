#include "check.h"

#include <algorithm>
#include <cinttypes>
#include <cstdarg>
#include <cstdio>

namespace qwen_vl {
namespace {

constexpr Layout kLayouts[] = {
    {"rgb8", 1, 3}, {"bgr8", 1, 3}, {"rgba8", 1, 4}, {"bgra8", 1, 4}, {"mono8", 1, 1},
    {"nv12", 2, 0}, {"nv21", 2, 0}, {"yuyv", 1, 0},  {"uyvy", 1, 0},
};
constexpr int kEncodings = sizeof(kLayouts) / sizeof(kLayouts[0]);

// Steps and strides beyond this are nonsense; below it no product of them overflows.
constexpr int64_t kMaxStep = int64_t{1} << 30;

struct Range {
  uintptr_t first;
  uintptr_t last;  // one past

  bool meets(const Range& other) const { return first < other.last && other.first < last; }
};

uint64_t plane_bytes(const qwen_vl_frame& frame, int index) {
  return static_cast<uint64_t>(frame.plane[index].step * (plane_rows(frame, index) - 1) +
                               row_bytes(frame, index));
}

Range plane_range(const qwen_vl_frame& frame, int index) {
  const uintptr_t first = reinterpret_cast<uintptr_t>(frame.plane[index].data);
  return {first, first + plane_bytes(frame, index)};
}

}  // namespace

const Layout* layout_of(int encoding) {
  return encoding >= 0 && encoding < kEncodings ? &kLayouts[encoding] : nullptr;
}

int64_t row_bytes(const qwen_vl_frame& frame, int index) {
  const int64_t width = frame.width, even = (width + 1) / 2 * 2;
  switch (frame.encoding) {
    case QWEN_VL_NV12:
    case QWEN_VL_NV21:
      return index ? even : width;
    case QWEN_VL_YUYV:
    case QWEN_VL_UYVY:
      return even * 2;
    default:
      return width * layout_of(frame.encoding)->bytes_per_pixel;
  }
}

int64_t plane_rows(const qwen_vl_frame& frame, int index) {
  return index ? (frame.height + 1) / 2 : frame.height;
}

int refuse(int status, char* message, size_t message_size, const char* format, ...) {
  if (message && message_size) {
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(message, message_size, format, arguments);
    va_end(arguments);
  }
  return status;
}

int check_frame(const qwen_vl_frame* frame, char* message, size_t size) {
  if (!frame) return refuse(QWEN_VL_NULL_POINTER, message, size, "the frame is a null pointer");
  const Layout* layout = layout_of(frame->encoding);
  if (!layout) {
    return refuse(QWEN_VL_BAD_ENCODING, message, size, "encoding %d is not one of 0 to %d",
                  frame->encoding, kEncodings - 1);
  }
  const int width = frame->width, height = frame->height;
  const int shorter = std::min(width, height), longer = std::max(width, height);
  if (shorter < QWEN_VL_UNIT || longer > QWEN_VL_MAX_SIDE) {
    return refuse(QWEN_VL_BAD_SIZE, message, size, "a frame of %dx%d has a side outside %d to %d",
                  width, height, QWEN_VL_UNIT, QWEN_VL_MAX_SIDE);
  }
  if (longer > QWEN_VL_MAX_ASPECT * shorter) {
    return refuse(QWEN_VL_BAD_SIZE, message, size,
                  "a frame of %dx%d is too narrow: sides may differ by a factor of %d at most",
                  width, height, QWEN_VL_MAX_ASPECT);
  }
  if (frame->planes != layout->planes) {
    return refuse(QWEN_VL_BAD_PLANES, message, size, "%s has %d plane(s), %d were given",
                  layout->name, layout->planes, frame->planes);
  }
  for (int i = 0; i < layout->planes; ++i) {
    const qwen_vl_plane& plane = frame->plane[i];
    if (!plane.data) {
      return refuse(QWEN_VL_NULL_POINTER, message, size, "plane %d of the %s frame is a null pointer",
                    i, layout->name);
    }
    const int64_t row = row_bytes(*frame, i);
    if (plane.step < row || plane.step > kMaxStep) {
      return refuse(QWEN_VL_BAD_STEP, message, size,
                    "step %" PRId64 " of plane %d is not within %" PRId64
                    " (a row of %d pixels of %s) and %" PRId64,
                    plane.step, i, row, width, layout->name, kMaxStep);
    }
    const uint64_t need = plane_bytes(*frame, i);
    const uint64_t room = UINTPTR_MAX - reinterpret_cast<uintptr_t>(plane.data);
    if (plane.size < need || room < need) {
      return refuse(QWEN_VL_SHORT_BUFFER, message, size,
                    "%" PRIu64 " bytes are too few for plane %d of %dx%d %s with step %" PRId64
                    ": %" PRIu64 " needed",
                    std::min(plane.size, room), i, width, height, layout->name, plane.step, need);
    }
  }
  if (layout->planes == 2 && plane_range(*frame, 0).meets(plane_range(*frame, 1))) {
    return refuse(QWEN_VL_OVERLAP, message, size,
                  "the planes of the %dx%d %s frame overlap: plane 1 starts %" PRId64
                  " bytes after plane 0, which is %" PRIu64 " bytes long",
                  width, height, layout->name,
                  static_cast<int64_t>(reinterpret_cast<intptr_t>(frame->plane[1].data) -
                                       reinterpret_cast<intptr_t>(frame->plane[0].data)),
                  plane_bytes(*frame, 0));
  }
  return QWEN_VL_OK;
}

int check_resize(const qwen_vl_patches& patches, char* message, size_t size) {
  const int width = patches.width, height = patches.height;
  const int shorter = std::min(width, height), longer = std::max(width, height);
  if (shorter < QWEN_VL_UNIT || longer > QWEN_VL_MAX_SIDE || width % QWEN_VL_UNIT ||
      height % QWEN_VL_UNIT) {
    return refuse(QWEN_VL_BAD_OUTPUT, message, size,
                  "a resized picture of %dx%d: sides must be multiples of %d from %d to %d", width,
                  height, QWEN_VL_UNIT, QWEN_VL_UNIT, QWEN_VL_MAX_SIDE);
  }
  if (patches.resampler != QWEN_VL_PILLOW_12 && patches.resampler != QWEN_VL_PILLOW_13) {
    return refuse(QWEN_VL_BAD_RESAMPLER, message, size, "resampler %d is not one of 0 and 1",
                  patches.resampler);
  }
  return QWEN_VL_OK;
}

int check_patches(const qwen_vl_frame& frame, const qwen_vl_patches* patches, char* message,
                  size_t size) {
  if (!patches || !patches->data) {
    return refuse(QWEN_VL_NULL_POINTER, message, size, "the patches are a null pointer");
  }
  const int status = check_resize(*patches, message, size);
  if (status) return status;
  const int width = patches->width, height = patches->height;
  constexpr int64_t kArea = QWEN_VL_PATCH * QWEN_VL_PATCH;
  const int64_t stride = patches->patch_stride, channel = patches->channel_stride;
  if (channel < kArea || channel > kMaxStep || stride < 2 * channel + kArea || stride > kMaxStep) {
    return refuse(QWEN_VL_BAD_OUTPUT, message, size,
                  "strides of %" PRId64 " bytes a patch and %" PRId64
                  " a channel: a channel takes %" PRId64 ", a patch two strides more",
                  stride, channel, kArea);
  }
  const int64_t count = static_cast<int64_t>(width / QWEN_VL_PATCH) * (height / QWEN_VL_PATCH);
  const uint64_t need = static_cast<uint64_t>(stride * (count - 1) + 2 * channel + kArea);
  const uintptr_t first = reinterpret_cast<uintptr_t>(patches->data);
  if (patches->size < need || UINTPTR_MAX - first < need) {
    return refuse(QWEN_VL_BAD_OUTPUT, message, size,
                  "%" PRIu64 " bytes are too few for the %" PRId64 " patches of %dx%d: %" PRIu64
                  " needed",
                  patches->size, count, width, height, need);
  }
  for (int i = 0; i < frame.planes; ++i) {
    if (plane_range(frame, i).meets({first, first + need})) {
      return refuse(QWEN_VL_OVERLAP, message, size, "the patches overlap plane %d of the frame", i);
    }
  }
  return QWEN_VL_OK;
}

bool columns_first(const qwen_vl_frame& frame, const qwen_vl_patches& patches) {
  const int rows_lost = frame.height - patches.height, columns_lost = frame.width - patches.width;
  return patches.resampler == QWEN_VL_PILLOW_13 && columns_lost != 0 && rows_lost > 0 &&
         rows_lost > 2 * columns_lost;
}

}  // namespace qwen_vl
