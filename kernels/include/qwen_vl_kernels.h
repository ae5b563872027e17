/*
 * The C interface of the native kernels: plain pointers and sizes, nothing of torch, nothing of ROS.
 *
 * Every function that can fail returns a qwen_vl_status and writes one sentence with the numbers
 * that were found into `message`. Everything is checked before any pixel is read or written.
 */
#ifndef QWEN_VL_KERNELS_H_
#define QWEN_VL_KERNELS_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define QWEN_VL_API __attribute__((visibility("default")))
#else
#define QWEN_VL_API
#endif

/* Grows with every change that a caller built against the former header would not survive. */
#define QWEN_VL_ABI_VERSION 1

/* Side of a patch and of a unit (2x2 patches) in pixels; bytes of one patch of a still. */
#define QWEN_VL_PATCH 14
#define QWEN_VL_UNIT 28
#define QWEN_VL_FEATURES (3 * QWEN_VL_PATCH * QWEN_VL_PATCH)

/* Longest side of a frame in pixels, and longest side over shortest. */
#define QWEN_VL_MAX_SIDE 65535
#define QWEN_VL_MAX_ASPECT 200

typedef enum qwen_vl_status {
  QWEN_VL_OK = 0,
  QWEN_VL_NULL_POINTER = 1,
  QWEN_VL_BAD_ENCODING = 2,
  QWEN_VL_BAD_SIZE = 3,
  QWEN_VL_BAD_STEP = 4,
  QWEN_VL_SHORT_BUFFER = 5,
  QWEN_VL_BAD_PLANES = 6,
  QWEN_VL_OVERLAP = 7,
  QWEN_VL_BAD_OUTPUT = 8,
  QWEN_VL_BAD_THREADS = 9,
  QWEN_VL_BAD_ISA = 10,
  QWEN_VL_NO_MEMORY = 11,
  QWEN_VL_BAD_RESAMPLER = 12,
  QWEN_VL_CUDA_ERROR = 13
} qwen_vl_status;

/* ROS names. yuyv is Y U Y V, uyvy is U Y V Y; nv12 has a second plane U V, nv21 one of V U. */
typedef enum qwen_vl_encoding {
  QWEN_VL_RGB8 = 0,
  QWEN_VL_BGR8 = 1,
  QWEN_VL_RGBA8 = 2,
  QWEN_VL_BGRA8 = 3,
  QWEN_VL_MONO8 = 4,
  QWEN_VL_NV12 = 5,
  QWEN_VL_NV21 = 6,
  QWEN_VL_YUYV = 7,
  QWEN_VL_UYVY = 8
} qwen_vl_encoding;

typedef struct qwen_vl_plane {
  const uint8_t* data;
  uint64_t size; /* bytes that may be read from data on */
  int64_t step;  /* bytes from one row to the next */
} qwen_vl_plane;

typedef struct qwen_vl_frame {
  int32_t encoding; /* qwen_vl_encoding */
  int32_t width;    /* pixels */
  int32_t height;
  int32_t planes; /* 2 for nv12 and nv21, else 1 */
  qwen_vl_plane plane[2];
} qwen_vl_frame;

/*
 * Whose bytes the resized picture has: bicubic, a = -0.5, antialiased, rounded to 8 bits after each
 * pass. Up to Pillow 12 the rows are resampled first, then the columns. Pillow 13 takes the columns
 * first where the height shrinks by more than twice what the width does, as with 640x480 -> 644x476.
 */
typedef enum qwen_vl_resampler {
  QWEN_VL_PILLOW_12 = 0,
  QWEN_VL_PILLOW_13 = 1
} qwen_vl_resampler;

/*
 * Where patches go. Patch p (unit order: unit row, unit column, row in unit, column in unit) has
 * channel c, row y, column x at data[p * patch_stride + c * channel_stride + y * 14 + x].
 * A still has strides 588 and 196. A pair of frames has 1176 and 392, its second frame starts
 * 196 bytes further.
 */
typedef struct qwen_vl_patches {
  uint8_t* data;
  uint64_t size;  /* bytes that may be written from data on */
  int32_t height; /* of the resized picture: multiples of 28 */
  int32_t width;
  int32_t resampler; /* qwen_vl_resampler */
  int32_t reserved;  /* 0 */
  int64_t patch_stride;
  int64_t channel_stride;
} qwen_vl_patches;

QWEN_VL_API int qwen_vl_abi_version(void);

/* ---- CPU ------------------------------------------------------------------------------------ */

typedef enum qwen_vl_isa {
  QWEN_VL_ISA_AUTO = -1,
  QWEN_VL_ISA_SCALAR = 0,
  QWEN_VL_ISA_AVX2 = 1,
  QWEN_VL_ISA_AVX512 = 2, /* AVX-512 F, BW and VNNI */
  QWEN_VL_ISA_NEON = 3    /* ARMv8.2 with the dot product, as on the Cortex-A78AE */
} qwen_vl_isa;

