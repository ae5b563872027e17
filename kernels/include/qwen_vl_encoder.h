/*
 * The C interface of libqwen_vl_encoder: what a transformer block of the vision encoder and of the
 * decoder's prefill is made of. Plain pointers and sizes, nothing of torch.
 *
 * Everything runs on the current device, in the given stream (a cudaStream_t), allocates nothing
 * and returns when it is launched, so that it can be captured in a graph. Matrices are row-major;
 * pointers are device pointers, aligned to 16 bytes, and rows of activations are multiples of 8
 * elements. Rows of a bucket beyond those that count are computed like the others: they have to
 * hold finite numbers.
 */
#ifndef QWEN_VL_ENCODER_H_
#define QWEN_VL_ENCODER_H_

#include "qwen_vl_kernels.h"

/* What qwen_vl_abi_version of this library returns: it changes with the functions below. */
#define QWEN_VL_ENCODER_ABI_VERSION 2

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Matrix products by cuBLASLt, which is opened at run time -------------------------------- */

typedef struct qwen_vl_lt qwen_vl_lt;
typedef struct qwen_vl_lt_plan qwen_vl_lt_plan;

/* Bytes that name an algorithm of cuBLASLt; they hold for one version of it and one device. */
#define QWEN_VL_LT_ALGORITHM 64

/* out[rows][outs] = x[rows][ins] * weight[outs][ins]^T (+ bias[outs]) (+ add[rows][outs]). */
typedef struct qwen_vl_product {
  int32_t rows, outs, ins;
  int32_t dtype; /* qwen_vl_dtype of all of them: bf16 or fp16 */
  int32_t bias;  /* 1: there is one */
  int32_t add;   /* 1: there is one; it may be the output itself */
} qwen_vl_product;

/* Opens a library: the loaded or installed libcublasLt of CUDA 13, 12 or 11, or that of a path. */
QWEN_VL_API int qwen_vl_lt_open(const char* path, qwen_vl_lt** handle, uint64_t* version,
                                char* message, size_t message_size);

/*
 * Prepares a product and asks for up to `most` algorithms that need at most `workspace` bytes, the
 * likely fastest first; `algorithms` is [most][QWEN_VL_LT_ALGORITHM]. The first one is chosen.
 */
QWEN_VL_API int qwen_vl_lt_prepare(qwen_vl_lt* handle, const qwen_vl_product* product,
                                   uint64_t workspace, int32_t most, uint8_t* algorithms,
                                   int32_t* found, qwen_vl_lt_plan** plan, char* message,
                                   size_t message_size);

/* Chooses an algorithm, after cuBLASLt has accepted it for this product. */
QWEN_VL_API int qwen_vl_lt_choose(qwen_vl_lt_plan* plan, const uint8_t* algorithm, char* message,
                                  size_t message_size);

QWEN_VL_API int qwen_vl_lt_multiply(qwen_vl_lt_plan* plan, const void* x, const void* weight,
                                    const void* bias, const void* add, void* out, void* workspace,
                                    void* stream, char* message, size_t message_size);

QWEN_VL_API void qwen_vl_lt_forget(qwen_vl_lt_plan* plan);
QWEN_VL_API void qwen_vl_lt_close(qwen_vl_lt* handle);

/* ---- Norms, activations, rotations ----------------------------------------------------------- */

typedef enum qwen_vl_activation {
  QWEN_VL_QUICK_GELU = 0, /* x * sigmoid(1.702 x) */
  QWEN_VL_GELU = 1,       /* with erf */
  QWEN_VL_GELU_TANH = 2,
  QWEN_VL_SILU = 3
} qwen_vl_activation;

/* Rows of activations: [rows][width], width a multiple of 8 and at most 4096 for norms. */
typedef struct qwen_vl_rows {
  int32_t rows, width;
  int32_t dtype; /* bf16 or fp16 */
} qwen_vl_rows;

/* Layer norm with bias; without (null) a root-mean-square norm. Sums are float32. */
QWEN_VL_API int qwen_vl_norm(const qwen_vl_rows* rows, const void* x, const void* weight,
                             const void* bias, float eps, void* out, void* stream, char* message,
                             size_t message_size);

/* The same, written as int8 with one scale a row: out * scale is the norm's result. */
QWEN_VL_API int qwen_vl_norm_s8(const qwen_vl_rows* rows, const void* x, const void* weight,
                                const void* bias, float eps, int8_t* out, float* scales,
                                void* stream, char* message, size_t message_size);

/* out = activation(x); may be x itself. */
QWEN_VL_API int qwen_vl_activate(const qwen_vl_rows* rows, int32_t activation, const void* x,
                                 void* out, void* stream, char* message, size_t message_size);

/* The same, written as int8 with one scale a row; width at most 8192. */
QWEN_VL_API int qwen_vl_activate_s8(const qwen_vl_rows* rows, int32_t activation, const void* x,
                                    int8_t* out, float* scales, void* stream, char* message,
                                    size_t message_size);

/* out[r][c] = x[r][c] - 128 for c < bytes, a multiple of 4, and 0 for other c < width. */
QWEN_VL_API int qwen_vl_centre(const qwen_vl_rows* rows, int32_t bytes, const uint8_t* x, void* out,
                               void* stream, char* message, size_t message_size);

/* out[r][c] = activation(x[r][c]) * x[r][width + c]; x is [rows][2 * width]. */
QWEN_VL_API int qwen_vl_gate(const qwen_vl_rows* rows, int32_t activation, const void* x, void* out,
                             void* stream, char* message, size_t message_size);

