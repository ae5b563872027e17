// The decode step: one persistent kernel from token to token.
//
// One block a multiprocessor; five matrices a layer with a barrier of all blocks after each and
// after attention. A block's share of every matrix is fixed (qwen_vl_decode_range), its warps read
// their items ahead of need (decode_stream.cuh). Sums in float throughout, the residual stays in
// float between layers; rows of a result that several blocks share are kept in parts, which the
// next reader adds in a fixed order: the same input gives the same bits, whoever is beside it.
#ifndef QWEN_VL_DECODE_STEP_CUH_
#define QWEN_VL_DECODE_STEP_CUH_

#include "decode_attend.cuh"
#include "decode_barrier.cuh"
#include "decode_choose.cuh"
#include "decode_stage.cuh"
#include "decode_tables.cuh"

namespace qwen_vl {
namespace decode {

template <class T, int kForm, int kHeadForm>
struct Step {
  const Params& p;
  uint8_t* const shared;
  Tables& tables;
  Stream<kForm, kHeadForm> stream;
  Barrier barrier;
  Best best[2];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  int layer = 0;

  __device__ Step(const Params& params, uint8_t* memory, Tables& filled)
      : p(params), shared(memory), tables(filled),
        stream(params, filled.layer, filled.range, memory), barrier(params.arrived, params.stuck) {}

  __device__ Staged staged() const {
    return Staged{shared + p.offset_act, reinterpret_cast<float*>(shared + p.offset_sums),
                  p.act_stride, p.m.group};
  }

  // Multiplies this block's share of a matrix with what is staged and finishes every output.
  template <int kOp>
  __device__ void multiply() {
    constexpr int kOwn = kOp == kHead ? kHeadForm : kForm;
    const Share share(tables.range[kOp]);
    float4* slots = reinterpret_cast<float4*>(shared + p.offset_slots);
    const int columns = (p.l.count + 1) / 2, slot = 8 * columns, in_slot = g * columns + t;
    const bool live = g < p.l.count, kept = t < columns;
    const uint8_t* act = shared + p.offset_act + g * p.act_stride + t * 16;
    const float* sums = reinterpret_cast<const float*>(shared + p.offset_sums);
    int at = share.item(warp);
    const int end = share.item(warp + 1);
    const int first_tile = at / share.per_tile;
    for (int tile = first_tile; at < end; ++tile) {
      const int tile_begin = tile * share.per_tile, stop = min(end, tile_begin + share.per_tile);
      const bool whole = at == tile_begin && stop == tile_begin + share.per_tile;
      float acc[4], chains[2][4] = {};
      for (; at < stop; ++at) {
        const int item = at - tile_begin;
        const uint8_t* from = stream.acquire();
        const uint32_t* scales = reinterpret_cast<const uint32_t*>(from + kItem);
        const float* group_sums =
            grouped(kOwn) ? sums + item * form_inputs(kOwn) / p.m.group * kRows : sums;
        multiply_item<T, kOwn>(chains, from + lane * 16, scales, act + item * form_inputs(kOwn) * 2,
                               live, group_sums, p.m.group);
        if (at + 1 == stop) {
          float low = 1.f, high = 1.f;
          if constexpr (kOwn == kInt8) {
            low = __uint_as_float(scales[g]);
            high = __uint_as_float(scales[g + 8]);
          }
#pragma unroll
          for (int j = 0; j < 4; ++j)
            acc[j] = (chains[0][j] + chains[1][j]) * (j < 2 ? low : high);
        }
        stream.release();
      }
      if (whole) {
        finish<kOp>(tile, acc, share);
      } else if (kept) {
        slots[(2 * warp + (tile != first_tile)) * slot + in_slot] =
            make_float4(acc[0], acc[1], acc[2], acc[3]);
      }
    }
    __syncthreads();
    // Tiles that several warps shared.
    if (share.count > 0) {
      const int last = (share.begin + share.count - 1) / share.per_tile;
      for (int tile = share.begin / share.per_tile + warp; tile <= last; tile += kWarps) {
        const int tile_begin = tile * share.per_tile, tile_end = tile_begin + share.per_tile;
        float acc[4] = {};
        bool done = false;
        for (int w = 0; w < kWarps; ++w) {
          const int begin = share.item(w), stop = share.item(w + 1);
          if (begin < stop && begin < tile_end && stop > tile_begin) {
            done |= begin <= tile_begin && stop >= tile_end;
            if (kept && !done) {
              const float4 v =
                  slots[(2 * w + (tile != begin / share.per_tile)) * slot + in_slot];
              acc[0] += v.x; acc[1] += v.y; acc[2] += v.z; acc[3] += v.w;
            }
          }
        }
        if (!done) finish<kOp>(tile, acc, share);
      }
    }
  }

