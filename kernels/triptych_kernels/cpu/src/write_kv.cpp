// This step's keys and values into their slots of the paged cache, rounded to its dtype.
#include <algorithm>

#include "kernel.h"
#include "parallel.h"
#include "vec.h"

namespace triptych {
namespace {

struct WriteKv {
  int64_t dtype;          // of key and value
  int64_t cache_dtype;
  const void* key;        // [rows, num_kv_heads, head_dim], the last axis dense
  int64_t key_stride;     // elements from row to row
  int64_t key_head_stride;
  const void* value;      // likewise
  int64_t value_stride;
  int64_t value_head_stride;
  void* kv_cache;         // [num_blocks, 2, num_kv_heads, block_size, head_dim]
  const int64_t* slots;   // [rows], block * block_size + offset, or -1: the row is skipped
  int64_t num_kv_heads;
  int64_t block_size;
  int64_t head_dim;
};

constexpr int64_t kElementsPerIndex = 16 << 10;  // about 2 us

template <typename X, typename T>
void copy(const X* from, T* to, int64_t size) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store(to + i, load(from + i));
  for (; i < size; ++i) store_one(to + i, to_float(from[i]));
}

template <typename X, typename T>
void write_rows(const WriteKv& args, int64_t rows) {
  const int64_t head_size = args.block_size * args.head_dim, half = args.num_kv_heads * head_size;
  const int64_t row_size = 2 * args.num_kv_heads * args.head_dim;
  const int64_t rows_per_index = std::max<int64_t>(kElementsPerIndex / row_size, 1);
  parallel_for((rows + rows_per_index - 1) / rows_per_index, [&](int64_t index) {
    const int64_t end = std::min((index + 1) * rows_per_index, rows);
    for (int64_t row = index * rows_per_index; row < end; ++row) {
      const int64_t slot = args.slots[row];
      if (slot < 0) continue;
      const X* key = static_cast<const X*>(args.key) + row * args.key_stride;
      const X* value = static_cast<const X*>(args.value) + row * args.value_stride;
      T* to = static_cast<T*>(args.kv_cache) + slot / args.block_size * 2 * half +
              slot % args.block_size * args.head_dim;
      for (int64_t head = 0; head < args.num_kv_heads; ++head, to += head_size) {
        copy(key + head * args.key_head_stride, to, args.head_dim);
        copy(value + head * args.value_head_stride, to + half, args.head_dim);
      }
    }
  });
}

template <typename X>
void write_rows(const WriteKv& args, int64_t rows) {
  if (args.cache_dtype == kFloat32) return write_rows<X, float>(args, rows);
  write_rows<X, bf16>(args, rows);
}

}  // namespace
}  // namespace triptych

TRIPTYCH_KERNEL(write_kv, triptych::WriteKv) {
  if (args.dtype == triptych::kFloat32) return triptych::write_rows<float>(args, rows);
  triptych::write_rows<triptych::bf16>(args, rows);
}
