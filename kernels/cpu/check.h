// What a caller handed over, held against itself before anything is touched.
#ifndef QWEN_VL_CPU_CHECK_H_
#define QWEN_VL_CPU_CHECK_H_

#include <cstddef>
#include <cstdint>

#include "qwen_vl_kernels.h"

namespace qwen_vl {

// How an encoding lies in memory.
struct Layout {
  const char* name;
  int planes;
  int bytes_per_pixel;  // of packed RGB and grey; 0 for YUV
};

// Null for a number that is no qwen_vl_encoding.
const Layout* layout_of(int encoding);

// Bytes of one row of plane `index`, and its rows.
int64_t row_bytes(const qwen_vl_frame& frame, int index);
int64_t plane_rows(const qwen_vl_frame& frame, int index);

// Writes one sentence into message (cut at its size) and returns status.
#if defined(__GNUC__)
__attribute__((format(printf, 4, 5)))
#endif
int refuse(int status, char* message, size_t message_size, const char* format, ...);

// Checks a frame, a resized picture's size, and the place for its patches against the frame.
int check_frame(const qwen_vl_frame* frame, char* message, size_t message_size);
int check_resize(const qwen_vl_patches& patches, char* message, size_t message_size);
int check_patches(const qwen_vl_frame& frame, const qwen_vl_patches* patches, char* message,
                  size_t message_size);

// Says whether columns are resampled before rows; both passes must be needed.
bool columns_first(const qwen_vl_frame& frame, const qwen_vl_patches& patches);

}  // namespace qwen_vl
#endif  // QWEN_VL_CPU_CHECK_H_
