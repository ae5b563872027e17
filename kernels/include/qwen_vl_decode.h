/* C interface of libqwen_vl_decode: the decode step of Qwen2-VL's language model on a GPU.

   All pointers but those of message buffers are device pointers or pinned host memory. Calls return
   when the work is launched in `stream`; a qwen_vl_status other than QWEN_VL_OK comes with one
   sentence in `message`. Nothing is allocated: the caller brings a zeroed workspace. */
#ifndef QWEN_VL_DECODE_H_
#define QWEN_VL_DECODE_H_

#include <stddef.h>
#include <stdint.h>

/* What qwen_vl_abi_version of this library returns: it changes with the functions below. */
#define QWEN_VL_DECODE_ABI_VERSION 2

#ifdef __cplusplus
extern "C" {
#endif

/* Sequences that are decoded together, and results of each that the host may still have to read. */
#define QWEN_VL_DECODE_ROWS 8
#define QWEN_VL_DECODE_RESULTS 64

/* How a matrix is stored. All are [outputs, inputs], the inputs of a row one after another.
   int8: signed codes, a float scale an output. int4: two codes a byte, low nibble first, and a
   scale and zero point a group of inputs; int8_group: unsigned codes, alike. */
enum { QWEN_VL_FORM_FLOAT = 0, QWEN_VL_FORM_INT8 = 1, QWEN_VL_FORM_INT4 = 2,
       QWEN_VL_FORM_INT8_GROUP = 3 };

/* The matrices of a step in the order in which it reads them. */
enum { QWEN_VL_OP_QKV = 0, QWEN_VL_OP_OUT = 1, QWEN_VL_OP_GATE_UP = 2, QWEN_VL_OP_DOWN = 3,
       QWEN_VL_OP_HEAD = 4, QWEN_VL_OPS = 5 };

/* `scales` in the order of the tiles of 16 outputs (kernels/decode_layout.py): float [tiles][16],
   or half [tiles][groups][16][2] of scale and zero point; NULL for floats. */
typedef struct {
  const void* weight;
  const void* scales;
} qwen_vl_decode_matrix;

typedef struct {
  qwen_vl_decode_matrix op[4];
  const void* bias;  /* of qkv */
  const void* norm1;
  const void* norm2;
  const void* reserved;
} qwen_vl_decode_layer;

/* What one block reads of a matrix: items [begin, end), an item being 16 outputs times 128 bytes
   of inputs, `per_tile` of them a tile. Sums of the block's first tile go to part `first` of the
   result, those of the others to part `base`. */
typedef struct {
  int32_t begin, end, per_tile, first, base, reserved[3];
} qwen_vl_decode_range;

typedef struct {
  int32_t dtype; /* qwen_vl_dtype: bfloat16 or float16 */
  int32_t form, head_form, group;
  int32_t layers, width, mlp, heads, kv_heads, head_dim, vocab;
  int32_t blocks, parts_out, parts_down;
  float eps;
  int32_t reserved;
  const qwen_vl_decode_layer* layer; /* [layers] */
  qwen_vl_decode_matrix head;
  const void* norm;
  const void* embedding;
  const float* frequencies;           /* [head_dim / 2] */
  const qwen_vl_decode_range* ranges; /* [QWEN_VL_OPS][blocks] */
  void* workspace;
  int64_t workspace_bytes;
} qwen_vl_decode_model;

/* A sequence; lives in the workspace and moves on with every step. */
typedef struct {
  void* cache;      /* [layers][2][kv_heads][capacity][head_dim] */
  int64_t capacity; /* rows that may be written */
  uint64_t seed;
  int64_t serial; /* number of its next result */
  int32_t length, offset, token, top_k;
  float temperature, top_p;
  int32_t reserved[2];
} qwen_vl_decode_row;

/* Flags of a result. */
enum { QWEN_VL_RESULT_FINITE = 1, QWEN_VL_RESULT_STUCK = 2 };

/* In pinned host memory, [QWEN_VL_DECODE_ROWS][QWEN_VL_DECODE_RESULTS]: result `serial` of a slot
   is complete when `ready` is serial + 1. */
typedef struct {
  int32_t token;
  float probability, margin;
  int32_t flags;
  int64_t ready;
  int64_t at; /* when it was chosen, nanoseconds of the device's own clock */
} qwen_vl_decode_result;

typedef struct {
  int32_t count, steps;
  int32_t slot[QWEN_VL_DECODE_ROWS];
  const uint8_t* mask[QWEN_VL_DECODE_ROWS]; /* bool [vocab] of what a grammar permits, or NULL */
  qwen_vl_decode_result* results;
  float* logits; /* [QWEN_VL_DECODE_ROWS][vocab] by place in `slot`, or NULL */
} qwen_vl_decode_launch;

/* Bytes of workspace that a model needs (fields up to `reserved` are read). */
int qwen_vl_decode_workspace(const qwen_vl_decode_model* model, int64_t* bytes, char* message,
                             size_t size);

/* Blocks to plan for on the current device and the most sequences that a step can take. */
int qwen_vl_decode_capacity(const qwen_vl_decode_model* model, int32_t* blocks, int32_t* rows,
                            char* message, size_t size);

/* Put a sequence into a slot. */
int qwen_vl_decode_admit(const qwen_vl_decode_model* model, int32_t slot,
                         const qwen_vl_decode_row* row, void* stream, char* message, size_t size);

/* Run `steps` tokens of `count` sequences. Rows with top_k or top_p need steps 1 and `logits`. */
int qwen_vl_decode_step(const qwen_vl_decode_model* model, const qwen_vl_decode_launch* launch,
                        void* stream, char* message, size_t size);

/* The same step as a chain of kernels in a CUDA graph, one a matrix, each started while the one
   before it still runs (programmatic dependent launch) where the GPU is able to. `ranges` and
   `parts_...` of the model are not read; groups are of 128. */
typedef struct qwen_vl_decode_chain qwen_vl_decode_chain;

/* Sets `blocks` of the model for the current device; returns the bytes of workspace. */
int qwen_vl_chain_workspace(qwen_vl_decode_model* model, int64_t* bytes, char* message,
                            size_t size);

/* Make a chain for a model with its workspace, and say how many sequences a step can take. What the
   model points to must live as long as the chain. */
int qwen_vl_chain_create(const qwen_vl_decode_model* model, qwen_vl_decode_chain** chain,
                         int32_t* rows, char* message, size_t size);

/* As qwen_vl_decode_admit and qwen_vl_decode_step; the first step of so many sequences makes their
   graph. Calls for one chain come one at a time. */
int qwen_vl_chain_admit(qwen_vl_decode_chain* chain, int32_t slot, const qwen_vl_decode_row* row,
                        void* stream, char* message, size_t size);
int qwen_vl_chain_step(qwen_vl_decode_chain* chain, const qwen_vl_decode_launch* launch,
                       void* stream, char* message, size_t size);

/* Clocks of the device between the pieces of weights that gate and up ask for while the kernel
   before them still runs: its own inputs wait behind them. 0 at first, 100000 at most. When the
   last step has ended. */
int qwen_vl_chain_pace(qwen_vl_decode_chain* chain, int32_t pace, char* message, size_t size);

/* Give a chain back, when its last step has ended. */
void qwen_vl_chain_destroy(qwen_vl_decode_chain* chain);

/* out = x * weight^T + bias for many rows: x T [rows][inputs], out T [rows][outputs], T by `dtype`
   as above. int8: scales float [outputs]. int4, int8_group: scales half [outputs][inputs / group],
   zeros uint8 (int4) or int16 alike. Without x (NULL), out is the dequantised matrix itself,
   T [outputs][inputs], and `rows` is 1. */
typedef struct {
  const void *x, *weight, *scales, *zeros, *bias;
  void* out;
  int32_t dtype, form, rows, inputs, outputs, group;
} qwen_vl_quant_product;

int qwen_vl_quant_gemm(const qwen_vl_quant_product* product, void* stream, char* message,
                       size_t size);

#ifdef __cplusplus
}
#endif
#endif
