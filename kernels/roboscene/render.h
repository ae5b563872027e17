// RoboScene: one scene's pixels, written once for the CPU and for CUDA.
//
// A pinhole camera looks over a textured floor; objects are ray-cast primitives with Lambert
// shading, cast shadows on the floor and haze. render_cpu.cc loops over these functions,
// render_cuda.cu calls them one thread a pixel: the same expressions in the same order, so both
// give the same picture up to the last rounding of sin-free float arithmetic.
//
// Coordinates: x right, y up, z forward, metres; the camera stands at (0, h, 0), pitched down.
// The flat float layouts below are the ABI; qwen_vl_ros/roboscene/layout.py names the same slots.
#ifndef QWEN_VL_ROBOSCENE_RENDER_H_
#define QWEN_VL_ROBOSCENE_RENDER_H_

#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define RS_HD __host__ __device__ inline
#else
#define RS_HD inline
#endif

namespace roboscene {

constexpr int kWidth = 448, kHeight = 336;
constexpr int kEnvFloats = 40, kObjectFloats = 24, kMaxObjects = 12;
constexpr int kTexSize = 128;               // texture bank: uint8 [n, 128, 128], grey
constexpr int kGlyphW = 20, kGlyphH = 28;   // digits: uint8 [10, 28, 20], coverage

enum Env {
  kCamHeight, kPitchCos, kPitchSin, kFocal, kCx, kCy, kLightX, kLightY, kLightZ, kAmbient,
  kHaze, kHazeR, kHazeG, kHazeB, kWallZ, kWallX, kCeiling, kFloorTex, kFloorScale, kFloorR,
  kFloorG, kFloorB, kFloorContrast, kWallTex, kWallScale, kWallR, kWallG, kWallB, kWallContrast,
  kBlur, kNoise, kQuality, kExposure, kGainR, kGainG, kGainB, kSeed, kCount, kNoiseSeed
};
enum Object {
  kShape, kX, kZ, kSx, kTall, kSz, kYawCos, kYawSin, kR, kG, kB, kGrain, kDigits, kD0, kD1, kD2,
  kDecalU, kDecalV, kDecalH, kU0, kV0, kU1, kV1
};
enum Shape { kBox, kCylinder, kCone, kBall, kPallet, kBarrel };

struct Vec { float x, y, z; };
RS_HD float dot(Vec a, Vec b) { return a.x * b.x + a.y * b.y + a.z * b.z; }

RS_HD uint32_t hash(uint32_t x) {  // lowbias32, C. Wellons, public domain constants
  x ^= x >> 16; x *= 0x7feb352dU; x ^= x >> 15; x *= 0x846ca68bU; x ^= x >> 16;
  return x;
}

// Value noise in [0, 1]: bilinear over hashed lattice points, two octaves.
RS_HD float lattice(int ix, int iy, uint32_t seed) {
  return (hash(static_cast<uint32_t>(ix) * 73856093U ^ static_cast<uint32_t>(iy) * 19349663U ^
               seed) & 0xffff) * (1.0f / 65535.0f);
}
RS_HD float value_noise(float x, float y, uint32_t seed) {
  float sum = 0.0f, weight = 0.65f;
  for (int octave = 0; octave < 2; ++octave) {
    float fx = floorf(x), fy = floorf(y);
    int ix = static_cast<int>(fx), iy = static_cast<int>(fy);
    float ax = x - fx, ay = y - fy;
    float top = lattice(ix, iy, seed) * (1 - ax) + lattice(ix + 1, iy, seed) * ax;
    float low = lattice(ix, iy + 1, seed) * (1 - ax) + lattice(ix + 1, iy + 1, seed) * ax;
    sum += weight * (top * (1 - ay) + low * ay);
    weight = 0.35f; x *= 2.7f; y *= 2.7f; seed = hash(seed + 1);
  }
  return sum;
}

RS_HD float sample_texture(const uint8_t* bank, int index, float x, float y) {
  // Mirrored repeat keeps photographs seamless.
  x = fabsf(x - 2.0f * floorf(x * 0.5f + 0.5f)); y = fabsf(y - 2.0f * floorf(y * 0.5f + 0.5f));
  float fx = x * (kTexSize - 1), fy = y * (kTexSize - 1);
  int ix = static_cast<int>(fx), iy = static_cast<int>(fy);
  if (ix > kTexSize - 2) ix = kTexSize - 2;
  if (iy > kTexSize - 2) iy = kTexSize - 2;
  float ax = fx - ix, ay = fy - iy;
  const uint8_t* p = bank + (index * kTexSize + iy) * kTexSize + ix;
  float top = p[0] * (1 - ax) + p[1] * ax;
  float low = p[kTexSize] * (1 - ax) + p[kTexSize + 1] * ax;
  return (top * (1 - ay) + low * ay) * (1.0f / 255.0f);
}

// Grey level around 0.5 of a surface at (x, y) in texture units; negative index = noise.
RS_HD float surface(const uint8_t* bank, float index, float x, float y, uint32_t seed) {
  return index < 0 ? value_noise(x * 9.0f, y * 9.0f, seed)
                   : sample_texture(bank, static_cast<int>(index), x, y);
}

struct Hit { float t; Vec n; float local_x, local_y; };

// Intersects the ray o + t*d with an object; keeps the nearer hit. Returns true when it is nearer.
RS_HD bool intersect(const float* ob, Vec o, Vec d, Hit* hit) {
  int shape = static_cast<int>(ob[kShape]);
  float ox = o.x - ob[kX], oz = o.z - ob[kZ];
  float c = ob[kYawCos], s = ob[kYawSin];
  Vec p{ox * c + oz * s, o.y, oz * c - ox * s};
  Vec v{d.x * c + d.z * s, d.y, d.z * c - d.x * s};
  float tall = ob[kTall], best = hit->t;
  Vec n{0, 1, 0};
  bool found = false;
  if (shape == kBox || shape == kPallet) {
    float lo[3] = {-ob[kSx], 0.0f, -ob[kSz]}, hi[3] = {ob[kSx], tall, ob[kSz]};
    float po[3] = {p.x, p.y, p.z}, vo[3] = {v.x, v.y, v.z};
    float near = -1e9f, far = 1e9f;
    int axis = 0;
    for (int i = 0; i < 3; ++i) {
      float inv = 1.0f / (fabsf(vo[i]) < 1e-9f ? 1e-9f : vo[i]);
      float a = (lo[i] - po[i]) * inv, b = (hi[i] - po[i]) * inv;
      if (a > b) { float swap = a; a = b; b = swap; }
      if (a > near) { near = a; axis = i; }
      if (b < far) far = b;
    }
    if (near < far && near > 1e-3f && near < best) {
      best = near; found = true;
      n = Vec{axis == 0 ? (vo[0] > 0 ? -1.0f : 1.0f) : 0.0f,
              axis == 1 ? (vo[1] > 0 ? -1.0f : 1.0f) : 0.0f,
              axis == 2 ? (vo[2] > 0 ? -1.0f : 1.0f) : 0.0f};
    }
  } else {
    // x^2 + z^2 = quadratic in y:  k0 + k1*y + k2*y^2
    float r2 = ob[kSx] * ob[kSx], k0, k1, k2;
    if (shape == kCone) { k0 = r2; k1 = -2 * r2 / tall; k2 = r2 / (tall * tall); }
    else if (shape == kBall) { k0 = 0; k1 = 2 * ob[kSx]; k2 = -1; }
    else {
      float bulge = shape == kBarrel ? 0.45f * r2 : 0.0f;
      k0 = r2 - bulge; k1 = 4 * bulge / tall; k2 = -4 * bulge / (tall * tall);
    }
    float qa = v.x * v.x + v.z * v.z - k2 * v.y * v.y;
    float qb = p.x * v.x + p.z * v.z - 0.5f * k1 * v.y - k2 * p.y * v.y;
    float qc = p.x * p.x + p.z * p.z - k0 - k1 * p.y - k2 * p.y * p.y;
    float disc = qb * qb - qa * qc;
    if (disc > 0 && fabsf(qa) > 1e-12f) {
      float root = sqrtf(disc);
      for (int side = 0; side < 2; ++side) {
        float t = (-qb + (side ? root : -root)) / qa;
        float y = p.y + t * v.y;
        if (t > 1e-3f && t < best && y >= 0 && y <= tall) {
          best = t; found = true;
          Vec g{p.x + t * v.x, -0.5f * k1 - k2 * y, p.z + t * v.z};
          float len = sqrtf(dot(g, g));
          n = Vec{g.x / len, g.y / len, g.z / len};
        }
      }
    }
    float cap = tall - p.y;  // the flat top of cylinders and barrels
    if ((shape == kCylinder || shape == kBarrel) && v.y < -1e-9f) {
      float t = cap / v.y, x = p.x + t * v.x, z = p.z + t * v.z;
      if (t > 1e-3f && t < best && x * x + z * z <= k0 + k1 * tall + k2 * tall * tall) {
        best = t; found = true; n = Vec{0, 1, 0};
      }
    }
  }
  if (!found) return false;
  hit->t = best;
  hit->local_x = p.x + best * v.x; hit->local_y = p.y + best * v.y;
  hit->n = Vec{n.x * c - n.z * s, n.y, n.z * c + n.x * s};
  return true;
}

RS_HD bool in_shadow(const float* objects, int count, Vec point, Vec light) {
  for (int i = 0; i < count; ++i) {
    const float* ob = objects + i * kObjectFloats;
    // Bounding sphere first: most objects are nowhere near the ray.
    float reach = ob[kSx] + ob[kSz] + ob[kTall];
    Vec to{ob[kX] - point.x, ob[kTall] * 0.5f - point.y, ob[kZ] - point.z};
    float along = dot(to, light);
    if (along < 0 || dot(to, to) - along * along > reach * reach) continue;
    Hit h{1e9f, {0, 1, 0}, 0, 0};
    if (intersect(ob, point, light, &h)) return true;
  }
  return false;
}

// Coverage in [0, 1] of the number decal's ink at pixel (u, v); -1 outside the plate.
RS_HD float decal(const float* ob, const uint8_t* glyphs, float u, float v) {
  int n = static_cast<int>(ob[kDigits]);
  float h = ob[kDecalH], w = 0.68f * h;
  float x = u - ob[kDecalU] + 0.5f * n * w, y = v - ob[kDecalV] + 0.5f * h;
  float margin = 0.16f * h;
  if (x < -margin || x > n * w + margin || y < -margin || y > h + margin) return -1.0f;
  if (x < 0 || x >= n * w || y < 0 || y >= h) return 0.0f;
  int place = static_cast<int>(x / w);
  if (place > n - 1) place = n - 1;
  float gx = (x - place * w) / w * kGlyphW - 0.5f, gy = y / h * kGlyphH - 0.5f;
  int ix = static_cast<int>(floorf(gx)), iy = static_cast<int>(floorf(gy));
  float ax = gx - ix, ay = gy - iy, ink = 0.0f;
  const uint8_t* g = glyphs + static_cast<int>(ob[kD0 + place]) * kGlyphH * kGlyphW;
  for (int dy = 0; dy < 2; ++dy)
    for (int dx = 0; dx < 2; ++dx) {
      int px = ix + dx, py = iy + dy;
      if (px < 0 || py < 0 || px >= kGlyphW || py >= kGlyphH) continue;
      ink += g[py * kGlyphW + px] * (dx ? ax : 1 - ax) * (dy ? ay : 1 - ay);
    }
  return ink * (1.0f / 255.0f);
}

// Colour of one ray through pixel coordinates (u, v); returns the object hit + 1, or 0.
RS_HD int trace(const float* env, const float* objects, const uint8_t* bank,
                const uint8_t* glyphs, float u, float v, float rgb[3]) {
  float a = (u - env[kCx]) / env[kFocal], b = (env[kCy] - v) / env[kFocal];
  float c = env[kPitchCos], s = env[kPitchSin];
  Vec o{0, env[kCamHeight], 0}, d{a, b * c - s, b * s + c};
  Vec light{env[kLightX], env[kLightY], env[kLightZ]};
  uint32_t seed = static_cast<uint32_t>(env[kSeed]);
  int count = static_cast<int>(env[kCount]), id = 0;
  Hit hit{1e9f, {0, 1, 0}, 0, 0};
  for (int i = 0; i < count; ++i) {
    const float* ob = objects + i * kObjectFloats;
    if (u < ob[kU0] || u > ob[kU1] || v < ob[kV0] || v > ob[kV1]) continue;
    if (intersect(ob, o, d, &hit)) id = i + 1;
  }
  float shade;
  if (id) {
    const float* ob = objects + (id - 1) * kObjectFloats;
    float diffuse = dot(hit.n, light);
    shade = env[kAmbient] + (1 - env[kAmbient]) * (diffuse > 0 ? diffuse : 0.0f);
    float grain = 1 + ob[kGrain] * (value_noise(hit.local_x * 23.0f, hit.local_y * 23.0f,
                                                seed + static_cast<uint32_t>(id)) - 0.5f);
    int shape = static_cast<int>(ob[kShape]);
    float bands = hit.local_y / ob[kTall];
    if (shape == kBarrel && hit.n.y < 0.9f &&
        (fabsf(bands - 0.3f) < 0.04f || fabsf(bands - 0.7f) < 0.04f)) grain *= 0.45f;
    if (shape == kPallet) {
      float slat = hit.local_x / ob[kSx] * 2.5f;
      if (slat - floorf(slat) < 0.3f) grain *= 0.4f;
    }
    rgb[0] = ob[kR] * grain; rgb[1] = ob[kG] * grain; rgb[2] = ob[kB] * grain;
    if (ob[kDigits] > 0) {
      float ink = decal(ob, glyphs, u, v);
      if (ink >= 0) {
        float grey = 0.95f - 0.88f * ink;
        rgb[0] = rgb[1] = rgb[2] = grey;
        shade = 0.5f + 0.5f * shade;
      }
    }
  } else {
    // The room: floor, back wall, side walls, ceiling; the nearest plane along the ray.
    float t = 1e9f;
    int plane = 0;
    if (d.y < -1e-6f) { t = -o.y / d.y; plane = 1; }
    float tz = (env[kWallZ] - o.z) / (d.z > 1e-6f ? d.z : 1e-6f);
    if (tz < t) { t = tz; plane = 2; }
    if (fabsf(d.x) > 1e-6f) {
      float tx = env[kWallX] / fabsf(d.x);
      if (tx < t) { t = tx; plane = 3; }
    }
    if (d.y > 1e-6f) {
      float ty = (env[kCeiling] - o.y) / d.y;
      if (ty < t) { t = ty; plane = 4; }
    }
    hit.t = t;
    Vec p{o.x + t * d.x, o.y + t * d.y, o.z + t * d.z};
    // Far texture falls below a pixel: fade it to its mean instead of aliasing.
    float fade = 1.0f / (1.0f + 0.03f * t * t);
    if (plane == 1) {
      float tex = surface(bank, env[kFloorTex], p.x * env[kFloorScale], p.z * env[kFloorScale],
                          seed + 101) - 0.5f;
      float m = 1 + env[kFloorContrast] * fade * tex;
      rgb[0] = env[kFloorR] * m; rgb[1] = env[kFloorG] * m; rgb[2] = env[kFloorB] * m;
      shade = env[kAmbient] + (1 - env[kAmbient]) * light.y;
      if (in_shadow(objects, count, p, light)) shade = env[kAmbient] * 0.8f;
    } else if (plane == 4) {
      rgb[0] = rgb[1] = rgb[2] = 0.85f; shade = 0.9f;
    } else {
      float across = plane == 2 ? p.x : p.z;
      float tex = surface(bank, env[kWallTex], across * env[kWallScale], p.y * env[kWallScale],
                          seed + 202) - 0.5f;
      float m = 1 + env[kWallContrast] * fade * tex;
      rgb[0] = env[kWallR] * m; rgb[1] = env[kWallG] * m; rgb[2] = env[kWallB] * m;
      float facing = plane == 2 ? -light.z : (p.x > 0 ? -light.x : light.x);
      shade = env[kAmbient] + (1 - env[kAmbient]) * (0.4f + 0.5f * (facing > 0 ? facing : 0.0f));
    }
  }
  // Haze by distance; 1 - 1/(1 + x + x^2/2) follows 1 - exp(-x) without a library call.
  float x = env[kHaze] * hit.t;
  float haze = 1.0f - 1.0f / (1.0f + x + 0.5f * x * x);
  for (int k = 0; k < 3; ++k) {
    float value = rgb[k] * shade * env[kExposure] * env[kGainR + k];
    rgb[k] = value * (1 - haze) + env[kHazeR + k] * haze;
  }
  return id;
}

RS_HD int render_pixel(const float* env, const float* objects, const uint8_t* bank,
                       const uint8_t* glyphs, int px, int py, float rgb[3]) {
  float one[3], two[3];
  int id = trace(env, objects, bank, glyphs, px + 0.25f, py + 0.25f, one);
  int other = trace(env, objects, bank, glyphs, px + 0.75f, py + 0.75f, two);
  for (int k = 0; k < 3; ++k) rgb[k] = 0.5f * (one[k] + two[k]);
  return id == other ? id : (id ? id : other);
}

// Lens blur (3x3 separable weights), sensor noise, rounding. image: float [336, 448, 3].
RS_HD uint8_t develop(const float* env, const float* image, int px, int py, int k) {
  float side = env[kBlur], mid = 1.0f - 2.0f * side;
  float sum = 0.0f;
  for (int dy = -1; dy <= 1; ++dy)
    for (int dx = -1; dx <= 1; ++dx) {
      int x = px + dx, y = py + dy;
      x = x < 0 ? 0 : (x > kWidth - 1 ? kWidth - 1 : x);
      y = y < 0 ? 0 : (y > kHeight - 1 ? kHeight - 1 : y);
      sum += image[(y * kWidth + x) * 3 + k] * (dx ? side : mid) * (dy ? side : mid);
    }
  uint32_t bits = hash(static_cast<uint32_t>((py * kWidth + px) * 3 + k) * 0x9e3779b9U ^
                       hash(static_cast<uint32_t>(env[kNoiseSeed]) + 77));
  float gauss = (static_cast<float>((bits & 255) + (bits >> 8 & 255) + (bits >> 16 & 255) +
                                    (bits >> 24)) - 510.0f) * (1.0f / 147.8f);
  float value = sum * 255.0f + env[kNoise] * gauss + 0.5f;
  return static_cast<uint8_t>(value < 0 ? 0 : (value > 255 ? 255 : value));
}

// JPEG loss without the bit stream: YCbCr, 8x8 DCT, quantise, inverse. One 8x8 block in place.
RS_HD void jpeg_block(uint8_t* image, int bx, int by, float quality) {
  const int base[8] = {16, 12, 14, 17, 22, 30, 46, 66};  // diagonal profile of Annex K's luma
  const float cosine[8] = {1.0f, 0.98078528f, 0.92387953f, 0.83146961f,
                           0.70710678f, 0.55557023f, 0.38268343f, 0.19509032f};
  float scale = quality < 50 ? 50.0f / quality : 2.0f - quality * 0.02f;
  float basis[8][8];
  for (int k = 0; k < 8; ++k)
    for (int n = 0; n < 8; ++n) {
      int phase = (2 * n + 1) * k & 31;  // cos(phase * pi / 16)
      int folded = phase > 16 ? 32 - phase : phase;
      float value = folded > 8 ? -(folded == 16 ? 1.0f : cosine[16 - folded])
                               : (folded == 8 ? 0.0f : cosine[folded]);
      basis[k][n] = value * (k ? 0.5f : 0.35355339f);
    }
  float plane[3][64];
  uint8_t* corner = image + ((by * 8) * kWidth + bx * 8) * 3;
  for (int i = 0; i < 64; ++i) {
    const uint8_t* p = corner + ((i >> 3) * kWidth + (i & 7)) * 3;
    float r = p[0], g = p[1], b = p[2];
    plane[0][i] = 0.299f * r + 0.587f * g + 0.114f * b - 128.0f;
    plane[1][i] = -0.168736f * r - 0.331264f * g + 0.5f * b;
    plane[2][i] = 0.5f * r - 0.418688f * g - 0.081312f * b;
  }
  for (int ch = 0; ch < 3; ++ch) {
    float half[64];
    for (int y = 0; y < 8; ++y)
      for (int k = 0; k < 8; ++k) {
        float sum = 0;
        for (int n = 0; n < 8; ++n) sum += plane[ch][y * 8 + n] * basis[k][n];
        half[y * 8 + k] = sum;
      }
    for (int k = 0; k < 8; ++k)
      for (int j = 0; j < 8; ++j) {
        float sum = 0;
        for (int n = 0; n < 8; ++n) sum += half[n * 8 + k] * basis[j][n];
        int band = (j + k + 1) / 2;
        float step = base[band > 7 ? 7 : band] * scale * (ch ? 1.3f : 1.0f);
        if (step < 1) step = 1;
        float q = floorf(sum / step + 0.5f);
        plane[ch][j * 8 + k] = q * step;
      }
    for (int j = 0; j < 8; ++j)
      for (int n = 0; n < 8; ++n) {
        float sum = 0;
        for (int k = 0; k < 8; ++k) sum += plane[ch][j * 8 + k] * basis[k][n];
        half[j * 8 + n] = sum;
      }
    for (int n = 0; n < 8; ++n)
      for (int y = 0; y < 8; ++y) {
        float sum = 0;
        for (int j = 0; j < 8; ++j) sum += half[j * 8 + n] * basis[j][y];
        plane[ch][y * 8 + n] = sum;
      }
  }
  for (int i = 0; i < 64; ++i) {
    uint8_t* p = corner + ((i >> 3) * kWidth + (i & 7)) * 3;
    float luma = plane[0][i] + 128.5f, cb = plane[1][i], cr = plane[2][i];
    float value[3] = {luma + 1.402f * cr, luma - 0.344136f * cb - 0.714136f * cr,
                      luma + 1.772f * cb};
    for (int k = 0; k < 3; ++k)
      p[k] = static_cast<uint8_t>(value[k] < 0 ? 0 : (value[k] > 255 ? 255 : value[k]));
  }
}

}  // namespace roboscene
#endif  // QWEN_VL_ROBOSCENE_RENDER_H_
