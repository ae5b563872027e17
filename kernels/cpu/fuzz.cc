// Random frames through every instruction set of this machine, in buffers without a byte to spare.
//
//   qwen_vl_fuzz [cases] [seed]
//
// Each case is run on the scalar form and on one other; both must write the same bytes. One case in
// four is damaged in one place and must be refused with the patches untouched. Built with
// AddressSanitizer (-DQWEN_VL_SANITIZE=ON) every byte read or written beyond a buffer ends the
// program. The digest printed at the end depends on the cases alone: it is the same on x86 and ARM.
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "qwen_vl_kernels.h"

namespace {

// xorshift64*
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 1) {}
  uint64_t next() {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return state_ * 0x2545f4914f6cdd1du;
  }
  int range(int low, int high) {  // both included
    return low + static_cast<int>((next() >> 33) % static_cast<uint64_t>(high - low + 1));
  }
  bool one_in(int n) { return range(1, n) == 1; }
  void fill(uint8_t* p, size_t n) {
    for (size_t i = 0; i < n; ++i) p[i] = static_cast<uint8_t>(next() >> 56);
  }

 private:
  uint64_t state_;
};

constexpr uint8_t kUntouched = 0xa5;
constexpr int kPixelBytes[] = {3, 3, 4, 4, 1, 1, 1, 2, 2};
constexpr int kUnit = QWEN_VL_UNIT, kPatch = QWEN_VL_PATCH;

bool is_nv(int encoding) { return encoding == QWEN_VL_NV12 || encoding == QWEN_VL_NV21; }

// Memory of exactly the size that is asked for, so that the sanitizer sees the first byte beyond.
struct Exact {
  explicit Exact(size_t n) : data(static_cast<uint8_t*>(std::malloc(n))), size(n) {
    if (!data) std::abort();
  }
  ~Exact() { std::free(data); }
  Exact(const Exact&) = delete;
  Exact& operator=(const Exact&) = delete;
  uint8_t* const data;
  const size_t size;
};

struct Case {
  qwen_vl_frame frame = {};
  int height, width;  // of the resized picture
  int resampler;
  bool pair;
  size_t bytes[2] = {0, 0};
};

Case draw(Random& random) {
  Case c;
  qwen_vl_frame& frame = c.frame;
  frame.encoding = random.range(QWEN_VL_RGB8, QWEN_VL_UYVY);
  const int longest = random.one_in(50) ? 1200 : random.one_in(6) ? 300 : 70;
  frame.width = random.range(kUnit, longest);
  frame.height = random.range(kUnit, random.one_in(8) ? 300 : 70);
  c.width = kUnit * random.range(1, random.one_in(10) ? 12 : 3);
  c.height = kUnit * random.range(1, random.one_in(10) ? 12 : 3);
  if (random.one_in(6)) frame.width = c.width;
  if (random.one_in(6)) frame.height = c.height;
  c.resampler = random.range(QWEN_VL_PILLOW_12, QWEN_VL_PILLOW_13);
  c.pair = random.one_in(4);
  const bool nv = is_nv(frame.encoding);
  frame.planes = nv ? 2 : 1;
  const int even = (frame.width + 1) / 2 * 2;
  for (int i = 0; i < frame.planes; ++i) {
    const int row = nv ? (i ? even : frame.width)
                       : (frame.encoding >= QWEN_VL_YUYV ? even : frame.width) *
                             kPixelBytes[frame.encoding];
    const int rows = i ? (frame.height + 1) / 2 : frame.height;
    frame.plane[i].step = row + (random.one_in(2) ? random.range(0, 40) : 0);
    c.bytes[i] = static_cast<size_t>(frame.plane[i].step) * (rows - 1) + row;
    frame.plane[i].size = c.bytes[i];
  }
  return c;
}

// Breaks one thing; what is broken must be seen without reading a pixel.
void damage(Random& random, Case& c, qwen_vl_patches& patches) {
  qwen_vl_frame& frame = c.frame;
  qwen_vl_plane& plane = frame.plane[random.range(0, frame.planes - 1)];
  switch (random.range(0, 13)) {
    case 0: plane.data = nullptr; break;
    case 1: plane.size -= 1; break;
    case 2: plane.size = 0; break;
    case 3: plane.step = random.range(-5, kUnit - 1); break;
    case 4: plane.step = INT64_MAX - random.range(0, 9); break;
    case 5: frame.planes = random.one_in(2) ? 0 : 3; break;
    case 6: frame.encoding = random.one_in(2) ? -1 : QWEN_VL_UYVY + random.range(1, 1000); break;
    case 7: frame.width = random.range(-3, kUnit - 1); break;
    case 8: frame.height = frame.width * QWEN_VL_MAX_ASPECT + random.range(1, 9); break;
    case 9: frame.height = random.one_in(2) ? INT32_MAX : INT32_MIN; break;
    case 10: patches.size -= 1; break;
    case 11: patches.width += random.range(1, kUnit - 1); break;
    case 12: patches.channel_stride = random.range(-1, kPatch * kPatch - 1); break;
    case 13:
      if (frame.planes == 2) {
        frame.plane[1].data = frame.plane[0].data + frame.plane[0].size - 1;
      } else {
        frame.plane[0].data = patches.data;  // the patches would overwrite the frame
        frame.plane[0].size = UINT32_MAX;
      }
      break;
  }
}

