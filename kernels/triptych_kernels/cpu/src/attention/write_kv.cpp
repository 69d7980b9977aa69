// This step's keys and values into their slots of the paged cache, rounded to its dtype; into one of 8 bits quantized,
// each vector with its own scale. Keys are written as attention reads them, see pages.h. And latent vectors, as rows.
#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "simd/vec.h"
#include "kernel.h"
#include "parallel.h"
#include "stages.h"

namespace triptych {
namespace {

struct WriteKv {
  int64_t dtype;          // of key and value
  int64_t cache_dtype;
  const void* key;        // [rows, num_kv_heads, head_dim], the last axis dense
  int64_t key_stride;     // elements from row to row
  int64_t key_head_stride;
  const void* value;      // [rows, num_kv_heads, head_dim], the last axis dense
  int64_t value_stride;
  int64_t value_head_stride;
  void* kv_cache;         // [num_blocks, 2, num_kv_heads, block_size, head_dim], keys in words
  float* kv_scales;       // [num_blocks, 2, num_kv_heads, block_size] beside int8, else null
  const int64_t* slots;   // [rows], block * block_size + offset, or -1: the row is skipped
  int64_t num_kv_heads;
  int64_t block_size;
  int64_t head_dim;
};

struct WriteLatent {
  int64_t dtype;          // of latent and rope_key
  int64_t cache_dtype;
  const void* latent;     // [rows, latent_dim], the last axis dense
  int64_t latent_stride;  // elements from row to row
  const void* rope_key;   // [rows, rope_dim], the last axis dense
  int64_t rope_key_stride;
  void* kv_cache;         // [num_blocks, block_size, width]
  const int64_t* slots;   // [rows], block * block_size + offset, or -1: the row is skipped
  int64_t latent_dim;
  int64_t rope_dim;
  int64_t width;          // at least both together; what is behind them stays
};

constexpr int64_t kWordBytes = 4;  // of keys
constexpr int64_t kElementsPerIndex = 16 << 10;  // about 2 us

template <typename X, typename T>
void copy(const X* from, T* to, int64_t size) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store(to + i, load(from + i));
  for (; i < size; ++i) store_one(to + i, to_float(from[i]));
}

// The elements of one vector; returns its scale. Divided as it is defined, not multiplied by an inverse: every
// implementation gives the same bits.
template <typename X>
float quantize(const X* from, int8_t* to, int64_t size) {
  constexpr float kLargest = 127.0f;
  vec maxima = zero();
  uint32_t flawed = 0;  // a maximum does not see NaN
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const vec x = load(from + i);
    maxima = max(maxima, abs(x));
    flawed |= unordered(x, x);
  }
  float maximum = largest(maxima);
  for (; i < size; ++i) {
    const float x = std::fabs(to_float(from[i]));
    maximum = std::max(maximum, x);
    flawed |= std::isnan(x);
  }
  const float scale = maximum / kLargest;
  if (flawed || std::isinf(maximum) || scale == 0.0f) {
    std::fill_n(to, size, int8_t{0});
    return scale == 0.0f && !flawed ? 0.0f : std::numeric_limits<float>::quiet_NaN();
  }
  for (i = 0; i + kLanes <= size; i += kLanes) {  // a scale that has lost bits near 0 may be too small
    const vec x = min(max(load(from + i) / splat(scale), splat(-kLargest)), splat(kLargest));
    store_bytes(to + i, to_ints(x));
  }
  for (; i < size; ++i) {
    const float x = std::clamp(to_float(from[i]) / scale, -kLargest, kLargest);
    to[i] = static_cast<int8_t>(std::nearbyint(x));
  }
  return scale;
}

// One vector in the dtype of the cache; in 8 bits with its scale, number `place` of all scales.
template <typename X, typename T>
void convert(const WriteKv& args, const X* from, T* to, [[maybe_unused]] int64_t place) {
  if constexpr (std::is_same_v<T, int8_t>) {
    args.kv_scales[place] = quantize(from, to, args.head_dim);
  } else {
    copy(from, to, args.head_dim);
  }
}

// The words of a key to place `offset` of a block of keys.
template <typename T>
void scatter(const T* key, int64_t num_words, int64_t block_size, T* block, int64_t offset) {
  constexpr int64_t kElements = kWordBytes / sizeof(T);
  for (int64_t word = 0; word < num_words; ++word) {
    std::memcpy(block + (word * block_size + offset) * kElements, key + word * kElements, kWordBytes);
  }
}