  // Outputs g (acc[0], acc[1]: sequences 2t, 2t + 1) and g + 8 (acc[2], acc[3]) of a tile.
  template <int kOp>
  __device__ void finish(int tile, const float (&acc)[4], const Share& share) {
    const int row = tile_row(p.m, kOp, tile) + g;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int s = 2 * t + j;
      if (s >= p.l.count) continue;
      const float low = acc[j], high = acc[2 + j];
      if constexpr (kOp == kQkv) {
        finish_qkv(tile, row, s, low, high, share);
      } else if constexpr (kOp == kGateUp) {
        static_cast<T*>(p.act)[s * p.m.mlp + row] = T(low / (1.f + __expf(-low)) * high);
      } else if constexpr (kOp == kHead) {
        take_logit(j, s, low, row);
        take_logit(j, s, high, row + 8);
      } else {
        const int part = tile == share.begin / share.per_tile ? share.first : share.base;
        float* out = (kOp == kOut ? p.part_out : p.part_down) +
                     static_cast<int64_t>(part * kRows + s) * p.m.width + row;
        out[0] = low;
        out[8] = high;
      }
    }
  }

  __device__ void finish_qkv(int tile, int row, int s, float low, float high, const Share& share) {
    const int dim = p.m.head_dim, head = row / dim, d = row % dim, half = dim / 2;
    const int bias = (tile - share.begin / share.per_tile) * kTile + g;
    low += tables.bias[bias];
    high += tables.bias[bias + 8];
    const qwen_vl_decode_row& r = tables.row[s];
    if (head < p.m.heads + p.m.kv_heads) {
      const float2 turn = tables.rope[s][d];
      const float turned = low * turn.x - high * turn.y;
      high = high * turn.x + low * turn.y;
      low = turned;
    }
    T* to;
    if (head < p.m.heads) {
      to = static_cast<T*>(p.q) + (s * p.m.heads + head) * dim + d;
    } else {
      if (r.length >= r.capacity) return;
      const int64_t plane = layer * 2 * p.m.kv_heads + head - p.m.heads;
      to = static_cast<T*>(r.cache) + (plane * r.capacity + r.length) * dim + d;
    }
    to[0] = T(low);
    to[half] = T(high);
  }

  __device__ void take_logit(int j, int s, float v, int token) {
    const qwen_vl_decode_row& r = tables.row[s];
    Best& b = best[j];
    if (!isfinite(v)) b.broken = 1;
    const uint8_t* mask = p.l.mask[s];
    if (mask && !mask[token]) v = -INFINITY;
    if (p.l.logits) p.l.logits[static_cast<int64_t>(s) * p.m.vocab + token] = v;
    consider(b, v, token);
    if (r.temperature > 0.f && v != -INFINITY)
      consider_noisy(b, v, v / r.temperature + gumbel(r.seed, r.length, token), token);
  }