/*
 * Rotates queries and keys of the encoder in place; qkv is [rows][3][heads][head_dim]. Channel c
 * turns with c + head_dim/2: the first quarter of the channels with the patch's row, the second
 * with its column. turns[position][head_dim/4] holds (cos, sin), spots[rows] (row, column).
 */
typedef struct qwen_vl_heads {
  int32_t rows;
  int32_t heads;
  int32_t kv_heads; /* divides heads */
  int32_t head_dim; /* 64, 80 or 128 */
  int32_t dtype;    /* bf16 or fp16 */
} qwen_vl_heads;

QWEN_VL_API int qwen_vl_rotate_grid(const qwen_vl_heads* heads, void* qkv, const int32_t* spots,
                                    const float* turns, void* stream, char* message,
                                    size_t message_size);

/*
 * Where a chunk of a prompt stands, in device memory, so that one graph serves every chunk. Keys of
 * layer l, head h, position p lie at cache + l * layer_step + h * head_step + p * head_dim (in
 * elements), values value_step further.
 */
typedef struct qwen_vl_span {
  uint64_t cache;
  int64_t layer_step, value_step, head_step;
  int64_t start; /* positions before the chunk */
  int64_t count; /* positions of the chunk; at most the rows of the bucket */
} qwen_vl_span;

/* turns[rows][head_dim/2] = (cos, sin) of positions[axes[i]][row] * frequencies[i]. */
QWEN_VL_API int qwen_vl_turns(int32_t rows, int32_t half, const int64_t* positions,
                              const int32_t* axes, const float* frequencies, float* turns,
                              void* stream, char* message, size_t message_size);

/* Rotates the queries of qkv [rows][heads + 2 * kv_heads][head_dim] in place, and writes rotated
 * keys and values of the chunk's rows into the cache. */
QWEN_VL_API int qwen_vl_rotate_text(const qwen_vl_heads* heads, void* qkv, const float* turns,
                                    const qwen_vl_span* span, int32_t layer, void* stream,
                                    char* message, size_t message_size);

/* ---- Attention ------------------------------------------------------------------------------- */

/* Rows of queries that one tile of the list covers at most. */
#define QWEN_VL_TILE_ROWS 128

typedef enum qwen_vl_attention_form {
  QWEN_VL_MMA = 0,  /* sm_80 class: any GPU that this library is for */
  QWEN_VL_WGMMA = 1, /* sm_90 alone; head_dim 80 */
  QWEN_VL_WGMMA_FINE = 2 /* the same, keys divided among more blocks: for few rows */
} qwen_vl_attention_form;

/*
 * Attention in all directions within segments: qkv as in qwen_vl_rotate_grid, out
 * [rows][heads][head_dim]. A tile is (first query, end, first key, end); tiles of a segment follow
 * each other and cover the rows of its keys; empty ones do nothing. The launch directly before, with
 * which this one overlaps, must not write the list.
 *
 * The workspace is of qwen_vl_attention_workspace bytes, null where that is 0. It holds zeros before
 * the first launch and is left as it has to be for the next; one launch at a time may use it.
 */
QWEN_VL_API int qwen_vl_attend_segments(const qwen_vl_heads* heads, int32_t form, const void* qkv,
                                        const int32_t* tiles, int32_t tile_count, float scale,
                                        void* out, void* workspace, void* stream, char* message,
                                        size_t message_size);

/* Bytes that a form of qwen_vl_attend_segments needs on the current device. */
QWEN_VL_API uint64_t qwen_vl_attention_workspace(int32_t form);

/* Causal attention of a chunk to the cache, itself included; out [rows][heads][head_dim]. */
QWEN_VL_API int qwen_vl_attend_cache(const qwen_vl_heads* heads, const void* qkv,
                                     const qwen_vl_span* span, int32_t layer, float scale,
                                     void* out, void* stream, char* message, size_t message_size);

/* 1 where the current device runs a form. */
QWEN_VL_API int qwen_vl_attention_has(int32_t form);

/* ---- INT8 products --------------------------------------------------------------------------- */

/*
 * out = (x * weight^T) * x_scales[row] * weight_scales[out] + bias (+ add), x int8 [rows][ins],
 * weight int8 [outs][ins], ins a multiple of 128, outs of 8; exact sums, rounded once.
 */
QWEN_VL_API int qwen_vl_multiply_s8(const qwen_vl_product* product, const int8_t* x,
                                    const float* x_scales, const int8_t* weight,
                                    const float* weight_scales, const void* bias, const void* add,
                                    void* out, void* stream, char* message, size_t message_size);

/* ---- Products with an activation or a rotation, sm_90 alone ---------------------------------- */

/*
 * QWEN_VL_QUICK_GELU: out = quick_gelu(x * weight^T + bias). QWEN_VL_SILU, without bias: weight is
 * [2 * outs][ins], gates first: out = silu(x * gates^T) * (x * others^T). ins is a multiple of 64.
 */
QWEN_VL_API int qwen_vl_multiply_activated(const qwen_vl_product* product, int32_t activation,
                                           const void* x, const void* weight, const void* bias,
                                           void* out, void* stream, char* message,
                                           size_t message_size);

/*
 * The encoder's queries, keys and values of heads of 80 channels: out[rows][3][heads][80] =
 * x * weight^T + bias, queries and keys rotated before they are rounded; spots and turns as in
 * qwen_vl_rotate_grid. product->outs is 240 * heads, ins a multiple of 64.
 */
QWEN_VL_API int qwen_vl_multiply_rotated(const qwen_vl_product* product, const void* x,
                                         const void* weight, const void* bias, const int32_t* spots,
                                         const float* turns, void* out, void* stream, char* message,
                                         size_t message_size);

#ifdef __cplusplus
}
#endif
#endif /* QWEN_VL_ENCODER_H_ */