qwen_vl_cpu* open(int isa, int threads) {
  char message[256];
  qwen_vl_cpu* handle = nullptr;
  if (qwen_vl_cpu_open(threads, nullptr, 0, isa, &handle, message, sizeof(message))) {
    std::fprintf(stderr, "fuzz: %s\n", message);
    std::exit(1);
  }
  return handle;
}

[[noreturn]] void fail(long number, const Case& c, const char* what) {
  std::fprintf(stderr, "fuzz: case %ld, encoding %d, %dx%d -> %dx%d, resampler %d: %s\n", number,
               c.frame.encoding, c.frame.width, c.frame.height, c.width, c.height, c.resampler,
               what);
  std::exit(1);
}

}  // namespace

int main(int argc, char** argv) {
  const long cases = argc > 1 ? std::atol(argv[1]) : 2000;
  Random random(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1);
  const int isas = qwen_vl_cpu_isas();
  qwen_vl_cpu* plain = open(QWEN_VL_ISA_SCALAR, 1);
  std::vector<qwen_vl_cpu*> others = {open(QWEN_VL_ISA_SCALAR, 3)};
  for (int isa = QWEN_VL_ISA_AVX2; isa <= QWEN_VL_ISA_NEON; ++isa) {
    if (isas >> isa & 1) {
      others.push_back(open(isa, 1));
      others.push_back(open(isa, 2));
    }
  }
  uint64_t digest = 14695981039346656037u;  // FNV-1a
  long refused = 0;
  for (long number = 0; number < cases; ++number) {
    Case c = draw(random);
    Exact first(c.bytes[0]), second(c.bytes[1] ? c.bytes[1] : 1);
    random.fill(first.data, first.size);
    random.fill(second.data, second.size);
    c.frame.plane[0].data = first.data;
    if (c.frame.planes == 2) c.frame.plane[1].data = second.data;

    const int64_t area = kPatch * kPatch, channel = c.pair ? 2 * area : area;
    const int64_t count = static_cast<int64_t>(c.width / kPatch) * (c.height / kPatch);
    Exact expected(static_cast<size_t>(channel * 3 * (count - 1) + channel * 2 + area));
    Exact got(expected.size);
    std::memset(expected.data, kUntouched, expected.size);
    std::memset(got.data, kUntouched, got.size);
    qwen_vl_patches patches = {got.data,     got.size, c.height,    c.width,
                               c.resampler, 0,        channel * 3, channel};
    char message[256] = "";
    if (random.one_in(4)) {
      damage(random, c, patches);
      qwen_vl_cpu* handle = others[static_cast<size_t>(number) % others.size()];
      const int status = qwen_vl_cpu_patches(handle, &c.frame, &patches, message, sizeof(message));
      if (!status || !message[0]) fail(number, c, "a damaged case was accepted");
      if (std::memcmp(expected.data, got.data, got.size)) fail(number, c, "refused, yet written");
      ++refused;
      continue;
    }
    qwen_vl_cpu* handle = others[static_cast<size_t>(number) % others.size()];
    if (qwen_vl_cpu_patches(handle, &c.frame, &patches, message, sizeof(message))) {
      fail(number, c, message);
    }
    patches.data = expected.data;
    if (qwen_vl_cpu_patches(plain, &c.frame, &patches, message, sizeof(message))) {
      fail(number, c, message);
    }
    if (std::memcmp(expected.data, got.data, got.size)) fail(number, c, "bytes differ");
    for (size_t i = 0; i < expected.size; ++i) {
      digest = (digest ^ expected.data[i]) * 1099511628211u;
    }
  }
  qwen_vl_cpu_close(plain);
  for (qwen_vl_cpu* handle : others) qwen_vl_cpu_close(handle);
  std::printf("%ld cases, %ld refused, instruction sets 0x%x, digest %016" PRIx64 "\n", cases,
              refused, isas, digest);
  return 0;
}
