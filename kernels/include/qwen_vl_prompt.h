/*
 * The C interface of what libqwen_vl_encoder has for prompts alone: attention of few queries, and the
 * first token of an answer. The rules of qwen_vl_encoder.h hold.
 */
#ifndef QWEN_VL_PROMPT_H_
#define QWEN_VL_PROMPT_H_

#include "qwen_vl_encoder.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes of what qwen_vl_cache_map writes. */
#define QWEN_VL_CACHE_MAP 128

/*
 * Describes a cache to Hopper's copy engine: `map` (in host memory, aligned to 64 bytes) is to be
 * copied to the device, again to 64 bytes. Layers, keys and values, heads and `capacity` positions lie
 * one after the other. Refused where the library has no wgmma form.
 */
QWEN_VL_API int qwen_vl_cache_map(const qwen_vl_heads* heads, const qwen_vl_span* span,
                                  int32_t layers, int32_t capacity, void* map, char* message,
                                  size_t message_size);

/*
 * qwen_vl_attend_cache for heads of 128 channels by twice as many warps: two groups of them share the
 * keys of the same queries. `map`: on the device, for the wgmma form; null: the sm_80 class. `tail` 1:
 * only the tile of queries that holds the chunk's last one.
 */
QWEN_VL_API int qwen_vl_attend_prompt(const qwen_vl_heads* heads, const void* qkv,
                                      const qwen_vl_span* span, const void* map, int32_t layer,
                                      float scale, int32_t tail, void* out, void* stream,
                                      char* message, size_t message_size);

/*
 * out = silu(x * gates^T) * (x * others^T); weight is [2 * outs][ins], gates first, ins a multiple of 64;
 * sm_90 alone, for any number of rows, fast for those of a prompt.
 */
QWEN_VL_API int qwen_vl_multiply_gated(const qwen_vl_product* product, const void* x,
                                       const void* weight, void* out, void* stream, char* message,
                                       size_t message_size);

/* Copies row span->count - 1 of a [rows][width] and of b to out[2][width]. */
QWEN_VL_API int qwen_vl_last_rows(const qwen_vl_rows* rows, const void* a, const void* b,
                                  const qwen_vl_span* span, void* out, void* stream, char* message,
                                  size_t message_size);

/* Bytes that qwen_vl_first_token needs beside its operands on the current device; 0 before its first
 * use there, and never touched in between. 0: there is no device. */
QWEN_VL_API uint64_t qwen_vl_first_token_workspace(void);

/*
 * The likeliest token after a hidden state: root-mean-square norm of x[width] with `norm`, product with
 * head[vocab][width], choice. `out` is (token, its probability, distance of its logit to the next best,
 * 1 where all logits are finite). Logits are float32 and the lowest of equal tokens wins. `shape` is
 * (vocab, width, dtype), width a multiple of 256 and at most 8192.
 */
QWEN_VL_API int qwen_vl_first_token(const qwen_vl_rows* shape, const void* x, const void* norm,
                                    float eps, const void* head, void* workspace, double* out,
                                    void* stream, char* message, size_t message_size);

#ifdef __cplusplus
}
#endif
#endif /* QWEN_VL_PROMPT_H_ */