template <typename X, typename T>
void write_rows(const WriteKv& args, int64_t first, int64_t end) {
  static thread_local Scratch scratch;
  T* const converted = static_cast<T*>(scratch.get(args.head_dim * sizeof(T)));
  T* const cache = static_cast<T*>(args.kv_cache);
  const int64_t num_words = args.head_dim * sizeof(T) / kWordBytes;
  for (int64_t row = first; row < end; ++row) {
    const int64_t slot = args.slots[row];
    if (slot < 0) continue;
    const X* key = static_cast<const X*>(args.key) + row * args.key_stride;
    const X* value = static_cast<const X*>(args.value) + row * args.value_stride;
    const int64_t block = slot / args.block_size, offset = slot - block * args.block_size;
    for (int64_t head = 0; head < args.num_kv_heads; ++head) {
      const int64_t keys = (block * 2 * args.num_kv_heads + head) * args.block_size;  // vectors before the block's
      const int64_t values = keys + args.num_kv_heads * args.block_size;
      convert(args, key + head * args.key_head_stride, converted, keys + offset);
      scatter(converted, num_words, args.block_size, cache + keys * args.head_dim, offset);
      convert(args, value + head * args.value_head_stride, cache + (values + offset) * args.head_dim, values + offset);
    }
  }
}

template <typename X>
void write_rows(const WriteKv& args, int64_t first, int64_t end) {
  if (args.cache_dtype == kFloat32) return write_rows<X, float>(args, first, end);
  if (args.cache_dtype == kInt8) return write_rows<X, int8_t>(args, first, end);
  write_rows<X, bf16>(args, first, end);
}

template <typename X, typename T>
void write_latent_rows(const WriteLatent& args, int64_t first, int64_t end) {
  for (int64_t row = first; row < end; ++row) {
    if (args.slots[row] < 0) continue;
    T* const to = static_cast<T*>(args.kv_cache) + args.slots[row] * args.width;
    copy(static_cast<const X*>(args.latent) + row * args.latent_stride, to, args.latent_dim);
    copy(static_cast<const X*>(args.rope_key) + row * args.rope_key_stride, to + args.latent_dim, args.rope_dim);
  }
}

template <typename X>
void write_latent_rows(const WriteLatent& args, int64_t first, int64_t end) {
  if (args.cache_dtype == kFloat32) return write_latent_rows<X, float>(args, first, end);
  write_latent_rows<X, bf16>(args, first, end);
}

}  // namespace
}  // namespace triptych

TRIPTYCH_STAGE(write_kv, triptych::WriteKv) {
  if (args.dtype == triptych::kFloat32) return triptych::write_rows<float>(args, first, end);
  triptych::write_rows<triptych::bf16>(args, first, end);
}

TRIPTYCH_KERNEL(write_kv, triptych::WriteKv,
                dtype, cache_dtype, key, key_stride, key_head_stride, value, value_stride, value_head_stride,
                kv_cache, kv_scales, slots, num_kv_heads, block_size, head_dim) {
  const int64_t row_size = 2 * args.num_kv_heads * args.head_dim;
  triptych::for_rows(rows, std::max<int64_t>(triptych::kElementsPerIndex / row_size, 1),
                     [&](int64_t first, int64_t end) { triptych_write_kv_rows(args, first, end); });
}

TRIPTYCH_STAGE(write_latent, triptych::WriteLatent) {
  if (args.dtype == triptych::kFloat32) return triptych::write_latent_rows<float>(args, first, end);
  triptych::write_latent_rows<triptych::bf16>(args, first, end);
}

TRIPTYCH_KERNEL(write_latent, triptych::WriteLatent,
                dtype, cache_dtype, latent, latent_stride, rope_key, rope_key_stride, kv_cache, slots, latent_dim,
                rope_dim, width) {
  const int64_t row_size = args.latent_dim + args.rope_dim;
  triptych::for_rows(rows, std::max<int64_t>(triptych::kElementsPerIndex / row_size, 1),
                     [&](int64_t first, int64_t end) { triptych_write_latent_rows(args, first, end); });
}
