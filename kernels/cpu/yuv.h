// BT.601, limited range, in 20-bit fixed point: the constants of OpenCV's ITUR_BT_601 conversion.
#ifndef QWEN_VL_CPU_YUV_H_
#define QWEN_VL_CPU_YUV_H_

namespace qwen_vl {

constexpr int kYuvShift = 20;
constexpr int kYuvHalf = 1 << (kYuvShift - 1);
constexpr int kYuvLuma = 1220542;
constexpr int kYuvRedV = 1673527;
constexpr int kYuvGreenV = -852492;
constexpr int kYuvGreenU = -409993;
constexpr int kYuvBlueU = 2116026;

}  // namespace qwen_vl
#endif  // QWEN_VL_CPU_YUV_H_
