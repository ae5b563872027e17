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
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  int layer = 0;

  __device__ Step(const Params& params, uint8_t* memory, Tables& filled)
      : p(params), shared(memory), tables(filled),
        stream(params, filled, memory), barrier(params, filled) {}

  __device__ Staged staged() const {
    return Staged{shared + p.offset_act, reinterpret_cast<float*>(shared + p.offset_sums),
                  p.act_stride, p.m.group,
                  p.m.group == 128 ? 4 : p.m.group == 64 ? 3 : 2};
  }

  // Multiplies this block's share of a matrix with what is staged and finishes every output.
  //
  // A tile that several warps share belongs to the first of them, which keeps its sums and adds
  // those that the others leave in shared memory, in their order.
  template <int kOwn, bool kLayers>
  __device__ void multiply(int op, Best* best) {
    WarpShare share = tables.share[op][min(warp, kWarps - 1)];
    if (warp == kWarps) share.begin = share.end;
    const OpInfo& info = tables.op[op];
    const int block_begin = info.begin, block_end = info.end, per_tile = info.per_tile;
    const int columns = (p.l.count + 1) / 2;
    float4* const slot =
        reinterpret_cast<float4*>(shared + p.offset_slots) + (warp * 8 + g) * columns + t;
    const bool live = g < p.l.count, kept = t < columns;
    const uint8_t* const act = shared + p.offset_act + g * p.act_stride + t * 16;
    const float* const sums = reinterpret_cast<const float*>(shared + p.offset_sums);
    const int groups = grouped(kOwn) ? form_inputs(kOwn) / p.m.group * kRows : 0;
    int at = share.begin, tile = share.tile, place = share.at;
    bool own = false;
    float acc[4] = {};
    if (at == share.end && kept && warp < kWarps) *slot = make_float4(0.f, 0.f, 0.f, 0.f);
    while (at < share.end) {
      const int tile_end = at - place + per_tile, stop = min(share.end, tile_end);
      const bool begins = place == 0 || at == block_begin;
      const bool ends = stop == tile_end || stop == block_end;
      float chains[2][4] = {}, low = 1.f, high = 1.f;
      const uint8_t* x = act + place * (form_inputs(kOwn) * 2);
      const float* group_sums = sums + place * groups;
#pragma unroll 1
      for (; at < stop; ++at) {
        const uint8_t* from = stream.acquire();
        const uint32_t* scales = reinterpret_cast<const uint32_t*>(from + kItem);
        multiply_item<T, kOwn>(chains, from + lane * 16, scales, x, live, group_sums, p.m.group);
        if constexpr (kOwn == kInt8) {
          low = __uint_as_float(scales[g]);
          high = __uint_as_float(scales[g + 8]);
        }
        x += form_inputs(kOwn) * 2;
        group_sums += groups;
        stream.release();
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) acc[j] = (chains[0][j] + chains[1][j]) * (j < 2 ? low : high);
      own = begins && !ends;
      if (own) break;
      if (begins) {
        finish<kLayers>(op, tile, acc, info, best);
      } else if (kept) {
        *slot = make_float4(acc[0], acc[1], acc[2], acc[3]);
      }
      ++tile;
      place = 0;
    }
    __syncthreads();
    if (own) {
      if (kept) {
#pragma unroll 4
        for (int w = 1; w <= share.others; ++w) {
          const float4 v = slot[w * 8 * columns];
          acc[0] += v.x; acc[1] += v.y; acc[2] += v.z; acc[3] += v.w;
        }
      }
      finish<kLayers>(op, tile, acc, info, best);
    }
  }

  // Outputs g (acc[0], acc[1]: sequences 2t, 2t + 1) and g + 8 (acc[2], acc[3]) of a tile.
  template <bool kLayers>
  __device__ void finish(int op, int tile, const float (&acc)[4], const OpInfo& info, Best* best) {
    const int row = tile_row(p.m, op, tile) + g;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int s = 2 * t + j;
      if (s >= p.l.count) continue;
      const float low = acc[j], high = acc[2 + j];
      if constexpr (!kLayers) {
        take_logit(best[j], s, low, row);
        take_logit(best[j], s, high, row + 8);
      } else if (op == kQkv) {
        finish_qkv(tile, row, s, low, high, info);
      } else if (op == kGateUp) {
        static_cast<T*>(p.act)[s * p.m.mlp + row] = T(low / (1.f + __expf(-low)) * high);
      } else {
        const int part = tile == info.first_tile ? info.part_first : info.part_base;
        float* out = (op == kOut ? p.part_out : p.part_down) +
                     static_cast<int64_t>(part * kRows + s) * p.m.width + row;
        out[0] = low;
        out[8] = high;
      }
    }
  }

  __device__ void finish_qkv(int tile, int row, int s, float low, float high, const OpInfo& info) {
    const int dim = p.m.head_dim, shift = dim == 128 ? 7 : 6, half = dim / 2;
    const int head = row >> shift, d = row & (dim - 1);
    const int bias = (tile - info.first_tile) * kTile + g;
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

  __device__ void take_logit(Best& b, int s, float v, int token) {
    const qwen_vl_decode_row& r = tables.row[s];
    if (!isfinite(v)) b.broken = 1;
    const uint8_t* mask = p.l.mask[s];
    if (mask && !mask[token]) v = -INFINITY;
    if (p.l.logits) p.l.logits[static_cast<int64_t>(s) * p.m.vocab + token] = v;
    consider(b, v, token);
    if (r.temperature > 0.f && v != -INFINITY)
      consider_noisy(b, v, v / r.temperature + gumbel(r.seed, r.length, token), token);
  }

  __device__ Unit find_unit(int index) const {
    for (int s = 0; s < p.l.count; ++s) {
      const int splits = tables.splits[s], units = p.m.kv_heads * splits;
      if (index >= units) {
        index -= units;
        continue;
      }
      const int kv = index / splits, part = index - kv * splits;
      const qwen_vl_decode_row& r = tables.row[s];
      const int length = static_cast<int>(min(static_cast<int64_t>(r.length) + 1, r.capacity));
      const int size = ((length + splits - 1) / splits + 15) / 16 * 16;
      const int begin = min(length, part * size);
      return Unit{s, kv, part, begin, min(length, begin + size)};
    }
    return Unit{-1, 0, 0, 0, 0};
  }
  __device__ const T* keys_of(const Unit& u) const {
    const qwen_vl_decode_row& r = tables.row[u.row];
    const int64_t plane = layer * 2 * p.m.kv_heads + u.kv;
    return static_cast<const T*>(r.cache) + plane * r.capacity * p.m.head_dim;
  }
  __device__ int64_t values_of(const Unit& u) const {
    return static_cast<int64_t>(p.m.kv_heads) * tables.row[u.row].capacity * p.m.head_dim;
  }
  __device__ void attention() {
    const int group = p.m.heads / p.m.kv_heads, dim = p.m.head_dim;
    Unit u = tables.unit;
    for (int index = blockIdx.x; u.row >= 0;) {
      const int64_t head = u.row * p.m.heads + u.kv * group;
      attend<T>(p, static_cast<const T*>(p.q) + head * dim, group, keys_of(u), values_of(u),
                u.begin, u.end, p.attention + (head * kMaxSplits + u.part) * dim,
                p.attention_scale + head * kMaxSplits + u.part, shared + p.offset_act,
                tables.edge);
      index += gridDim.x;
      u.row = -1;
      if (index < tables.unit_count) u = find_unit(index);
    }
  }

  // Biases of this block's share of qkv of a layer.
  __device__ void load_bias(int of) {
    const OpInfo& info = tables.op[kQkv];
    const T* bias = static_cast<const T*>(tables.layer[of].bias);
    int tile = info.first_tile;
    for (int at = info.begin; at < info.end; at += info.per_tile, ++tile) {
      const int i = threadIdx.x;
      if (i < kTile)
        tables.bias[(tile - info.first_tile) * kTile + i] = static_cast<float>(
            bias[tile_row(p.m, kQkv, tile) + i % 8 + i / 8 * (p.m.head_dim / 2)]);
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
    const int half = p.m.head_dim / 2, shift = p.m.head_dim == 128 ? 6 : 5;
    for (int i = threadIdx.x; i < p.l.count << shift; i += kThreads) {
      const qwen_vl_decode_row& r = tables.row[i >> shift];
      float2 turn;
      sincosf(static_cast<float>(r.length + r.offset) * p.m.frequencies[i & (half - 1)], &turn.y,
              &turn.x);
      tables.rope[i >> shift][i & (half - 1)] = turn;
    }
    if (static_cast<int>(threadIdx.x) < p.l.count)
      tables.splits[threadIdx.x] = split_count(tables.row[threadIdx.x].length + 1);
    layer = 0;
    load_bias(0);
    __syncthreads();
    if (threadIdx.x == 0) {
      int count = 0;
      for (int s = 0; s < p.l.count; ++s) count += tables.splits[s] * p.m.kv_heads;
      tables.unit_count = count;
      tables.unit = find_unit(blockIdx.x);
    }
  }

  // One copy of the code of products and norms for all matrices: instruction caches are small.
  __device__ void run_layer() {
    const qwen_vl_decode_layer& l = tables.layer[layer];
    const int next = layer + 1 < p.m.layers ? layer + 1 : 0;
#pragma unroll 1
    for (int op = 0; op < kHead; ++op) {
      if (op == kQkv || op == kGateUp) {
        const bool second = op == kGateUp;
        stage_norm<T, kForm>(p, staged(), p.x[second], second ? p.part_out : p.part_down,
                             second ? p.m.parts_out : p.m.parts_down,
                             !second && layer == 0 ? tables.token : nullptr, p.x[!second],
                             second ? l.norm2 : l.norm1, tables.squares);
      } else if (op == kOut) {
        attention();
        barrier.arrive();
        barrier.wait();
        stage_attention<T, kForm>(p, staged(), tables.splits);
      } else {
        stage_copy<T, kForm>(p, staged());
      }
      multiply<kForm, true>(op, nullptr);
      barrier.arrive();
      if (op == kQkv) {
        prefetch_vectors(next);
        const Unit u = tables.unit;
        if (u.row >= 0) prefetch_cache<T>(p, keys_of(u), values_of(u), u.begin, u.end);
      } else if (op == kGateUp) {
        load_bias(next);
      }
      barrier.wait();
    }
  }

  // Logits, each block's best of them, and after a barrier the best of all: every block knows the
  // next token, the first one writes it down.
  __device__ void run_head(bool last) {
    stage_norm<T, kHeadForm>(p, staged(), p.x[0], p.part_down, p.m.parts_down, nullptr, nullptr,
                             p.m.norm, tables.squares);
    Best best[2] = {no_logits(), no_logits()};
    multiply<kHeadForm, false>(kHead, best);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int d = 4; d < 32; d *= 2) best[j] = merged(best[j], shuffled(best[j], d));
    }
    __syncthreads();
    Best* of_warps = reinterpret_cast<Best*>(shared + p.offset_act);
    if (g == 0 && warp < kWarps) {
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
  QWEN_VL_DYNAMIC_SHARED(shared);
  Tables& tables = *reinterpret_cast<Tables*>(shared + p.offset_tables);
  fill_tables(p, tables);
  __syncthreads();
  Step<T, kForm, kHeadForm> step(p, shared, tables);
  for (int i = 0; i < p.l.steps; ++i) {
    step.begin_step();
    for (; step.layer < p.m.layers; ++step.layer) step.run_layer();
    step.run_head(i + 1 == p.l.steps);
  }
  wait_for(0);
}

}  // namespace decode
}  // namespace qwen_vl
#endif  // QWEN_VL_DECODE_STEP_CUH_
