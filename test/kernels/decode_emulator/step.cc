// The decode step on the emulator, behind the functions of qwen_vl_decode.h that it needs.
#include <cstdio>

#include "decode_memory.cuh"
#include "decode_step.cuh"

using namespace qwen_vl::decode;

namespace {

constexpr int kShared = 232448, kBlocks = 3;
constexpr uint64_t kTurns = 4000000;

template <class T>
bool run(const Params& p, int bytes) {
  auto launch = [&](auto kernel) {
    groups.clear();
    return emulator::run(kBlocks, kThreads, bytes, kTurns, [&] { kernel(p); });
  };
  switch (p.m.form * 4 + p.m.head_form) {
    case kFloat * 4 + kFloat: return launch(decode_step<T, kFloat, kFloat>);
    case kInt8 * 4 + kInt8: return launch(decode_step<T, kInt8, kInt8>);
    case kInt4 * 4 + kInt8: return launch(decode_step<T, kInt4, kInt8>);
    case kInt8Group * 4 + kFloat: return launch(decode_step<T, kInt8Group, kFloat>);
    default: return false;
  }
}

}  // namespace

extern "C" {

int qwen_vl_decode_workspace(const qwen_vl_decode_model* model, int64_t* bytes, char*, size_t) {
  *bytes = place(*model, nullptr);
  return 0;
}

int qwen_vl_decode_capacity(const qwen_vl_decode_model* model, int32_t* blocks, int32_t* rows,
                            char*, size_t) {
  *blocks = kBlocks;
  *rows = 0;
  for (int n = 1; n <= kRows; ++n)
    if (fits(*model, n, kShared)) *rows = n;
  return 0;
}

int qwen_vl_decode_admit(const qwen_vl_decode_model* model, int32_t slot,
                         const qwen_vl_decode_row* row, void*, char*, size_t) {
  Params p;
  place(*model, &p);
  p.state[slot] = *row;
  return 0;
}

int qwen_vl_decode_step(const qwen_vl_decode_model* model, const qwen_vl_decode_launch* launch,
                        void*, char* message, size_t size) {
  Params p;
  place(*model, &p);
  const int bytes = set_launch(*launch, kShared, &p);
  const bool done = model->dtype == 0 ? run<__nv_bfloat16>(p, bytes) : run<__half>(p, bytes);
  if (!done) snprintf(message, size, "the emulated step did not come to its end");
  return done ? 0 : 1;
}

}  // extern "C"