  // Parts of one sequence's attention, all heads of a group each.
  __device__ void attention() {
    const int splits = part_count(), total = p.l.count * p.m.kv_heads * splits;
    const int dim = p.m.head_dim, group = p.m.heads / p.m.kv_heads;
    for (int unit = blockIdx.x; unit < total; unit += gridDim.x) {
      const int q = unit % splits, kv = unit / splits % p.m.kv_heads;
      const int s = unit / splits / p.m.kv_heads;
      int begin, end;
      const T* keys = part(s, kv, q, splits, &begin, &end);
      const int64_t head = s * p.m.heads + kv * group;
      attend<T>(p, static_cast<const T*>(p.q) + head * dim, group, keys, values(s), begin, end,
                p.attention + (head * kMaxSplits + q) * dim,
                p.attention_scale + head * kMaxSplits + q, shared + p.offset_act, tables.edge);
    }
  }
  __device__ void prefetch_attention() {
    const int splits = part_count(), unit = blockIdx.x;
    if (unit < p.l.count * p.m.kv_heads * splits) {
      int begin, end;
      const int s = unit / splits / p.m.kv_heads;
      const T* keys = part(s, unit / splits % p.m.kv_heads, unit % splits, splits, &begin, &end);
      prefetch_cache<T>(p, keys, values(s), begin, end);
    }
  }
  __device__ int part_count() const {
    int longest = 1;
    for (int s = 0; s < p.l.count; ++s) longest = max(longest, tables.row[s].length + 1);
    return split_count(longest, p.l.count);
  }
  __device__ int64_t values(int s) const {
    return static_cast<int64_t>(p.m.kv_heads) * tables.row[s].capacity * p.m.head_dim;
  }
  __device__ const T* part(int s, int kv, int q, int splits, int* begin, int* end) const {
    const qwen_vl_decode_row& r = tables.row[s];
    const int length = static_cast<int>(min(static_cast<int64_t>(r.length) + 1, r.capacity));
    const int size = ((length + splits - 1) / splits + 15) / 16 * 16;
    *begin = min(length, q * size);
    *end = min(length, *begin + size);
    const int64_t plane = layer * 2 * p.m.kv_heads + kv;
    return static_cast<const T*>(r.cache) + plane * r.capacity * p.m.head_dim;
  }

  // Biases of this block's share of qkv.
  __device__ void load_bias() {
    const Share share(tables.range[kQkv]);
    const int first = share.begin / share.per_tile, n = share.count / share.per_tile * kTile;
    const T* bias = static_cast<const T*>(tables.layer[layer].bias);
    for (int i = threadIdx.x; i < n; i += kThreads) {
      const int half = i % kTile / 8;
      tables.bias[i] = static_cast<float>(
          bias[tile_row(p.m, kQkv, first + i / kTile) + i % 8 + half * (p.m.head_dim / 2)]);
    }
  }

  // Vectors of the next reads that no ring holds, into the L2 cache by one block.
  __device__ void prefetch_vectors(int of) {
    if (static_cast<int>(blockIdx.x) != of % static_cast<int>(gridDim.x)) return;
    const qwen_vl_decode_layer& l = tables.layer[of];
    const int lines = p.m.width * 2 / 128;
    const int more = (p.m.heads + 2 * p.m.kv_heads) * p.m.head_dim * 2 / 128;
    for (int i = threadIdx.x; i < 2 * lines + more; i += kThreads) {
      const void* from = i < lines ? l.norm1 : i < 2 * lines ? l.norm2 : l.bias;
      const int line = i < lines ? i : i < 2 * lines ? i - lines : i - 2 * lines;
      prefetch_l2(static_cast<const uint8_t*>(from) + line * 128);
    }
  }

  __device__ void begin_step() {
    const int half = p.m.head_dim / 2;
    for (int i = threadIdx.x; i < p.l.count * half; i += kThreads) {
      const qwen_vl_decode_row& r = tables.row[i / half];
      float2 turn;
      sincosf(static_cast<float>(r.length + r.offset) * p.m.frequencies[i % half], &turn.y,
              &turn.x);
      tables.rope[i / half][i % half] = turn;
    }
  }

  __device__ void run_layer(bool first) {
    const qwen_vl_decode_layer& l = tables.layer[layer];
    prefetch_vectors(layer + 1 < p.m.layers ? layer + 1 : 0);
    load_bias();
    stage_norm_of<T, kForm>(p, staged(), p.x[0], p.part_down, p.m.parts_down,
                         first ? tables.token : nullptr, p.x[1], l.norm1, tables.squares);
    multiply<kQkv>();
    barrier.arrive();
    prefetch_attention();
    barrier.wait();
    attention();
    barrier.arrive();
    barrier.wait();
    stage_attention<T, kForm>(p, staged(), part_count());
    multiply<kOut>();
    barrier.arrive();
    barrier.wait();
    stage_norm_of<T, kForm>(p, staged(), p.x[1], p.part_out, p.m.parts_out, nullptr, p.x[0], l.norm2,
                         tables.squares);
    multiply<kGateUp>();
    barrier.arrive();
    barrier.wait();
    stage_copy<T, kForm>(p, staged());
    multiply<kDown>();
    barrier.arrive();
    barrier.wait();
  }

