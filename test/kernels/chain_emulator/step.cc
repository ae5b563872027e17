// The chain of kernels on the emulator, behind the functions of qwen_vl_decode.h that it needs.
#include <cstdio>

#include "chain/plan.cuh"
#include "chain/product.cuh"

using namespace qwen_vl::chain;

struct qwen_vl_decode_chain {
  qwen_vl_decode_model model;
  Model places;
  int pace = 0;
};

namespace {

constexpr int kBlocks = 3;
constexpr uint64_t kTurns = 4000000;

template <class Kernel, class Argument>
bool run(Kernel kernel, int grid, int threads, int bytes, const Argument& argument) {
  qwen_vl::decode::groups.clear();
  return emulator::run(grid, threads, bytes, kTurns, [&] { kernel(argument); });
}

template <class T, int kForm, int kOp>
bool run_product(const Product& p, int bytes) {
  return p.m.count == 1
             ? run(product<T, kForm, kOp, 1, 1, 2>, kBlocks, kThreads, bytes, p)
             : run(product<T, kForm, kOp, kRows, 1, 2>, kBlocks, kThreads, bytes, p);
}
template <class T, int kForm>
bool run_op(int op, const Product& p, int bytes) {
  switch (op) {
    case kQkv: return run_product<T, kForm, kQkv>(p, bytes);
    case kOut: return run_product<T, kForm, kOut>(p, bytes);
    case kGateUp: return run_product<T, kForm, kGateUp>(p, bytes);
    case kDown: return run_product<T, kForm, kDown>(p, bytes);
    default: return run_product<T, kForm, kHead>(p, bytes);
  }
}
template <class T>
bool run_form(int form, int op, const Product& p, int bytes) {
  switch (form) {
    case kFloat: return run_op<T, kFloat>(op, p, bytes);
    case kInt8: return run_op<T, kInt8>(op, p, bytes);
    case kInt4: return run_op<T, kInt4>(op, p, bytes);
    default: return run_op<T, kInt8Group>(op, p, bytes);
  }
}

template <class T>
bool run_step(const qwen_vl_decode_model& model, const Model& m, int pace) {
  bool done = run(embed<T>, m.count, kEmbedThreads, 128, m);
  auto multiply = [&](int op, int layer) {
    Product p;
    const int bytes = set_product(model, model.layer, m, op, layer, 2, &p);
    p.pace = pace;
    done = done && run_form<T>(op == kHead ? model.head_form : model.form, op, p, bytes);
  };
  for (int layer = 0; layer < model.layers; ++layer) {
    multiply(kQkv, layer);
    const Attention a = {m, layer};
    done = done && (model.head_dim == 128
                        ? run(attention<T, 128>, attention_grid(m, kBlocks), kAttendThreads, kAttendBytes, a)
                        : run(attention<T, 64>, attention_grid(m, kBlocks), kAttendThreads, kAttendBytes, a));
    multiply(kOut, layer);
    multiply(kGateUp, layer);
    multiply(kDown, layer);
  }
  multiply(kHead, 0);
  return done && run(choose, 1, 32 * kRows, 128, Choice{m, kBlocks});
}

}  // namespace

extern "C" {

int qwen_vl_chain_workspace(qwen_vl_decode_model* model, int64_t* bytes, char*, size_t) {
  model->blocks = kBlocks;
  *bytes = place(*model, nullptr);
  return 0;
}

int qwen_vl_chain_create(const qwen_vl_decode_model* model, qwen_vl_decode_chain** chain,
                         int32_t* rows, char*, size_t) {
  *chain = new qwen_vl_decode_chain{*model, {}};
  place(*model, &(*chain)->places);
  *rows = kRows;
  return 0;
}

int qwen_vl_chain_admit(qwen_vl_decode_chain* chain, int32_t slot, const qwen_vl_decode_row* row,
                        void*, char*, size_t) {
  chain->places.state[slot] = *row;
  return 0;
}

int qwen_vl_chain_step(qwen_vl_decode_chain* chain, const qwen_vl_decode_launch* launch, void*,
                       char* message, size_t size) {
  Model m = chain->places;
  m.count = launch->count;
  *const_cast<qwen_vl_decode_launch*>(m.launch) = *launch;
  for (int i = 0; i < launch->steps; ++i) {
    if (chain->model.dtype == 0 ? run_step<__nv_bfloat16>(chain->model, m, chain->pace)
                                : run_step<__half>(chain->model, m, chain->pace))
      continue;
    snprintf(message, size, "the emulated step did not come to its end");
    return 1;
  }
  return 0;
}

int qwen_vl_chain_pace(qwen_vl_decode_chain* chain, int32_t pace, char*, size_t) {
  chain->pace = pace;
  return 0;
}

void qwen_vl_chain_destroy(qwen_vl_decode_chain* chain) { delete chain; }

}  // extern "C"
