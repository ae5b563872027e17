// RoboScene on the CPU: plain loops over render.h, images shared out to threads.
#include <atomic>
#include <thread>
#include <vector>

#include "render.h"

namespace rs = roboscene;

// env [n, 40], objects [n, 12, 24] float32; bank uint8 [t, 128, 128]; glyphs uint8 [10, 28, 20].
// Writes rgb uint8 [n, 336, 448, 3] and, when not null, ids uint8 [n, 336, 448]: object + 1 or 0.
extern "C" void roboscene_render_cpu(const float* env, const float* objects, const uint8_t* bank,
                                     const uint8_t* glyphs, int n, int threads, uint8_t* rgb,
                                     uint8_t* ids) {
  constexpr int kPixels = rs::kWidth * rs::kHeight;
  std::atomic<int> next{0};
  auto work = [&] {
    std::vector<float> image(static_cast<size_t>(kPixels) * 3);
    for (int i = next++; i < n; i = next++) {
      const float* e = env + i * rs::kEnvFloats;
      const float* ob = objects + i * rs::kMaxObjects * rs::kObjectFloats;
      uint8_t* out = rgb + static_cast<size_t>(i) * kPixels * 3;
      for (int y = 0; y < rs::kHeight; ++y)
        for (int x = 0; x < rs::kWidth; ++x) {
          int id = rs::render_pixel(e, ob, bank, glyphs, x, y, &image[(y * rs::kWidth + x) * 3]);
          if (ids) ids[static_cast<size_t>(i) * kPixels + y * rs::kWidth + x] =
              static_cast<uint8_t>(id);
        }
      for (int y = 0; y < rs::kHeight; ++y)
        for (int x = 0; x < rs::kWidth; ++x)
          for (int k = 0; k < 3; ++k)
            out[(y * rs::kWidth + x) * 3 + k] = rs::develop(e, image.data(), x, y, k);
      if (e[rs::kQuality] > 0)
        for (int by = 0; by < rs::kHeight / 8; ++by)
          for (int bx = 0; bx < rs::kWidth / 8; ++bx)
            rs::jpeg_block(out, bx, by, e[rs::kQuality]);
    }
  };
  std::vector<std::thread> pool;
  for (int i = 1; i < threads; ++i) pool.emplace_back(work);
  work();
  for (auto& t : pool) t.join();
}