  // Logits, each block's best of them, and after a barrier the best of all: every block knows the
  // next token, the first one writes it down.
  __device__ void run_head(bool last) {
    stage_norm_of<T, kHeadForm>(p, staged(), p.x[0], p.part_down, p.m.parts_down, nullptr, nullptr,
                             p.m.norm, tables.squares);
    best[0] = best[1] = no_logits();
    multiply<kHead>();
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int d = 4; d < 32; d *= 2) best[j] = merged(best[j], shuffled(best[j], d));
    }
    __syncthreads();
    Best* of_warps = reinterpret_cast<Best*>(shared + p.offset_act);
    if (g == 0) {
      of_warps[warp * kRows + 2 * t] = best[0];
      of_warps[warp * kRows + 2 * t + 1] = best[1];
    }
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < p.l.count) {
      Best b = of_warps[threadIdx.x];
      for (int w = 1; w < kWarps; ++w) b = merged(b, of_warps[w * kRows + threadIdx.x]);
      p.best[blockIdx.x * kRows + threadIdx.x] = b;
    }
    barrier.arrive();
    if (last && blockIdx.x != 0) return;
    barrier.wait();
    if (warp < p.l.count) choose(warp);
    __syncthreads();
  }

  __device__ void choose(int s) {
    Best b = no_logits();
    for (int i = lane; i < static_cast<int>(gridDim.x); i += 32) {
      const float4* from = reinterpret_cast<const float4*>(p.best + i * kRows + s);
      union { Best best; float4 raw[2]; } o;
      o.raw[0] = __ldcg(from);
      o.raw[1] = __ldcg(from + 1);
      b = merged(b, o.best);
    }
    for (int d = 16; d > 0; d /= 2) b = merged(b, shuffled(b, d));
    qwen_vl_decode_row& r = tables.row[s];
    const bool draws = r.temperature > 0.f;
    const bool filtered = draws && (r.top_k > 0 || r.top_p < 1.f);
    const int token = draws ? b.drawn_token : b.token;
    if (lane != 0) return;
    if (blockIdx.x == 0 && !filtered) {
      const int stuck = *reinterpret_cast<volatile int*>(p.stuck);
      const float logit = draws ? b.drawn : b.top;
      const bool sound = !b.broken && static_cast<unsigned>(tables.token[s]) <
                                          static_cast<unsigned>(p.m.vocab);
      publish(p.l.results + p.l.slot[s] * QWEN_VL_DECODE_RESULTS +
                  r.serial % QWEN_VL_DECODE_RESULTS,
              token, __expf(logit - b.top) / b.sum, b.top - b.second,
              (sound ? QWEN_VL_RESULT_FINITE : 0) | (stuck ? QWEN_VL_RESULT_STUCK : 0), r.serial);
    }
    tables.token[s] = token;
    r.token = token;
    r.length += 1;
    r.serial += filtered ? 0 : 1;
    if (blockIdx.x == 0) p.state[p.l.slot[s]] = r;
  }
};

template <class T, int kForm, int kHeadForm>
__global__ void __launch_bounds__(kThreads, 1) decode_step(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) uint8_t shared[];
  Tables& tables = *reinterpret_cast<Tables*>(shared + p.offset_tables);
  for (int i = threadIdx.x; i < kOps; i += kThreads)
    tables.range[i] = p.m.ranges[i * p.m.blocks + blockIdx.x];
  const int words = p.m.layers * static_cast<int>(sizeof(qwen_vl_decode_layer) / 8);
  for (int i = threadIdx.x; i < words; i += kThreads)
    reinterpret_cast<uint64_t*>(tables.layer)[i] =
        reinterpret_cast<const uint64_t*>(p.m.layer)[i];
  for (int s = threadIdx.x; s < p.l.count; s += kThreads) {
    tables.row[s] = p.state[p.l.slot[s]];
    tables.token[s] = tables.row[s].token;
  }
  __syncthreads();
  Step<T, kForm, kHeadForm> step(p, shared, tables);
  for (int i = 0; i < p.l.steps; ++i) {
    step.begin_step();
    for (step.layer = 0; step.layer < p.m.layers; ++step.layer) step.run_layer(step.layer == 0);
    step.run_head(i + 1 == p.l.steps);
  }
  wait_for(0);
}

}  // namespace decode
}  // namespace qwen_vl
#endif  // QWEN_VL_DECODE_STEP_CUH_
