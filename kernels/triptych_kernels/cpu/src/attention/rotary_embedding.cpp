// Rotary position embedding of queries and keys; float32 inside, rounded once.
#include <algorithm>

#include "kernel.h"
#include "parallel.h"
#include "simd/vec.h"
#include "stages.h"

namespace triptych {
namespace {

struct RotaryEmbedding {
  int64_t dtype;             // of query, key and what they become
  const void* query;         // [rows, num_heads, head_dim], the last axis dense
  int64_t query_stride;      // elements from row to row
  int64_t query_head_stride;
  const void* key;           // [rows, num_kv_heads, head_dim], the last axis dense
  int64_t key_stride;
  int64_t key_head_stride;
  const int64_t* positions;  // [rows]
  const float* cos_sin;      // [max_position, rotary_dim]: rotary_dim / 2 cosines, then as many sines
  void* query_out;           // [rows, num_heads, head_dim], dense
  void* key_out;             // [rows, num_kv_heads, head_dim], dense
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t rotary_dim;        // elements of a head, its first ones, that are rotated
  int64_t interleaved;       // whether neighbours are rotated against each other, and not the halves
};

constexpr int64_t kElementsPerIndex = 16 << 10;  // about 2 us

template <typename T>
void rotate_halves(const T* x, int64_t half, const float* cos, const float* sin, T* out) {
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const vec first = load(x + i), second = load(x + half + i), c = load(cos + i), s = load(sin + i);
    store(out + i, first * c - second * s);
    store(out + half + i, second * c + first * s);
  }
  for (; i < half; ++i) {
    const float first = to_float(x[i]), second = to_float(x[half + i]);
    store_one(out + i, first * cos[i] - second * sin[i]);
    store_one(out + half + i, second * cos[i] + first * sin[i]);
  }
}

template <typename T>
void rotate_neighbours(const T* x, int64_t half, const float* cos, const float* sin, T* out) {
  int64_t i = 0;
  if constexpr (std::is_same_v<T, bf16>) {
    for (; i + kLanes <= half; i += kLanes) {
      vec pairs;
      std::memcpy(&pairs, x + 2 * i, sizeof pairs);
      const vec first = even(pairs), second = odd(pairs), c = load(cos + i), s = load(sin + i);
      store_pairs(out + 2 * i, first * c - second * s, second * c + first * s);
    }
  }
  for (; i < half; ++i) {
    const float first = to_float(x[2 * i]), second = to_float(x[2 * i + 1]);
    store_one(out + 2 * i, first * cos[i] - second * sin[i]);
    store_one(out + 2 * i + 1, second * cos[i] + first * sin[i]);
  }
}

// cos: of the position, sines after the cosines.
template <typename T>
void rotate_heads(const RotaryEmbedding& args, const T* x, int64_t head_stride, int64_t num_heads, const float* cos,
                  T* out) {
  const int64_t half = args.rotary_dim / 2;
  for (int64_t head = 0; head < num_heads; ++head, x += head_stride, out += args.head_dim) {
    if (args.interleaved) {
      rotate_neighbours(x, half, cos, cos + half, out);
    } else {
      rotate_halves(x, half, cos, cos + half, out);
    }
    std::copy(x + args.rotary_dim, x + args.head_dim, out + args.rotary_dim);
  }
}

template <typename T>
void rotate_rows(const RotaryEmbedding& args, int64_t first, int64_t end) {
  const int64_t query_size = args.num_heads * args.head_dim, key_size = args.num_kv_heads * args.head_dim;
  for (int64_t row = first; row < end; ++row) {
    const float* cos = args.cos_sin + args.positions[row] * args.rotary_dim;
    rotate_heads(args, static_cast<const T*>(args.query) + row * args.query_stride, args.query_head_stride,
                 args.num_heads, cos, static_cast<T*>(args.query_out) + row * query_size);
    rotate_heads(args, static_cast<const T*>(args.key) + row * args.key_stride, args.key_head_stride,
                 args.num_kv_heads, cos, static_cast<T*>(args.key_out) + row * key_size);
  }
}

}  // namespace
}  // namespace triptych

TRIPTYCH_STAGE(rotary_embedding, triptych::RotaryEmbedding) {
  if (args.dtype == triptych::kFloat32) return triptych::rotate_rows<float>(args, first, end);
  triptych::rotate_rows<triptych::bf16>(args, first, end);
}

TRIPTYCH_KERNEL(rotary_embedding, triptych::RotaryEmbedding,
                dtype, query, query_stride, query_head_stride, key, key_stride, key_head_stride, positions, cos_sin,
                query_out, key_out, num_heads, num_kv_heads, head_dim, rotary_dim, interleaved) {
  const int64_t row_size = (args.num_heads + args.num_kv_heads) * args.head_dim;
  triptych::for_rows(rows, std::max<int64_t>(triptych::kElementsPerIndex / row_size, 1),
                     [&](int64_t first, int64_t end) { triptych_rotary_embedding_rows(args, first, end); });
}
