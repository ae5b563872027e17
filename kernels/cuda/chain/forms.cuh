// The instances of the chain's kernels for activations of one type.
#ifndef QWEN_VL_CHAIN_FORMS_CUH_
#define QWEN_VL_CHAIN_FORMS_CUH_

#include "attend.cuh"
#include "kernels.h"
#include "plan.cuh"
#include "product.cuh"

namespace qwen_vl {
namespace chain {

template <class T, int kForm, int kOp, int kN, int kSteps>
const void* product_width(bool wide) {
  // Only norms go through a row in chunks of a thread each.
  constexpr bool kNorms = kOp == kQkv || kOp == kGateUp || kOp == kHead;
  return wide ? reinterpret_cast<const void*>(product<T, kForm, kOp, kN, kNorms ? 2 : 1, kSteps>)
              : reinterpret_cast<const void*>(product<T, kForm, kOp, kN, 1, kSteps>);
}
template <class T, int kForm, int kOp>
const void* product_rows(int rows, bool wide, int ahead) {
  if (rows == 1) {
    if constexpr (kOp == kGateUp)
      if (ahead == kAheadGate) return product_width<T, kForm, kOp, 1, kAheadGate>(wide);
    if constexpr (kOp == kDown)
      if (ahead == kAheadDown[0]) return product_width<T, kForm, kOp, 1, kAheadDown[0]>(wide);
    return product_width<T, kForm, kOp, 1, kAhead>(wide);
  }
  if constexpr (kOp == kHead) {
    return product_width<T, kForm, kOp, kRows, kAhead>(wide);
  } else if constexpr (kOp == kDown) {
    return ahead == kAheadDown[0]   ? product_width<T, kForm, kOp, kRows, kAheadDown[0]>(wide)
           : ahead == kAheadDown[1] ? product_width<T, kForm, kOp, kRows, kAheadDown[1]>(wide)
                                    : product_width<T, kForm, kOp, kRows, kAheadDown[2]>(wide);
  } else {
    return ahead == kAheadMany[0] ? product_width<T, kForm, kOp, kRows, kAheadMany[0]>(wide)
                                  : product_width<T, kForm, kOp, kRows, kAheadMany[1]>(wide);
  }
}
template <class T, int kForm>
const void* product_op(int op, int rows, bool wide, int ahead) {
  switch (op) {
    case kQkv: return product_rows<T, kForm, kQkv>(rows, wide, ahead);
    case kOut: return product_rows<T, kForm, kOut>(rows, wide, ahead);
    case kGateUp: return product_rows<T, kForm, kGateUp>(rows, wide, ahead);
    case kDown: return product_rows<T, kForm, kDown>(rows, wide, ahead);
    default: return nullptr;
  }
}
template <class T>
const void* product_kernel(int form, int op, int rows, bool wide, int ahead) {
  if (op == kHead)
    return form == kFloat ? product_rows<T, kFloat, kHead>(rows, wide, ahead)
           : form == kInt8 ? product_rows<T, kInt8, kHead>(rows, wide, ahead) : nullptr;
  switch (form) {
    case kFloat: return product_op<T, kFloat>(op, rows, wide, ahead);
    case kInt8: return product_op<T, kInt8>(op, rows, wide, ahead);
    case kInt4: return product_op<T, kInt4>(op, rows, wide, ahead);
    case kInt8Group: return product_op<T, kInt8Group>(op, rows, wide, ahead);
    default: return nullptr;
  }
}
template <class T>
const void* attention_kernel(int dim) {
  return dim == 128 ? reinterpret_cast<const void*>(attention<T, 128>)
         : dim == 64 ? reinterpret_cast<const void*>(attention<T, 64>) : nullptr;
}

}  // namespace chain
}  // namespace qwen_vl
#endif  // QWEN_VL_CHAIN_FORMS_CUH_