/* Threads, scratch memory and resampling tables; calls on one handle wait for each other. */
typedef struct qwen_vl_cpu qwen_vl_cpu;

/* Bit i is set when this build and this machine have qwen_vl_isa i. */
QWEN_VL_API int qwen_vl_cpu_isas(void);

/*
 * Opens a handle with `threads` threads (1 to 64). With cpu_count > 0, thread i is pinned to
 * cpus[i % cpu_count] and the caller only waits; otherwise the caller is one of the threads.
 */
QWEN_VL_API int qwen_vl_cpu_open(int32_t threads, const int32_t* cpus, int32_t cpu_count,
                                 int32_t isa, qwen_vl_cpu** handle, char* message,
                                 size_t message_size);

/* Resizes a frame and cuts it into patches, byte for byte the same on every instruction set. */
QWEN_VL_API int qwen_vl_cpu_patches(qwen_vl_cpu* handle, const qwen_vl_frame* frame,
                                    const qwen_vl_patches* patches, char* message,
                                    size_t message_size);

/* The instruction set in use (qwen_vl_isa), and bytes held beside the caller's own buffers. */
QWEN_VL_API int qwen_vl_cpu_isa(const qwen_vl_cpu* handle);
QWEN_VL_API uint64_t qwen_vl_cpu_scratch_bytes(const qwen_vl_cpu* handle);

QWEN_VL_API void qwen_vl_cpu_close(qwen_vl_cpu* handle);

/* ---- CUDA: libqwen_vl_cuda ------------------------------------------------------------------
 *
 * Everything runs on the current device, in the given stream (a cudaStream_t), and returns when it
 * is launched. Pointers to pixels, patches, weights and embeddings are device pointers; frames may
 * also lie in pinned host memory, which an Orin reads in place. Resampling tables of a new size are
 * made and copied at its first use: use a size once before it is captured in a graph.
 */

typedef enum qwen_vl_dtype {
  QWEN_VL_BF16 = 0,
  QWEN_VL_FP16 = 1,
  QWEN_VL_FP32 = 2
} qwen_vl_dtype;

/*
 * The patch embedding with the normalisation folded in: out = scale * (patch - 128) * weight^T + bias.
 * weight is [padded_width][padded_features] with zeros beyond width and features. A power of two as
 * the scale keeps small weights among the normal numbers of fp16.
 */
typedef struct qwen_vl_projection {
  const void* weight;
  const float* bias;  /* [padded_width], or null for none */
  int32_t dtype;      /* of weight: bf16 or fp16 */
  int32_t out_dtype;
  int32_t width;      /* multiple of 8 */
  int32_t features;   /* 588 for a still, 1176 for a pair of frames */
  float scale;        /* over 0 */
  int32_t reserved;   /* 0 */
} qwen_vl_projection;

/* What width and features are padded to. */
#define QWEN_VL_WIDTH_STEP 256
#define QWEN_VL_FEATURES_STEP 32

typedef struct qwen_vl_cuda qwen_vl_cuda;

QWEN_VL_API int qwen_vl_cuda_open(qwen_vl_cuda** handle, char* message, size_t message_size);

/* The same bytes as qwen_vl_cpu_patches. data and strides of the patches: multiples of 4. */
QWEN_VL_API int qwen_vl_cuda_patches(qwen_vl_cuda* handle, const qwen_vl_frame* frame,
                                     const qwen_vl_patches* patches, void* stream, char* message,
                                     size_t message_size);

/*
 * out[4 * i + j] = embedding of patch 4 * units[i] + j, or of patch 4 * i + j without units.
 * patches is [*][features], out [4 * unit_count][width]; addend, where not null, is float
 * [4 * unit_count][width] and is added: the older half of a pair of frames, projected when it came.
 */
QWEN_VL_API int qwen_vl_cuda_project(qwen_vl_cuda* handle, const qwen_vl_projection* projection,
                                     const uint8_t* patches, const int32_t* units,
                                     int64_t unit_count, const float* addend, void* out,
                                     void* stream, char* message, size_t message_size);

/*
 * Both in one launch: a still frame, resized to patches->height x patches->width, to embeddings.
 * Of patches only the sizes and the resampler count; nothing is written to patches->data.
 */
QWEN_VL_API int qwen_vl_cuda_embed(qwen_vl_cuda* handle, const qwen_vl_frame* frame,
                                   const qwen_vl_patches* patches,
                                   const qwen_vl_projection* projection, const int32_t* units,
                                   int64_t unit_count, void* out, void* stream, char* message,
                                   size_t message_size);

QWEN_VL_API void qwen_vl_cuda_close(qwen_vl_cuda* handle);

#ifdef __cplusplus
}
#endif
#endif  /* QWEN_VL_KERNELS_H_ */
