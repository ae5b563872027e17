// The instances of the chain's kernels for activations of one type.
#ifndef QWEN_VL_CHAIN_FORMS_CUH_
#define QWEN_VL_CHAIN_FORMS_CUH_

#include "attend.cuh"
#include "kernels.h"
#include "plan.cuh"
#include "product.cuh"

namespace qwen_vl {
namespace chain {

template <class T, int kForm, int kOp, int kN>
const void* product_width(bool wide, bool slim) {
  // Only norms go through a row in chunks of a thread each.
  constexpr bool kNorms = kOp == kQkv || kOp == kGateUp || kOp == kHead;
  constexpr int kChunks = kNorms ? 2 : 1, kAhead = ahead_of(kN, false);
  constexpr int kLess = ahead_of(kN, has_slim(kOp, kN));
  if (slim) return reinterpret_cast<const void*>(product<T, kForm, kOp, kN, 1, kLess>);
  return wide ? reinterpret_cast<const void*>(product<T, kForm, kOp, kN, kChunks, kAhead>)
              : reinterpret_cast<const void*>(product<T, kForm, kOp, kN, 1, kAhead>);
}
template <class T, int kForm, int kOp>
const void* product_rows(int rows, bool wide, bool slim) {
  return rows == 1 ? product_width<T, kForm, kOp, 1>(wide, slim)
                   : product_width<T, kForm, kOp, kRows>(wide, slim);
}
template <class T, int kForm>
const void* product_op(int op, int rows, bool wide, bool slim) {
  switch (op) {
    case kQkv: return product_rows<T, kForm, kQkv>(rows, wide, slim);
    case kOut: return product_rows<T, kForm, kOut>(rows, wide, slim);
    case kGateUp: return product_rows<T, kForm, kGateUp>(rows, wide, slim);
    case kDown: return product_rows<T, kForm, kDown>(rows, wide, slim);
    default: return nullptr;
  }
}
template <class T>
const void* product_kernel(int form, int op, int rows, bool wide, bool slim) {
  if (op == kHead)
    return form == kFloat ? product_rows<T, kFloat, kHead>(rows, wide, slim)
           : form == kInt8 ? product_rows<T, kInt8, kHead>(rows, wide, slim) : nullptr;
  switch (form) {
    case kFloat: return product_op<T, kFloat>(op, rows, wide, slim);
    case kInt8: return product_op<T, kInt8>(op, rows, wide, slim);
    case kInt4: return product_op<T, kInt4>(op, rows, wide, slim);
    case kInt8Group: return product_op<T, kInt8Group>(op, rows, wide, slim);
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
